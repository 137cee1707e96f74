"""Moves the newest tokens of a sliding layer to the front of its buffer."""
