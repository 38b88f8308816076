"""Errors outside the configuration that a user has to fix, and the end of a finished run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StartError(Exception):
    """A run cannot start: something is wrong with its data, model or reward file."""


@contextmanager
def explain_os_errors() -> Iterator[None]:
    """Turn an OSError into a StartError that names the file. A closed pipe is no such error: its reader has left."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        what = f"{error.filename} cannot be used: {error.strerror}" if error.filename else str(error)
        raise StartError(f"{what}; check that it exists and that you may read and write it") from error


class Finished(Exception):
    """A run that has done all its steps was started again: there is nothing to do."""

    def __init__(self, directory: Path, message: str) -> None:
        super().__init__(message)
        self.directory = directory


class RunError(Exception):
    """A run failed for a reason that the user can remove; its checkpoints are intact."""


class RankLost(RunError):
    """A process of the run has ended or does not answer; the run can resume from its last checkpoint."""


class PassesCut(RankLost):
    """One process ran out of device memory while others wait in the middle of the same pass. The smaller pass size is
    stored for the next attempt."""


class Diverged(RunError):
    """The model's numbers are NaN or infinite: training cannot continue, and nothing is worth saving."""


class DeviceFull(RunError):
    """Not even the smallest part of the work fits into device memory."""
