"""Videos, by PyAV: what a file holds, and the pixels of the frames that a model is shown.

The scan reads a header and decodes one frame. Frames are decoded one after the other, and each that is shown is resized
at once, so that a long film takes no more memory than what is shown of it. Media of all kinds are measured and decoded
here; how an image is, `media.py` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from mtrl.data.media import MAX_PIXELS, Size, decode, media_name, open_bytes, read_size, within_side
from mtrl.data.row_settings import DataError, RowError
from mtrl.protocols import PromptEncoder
from mtrl.types import Medium, Task

INSTALL = "a row has a video, and PyAV is not installed: pip install 'mtrl[video]'"
# Containers that hold their frames themselves; a playlist would have others opened, or fetched.
CONTAINERS = "mov,matroska,avi,mpeg,mpegts,flv,asf,ogg,gif,mpegvideo,h264,hevc,m4v"
LOST = 0.02  # share of the frames that a header may promise and a file not hold: the last one stands in


@dataclass(frozen=True)
class Film:
    """What a video file says of itself; the size is upright."""

    size: Size
    frames: int
    fps: float


def measure(task: Task, encoder: PromptEncoder | None, verify: bool = True) -> tuple[Task, list[Size]]:
    """The sizes of the media as they are in the data, and the task with the frames that are shown of its videos."""
    if not any(medium.kind == "video" for medium in task.media):
        return task, [read_size(medium, verify) for medium in task.media]
    media, sizes = [], []
    for medium in task.media:
        if medium.kind == "video":
            film = read_film(medium, verify)
            medium = replace(medium, clip=None if encoder is None else _clip(encoder, film))
            sizes.append(film.size)
        else:
            sizes.append(read_size(medium, verify))
        media.append(medium)
    return replace(task, media=tuple(media)), sizes


def target_sizes(
    encoder: PromptEncoder | None, sizes: Sequence[Size], media: Sequence[Medium] | None = None
) -> list[Size]:
    """The sizes the model will see; without an encoder, the sizes as they are. Without `media` all are images."""
    if encoder is None:
        return list(sizes)
    targets = []
    for place, (height, width) in enumerate(sizes):
        kind = "image" if media is None else media[place].kind
        try:
            targets.append((encoder.target_size if kind == "image" else encoder.frame_size)(height, width))
        except ValueError as error:
            raise RowError(f"the model cannot take an {kind} of {width} x {height} pixels ({error})") from error
    return targets


def pixels(medium: Medium, target: Size) -> np.ndarray:
    """RGB uint8 at the target (height, width): [H, W, 3] an image, [F, H, W, 3] the frames shown of a video."""
    return decode(medium, target) if medium.kind == "image" else _decode_frames(medium, target)


def check_pixels(media: Iterable[Medium]) -> None:
    """Decodes all that is shown, for the error that a damaged file raises."""
    for medium in media:
        size = read_film(medium).size if medium.kind == "video" else read_size(medium, verify=False)
        pixels(medium, within_side(size, None if medium.kind == "image" else 64))


def read_film(medium: Medium, verify: bool = True) -> Film:
    """From the header and the first frame; `verify` looks whether the file ends before its last frame does."""
    with _opened(medium) as (container, stream, length):
        if verify and any(entry.pos + entry.size > length for entry in list(stream.index_entries)[-1:]):
            raise RowError(f"{media_name(medium)} is truncated or damaged (it ends before its last frame)")
        frame = next(container.decode(stream), None)
        if frame is None:
            raise RowError(f"{media_name(medium)} has no frames")
        height, width = frame.height, frame.width
        if width * height > MAX_PIXELS:
            raise RowError(f"{media_name(medium)} is too large: {width} x {height} pixels, more than {MAX_PIXELS:,}")
        fps = stream.average_rate or stream.guessed_rate
        if not fps:
            raise RowError(f"{media_name(medium)} does not say how many frames a second has")
        size = (width, height) if _turns(frame) % 2 else (height, width)
        return Film(size, stream.frames or _counted(container, stream, float(fps)), float(fps))


def _clip(encoder: PromptEncoder, film: Film) -> Any:
    if not hasattr(encoder, "clip"):
        raise RowError("it has a video, which this model's family does not take")
    try:
        return encoder.clip(film.frames, film.fps)
    except ValueError as error:
        raise RowError(f"it has a video: {error}") from error


def _decode_frames(medium: Medium, target: Size) -> np.ndarray:
    """Those of the medium's clip; all of them where it has none."""
    wanted = None if medium.clip is None else medium.clip.frames
    shown: list[np.ndarray] = []
    number = -1
    with _opened(medium) as (container, stream, _):
        for number, frame in enumerate(container.decode(stream)):
            repeats = 1 if wanted is None else wanted.count(number)
            shown += repeats * [_resized(frame, target)] if repeats else []
            if wanted is not None and number >= wanted[-1]:
                break
    if wanted is not None and len(shown) < len(wanted):
        missing = wanted[-1] - number
        if not shown or missing > max(2, LOST * wanted[-1]):
            raise RowError(f"{media_name(medium)} is truncated or damaged (it ends after {number + 1} frames)")
        shown += (len(wanted) - len(shown)) * shown[-1:]
    return np.stack(shown)


def _resized(frame: Any, target: Size) -> np.ndarray:
    array = np.rot90(frame.to_ndarray(format="rgb24"), _turns(frame))
    if array.shape[:2] == tuple(target):
        return np.ascontiguousarray(array)
    image = Image.fromarray(np.ascontiguousarray(array))
    return np.asarray(image.resize((target[1], target[0]), Image.Resampling.BICUBIC))


def _turns(frame: Any) -> int:
    """Quarters of a turn, against the clock, that stand a frame upright: phones lay theirs on the side."""
    return round((getattr(frame, "rotation", 0) or 0) / 90) % 4


def _counted(container: Any, stream: Any, fps: float) -> int:
    """Frames of a file whose header does not count them: by its length in time, else one by one."""
    if stream.duration:
        return max(1, round(float(stream.duration * stream.time_base) * fps))
    if container.duration:
        return max(1, round(container.duration / 1_000_000 * fps))
    container.seek(0)
    return max(1, sum(1 for packet in container.demux(stream) if packet.size))


@contextmanager
def _opened(medium: Medium) -> Iterator[tuple[Any, Any, int]]:
    """The container, its first stream of video and the length of the file. PyAV raises anything on damaged files."""
    if find_spec("av") is None:
        raise DataError(INSTALL)
    import av

    with open_bytes(medium) as data:
        length = data.seek(0, 2)
        data.seek(0)
        if not length:
            raise RowError(f"{media_name(medium)} is empty")
        try:
            with av.open(data, options={"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}) as container:
                if not container.streams.video:
                    raise RowError(f"{media_name(medium)} holds no video")
                yield container, container.streams.video[0], length
        except RowError:
            raise
        except (av.FFmpegError, ValueError, EOFError, MemoryError) as error:
            told = getattr(error, "strerror", None) or error
            raise RowError(f"{media_name(medium)} is no video that can be read ({told})") from error
