"""The environment of a measurement, stored with every result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "numpy", "pillow", "trl", "vllm")


def environment() -> dict[str, object]:
    """Hardware, versions and the commit."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def finish(result: dict[str, Any], out: Path | None) -> None:
    """Writes the result with its environment to `out`, if one is given, and prints it as the last line."""
    result = {**result, **environment()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


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
    """The commit of the measured tree: MTRL_COMMIT if set (for a copy without git history), otherwise git's."""
    if "MTRL_COMMIT" in os.environ:
        return os.environ["MTRL_COMMIT"]
    try:
        process = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.strip()
