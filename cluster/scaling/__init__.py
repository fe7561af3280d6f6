"""How many workers each pool needs, and the steps there. Pure: no clock, no I/O, no torch."""
