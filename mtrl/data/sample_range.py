"""Which value of a picture's samples is black and which is white, for samples of more than 8 bits.

What the file says decides: the PNG chunk sBIT, the TIFF fields BitsPerSample, SampleFormat, MaxSampleValue,
SMinSampleValue and SMaxSampleValue. If it says nothing, the usual ranges count (0..65535 for integers, 0..1 or 0..255
for floats), unless the picture would be wrong or nearly black under them: then it is refused.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from mtrl.data.png_chunks import read_png_chunks

NEARLY_BLACK = 16 / 255  # the brightest sample, as a share of white: 12 bits in 16 are below it
PHOTOMETRIC, BITS, MAX_VALUE, FORMAT, S_MIN, S_MAX = 262, 258, 281, 339, 340, 341  # TIFF fields
ADVICE = "save it with 8 bits per sample, or scaled to the full range of 16 bits"


def has_wide_gray(image: Image.Image) -> bool:
    """Whether the image has grey samples of more than 8 bits, as Pillow reads it."""
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def has_wide_samples(image: Image.Image, data: BinaryIO) -> bool:
    """Whether the file has samples of more than 8 bits."""
    return has_wide_gray(image) or (_bits_per_sample(image, data) or 8) > 8


def to_gray(image: Image.Image, data: BinaryIO) -> np.ndarray:
    """Return the samples as floats from 0 (black) to 255 (white); raise ValueError if their range is unknown."""
    values = np.asarray(image).astype(np.float64)
    if np.isinf(values).any():
        raise ValueError(f"it has infinite samples; {ADVICE}")
    values = np.nan_to_num(values)
    low, top = _stated_range(image, values, data) or _usual_range(image, values)
    scaled = (values - low) * (255 / (top - low))
    return 255 - scaled if _tags(image).get(PHOTOMETRIC) == 0 else scaled  # TIFF's WhiteIsZero


def check_colors(image: Image.Image, data: BinaryIO) -> None:
    """Refuse 12 bits stored in 16 per colour: Pillow keeps the upper 8 of the 16."""
    colors = [name for name in image.getbands() if name in "RGBL"]
    if not colors or _bits_per_sample(image, data) != 16:
        return
    if max(int(np.asarray(image.getchannel(name)).max()) for name in colors) < NEARLY_BLACK * 255:
        raise ValueError(f"its samples of 16 bits use only the lowest 12, or it is black; {ADVICE}")


def _stated_range(image: Image.Image, values: np.ndarray, data: BinaryIO) -> tuple[float, float] | None:
    tags = _tags(image)
    low, top = _number(tags.get(S_MIN)), _number(tags.get(S_MAX))
    if top is not None and top > (low or 0.0):
        return low or 0.0, top
    if image.mode == "F":
        return None
    bits = _number(tags.get(BITS))
    limit = _number(tags.get(MAX_VALUE))
    if bits is not None and 8 < bits < 16:
        return 0.0, 2.0**bits - 1
    # Writers fill in the field's default, 2 ** bits - 1, without looking at the samples.
    if limit is not None and 255 <= limit <= 32767 and np.log2(limit + 1).is_integer() and values.max() <= limit:
        return 0.0, limit
    significant = _significant_bits(image, data)
    if significant is not None and 8 <= significant < 16 and _is_unscaled(values, significant):
        return 0.0, 2.0**significant - 1
    return None if significant is None else (0.0, 65535.0)


def _usual_range(image: Image.Image, values: np.ndarray) -> tuple[float, float]:
    low, top = float(values.min()), float(values.max())
    if image.mode == "F":
        white = 1.0 if top <= 1 else 255.0
    else:
        is_signed = _number(_tags(image).get(FORMAT)) == 2 and _number(_tags(image).get(BITS)) == 16
        white = 32767.0 if is_signed else 65535.0
    if low < 0 or top > white or 0 < top < NEARLY_BLACK * white:
        kind = "floats" if image.mode == "F" else "integers"
        raise ValueError(
            f"its samples are {kind} from {low:g} to {top:g}, and the file does not say which is black and which is "
            f"white; {ADVICE}, or state the range in the file (TIFF: SMinSampleValue, SMaxSampleValue; PNG: sBIT)"
        )
    return 0.0, white


def _is_unscaled(values: np.ndarray, bits: int) -> bool:
    """Whether samples of so many significant bits are stored as they are. The PNG standard scales them to 16 bits:
    the upper bits are the sample, the lower ones zero or the sample's upper bits again."""
    if values.max() >= 2**bits:
        return False
    samples, shift = values.astype(np.int64), 16 - bits
    shifted = samples >> shift << shift
    repeated = shifted | samples >> shift >> max(0, bits - shift)
    return not (np.array_equal(samples, shifted) or np.array_equal(samples, repeated))


def _significant_bits(image: Image.Image, data: BinaryIO) -> int | None:
    chunk = (read_png_chunks(data) or {}).get(b"sBIT") if image.format == "PNG" else None
    return max(chunk) if chunk else None


def _bits_per_sample(image: Image.Image, data: BinaryIO) -> int | None:
    if image.format == "PNG":
        position = data.tell()
        data.seek(24)
        depth = data.read(1)
        data.seek(position)
        return depth[0] if depth else None
    bits = _number(_tags(image).get(BITS))
    return None if bits is None else int(bits)


def _tags(image: Image.Image) -> Any:
    return getattr(image, "tag_v2", None) or {}


def _number(value: Any) -> float | None:
    """Return a TIFF field as a number; fields of several samples are tuples."""
    value = value[0] if isinstance(value, tuple) and value else value
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, ZeroDivisionError):
        return None
