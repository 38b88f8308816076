"""Small arrays kept between starts, so that a second start need not look at every row again.

An entry is a checksum and an `.npz` archive after it. A damaged one counts as absent and is made anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mtrl.utils.files import regular_file

DIGEST = 16  # bytes of the checksum before an archive

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """$MTRL_CACHE, or ~/.cache/mtrl."""
    return Path(os.environ.get("MTRL_CACHE") or Path.home() / ".cache" / "mtrl")


def file_stamp(path: Path) -> tuple[str, int, int]:
    """What says that a file is still the same one: absolute path, size, mtime in ns."""
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns


class DiskCache:
    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_cache_dir()

    def path(self, kind: str, key: Any, suffix: str = "cache") -> Path:
        """The file of an entry; `key` is anything JSON can spell."""
        name = _digest(json.dumps(key, sort_keys=True).encode()).hex()
        return self.directory / kind / f"{name}.{suffix}"

    def load(self, kind: str, key: Any) -> dict[str, np.ndarray] | None:
        try:
            stored = regular_file(self.path(kind, key)).read_bytes()
        except OSError:
            return None
        checksum, archive = stored[:DIGEST], stored[DIGEST:]
        if _digest(archive) != checksum:
            return None
        with np.load(io.BytesIO(archive), allow_pickle=False) as entry:
            return {name: entry[name] for name in entry.files}

    def store(self, kind: str, key: Any, arrays: dict[str, np.ndarray]) -> None:
        archive = io.BytesIO()
        np.savez(archive, **arrays)  # type: ignore[arg-type]
        try:
            with replacing(self.path(kind, key)) as out:
                out.write(_digest(archive.getvalue()) + archive.getvalue())
        except OSError as error:
            logger.warning("cannot keep the scan in %s (%s); the next start repeats it", self.directory, error)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


class replacing:
    """Writes a file beside its final place and moves it there when done: a reader sees all of it or nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.out = tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=f".{self.path.name}.", delete=False)
        return self.out

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.out.close()
        if kind is None:
            os.replace(self.out.name, self.path)
        else:
            os.unlink(self.out.name)


def pack_json(value: Any) -> np.ndarray:
    """Lists of strings and the like as an array of bytes, to lie beside the numbers."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def unpack_json(packed: np.ndarray) -> Any:
    return json.loads(packed.tobytes())
