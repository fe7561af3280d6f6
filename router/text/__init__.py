"""A model's words: chat templates, tokens, text, and which models are served."""
