"""The network. Start with `diffusion.py`.

The network is nine files: config, diffusion, backbone, attention, experts, layers, rotary, masks and cache.
`denoiser.py` is the interface of a model to a run. The other files are for autoregressive decoding, checks, noise
levels, published configs, released experts, presets and images.
"""
