"""The simulator: production placement, admission, index and schedulers under a virtual clock (design section 7)."""
