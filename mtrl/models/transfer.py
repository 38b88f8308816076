"""Copies to the device that do not wait for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """A CPU tensor for the device, in turn with what is already asked of it.

    A plain `.to` waits until the device has done all its work, and then the device waits for the next piece.
    """
    device = torch.device(device or "cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
