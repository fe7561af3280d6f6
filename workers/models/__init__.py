"""Model families: one shared transformer, one file per family."""
