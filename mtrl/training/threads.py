"""Sets the number of torch threads: torch's default, or fewer if other programs use the processors."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from mtrl.utils.files import write_file
from mtrl.utils.machine import free_cores, usable_cores

FILE = "torch_threads"  # in the run directory: another number of threads may change the order of sums
CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
ENOUGH = 0.75  # fraction of the processors that must be free to use all threads

logger = logging.getLogger(__name__)


def set_threads(directory: Path | None = None, resumed: bool = False) -> None:
    """Set the number of threads and record it in the run directory: a resumed run uses the same number."""
    usual, usable = torch.get_num_threads(), usable_cores()
    variable = next((name for name in CHOSEN_BY_USER if os.environ.get(name)), None)
    before = read_threads(directory / FILE) if directory is not None and resumed else None
    changed = "the run used %d threads before, now it uses %d"
    if variable is not None:
        chosen = usual
        if before not in (None, chosen):
            logger.warning(f"%s: {changed}; results may differ in the last bits", variable, before, chosen)
    elif before is not None:
        chosen = before if before <= usual else min(before, max(usual, usable))
        if chosen != before:
            logger.warning(
                f"{changed}, the processors of this machine; results may differ in the last bits", before, chosen
            )
    else:
        chosen = choose_threads(usual, usable)
    if chosen != usual:
        torch.set_num_threads(chosen)
    if directory is not None and read_threads(directory / FILE) != chosen:
        write_file(directory / FILE, f"{chosen}\n")


def choose_threads(usual: int, usable: int) -> int:
    """The usual number on an idle machine, else the number of free processors: a thread that waits for a processor
    delays all others."""
    if usual == 1:
        return 1
    free = min(usable, free_cores())
    if free >= ENOUGH * usual:
        return usual
    chosen = max(1, int(free))
    message = "%.1f of %d processors are free: torch uses %d instead of %d threads; set OMP_NUM_THREADS to change it"
    logger.warning(message, free, usable, chosen, usual)
    return chosen


def read_threads(file: Path) -> int | None:
    try:
        number = int(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return number if number > 0 else None
