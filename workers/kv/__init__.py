"""KV memory: how it is laid out over ranks, who may read it, and the links by which peers do."""
