"""One operation per file, each beside a torch reference that runs on a CPU."""
