"""The progress of a soak in a file, so that it can be stopped at any time and continued."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class Ledger:
    """Counts of one trial in `<directory>/ledger.json`. `seconds`: total working time over all starts."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self._file = directory, directory / "ledger.json"
        self._began = time.monotonic()
        self.counts: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def get(self, name: str, default: Any = 0) -> Any:
        return self.counts.get(name, default)

    def record(self, **counts: Any) -> None:
        now = time.monotonic()
        self.counts |= counts
        self.counts["seconds"] = round(self.get("seconds") + now - self._began, 1)
        self._began = now
        aside = self._file.with_suffix(".new")
        aside.write_text(json.dumps(self.counts, indent=1) + "\n")
        os.replace(aside, self._file)
