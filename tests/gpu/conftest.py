"""Shared fixtures of tests on a GPU."""

import pytest
import torch


@pytest.fixture
def exact_products():
    """Computes float32 products in float32, as on a CPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
