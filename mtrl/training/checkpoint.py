"""Checkpoints in the Hugging Face layout, complete or not there at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from mtrl.protocols import Actor


class FolderStore:
    """`<directory>/step_N`, written under another name first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, step: int, actor: Actor) -> None:
        target = self.directory / f"step_{step}"
        unfinished = self.directory / f".step_{step}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        actor.save(unfinished)
        unfinished.rename(target)


def newest_checkpoint(run: Path) -> Path | None:
    """The last step's checkpoint of a run directory."""
    steps = [path for path in (run / "checkpoints").glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return max(steps, key=lambda path: int(path.name.removeprefix("step_")), default=None)
