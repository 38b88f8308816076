"""A cache of small arrays on disk, so that a second start need not scan every row again.

An entry is a checksum followed by an `.npz` archive. A damaged entry counts as absent and is made again.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mtrl.utils.files import atomic_write, regular_file

CHECKSUM_BYTES = 16

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """$MTRL_CACHE, or ~/.cache/mtrl."""
    return Path(os.environ.get("MTRL_CACHE") or Path.home() / ".cache" / "mtrl")


def file_stamp(path: Path) -> tuple[str, int, int]:
    """Return absolute path, size and mtime in ns, which identify a file that has not changed."""
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns


class DiskCache:
    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_cache_dir()

    def path(self, kind: str, key: Any, suffix: str = "cache") -> Path:
        """Return the file of an entry; `key` is any JSON value."""
        name = _digest(json.dumps(key, sort_keys=True).encode()).hex()
        return self.directory / kind / f"{name}.{suffix}"

    def load(self, kind: str, key: Any) -> dict[str, np.ndarray] | None:
        try:
            stored = regular_file(self.path(kind, key)).read_bytes()
        except OSError:
            return None
        checksum, archive = stored[:CHECKSUM_BYTES], stored[CHECKSUM_BYTES:]
        if _digest(archive) != checksum:
            return None
        with np.load(io.BytesIO(archive), allow_pickle=False) as entry:
            return {name: entry[name] for name in entry.files}

    def store(self, kind: str, key: Any, arrays: dict[str, np.ndarray]) -> None:
        archive = io.BytesIO()
        np.savez(archive, **arrays)  # type: ignore[arg-type]
        try:
            with atomic_write(self.path(kind, key)) as out:
                out.write(_digest(archive.getvalue()) + archive.getvalue())
        except OSError as error:
            logger.warning("cannot store the scan in %s (%s); the next start repeats it", self.directory, error)

    def get(
        self, kind: str, key: Any, names: set[str], make: Callable[[], dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Load an entry with these arrays, or make and store it. Without a key it is made and not stored."""
        entry = None if key is None else self.load(kind, key)
        if entry is None or names - entry.keys():
            entry = make()
            if key is not None:
                self.store(kind, key, entry)
        return entry


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def pack_json(value: Any) -> np.ndarray:
    """Encode lists of strings and the like as an array of bytes, to store them with the other arrays."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def unpack_json(packed: np.ndarray) -> Any:
    return json.loads(packed.tobytes())
