"""Videos, by PyAV: their sizes, and the pixels of the frames that the model sees.

The scan reads a header and decodes one frame. Frames are decoded one by one and resized at once, so that a long video
needs memory only for the frames shown. `measure_media` and `decode_medium` handle images too, by `media.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from mtrl.data.media import MAX_PIXELS, WITH_ARTICLE, Size, decode, limit_side, media_name, open_bytes, read_size
from mtrl.data.row_settings import DataError, RowError
from mtrl.protocols import PromptEncoder
from mtrl.types import Medium, Task
from mtrl.utils.images import resize_image

# Containers that hold their own frames; a playlist would make PyAV open or fetch other files.
CONTAINERS = "mov,matroska,avi,mpeg,mpegts,flv,asf,ogg,gif,mpegvideo,h264,hevc,m4v"
MAX_MISSING_SHARE = 0.02  # share of the header's frame count; the last frame replaces missing ones


@dataclass(frozen=True)
class VideoInfo:
    size: Size  # upright
    frames: int
    fps: float


def measure_media(task: Task, encoder: PromptEncoder | None, verify: bool = True) -> tuple[Task, list[Size]]:
    """Return the task with the clips of its videos, and the sizes of its media in the data."""
    media, sizes = [], []
    for medium in task.media:
        if medium.kind == "video":
            info = read_video_info(medium, verify)
            medium = replace(medium, clip=None if encoder is None else _make_clip(encoder, info))
            sizes.append(info.size)
        else:
            sizes.append(read_size(medium, verify))
        media.append(medium)
    return replace(task, media=tuple(media)), sizes


def target_sizes(
    encoder: PromptEncoder | None, sizes: Sequence[Size], media: Sequence[Medium] | None = None
) -> list[Size]:
    """Return the sizes the model will see; without an encoder, the same sizes. Without `media` all are images."""
    if encoder is None:
        return list(sizes)
    targets = []
    for index, (height, width) in enumerate(sizes):
        kind = "image" if media is None else media[index].kind
        try:
            targets.append((encoder.target_size if kind == "image" else encoder.frame_size)(height, width))
        except ValueError as error:
            name = WITH_ARTICLE[kind]
            raise RowError(f"the model cannot take {name} of {width} x {height} pixels ({error})") from error
    return targets


def decode_medium(medium: Medium, target: Size) -> np.ndarray:
    """Decode as RGB uint8 at the target (height, width): an image [H, W, 3], the frames of a video [F, H, W, 3]."""
    return decode(medium, target) if medium.kind == "image" else _decode_frames(medium, target)


def check_pixels(media: Iterable[Medium]) -> None:
    """Decode all media; raise RowError for a damaged file."""
    for medium in media:
        size = read_video_info(medium).size if medium.kind == "video" else read_size(medium, verify=False)
        decode_medium(medium, limit_side(size, None if medium.kind == "image" else 64))


def read_video_info(medium: Medium, verify: bool = True) -> VideoInfo:
    """Read the header and the first frame; `verify` checks that the file contains its last frame."""
    with _open_video(medium) as (container, stream, length):
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
            raise RowError(f"{media_name(medium)} has no frame rate")
        size = (width, height) if _quarter_turns(frame) % 2 else (height, width)
        return VideoInfo(size, stream.frames or _count_frames(container, stream, float(fps)), float(fps))


def _make_clip(encoder: PromptEncoder, info: VideoInfo) -> Any:
    if not hasattr(encoder, "clip"):
        raise RowError("it has a video, which this model's family does not take")
    try:
        return encoder.clip(info.frames, info.fps)
    except ValueError as error:
        raise RowError(f"it has a video: {error}") from error


def _decode_frames(medium: Medium, target: Size) -> np.ndarray:
    """Decode the frames of the medium's clip, or all frames if it has none."""
    requested = None if medium.clip is None else medium.clip.frames
    frames: list[np.ndarray] = []
    number = -1
    with _open_video(medium) as (container, stream, _):
        for number, frame in enumerate(container.decode(stream)):
            repeats = 1 if requested is None else requested.count(number)
            frames += repeats * [_resize(frame, target)] if repeats else []
            if requested is not None and number >= requested[-1]:
                break
    if requested is not None and len(frames) < len(requested):
        missing = requested[-1] - number
        if not frames or missing > max(2, MAX_MISSING_SHARE * requested[-1]):
            raise RowError(f"{media_name(medium)} is truncated or damaged (it ends after {number + 1} frames)")
        frames += (len(requested) - len(frames)) * frames[-1:]
    return np.stack(frames)


def _resize(frame: Any, target: Size) -> np.ndarray:
    upright = np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), _quarter_turns(frame)))
    return resize_image(upright, *target)


def _quarter_turns(frame: Any) -> int:
    """Return the counterclockwise quarter turns that put a frame upright: phones often store it rotated."""
    return round((getattr(frame, "rotation", 0) or 0) / 90) % 4


def _count_frames(container: Any, stream: Any, fps: float) -> int:
    """Count the frames if the header does not: from the duration, else one by one."""
    if stream.duration:
        return max(1, round(float(stream.duration * stream.time_base) * fps))
    if container.duration:
        return max(1, round(container.duration / 1_000_000 * fps))
    container.seek(0)
    return max(1, sum(1 for packet in container.demux(stream) if packet.size))


@contextmanager
def _open_video(medium: Medium) -> Iterator[tuple[Any, Any, int]]:
    """Yield the container, its first video stream and the length of the file in bytes."""
    if find_spec("av") is None:
        raise DataError(f"{media_name(medium)} needs PyAV, which is not installed: pip install 'mtrl[video]'")
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
            reason = getattr(error, "strerror", None) or error
            raise RowError(f"{media_name(medium)} cannot be read as a video ({reason})") from error
