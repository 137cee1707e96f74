"""Head norms, rotation and cache write after the q, k, v product."""
