"""The embedded tasks as data sources, whose rows are generated on demand and never change; and the paths of their
settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mtrl.embedded import look_again, scenes, task
from mtrl.embedded.task import Split
from mtrl.utils.embedded_models import MODELS

HOME = Path(__file__).parent
SIZES: dict[Split, int] = {"train": 2000, "validation": 200, "test": 1000}
SCENES_SIZES: dict[Split, int] = {"train": 2000, "validation": 400, "test": scenes.TEST_QUESTIONS}
LOOK_AGAIN_SIZES: dict[Split, int] = {"train": 2000, "validation": 400, "test": look_again.TEST_QUESTIONS}
MODEL_DIRECTORY = MODELS["zoo"]
CONFIG_FILES = {name: HOME / f"{name}.yaml" for name in MODELS}
CONFIG_FILE = CONFIG_FILES["zoo"]
TASK_VERSION = 1  # raise it when the same index gives another question


class ZooRows:
    """One split of the embedded task."""

    directory = Path(".")
    title: ClassVar[str] = "embedded task"
    version_tag: ClassVar[str] = f"zoo{TASK_VERSION}"
    sizes: ClassVar[Mapping[Split, int]] = SIZES

    def __init__(self, split: Split) -> None:
        if split not in self.sizes:
            raise ValueError(f"the {self.title} has no split {split!r}; it has {', '.join(self.sizes)}")
        self.split: Split = split
        self.name = f"{self.title}, {split}"
        self.fingerprint = f"{self.version_tag}-{split}"
        self.stamp = [self.fingerprint, self.sizes[split]]

    def __len__(self) -> int:
        return self.sizes[self.split]

    def read(self, index: int) -> dict[str, Any]:
        return task.row(task.make_question(self.split, index))

    def row_number(self, index: int) -> int:
        return index + 1


class SceneRows(ZooRows):
    """One split of `scenes`."""

    title = "embedded task scenes"
    version_tag = f"scenes{scenes.VERSION}"
    sizes = SCENES_SIZES

    def read(self, index: int) -> dict[str, Any]:
        return scenes.row(scenes.make_question(self.split, index))


class BlankSceneRows(SceneRows):
    """The same questions about grey pictures: a control, on which nothing can be learned by looking."""

    title = "embedded task scenes without its pictures"
    version_tag = f"scenes{scenes.VERSION}-blank"

    def read(self, index: int) -> dict[str, Any]:
        return scenes.row(scenes.make_question(self.split, index), blank=True)


class LookAgainRows(ZooRows):
    """One split of `lookagain`."""

    title = "embedded task lookagain"
    version_tag = f"{look_again.NAME}{look_again.VERSION}"
    sizes = LOOK_AGAIN_SIZES

    def read(self, index: int) -> dict[str, Any]:
        return look_again.row(look_again.make_question(self.split, index))


class BlankLookAgainRows(LookAgainRows):
    """The same questions, whose zooms show grey: a control, on which nothing can be learned by zooming."""

    title = "embedded task lookagain without its zooms"
    version_tag = f"{look_again.NAME}{look_again.VERSION}-blank"

    def read(self, index: int) -> dict[str, Any]:
        return look_again.row(look_again.make_question(self.split, index), blank=True)


TASKS: dict[str, type[ZooRows]] = {
    "zoo": ZooRows,
    "scenes": SceneRows,
    "scenes-blank": BlankSceneRows,
    "lookagain": LookAgainRows,
    "lookagain-blank": BlankLookAgainRows,
}
ALIASES = {"zoo@lookagain": "lookagain@train"}


def embedded_rows(name: str) -> ZooRows:
    """The rows of a task and split, such as `zoo@test`."""
    task_name, _, split = ALIASES.get(name, name).partition("@")
    return TASKS[task_name](split)  # type: ignore[arg-type]


def packaged_config(data: str) -> Path | None:
    """The settings file of an embedded task and its model, if `data` names such a task."""
    name, at, _ = ALIASES.get(data, data).partition("@")
    return CONFIG_FILES[name.removesuffix("-blank")] if at and name in TASKS else None
