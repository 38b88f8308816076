"""What several tests on a GPU share."""

import pytest
import torch


@pytest.fixture
def exact_products():
    """Products of float32 in float32, as on a CPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
