"""Samples of more than 8 bits are scaled by what the file says or refused; pictures are turned upright by every kind
of metadata; a picture that is exchanged during a run is noticed."""

import io
import os
import struct
import time
import zlib

import numpy as np
import pytest
from data_helpers import FakeEncoder, image_rows, picture, picture_bytes
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from mtrl.data import DataError, DataSettings, Sampler, open_dataset
from mtrl.data.media import decode, read_size
from mtrl.data.row_settings import RowError
from mtrl.types import Medium

RAMP = np.linspace(0, 1, 64).reshape(8, 8)
EIGHT = np.rint(RAMP * 255).astype(int)


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(values, bits=16, color=0, before=b"", after=b""):
    """A PNG of these samples, with chunks before and after the pixels."""
    height, width = values.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    kind = ">u2" if bits == 16 else "u1"
    lines = b"".join(b"\0" + line.tobytes() for line in values.astype(kind).reshape(height, -1))
    pixels = chunk(b"IDAT", zlib.compress(lines))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + pixels + after + chunk(b"IEND", b"")


def tiff(values, **fields):
    out, tags = io.BytesIO(), ImageFileDirectory_v2()
    for number, (kind, value) in fields.pop("tags", {}).items():
        tags.tagtype[number] = kind
        tags[number] = value
    Image.fromarray(values).save(out, "TIFF", tiffinfo=tags, **fields)
    return out.getvalue()


def packed_tiff(values, bits):
    """A TIFF of 12 bits per sample, which Pillow reads and does not write."""
    text = "".join(f"{value:0{bits}b}" for value in values.ravel().tolist())
    pixels = int(text, 2).to_bytes(len(text) // 8, "big")
    height, width = values.shape
    entries = [(256, width), (257, height), (258, bits), (259, 1), (262, 1), (273, 8), (277, 1), (278, height),
               (279, len(pixels))]  # fmt: skip
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", tag, 4, 1, v) for tag, v in entries)
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + directory + b"\0\0\0\0"


def twelve(scale=4095):
    return np.rint(RAMP * scale).astype(np.uint16)


DOUBLE, LONG, SHORT = 12, 4, 3
STATED = {
    "PNG, sBIT 12, stored as they are": png(twelve(), before=chunk(b"sBIT", b"\x0c")),
    "PNG, sBIT 12, scaled as the standard says": png(twelve() << 4 | twelve() >> 8, before=chunk(b"sBIT", b"\x0c")),
    "PNG, sBIT 12, shifted": png(twelve() << 4, before=chunk(b"sBIT", b"\x0c")),
    "PNG, sBIT 10": png(twelve(1023), before=chunk(b"sBIT", b"\x0a")),
    "TIFF of 12 bits": packed_tiff(twelve(), 12),
    "TIFF, MaxSampleValue": tiff(twelve(), tags={281: (SHORT, 4095)}),
    "TIFF, SMaxSampleValue": tiff(twelve(), tags={340: (SHORT, 0), 341: (SHORT, 4095)}),
    "int32 TIFF, SMaxSampleValue": tiff((RAMP * 1e6).astype(np.int32), tags={341: (LONG, 1_000_000)}),
    "float TIFF of -1..1": tiff((RAMP * 2 - 1).astype(np.float32), tags={340: (DOUBLE, -1.0), 341: (DOUBLE, 1.0)}),
    "float TIFF of 0..4095": tiff((RAMP * 4095).astype(np.float32), tags={341: (DOUBLE, 4095.0)}),
    "float TIFF of 0..255": tiff((RAMP * 255).astype(np.float32)),
    "16-bit TIFF, white is zero": tiff(65535 - twelve(65535), tags={262: (SHORT, 0)}),
    "int32 TIFF of 0..65535": tiff((RAMP * 65535).astype(np.int32)),
}


@pytest.mark.parametrize("name", STATED)
def test_samples_are_scaled_by_what_the_file_says(name):
    medium = Medium("image", STATED[name])
    assert read_size(medium) == (8, 8)
    assert np.abs(decode(medium, (8, 8))[..., 0].astype(int) - EIGHT).max() <= 1


COLORS = np.stack([twelve()] * 3, -1)
UNKNOWN = {
    "12 bits in a 16-bit PNG": png(twelve()),
    "12 bits in a 16-bit RGB PNG": png(COLORS, color=2),
    "8 bits in a 16-bit RGBA PNG": png(np.dstack([COLORS // 16, np.full((8, 8), 65535)]), color=6),
    "12 bits in a 16-bit TIFF": tiff(twelve()),
    "int32 TIFF of 0..255": tiff((RAMP * 255).astype(np.int32)),
    "int32 TIFF of 0..1e6": tiff((RAMP * 1e6).astype(np.int32)),
    "int32 TIFF below 0": tiff((RAMP * 65535 - 9).astype(np.int32)),
    "float TIFF of 0..4": tiff((RAMP * 4).astype(np.float32)),
    "float TIFF of 0..4095": tiff((RAMP * 4095).astype(np.float32)),
    "float TIFF of -1..1": tiff((RAMP * 2 - 1).astype(np.float32)),
    "infinite": tiff(np.where(RAMP > 0.9, np.inf, RAMP).astype(np.float32)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_samples_of_unknown_range_are_refused_by_the_scan_with_what_to_do(name):
    for read in (read_size, lambda medium: decode(medium, (8, 8))):
        with pytest.raises(RowError, match=r"samples.*; save it with 8 bits per sample"):
            read(Medium("image", UNKNOWN[name]))


def test_black_pictures_and_holes_are_no_error():
    for data in (png(twelve(0)), tiff(np.zeros((8, 8), np.int32)), tiff(np.zeros((8, 8), np.float32))):
        assert not decode(Medium("image", data), (8, 8)).any()
    holes = tiff(np.where(RAMP < 0.5, np.nan, RAMP).astype(np.float32))
    assert decode(Medium("image", holes), (8, 8))[0, 0, 0] == 0


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def exif():
    block = Image.Exif()
    block[0x0112] = 6
    return block.tobytes().removeprefix(b"Exif\0\0")


def itxt(text, compressed=False):
    body = zlib.compress(text) if compressed else text
    return chunk(b"iTXt", b"XML:com.adobe.xmp\0" + bytes([compressed, 0]) + b"\0\0" + body)


def with_xmp(kind):
    out = io.BytesIO()
    picture(16, 24).save(out, kind, xmp=XMP, **({"lossless": True} if kind == "WEBP" else {}))
    return out.getvalue()


PIXELS = np.asarray(picture(16, 24))
TURNED = {
    "eXIf before the pixels": png(PIXELS, 8, 2, before=chunk(b"eXIf", exif())),
    "eXIf after the pixels": png(PIXELS, 8, 2, after=chunk(b"eXIf", exif())),
    "XMP before the pixels": png(PIXELS, 8, 2, before=itxt(XMP)),
    "XMP after the pixels": png(PIXELS, 8, 2, after=itxt(XMP)),
    "compressed XMP after the pixels": png(PIXELS, 8, 2, after=itxt(XMP, True)),
    "XMP in a JPEG": with_xmp("JPEG"),
    "XMP in a WebP": with_xmp("WEBP"),
    "XMP in a TIFF": tiff(PIXELS, tags={700: (7, XMP)}),
}


@pytest.mark.parametrize("name", TURNED)
def test_pictures_are_turned_by_exif_and_xmp_wherever_they_are(name):
    medium = Medium("image", TURNED[name])
    assert read_size(medium) == (24, 16)
    error = np.abs(decode(medium, (24, 16)).astype(int) - np.rot90(PIXELS, -1)).mean()
    assert error <= (16 if "JPEG" in name else 0)


def opened(tmp_path, resuming=False, **settings):
    data = str(tmp_path / "train.jsonl")
    return open_dataset(data, DataSettings(**settings), FakeEncoder(), cache_dir=tmp_path / "c", resuming=resuming)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_exchanged_during_a_run_is_a_bad_row(tmp_path, caplog, workers):
    image_rows(tmp_path, 4)
    dataset = opened(tmp_path)
    for number in range(4):  # the same content, written again
        os.utime(tmp_path / f"images/{number}.png", ns=(1, time.time_ns()))
    with Sampler(dataset, FakeEncoder(), shuffle=False, workers=workers) as sampler:
        assert len(sampler.take(4)) == 4 and not sampler.bad_rows
    (tmp_path / "images/2.png").write_bytes(picture_bytes(28 + 28 * 2, 56, seed=9))
    with Sampler(dataset, FakeEncoder(), shuffle=False, workers=workers) as sampler:
        assert [prompt.task.origin[-1] for prompt in sampler.take(4)] == ["1", "2", "4", "1"]
        assert "images/2.png has changed since the run began; restore it" in sampler.bad_rows[2].reason
    with (
        Sampler(opened(tmp_path, on_bad_row="error"), FakeEncoder(), shuffle=False) as sampler,
        pytest.raises(DataError, match=r"row 4: the image .*3\.png has changed"),
    ):
        (tmp_path / "images/3.png").write_bytes(picture_bytes(28, 56, seed=11))
        sampler.take(4)


def test_a_resumed_run_says_that_files_were_written_since(tmp_path, caplog):
    image_rows(tmp_path, 4)
    opened(tmp_path)
    (tmp_path / "images/1.png").write_bytes(picture_bytes(56, 56, seed=9))
    assert len(opened(tmp_path, resuming=True)) == 4
    assert "the image or video files of 1 rows were written after the last scan" in caplog.text
