"""`mtrl doctor MODEL --parity`: the checks of a model family on a user's weights, against transformers' own passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mtrl.commands import installed
from mtrl.commands.load_arguments import check_call
from mtrl.compose.family_checks import load_candidate, run_check
from mtrl.compose.policy import build_encoder, model_path
from mtrl.compose.run import configure
from mtrl.config import take_file
from mtrl.config.packaged import is_config
from mtrl.models.check_candidate import Finding
from mtrl.models.families import load_encoder
from mtrl.models.family_checks import CHECKS, LARGE_CHECKS
from mtrl.models.load_model import DTYPES, empty_model
from mtrl.models.save_pretrained import read_dtype
from mtrl.utils.embedded_models import MODELS

FAILED = 1
SPARE = 0.9  # of the free memory: passes need some of it


def run_parity(arguments: Sequence[str], dtype: str | None) -> int:
    """`arguments`: a model or a configuration that names one, and overrides."""
    name, overrides = take_file(arguments)
    if name is not None and (name in MODELS or not is_config(name)):
        name, overrides = None, [f"worker.actor.model.model_path={name}", *overrides]
    config, _ = configure(name, overrides)
    check_call(build_encoder, config)  # registers a family from outside
    path, trusted = model_path(config), config.worker.actor.model.trust_remote_code
    # The checkpoint's own template and pixel limits, as transformers' processor has them.
    encoder = check_call(lambda: load_encoder(path, trust_remote_code=trusted))
    size = sum(each.numel() for each in empty_model(path, trust_remote_code=trusted).parameters())
    free = int(SPARE * installed.devices()[0].free)
    dtype = dtype or choose_dtype(size, free, read_dtype(Path(path), trusted))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{path}: {size / 1e6:,.1f} million parameters, in {dtype} on {device}", flush=True)
    candidate = check_call(lambda: load_candidate(path, encoder, dtype, device, trusted))
    no_room = explain_no_room(size, dtype, free)
    print(f"  {'check':<20} {'difference':>10} {'allowed':>9}  result")
    failed = []
    for check in CHECKS:
        print(f"  {check:<20}", end=" ", flush=True)
        finding = run_check(check, candidate, no_room if check in LARGE_CHECKS else None)
        print(format_finding(finding), flush=True)
        failed += [] if finding.passed else [check]
    print(f"  PROBLEM  this model differs from transformers: {', '.join(failed)}" if failed else "  No check failed.")
    return FAILED if failed else 0


def choose_dtype(size: int, free: int, stored: str) -> str:
    """float32 shows faults that 16 bits hide, if half of the memory holds the weights."""
    return "fp32" if size * DTYPES["fp32"].itemsize <= free / 2 else stored


def explain_no_room(size: int, dtype: str, free: int) -> str | None:
    """Why there is no room for two sets of gradients in float32, and for the weights in float32 if they are not; None
    if there is."""
    needed = size * (DTYPES[dtype].itemsize + (2 if dtype == "fp32" else 3) * DTYPES["fp32"].itemsize)
    return None if needed <= free else f"it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"


def format_finding(finding: Finding) -> str:
    if finding.limit is None:
        return f"{'-':>10} {'-':>9}  skipped: {finding.note}"
    result = "ok" if finding.passed else "FAILED"
    return f"{finding.worst:>10.1e} {max(finding.limit, 0):>9.1e}  {result}{': ' if finding.note else ''}{finding.note}"
