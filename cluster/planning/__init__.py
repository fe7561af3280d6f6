"""How many GPUs traffic needs: memory, speed, queues, cost. Pure: no clock, no I/O, no torch."""
