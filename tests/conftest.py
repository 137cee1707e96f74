"""Set up once for all tests: Triton's interpreter where there is no GPU, one thread for each of several workers."""

import os

import torch

if not torch.cuda.is_available():
    # Triton decides at its import whether functions are compiled or interpreted, and transformers imports it too.
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
