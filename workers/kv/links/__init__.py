"""Ways for a rank to read a peer's KV blocks; `base` is the contract."""
