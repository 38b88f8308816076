"""The errors of everything outside the configuration that a user has to change, and of a run that has ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StartError(Exception):
    """A run that cannot start: data, a model or a reward file is not as it should be."""


@contextmanager
def opening() -> Iterator[None]:
    """Before a run, what the system refuses is the user's to allow. Nobody listening any more is no such thing."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        what = f"{error.filename} cannot be used: {error.strerror}" if error.filename else str(error)
        raise StartError(f"{what}; see that it is there and that you may read and write it") from error


class Finished(Exception):
    """A run that has done all its steps was started again: nothing is wrong, and nothing is to be done."""

    def __init__(self, directory: Path, told: str) -> None:
        super().__init__(told)
        self.directory = directory


class RunError(Exception):
    """A run that cannot end well, for a reason a user can remove; what it saved before is whole."""


class RankLost(RunError):
    """A process of the run has ended or does not answer; the last checkpoint is where to go on."""


class PassesCut(RankLost):
    """The device of one process had no room for its part of a pass, while others wait in the middle of theirs. What was
    kept for the next attempt is smaller."""


class Diverged(RunError):
    """The model's numbers are NaN or infinite: there is nothing to go on with, and nothing to save."""


class DeviceFull(RunError):
    """Not even the smallest part of the work fits into the device's memory."""
