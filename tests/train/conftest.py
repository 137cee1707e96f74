"""The device of tests that open the door of training: it takes a model on a GPU wherever there is one."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
