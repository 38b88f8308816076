"""Model FLOPs utilization (MFU): the share of a GPU's peak that the arithmetic of the model needs."""

from __future__ import annotations

import re

PEAKS = {  # name of the GPU as CUDA gives it: 10^12 dense bf16 operations a second, by its data sheet
    r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe": 312,
    r"A10": 125,
    r"L4": 121,
    r"L40S": 362,
    r"GeForce RTX 4090": 165,
    r"H100 80GB HBM3": 989,
    r"H100 PCIe": 756,
    r"H100 NVL": 835,
    r"H200": 989,
    r"B200": 2250,
}


def find_peak(gpu: str | None) -> float | None:
    """Operations a second of a whole GPU of this name; None if it is unknown, or there is none.

    >>> find_peak("NVIDIA H200"), find_peak("NVIDIA H200 MIG 1g.18gb"), find_peak(None)
    (989000000000000.0, None, None)
    """
    name = (gpu or "").removeprefix("NVIDIA ")
    return next((tera * 1e12 for pattern, tera in PEAKS.items() if re.fullmatch(pattern, name)), None)


def measure_mfu(parameters: int, tokens: int, seconds: float, peak: float) -> float:
    """6 N T over the peak: 2 operations for each parameter and token in the forward pass, 4 in the backward pass.
    Attention and what checkpointing computes again are not counted.

    >>> measure_mfu(3_000_000_000, 10_000, 1.0, 989e12)
    0.182
    """
    return round(6 * parameters * tokens / seconds / peak, 4)
