"""Only regular files are read: a pipe would block its reader for ever, and a device never ends. Files are replaced as a
whole. Names of paths."""

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def regular_file(path: str | os.PathLike[str]) -> Path:
    """Return the path if it is a regular file or a link to one; raise an OSError that says what it is otherwise."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
    return Path(path)


def is_inside(path: Path, directory: Path) -> bool:
    """Whether a path is really in a directory, or is that directory: a link may lead anywhere."""
    try:
        return path.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError):  # a link to itself
        return False


def is_own_file(path: Path, directory: Path) -> bool:
    """Whether a path is a regular file of a directory: not a pipe, and not a link that leads out of it."""
    return path.is_file() and is_inside(path, directory)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file (flock). No if there is no such file, or the system has no locks."""
    try:
        with regular_file(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def check_regular_files(directory: str | os.PathLike[str]) -> None:
    """Raise an OSError if a directory that a library is about to read holds a pipe, a socket or a device."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.exists(path):  # whoever reads a broken link reports it
                regular_file(path)


def write_file(path: Path, text: str) -> None:
    """Writes all of the new text, or leaves the old file as it was."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text, encoding="utf-8")
    sync_path(unfinished)
    unfinished.replace(path)
    sync_path(path.parent)


@contextmanager
def atomic_write(path: Path) -> Iterator[Any]:
    """Write a temporary file and rename it to its final path: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as out:
        try:
            yield out
            out.close()
            os.replace(out.name, path)
        except BaseException:
            os.unlink(out.name)
            raise


def sync_path(path: Path) -> None:
    """Returns when a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as make the names unique.

    >>> short_names([Path("a/x/one"), Path("b/x/one")]), short_names([Path("a/one"), Path("a/two")])
    (['a/x/one', 'b/x/one'], ['one', 'two'])
    """
    for count in range(1, max((len(path.parts) for path in paths), default=1)):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    return [str(path) for path in paths]
