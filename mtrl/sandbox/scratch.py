"""A temporary directory that is removed even if its owner is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "mtrl-scratch-"  # older versions used another prefix, for folders without a lock


class ScratchDirectory:
    """A directory that is removed with this process. If that is impossible (all processes were killed, the machine went
    down), the next start removes it: the system releases its lock when the owner dies."""

    def __init__(self) -> None:
        remove_abandoned()
        while True:
            self._directory = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
            self.name = self._directory.name
            with suppress(FileNotFoundError):  # another start removed it as abandoned before it was locked
                self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
                with suppress(OSError):  # a file system without locks: no other start can remove it either
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.isdir(self.name):
                    return
                os.close(self._lock)


def remove_abandoned() -> None:
    """Remove the directories of dead processes of this user, without following links: anybody may write to /tmp."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # not a directory, or not ours
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(directory).st_uid == os.getuid():
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(directory)
