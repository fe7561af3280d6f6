"""A worker: one engine and its service. Knows nothing of routers."""
