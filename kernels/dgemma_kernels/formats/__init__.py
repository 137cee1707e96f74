"""Weight formats of the experts, with encoder and decoder in PyTorch."""
