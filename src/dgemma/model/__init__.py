"""The network: follow `diffusion.py`, which names every other file here."""
