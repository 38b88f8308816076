"""2,000 mutated rows and files: each is used, or refused with its file and row. No other error, no hang."""

import base64
import io
import json
import logging
import random
import signal
import struct
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import FakeEncoder, picture, picture_bytes
from PIL import Image

from mtrl.data import BadRow, DataError, DataSettings
from mtrl.data.dataset import scan_dataset
from mtrl.data.sampler import PromptLoader
from mtrl.types import Prompt

CASE_SECONDS = 10
WEIRD_TEXT = [
    "", " ", "\0", "\ud800", "a\udfffb", "\u202edesrever", "e\u0301" * 50, "\ufdfd" * 20, "\U0010ffff", "<image>" * 40,
    "<image", "image>", "<video>", "<IMAGE>x", "<pad>", "{{ content }}", "../../../../etc/passwd", "/dev/zero",
    "/dev/stdin", "/", ".", "C:\\x.png", "data:image/png;base64,", "data:,x", "http://localhost:1/x.png", "file:///",
    "/9j/" + "A" * 100, "iVBORw0KGgo" + "=" * 80, "x" * 5000, "a/" * 3000, "\n", "\r\n", "NaN", "null",
]  # fmt: skip
WEIRD_VALUES = [
    None, True, 0, -1, 3.5, float("nan"), float("inf"), 10**400, [], {}, [[]], [None], [[["deep"]]], {"bytes": None},
    {"bytes": 5}, {"bytes": []}, {"path": ["x"]}, {"path": ""}, {"role": "user"}, {"a": {"b": {"c": []}}}, ["<image>"],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image"}]}], [{"content": "x"}],
    [{"role": None, "content": "x"}], [{"role": "user", "content": [[]]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 4}]}],
]  # fmt: skip


class Fuzzer:
    def __init__(self, seed):
        self.random = random.Random(seed)
        kinds = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
        self.images = [picture_bytes(28 + 9 * i, 60 - 5 * i, seed=i, kind=kind) for i, kind in enumerate(kinds)]
        self.images += [self._saved(picture(30, 40, mode=mode), "PNG") for mode in ("RGBA", "P", "LA", "1", "I;16")]
        exif = Image.Exif()
        exif[0x0112] = 6
        self.images += [self._saved(picture(30, 40), kind, exif=exif) for kind in ("JPEG", "PNG", "TIFF", "WEBP")]
        self.images.append(self._saved(picture(30, 40, mode="CMYK"), "JPEG"))

    def _saved(self, image, kind, **options):
        data = io.BytesIO()
        image.save(data, kind, **options)
        return data.getvalue()

    def bytes(self, data, most=8):
        """Bits flipped, parts cut, doubled, or overwritten with other numbers."""
        data = bytearray(data)
        for _ in range(self.random.randint(1, most)):
            if not data:
                break
            at = self.random.randrange(len(data))
            kind = self.random.randrange(7)
            if kind <= 1:
                data[at] ^= 1 << self.random.randrange(8)
            elif kind == 2:
                del data[at:]
            elif kind == 3:
                del data[at : at + self.random.randint(1, 20)]
            elif kind == 4:
                data[at:at] = data[at : at + self.random.randint(1, 20)]
            elif kind == 5:  # sizes and lengths stand near the front
                number = self.random.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 100_000])
                at = min(at, 40) if self.random.random() < 0.7 else at
                data[at : at + 4] = struct.pack(self.random.choice(["<I", ">I"]), number)
            else:
                data[at] = self.random.randrange(256)
        return bytes(data)

    def image(self):
        data = self.random.choice(self.images)
        return self.bytes(data) if self.random.random() < 0.8 else data

    def row(self, directory, number):
        """A row that was good once."""
        count = self.random.randint(0, 3)
        values = []
        for i in range(count):
            data, spelling = self.image(), self.random.randrange(4)
            if spelling == 0:
                values.append(base64.b64encode(data).decode())
            elif spelling == 1:
                values.append({"bytes": base64.b64encode(data).decode(), "path": None})
            else:
                (directory / f"{number}_{i}.img").write_bytes(data)
                values.append(f"{number}_{i}.img")
        row = {"prompt": "<image>" * count + "what is it?", "answer": "A", "images": values, "options": ["x", "y"]}
        if self.random.random() < 0.5:
            self.mutate(row)
        return row

    def mutate(self, row):
        key = self.random.choice(["prompt", "images", "answer", "options", "videos"])
        kind = self.random.randrange(4)
        if kind == 0:
            row.pop(key, None)
        elif kind == 1:
            row[key] = self.random.choice(WEIRD_VALUES)
        elif kind == 2:
            row[key] = self.random.choice(WEIRD_TEXT)
        elif row["images"] and key == "images":
            self.random.choice([row["images"].pop, lambda: row["images"].append(self.random.choice(WEIRD_TEXT))])()
        else:
            row["prompt"] += self.random.choice(WEIRD_TEXT)


@contextmanager
def time_limit(seconds):
    def ring(*_):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(path, cache_dir):
    """(used, refused) rows of a file; fails when a row is neither, or anything but DataError is raised."""
    encoder = FakeEncoder()
    settings = DataSettings(on_bad_row="skip", max_prompt_length=10**6)
    try:
        with time_limit(6 * CASE_SECONDS):
            dataset = scan_dataset(str(path), settings, encoder, cache_dir=cache_dir, workers=1)
    except DataError as error:
        assert str(path) in str(error)
        return 0, 0
    loader = PromptLoader(dataset, encoder)
    used = refused = 0
    for position in range(len(dataset)):
        with time_limit(CASE_SECONDS):
            result = loader.load(position)
        if isinstance(result, BadRow):
            assert result.file == str(path) and result.row == dataset.place(position)[1] and result.reason
            refused += 1
        else:
            assert isinstance(result, Prompt) and len(result.ids) == dataset.lengths[position]
            used += 1
    for bad in dataset.bad_rows:
        assert bad.file == str(path) and bad.row >= 1 and bad.reason and "\n" not in str(bad)
    counts = dataset.counts
    rows = [bad.row for bad in dataset.bad_rows] + [dataset.place(i)[1] for i in range(len(dataset))]
    assert len(set(rows)) == len(rows) == counts.total
    return used, refused + counts.bad


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.mark.filterwarnings("ignore")  # Pillow and the like warn of what they find
@pytest.mark.parametrize("seed", range(4))
def test_mutated_rows_and_images(seed, tmp_path):
    fuzzer = Fuzzer(seed)
    lines = [json.dumps(fuzzer.row(tmp_path, number)) for number in range(325)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    used, refused = judge(path, tmp_path / "cache")
    assert used + refused == 325 and used > 20 and refused > 100


@pytest.mark.filterwarnings("ignore")
def test_mutated_lines(tmp_path):
    fuzzer = Fuzzer(100)
    good = json.dumps({"prompt": "<image>what?", "images": ["a.png"], "answer": "A"}).encode()
    (tmp_path / "a.png").write_bytes(picture_bytes())
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(fuzzer.bytes(good, most=3) for _ in range(500)))
    used, refused = judge(path, tmp_path / "cache")
    assert used > 10 and refused > 100


@pytest.mark.filterwarnings("ignore")
def test_mutated_parquet_files(tmp_path):
    fuzzer, generator = Fuzzer(200), np.random.default_rng(0)
    rows = [{"prompt": f"what {i}?", "images": [{"bytes": picture_bytes(28, 28, seed=i), "path": None}],
             "answer": str(generator.integers(10))} for i in range(4)]  # fmt: skip
    data = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), data, row_group_size=2)
    opened = 0
    for number in range(200):
        path = tmp_path / f"{number}.parquet"
        path.write_bytes(fuzzer.bytes(data.getvalue(), most=2))
        opened += sum(judge(path, tmp_path / "cache")) > 0
    assert opened > 20
