"""Who computes what in the next step, and which block is whose. Pure: no torch, no clock, no I/O."""
