"""The fused denoiser: weights, prefix buffers, CUDA graphs and the captured denoising step."""
