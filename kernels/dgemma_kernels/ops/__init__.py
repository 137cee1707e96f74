"""One folder per operation: the Triton kernel and its PyTorch reference, with the same name and signature."""
