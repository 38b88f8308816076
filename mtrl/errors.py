"""The errors of everything outside the configuration that a user has to change, and of a run that has ended."""

from pathlib import Path


class StartError(Exception):
    """A run that cannot start: data, a model or a reward file is not as it should be."""


class Finished(Exception):
    """A run that has done all its steps was started again: nothing is wrong, and nothing is to be done."""

    def __init__(self, directory: Path, told: str) -> None:
        super().__init__(told)
        self.directory = directory


class RunError(Exception):
    """A run that cannot end well, for a reason a user can remove; what it saved before is whole."""
