"""Checkpoints in the Hugging Face layout, complete or not there at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from mtrl.protocols import Actor


class FolderStore:
    """`<directory>/step_N`, written under another name first; the newest `limit` stay (-1: all), at least one."""

    def __init__(self, directory: Path, limit: int = -1) -> None:
        self.directory, self.limit = directory, limit

    def save(self, step: int, actor: Actor) -> None:
        target = self.directory / f"step_{step}"
        unfinished = self.directory / f".step_{step}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        actor.save(unfinished)
        unfinished.rename(target)
        if self.limit >= 0:
            for old in checkpoints(self.directory)[: -max(1, self.limit)]:
                shutil.rmtree(old)


def newest_checkpoint(run: Path) -> Path | None:
    """The last step's checkpoint of a run directory."""
    return next(reversed(checkpoints(run / "checkpoints")), None)


def checkpoints(directory: Path) -> list[Path]:
    """`step_N`, the newest last."""
    steps = [path for path in directory.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step_")))
