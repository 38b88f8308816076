"""How Qwen's families read a video: which frames, how large, and at which positions in time.

The frames are those that the family's processor in transformers takes. Qwen2-VL counts them, Qwen2.5-VL spaces them by
the seconds between them, and Qwen3-VL writes the time before each patch of frames.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from mtrl.protocols import Clip, ImageSettings, VideoSettings

MIN_FRAMES = 4  # if the video has as many
FRAME_TOKENS = (128, 768)  # fewest and most tokens of a frame, as in transformers' video processors


@dataclass(frozen=True)
class ClipRules:
    """How a family samples and places the frames of a video. `has_timestamps`: their time is written as text; otherwise
    a second is `positions_per_second` positions, or a patch one position if that is None."""

    frames_per_patch: int
    has_timestamps: bool = False
    positions_per_second: float | None = None

    def sample(self, total: int, fps: float, settings: VideoSettings) -> Clip:
        """Sample frames evenly; without timestamps, whole patches of them."""
        wanted = max(total / fps * settings.video_fps, MIN_FRAMES)
        most = min(settings.video_max_frames, total)
        if self.has_timestamps:
            frames = np.linspace(0, total - 1, min(int(wanted), most)).round().astype(int).tolist()
            return Clip(total, fps, tuple(frames))
        count = int(min(wanted, most) // self.frames_per_patch) * self.frames_per_patch
        # torch's own arithmetic decides how a position between two frames is rounded, and may give one frame too many.
        frames = torch.arange(0, total, total / count).int()[:count].tolist() if count else [0]
        return Clip(total, fps, tuple(frames))

    @property
    def uses_seconds(self) -> bool:
        """Whether positions in time follow the seconds of the video."""
        return not self.has_timestamps and self.positions_per_second is not None

    def seconds_per_patch(self, clip: Clip) -> float:
        return self.frames_per_patch / clip.shown_fps

    def time_positions(self, clip: Clip, patches: int) -> list[int]:
        """The position in time of each patch, relative to the clip. As in transformers: float32, truncated."""
        if self.positions_per_second is None:
            return list(range(patches))
        step = self.positions_per_second * torch.tensor(self.seconds_per_patch(clip))
        return (torch.arange(patches) * step).long().tolist()

    def timestamps(self, clip: Clip) -> list[str]:
        """The text before each patch: the middle of its time."""
        size = self.frames_per_patch
        numbers = [*clip.frames, *clip.frames[-1:] * (-len(clip.frames) % size)]
        seconds = [number / clip.fps for number in numbers]
        ends = zip(seconds[::size], seconds[size - 1 :: size], strict=True)
        return [f"<{(first + last) / 2:.1f} seconds>" for first, last in ends]


def frame_settings(image: ImageSettings, video: VideoSettings) -> ImageSettings:
    """The pixel limits of a frame: those of images, reduced since there are many frames."""
    low, high = (tokens * image.factor**2 for tokens in FRAME_TOKENS)
    most = min(image.max_pixels, high if video.video_max_pixels is None else video.video_max_pixels)
    return replace(image, min_pixels=min(image.min_pixels, low, most), max_pixels=most)
