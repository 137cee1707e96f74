"""Quantised weights: their formats, rounding to a format, and reports of their memory. Start with `rounding.py`."""
