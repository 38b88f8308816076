"""Images of every kind become the right RGB pixels, and headers agree with the decoded images."""

import base64
import io
import os
import struct
import zlib

import numpy as np
import pytest
from data_helpers import picture, picture_bytes
from PIL import Image, ImageOps

from mtrl.data.media import decode, limit_side, make_medium, media_list, read_size
from mtrl.data.row_settings import RowError
from mtrl.types import Medium


def saved(image, kind, **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def check(data, size=None):
    """Size and pixels of these bytes at their own size."""
    medium = Medium("image", data)
    height, width = read_size(medium)
    pixels = decode(medium, (height, width))
    assert pixels.dtype == np.uint8 and pixels.shape == (height, width, 3)
    assert size is None or (height, width) == size
    return pixels


def test_every_spelling_of_an_image_is_the_same_image(tmp_path):
    data = picture_bytes(40, 30)
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    wrapped = "\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    spellings = [
        "a.png", str(tmp_path / "a.png"), tmp_path / "a.png", f"file://{tmp_path / 'a.png'}", data, bytearray(data),
        text, wrapped, f"data:image/png;base64,{text}", {"bytes": data, "path": "gone.png"}, {"bytes": text},
        {"bytes": None, "path": "a.png"}, {"path": "a.png"}, picture(40, 30),
    ]  # fmt: skip
    for spelling in spellings:
        medium = make_medium(spelling, tmp_path)
        assert read_size(medium) == (40, 30)
        assert np.array_equal(decode(medium, (40, 30)), np.asarray(picture(40, 30)))


def test_a_jpeg_in_base64_is_not_taken_for_a_path(tmp_path):
    text = base64.b64encode(picture_bytes(kind="JPEG")).decode()
    assert text.startswith("/9j/")
    assert isinstance(make_medium(text, tmp_path).source, bytes)


def test_media_lists():
    assert media_list(None) == media_list("") == media_list([]) == []
    assert media_list("a") == media_list(["a"]) == ["a"]


@pytest.mark.parametrize("value", [3, 2.5, True, ["a"], {}, {"url": "x"}, {"path": None, "bytes": None}, {"path": 7}])
def test_wrong_types_are_errors(value, tmp_path):
    with pytest.raises(RowError, match="an image is"):
        make_medium(value, tmp_path)


@pytest.mark.parametrize("text", ["https://x.org/a.png", "data:image/png,abc", "data:image/png;base64,@@@"])
def test_urls_are_errors(text, tmp_path):
    with pytest.raises(RowError):
        make_medium(text, tmp_path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(picture(24, 40), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    pixels = check(data, (40, 24) if orientation >= 5 else (24, 40))
    assert np.array_equal(pixels, np.asarray(upright))


def test_transparency_becomes_white():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    clear.putpixel((0, 0), (10, 20, 30, 255))
    for image in (clear, clear.convert("LA"), clear.quantize(4), clear.convert("PA")):
        data = saved(image, "PNG") if image.mode != "PA" else None
        pixels = check(data) if data else decode(Medium("image", image), (8, 8))
        assert (pixels[4, 4] == 255).all() and pixels[0, 0].max() < 100, image.mode
    keyed = saved(Image.new("RGB", (8, 8), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert (check(keyed) == 255).all()


def test_other_modes():
    grey = Image.new("L", (9, 7), 120)
    assert (check(saved(grey, "PNG"), (7, 9)) == 120).all()
    assert (check(saved(grey.convert("1"), "PNG")) % 255 == 0).all()
    assert abs(check(saved(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG")).astype(int) - [0, 255, 255]).max() < 90
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 9, 8, 7])
    assert (check(saved(palette, "PNG")) == [9, 8, 7]).all()


def test_sixteen_bits_become_eight():
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    pixels = check(saved(Image.fromarray(ramp), "PNG"))
    assert pixels[0, 0, 0] == 0 and pixels[-1, -1, 0] == 255 and abs(int(pixels[4, 0, 0]) - 130) < 3
    assert np.array_equal(check(saved(Image.fromarray(ramp), "TIFF")), pixels)
    wide = decode(Medium("image", Image.fromarray(ramp.astype(np.int32))), (8, 8))
    assert np.array_equal(wide, pixels)
    unit = decode(Medium("image", Image.fromarray((ramp / 65535).astype(np.float32))), (8, 8))
    assert abs(unit.astype(int) - pixels).max() <= 1


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_shows_its_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (check(data) == [255, 0, 0]).all()


def test_resized_once_by_bicubic():
    image = picture(50, 70)
    pixels = decode(Medium("image", saved(image, "PNG")), (28, 56))
    assert np.array_equal(pixels, np.asarray(image.resize((56, 28), Image.Resampling.BICUBIC)))


def test_shared_pixels_are_read_only():
    assert not decode(Medium("image", picture_bytes()), (28, 28)).flags.writeable


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
def test_truncated_images_are_found_by_the_scan(kind, part):
    whole = picture_bytes(120, 120, kind=kind)
    check(whole)
    medium = Medium("image", whole[: int(len(whole) * part)])
    try:
        read_size(medium)
    except RowError:
        return
    # a decoder may accept a truncated file (progressive formats); then decoding must agree
    decode(medium, (120, 120))
    assert kind == "JPEG2000"


def test_a_jpeg_without_its_end_mark_or_with_a_tail_is_fine():
    data = picture_bytes(64, 64, kind="JPEG")
    check(data + b"\0" * 1000)
    check(data + b"made by a camera" * 100)


def bomb(width, height):
    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [12_000, 60_000, 2**31 - 1])
def test_decompression_bombs(side):
    with pytest.raises(RowError, match=r"bomb|damaged header|not an image"):
        read_size(Medium("image", bomb(side, side)))


@pytest.mark.parametrize(
    "data",
    [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", bomb(0, 0), b"%!PS-Adobe-3.0 EPSF-3.0"],
)
def test_bytes_that_are_no_image(data):
    with pytest.raises(RowError, match="image"):
        read_size(Medium("image", data))


def test_files_that_are_no_image(tmp_path):
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "text.png").write_text("hello")
    os.mkfifo(tmp_path / "pipe.png")
    reasons = {"empty.png": "is empty", "folder.png": "a directory", "text.png": "not an image", "pipe.png": "a pipe",
               "gone.png": "does not exist", "x" * 5000: "cannot be opened", "a\0.png": "cannot be opened"}  # fmt: skip
    for name, reason in reasons.items():
        with pytest.raises(RowError, match=reason):
            read_size(make_medium(name, tmp_path))


def test_within_side():
    assert limit_side((100, 50), None) == limit_side((100, 50), 100) == (100, 50)
    assert limit_side((1000, 50), 100) == (100, 5) and limit_side((10_000, 1), 100) == (100, 1)
