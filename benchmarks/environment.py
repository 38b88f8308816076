"""What a measurement was taken on: it stands beside every number."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "numpy", "pillow", "trl", "vllm")


def environment() -> dict[str, object]:
    """Hardware, versions and the commit."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def hardware() -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    found: dict[str, object] = {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(gigabytes)}
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
    """Of the tree that was measured: git's, or MTRL_COMMIT where a copy without its history runs."""
    if "MTRL_COMMIT" in os.environ:
        return os.environ["MTRL_COMMIT"]
    try:
        shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return shown.stdout.strip()
