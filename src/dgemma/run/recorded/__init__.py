"""Recorded runs: a trajectory can be replayed, forked, scored and stored in a file. Start with `trajectory.py`."""
