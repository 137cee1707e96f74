"""Counter-based uniform random numbers."""
