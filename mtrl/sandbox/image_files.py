"""Images for worker processes: written to a file once, however many functions and workers read them."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mtrl.sandbox.scratch import ScratchDirectory

if TYPE_CHECKING:  # a worker imports this module, but Pillow only for an image
    from PIL import Image

RAW_MODES = ("L", "RGB")  # PPM stores these uncompressed


class ImageFiles:
    """One file per image, deleted with the image or with the process."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}  # file of each live image, by its id()
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @cached_property
    def directory(self) -> ScratchDirectory:
        return ScratchDirectory()

    def image_path(self, image: Image.Image) -> str:
        key = id(image)
        with self._lock:
            if key not in self._paths:
                kind = "ppm" if image.mode in RAW_MODES else "png"
                path = os.path.join(self.directory.name, f"{next(self._numbers)}.{kind}")
                image.save(path, kind, compress_level=1)  # for PNG: fast rather than small
                self._paths[key] = path
                weakref.finalize(image, self._forget, key, path)
            return self._paths[key]

    def _forget(self, key: int, path: str) -> None:
        del self._paths[key]
        with suppress(FileNotFoundError):
            os.unlink(path)


class Packer(pickle.Pickler):
    """Pickles images as the names of their files."""

    def __init__(self, buffer: io.BytesIO, files: ImageFiles) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.files = files

    def reducer_override(self, value: Any) -> Any:
        from PIL import Image

        return (open_image, (self.files.image_path(value),)) if isinstance(value, Image.Image) else NotImplemented


def pack(samples: Sequence[Any], files: ImageFiles) -> bytes:
    """Make a message for a worker. Each sample is pickled separately, so that a function that changes one does not
    change the others."""
    packed = []
    for sample in samples:
        buffer = io.BytesIO()
        Packer(buffer, files).dump(sample)
        packed.append(buffer.getvalue())
    return pickle.dumps(packed)


def open_image(path: str) -> Image.Image:
    """Open an image; Pillow reads its pixels on first use."""
    from PIL import Image

    return Image.open(path)
