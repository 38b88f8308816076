"""Shared helpers of the tests of kernels."""

import torch

from mtrl.rollout.decode.buffers import Room

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOM = Room(slots=16, groups=4, new=12, prompt_tokens=64, longest=40, positions=64)
DTYPES = [torch.float32, torch.bfloat16]


def noise(*size, dtype=torch.float32):
    return torch.randn(*size, device=DEVICE).to(dtype)


def close(found, expected, dtype=torch.float32, magnitude=0.0):
    """bf16 rounds at the same points in both, but a sum near the middle of two numbers may be rounded either way, and
    the interpreter cuts digits off. `magnitude`: of the terms of a sum that may cancel."""
    rtol = 2e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected, rtol=rtol, atol=2e-6 + rtol * magnitude)


def shuffled_slots(rows=16):
    return torch.arange(rows, device=DEVICE).int().flip(0).contiguous()
