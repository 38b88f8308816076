"""Writes the result of a benchmark with its environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtrl.bench.environment import environment


def finish(result: dict[str, Any], out: Path | None) -> None:
    """Writes the result with its environment to `out`, if one is given, and prints it as the last line."""
    result = {**result, **environment()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
