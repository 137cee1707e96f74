"""The network. Start with `diffusion.py`, which uses every other file here."""
