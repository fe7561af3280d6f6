"""Open-loop clients, trace replay and benchmarks."""
