"""How many threads torch computes with: those it takes by itself, or fewer where other programs use the processors."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from mtrl.checkpoint.manifest import write_file
from mtrl.utils.machine import free_cores, usable_cores

FILE = "torch_threads"  # in a run's folder: sums may be added up in another order by another number of threads
CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
ENOUGH = 0.75  # share of the threads' processors that must be free for all of them

logger = logging.getLogger(__name__)


def settle_threads(directory: Path | None = None, resumed: bool = False) -> None:
    """Sets the number of threads, and keeps it in the run's folder: a run that goes on computes with as many."""
    usual, usable = torch.get_num_threads(), usable_cores()
    named = next((name for name in CHOSEN_BY_USER if os.environ.get(name)), None)
    before = recorded(directory / FILE) if directory is not None and resumed else None
    if named is not None:
        chosen = usual
        if before not in (None, chosen):
            told = "its numbers may differ in the last bits from here on"
            logger.warning("%s: the run computed with %d threads before, now with %d; %s", named, before, chosen, told)
    elif before is not None:
        chosen = before if before <= usual else min(before, max(usual, usable))
        if chosen != before:
            told = "there are no more processors here, so its numbers may differ in the last bits from here on"
            logger.warning("the run computed with %d threads before, now with %d: %s", before, chosen, told)
    else:
        chosen = free_threads(usual, usable)
    if chosen != usual:
        torch.set_num_threads(chosen)
    if directory is not None and recorded(directory / FILE) != chosen:
        write_file(directory / FILE, f"{chosen}\n")


def free_threads(usual: int, usable: int) -> int:
    """As many as usual on a quiet machine. Threads that wait for a processor keep all the others waiting, so elsewhere
    as many as there are processors free."""
    if usual == 1:
        return 1
    free = min(usable, free_cores())
    if free >= ENOUGH * usual:
        return usual
    chosen = max(1, int(free))
    told = f"{free:.1f} of {usable} processors are free: torch computes with {chosen} in place of {usual} threads"
    logger.warning("%s, which would wait for each other; OMP_NUM_THREADS sets a number", told)
    return chosen


def recorded(file: Path) -> int | None:
    try:
        number = int(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return number if number > 0 else None
