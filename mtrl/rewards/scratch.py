"""A temporary directory that no death of its owner leaves behind for good."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "mtrl-scratch-"  # not that of older versions, whose folders nobody locks


class ScratchDirectory:
    """A directory that goes with this process. Where nobody could remove it (all was killed, the machine went down),
    the next start does: a lock, which the system opens when the owner dies in whatever way, tells who is gone."""

    def __init__(self) -> None:
        remove_abandoned()
        while True:
            self._directory = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
            self.name = self._directory.name
            with suppress(FileNotFoundError):  # another start found it before it was locked, and took it for abandoned
                self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
                with suppress(OSError):  # a file system without locks: then nobody can remove it either
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.isdir(self.name):
                    return
                os.close(self._lock)


def remove_abandoned() -> None:
    """Removes what dead processes of this user left. Links are not followed: anybody may write to /tmp."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # not a directory, or not ours
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(directory).st_uid == os.getuid():
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(directory)
