"""Two test processes share two cores (pytest -n 2), so every process computes with one thread."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def double():
    """Computes in 64 bits, so that two ways to write a formula agree to many digits."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
