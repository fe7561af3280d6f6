"""What the router decides, and on what it decides. Pure: no clock, no chance, no wire."""
