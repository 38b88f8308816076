"""What Qwen's families make of a video: which frames they are shown, how large, and where these stand in time.

The frames are those that the family's own processor in transformers takes. Qwen2-VL counts them, Qwen2.5-VL spaces them
by the seconds between them, and Qwen3-VL writes the time before each patch of frames.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from mtrl.protocols import Clip, ImageSettings, VideoSettings

MIN_FRAMES = 4  # of a video that has them
FRAME_TOKENS = (128, 768)  # that a frame is enlarged and reduced to, as transformers' video processors do it


@dataclass(frozen=True)
class ClipRules:
    """`deep`: frames of a patch. `stamped`: their time is written; else `per_second` positions are a second, or a patch
    where it is None."""

    deep: int
    stamped: bool = False
    per_second: float | None = None

    def clip(self, total: int, fps: float, settings: VideoSettings) -> Clip:
        """Evenly over the video, whole patches of them where they are not stamped."""
        wanted = max(total / fps * settings.fps, MIN_FRAMES)
        most = min(settings.max_frames, total)
        if self.stamped:
            places = np.linspace(0, total - 1, min(int(wanted), most)).round().astype(int).tolist()
            return Clip(total, fps, tuple(places))
        count = int(min(wanted, most) // self.deep) * self.deep
        # torch's own numbers: they decide to which frame a place between two is rounded, and may be one too many.
        places = torch.arange(0, total, total / count).int()[:count].tolist() if count else [0]
        return Clip(total, fps, tuple(places))

    @property
    def timed(self) -> bool:
        """Whether videos are placed by their seconds."""
        return not self.stamped and self.per_second is not None

    def seconds(self, clip: Clip) -> float:
        """Of a patch."""
        return self.deep / clip.shown_fps

    def times(self, clip: Clip, patches: int) -> list[int]:
        """The position in time of each patch, from that of the clip. transformers' numbers: float32, cut off."""
        if self.per_second is None:
            return list(range(patches))
        step = self.per_second * torch.tensor(self.seconds(clip))
        return (torch.arange(patches) * step).long().tolist()

    def stamps(self, clip: Clip) -> list[str]:
        """What stands before each patch: the middle of its time."""
        numbers = [*clip.frames, *clip.frames[-1:] * (-len(clip.frames) % self.deep)]
        seconds = [number / clip.fps for number in numbers]
        ends = zip(seconds[:: self.deep], seconds[self.deep - 1 :: self.deep], strict=True)
        return [f"<{(first + last) / 2:.1f} seconds>" for first, last in ends]


def frame_settings(image: ImageSettings, video: VideoSettings) -> ImageSettings:
    """The limits of a frame: those of images, and fewer pixels at both ends, since there are many frames."""
    low, high = (tokens * image.factor**2 for tokens in FRAME_TOKENS)
    most = min(image.max_pixels, high if video.max_pixels is None else video.max_pixels)
    return replace(image, min_pixels=min(image.min_pixels, low, most), max_pixels=most)
