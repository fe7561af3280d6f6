"""The ranks that compute: from a plan to tokens, on tp × pp processes behind one Executor."""
