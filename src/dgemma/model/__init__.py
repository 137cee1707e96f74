"""The network. Start with `diffusion.py`."""
