"""The run directory, which one process at a time may write to."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.utils.errors import RunError, StartError
from mtrl.utils.files import regular_file, write_file

LOCK = "run.lock"
CONFIG = "config.yaml"
ID = "run_id"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # from network file systems without locks
FILES = (LOCK, ID, CONFIG, "metrics.jsonl", "rollouts.jsonl", "validations.jsonl", "bad_rows.jsonl", "torch_threads")
FOLDERS = ("checkpoints", "logs")
TRACES = (CONFIG, "metrics.jsonl", "checkpoints")  # any of these shows that a run has used the directory

logger = logging.getLogger(__name__)


class RunDirectory:
    """Locked while it is open. The system releases the lock when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config: str | None = None
        try:
            check_known_files(path)
            self._lock = self._claim()
            self.used = any(os.path.lexists(path / name) for name in TRACES)
            self.id = self._identify()
        except OSError as error:
            raise self._unusable(error) from error

    def record(self, config: str) -> None:
        """Writes the configuration of the run."""
        self._config = config
        try:
            write_file(self.path / CONFIG, config)
        except OSError as error:
            raise self._unusable(error) from error

    def recreate_if_removed(self) -> None:
        """Makes the directory again if somebody removed it during the run."""
        if self._is_ours():
            return
        self.check_still_ours()
        logger.warning("%s was removed during the run; it is created again, without its previous contents", self.path)
        try:
            old, self._lock = self._lock, self._claim()  # if this fails, the old lock stays for the next time
        except StartError as error:
            raise self._taken() from error
        old.close()
        write_file(self.path / ID, self.id)
        if self._config is not None:
            write_file(self.path / CONFIG, self._config)

    def check_still_ours(self) -> None:
        """Ends this run if the directory was removed and another run has used it since."""
        with suppress(OSError):  # it is gone or unreadable: the next write will fail
            if regular_file(self.path / ID).read_text(encoding="utf-8").strip() != self.id:
                raise self._taken()

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim(self) -> TextIO:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / LOCK).open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            raise StartError(
                f"{self.path} is in use by {owner}; wait for it, or choose another training.experiment_name"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            logger.warning("%s is on a file system without locks; make sure that no two runs use it", self.path)
        lock.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        return lock

    def _unusable(self, error: OSError) -> StartError:
        file = f" ({error.filename})" if error.filename and Path(error.filename) != self.path else ""
        return StartError(f"the run cannot use {self.path}: {error.strerror}{file}; set training.output_dir")

    def _taken(self) -> RunError:
        message = f"{self.path} was removed during the run, and another process uses it now"
        last = next(reversed(self._moved_checkpoints()), None)
        left = f"the last checkpoint of this run is {last}" if last else "its checkpoints were removed with it"
        return RunError(f"{message}. This run has not touched it; {left}. Choose another training.experiment_name")

    def _moved_checkpoints(self) -> list[Path]:
        """The checkpoints of a directory that was renamed rather than removed: Linux knows where our lock file is."""
        try:
            lock = Path(os.readlink(f"/proc/self/fd/{self._lock.fileno()}"))
            return list_checkpoints(lock.parent / "checkpoints") if lock.exists() else []
        except OSError:
            return []

    def _is_ours(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock.fileno()), (self.path / LOCK).stat())
        except FileNotFoundError:
            return False

    def _identify(self) -> str:
        """An id that is the same for every attempt, so that loggers continue the same curve."""
        file = self.path / ID
        if not file.exists():
            write_file(file, uuid.uuid4().hex[:12])
        run_id = file.read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"[\w-]+", run_id):
            raise StartError(f"{file} does not hold the id that the run wrote there; put it back, or remove the file")
        return run_id


def set_aside(path: Path) -> Path | None:
    """Rename the directory of a run, which must not be in use, to `NAME.old` and return its new path; None if there is
    no run. An earlier `NAME.old` is removed."""
    if not any(os.path.lexists(path / name) for name in TRACES):
        return None
    target = path.with_name(f"{path.name}.old")
    with RunDirectory(path):
        if target.exists():
            shutil.rmtree(target)
        path.rename(target)
    return target


def check_known_files(path: Path) -> None:
    """Checks that the names of a run's files and folders are not used for anything else. Reading a pipe would never
    end, and behind a broken link a run would start anew although its checkpoints are elsewhere."""
    for names, kind, is_kind in ((FILES, "file", Path.is_file), (FOLDERS, "folder", Path.is_dir)):
        for each in (path / name for name in names):
            if os.path.lexists(each) and not is_kind(each):
                message = f"{each} is not a {kind}, but something else or a broken link"
                raise StartError(f"{message}; move it away, or choose another training.experiment_name")
