"""A run's folder, which one process at a time may write to."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mtrl.checkpoint.folder_store import checkpoints
from mtrl.checkpoint.manifest import write_file
from mtrl.utils.errors import RunError, StartError
from mtrl.utils.files import regular_file

LOCK = "run.lock"
CONFIG = "config.yaml"
ID = "run_id"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what network file systems without locks answer
FILES = (LOCK, ID, CONFIG, "metrics.jsonl", "rollouts.jsonl", "validations.jsonl", "bad_rows.jsonl", "torch_threads")
FOLDERS = ("checkpoints", "logs")
TRACES = (CONFIG, "metrics.jsonl", "checkpoints")  # any of these shows that a run has used the folder

logger = logging.getLogger(__name__)


class RunDirectory:
    """Claimed while it is open. The lock is the system's, so it ends with the process, however that ends."""

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
        """Writes down the configuration that the run goes on with."""
        self._config = config
        try:
            write_file(self.path / CONFIG, config)
        except OSError as error:
            raise self._unusable(error) from error

    def keep(self) -> None:
        """Makes the folder anew where somebody removed it under the run."""
        if self._is_ours():
            return
        self.check_still_ours()
        logger.warning("%s was removed while the run is on; it is made again, without what was in it", self.path)
        try:
            gone, self._lock = self._lock, self._claim()  # one that fails leaves the old lock, for the next time
        except StartError as error:
            raise self._taken() from error
        gone.close()
        write_file(self.path / ID, self.id)
        if self._config is not None:
            write_file(self.path / CONFIG, self._config)

    def check_still_ours(self) -> None:
        """Ends this run where the folder was removed and another run has it now, or had it: nothing there is ours."""
        with suppress(OSError):  # gone, or not to be read: whoever writes there will see
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
            logger.warning("%s is on a file system without locks; see to it that no two runs use it", self.path)
        lock.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        return lock

    def _unusable(self, error: OSError) -> StartError:
        file = f" ({error.filename})" if error.filename and Path(error.filename) != self.path else ""
        return StartError(f"the run cannot be kept in {self.path}: {error.strerror}{file}; set training.output_dir")

    def _taken(self) -> RunError:
        told = f"{self.path} was removed while the run was on, and another process has taken it"
        last = next(reversed(self._moved()), None)
        left = f"the last checkpoint of this run is {last}" if last else "its own checkpoints went with the folder"
        return RunError(f"{told}. Nothing there was touched; {left}. Choose another training.experiment_name")

    def _moved(self) -> list[Path]:
        """The checkpoints of a folder that was renamed rather than removed: Linux knows where our lock is now, or that
        it is nowhere."""
        try:
            lock = Path(os.readlink(f"/proc/self/fd/{self._lock.fileno()}"))
            return checkpoints(lock.parent / "checkpoints") if lock.exists() else []
        except OSError:
            return []

    def _is_ours(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock.fileno()), (self.path / LOCK).stat())
        except FileNotFoundError:
            return False

    def _identify(self) -> str:
        """An id that is the same for every attempt, so that loggers go on with the same curve."""
        place = self.path / ID
        if not place.exists():
            write_file(place, uuid.uuid4().hex[:12])
        found = place.read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"[\w-]+", found):
            raise StartError(f"{place} does not hold the id that the run wrote there; put it back, or remove the file")
        return found


def check_known_files(path: Path) -> None:
    """What stands in the place of a run's file or folder must be one. From a pipe one would read for ever, and a link
    that leads nowhere would make a new start of a run whose checkpoints are elsewhere."""
    for names, what, there in ((FILES, "file", Path.is_file), (FOLDERS, "folder", Path.is_dir)):
        for place in (path / name for name in names):
            if os.path.lexists(place) and not there(place):
                told = f"{place} is no {what}, but something else or a link that leads nowhere"
                raise StartError(f"{told}; move it away, or choose another training.experiment_name")
