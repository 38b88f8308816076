"""Files that a user names, or that a run left, are read only where they are files: a pipe keeps its reader waiting for
ever, and a device never ends."""

import errno
import os
import stat
from pathlib import Path

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def regular_file(path: str | os.PathLike[str]) -> Path:
    """The path, where a regular file is there or a link leads to one; else an OSError that says what is there."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
    return Path(path)


def check_regular_file(directory: str | os.PathLike[str]) -> None:
    """Raises for a pipe, a socket or a device anywhere in a folder that a library is about to read."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.exists(path):  # a link that leads nowhere is whoever's business that wants to read it
                regular_file(path)
