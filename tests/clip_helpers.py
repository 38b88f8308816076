"""Videos encoded with PyAV, and prompts with them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from tiny_models import get_encoder, picture

from mtrl.data import DataSettings, RowList, Sampler, open_dataset
from mtrl.models.families import TextEncoder
from mtrl.types import Prompt


def film(height: int, width: int, frames: int, seed: int = 0) -> np.ndarray:
    """[F, H, W, 3]: a drifting picture, so that all frames differ and compress well."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    still = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
    return np.stack([np.roll(still, 5 * number, axis=1) for number in range(frames)])


def film_bytes(
    pixels: np.ndarray, fps: int = 8, kind: str = "mp4", codec: str = "libx264", rotation: int = 0, **options: str
) -> bytes:
    import av

    with tempfile.NamedTemporaryFile() as file, av.open(file.name, "w", format=kind, options=options) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
        container.close()
        return Path(file.name).read_bytes()


def tiny_film(
    encoder: TextEncoder, path: Path, rows: int = 5, columns: int = 6, frames: int = 20, fps: int = 8
) -> Path:
    """Writes a video whose frames have the size that the model sees, rows x columns tokens."""
    side = encoder.image_settings.factor
    path.write_bytes(film_bytes(film(rows * side, columns * side, frames), fps))
    return path


def mixed_rows(encoder: TextEncoder, folder: Path) -> list[dict]:
    """A row with a video, one with two images, one with text only, and one with a video between words and an image."""
    tiny_film(encoder, folder / "a.mp4")
    for number in range(2):
        Image.fromarray(picture(encoder, 2, 3 + number, seed=number)).save(folder / f"{number}.png")
    images, film_name = [str(folder / "0.png"), str(folder / "1.png")], str(folder / "a.mp4")
    return [
        {"prompt": "<video>what colour is it", "videos": [film_name], "answer": "red", "images": None},
        {"prompt": "is <image> left of <image>", "videos": None, "answer": "no", "images": images},
        {"prompt": "how many", "videos": None, "answer": "two", "images": None},
        {"prompt": "is <video> like <image>", "videos": film_name, "answer": "yes", "images": images[:1]},
    ]


def mixed_prompts(family: str, folder: Path) -> list[Prompt]:
    """The prompts of `mixed_rows`, in order."""
    encoder = get_encoder(family)
    dataset = open_dataset([RowList(mixed_rows(encoder, folder), "rows")], DataSettings(), encoder)
    with Sampler(dataset, encoder, shuffle=False) as sampler:
        return sampler.take(len(dataset))
