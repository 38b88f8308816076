"""The environment of a measurement, stored with every result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mtrl.utils.machine import cpu_memory, usable_cores

PACKAGES = ("mtrl", "torch", "transformers", "numpy", "pillow", "trl", "vllm")
CHECKOUT = Path(__file__).parents[2]


def environment() -> dict[str, object]:
    """Hardware, versions and the commit."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def hardware() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    found: dict[str, Any] = {"cpu": model, "cores": usable_cores(), "memory_gib": round(cpu_memory() / 2**30)}
    import torch

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the measured code: MTRL_COMMIT if set (for a copy without git history), otherwise that of the
    checkout. An installed package has a version and no commit."""
    if "MTRL_COMMIT" in os.environ:
        return os.environ["MTRL_COMMIT"]
    if not (CHECKOUT / ".git").exists():
        return None
    command = ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.strip()
