"""Mutated rows, images and data files, deterministic by seed:

    python tests/soak/data_fuzz.py --cases 10000 --seed 0

Each row is used, or rejected with its file and row; each file opens, or is rejected by name. Any other error, a hang,
or a row that is neither used nor rejected is a failure: its traceback is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import logging
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from data_helpers import FakeEncoder, picture, picture_bytes

from mtrl.data import BadRow, DataError, DataSettings, Sampler
from mtrl.data.dataset import scan_dataset
from mtrl.data.sampler import PromptLoader
from mtrl.report import data_page as data_report
from mtrl.types import Prompt

CASE_SECONDS = 10
ROWS_OF_A_FILE = 125
WEIRD_TEXT = [
    "", " ", "\0", "\ud800", "a\udfffb", "\u202edesrever", "e\u0301" * 50, "\ufdfd" * 20, "\U0010ffff", "<image>" * 40,
    "<image", "image>", "<video>", "<IMAGE>x", "<pad>", "{{ content }}", "../../../../etc/passwd", "/dev/zero",
    "/dev/stdin", "/", ".", "C:\\x.png", "data:image/png;base64,", "data:,x", "http://localhost:1/x.png", "file:///",
    "/9j/" + "A" * 100, "iVBORw0KGgo" + "=" * 80, "x" * 5000, "a/" * 3000, "\n", "\r\n", "NaN", "null",
    "<|im_end|>\n<|im_start|>system\n", "<|image_pad|>", "<|vision_start|><|vision_end|>", "\U000f0000<|im_end|>",
    "\x1b[2J\x1b]0;x\x07", "iVBORw0KGgo" + "A\n" * 50_000, "x" * 300_000, "猫" * 3000, "<image>" * 3000,
]  # fmt: skip


def nested(levels: int, kind: str) -> Any:
    leaf: Any = "deep"
    for level in range(levels):
        leaf = [leaf] if kind == "list" or (kind == "both" and level % 2) else {"a": leaf}
    return leaf


WEIRD_VALUES = [
    None, True, 0, -1, 3.5, float("nan"), float("inf"), 10**400, [], {}, [[]], [None], [[["deep"]]], {"bytes": None},
    {"bytes": 5}, {"bytes": []}, {"path": ["x"]}, {"path": ""}, {"role": "user"}, {"a": {"b": {"c": []}}}, ["<image>"],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image"}]}], [{"content": "x"}],
    [{"role": None, "content": "x"}], [{"role": "user", "content": [[]]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 4}]}],
    *(nested(levels, kind) for levels in (40, 90, 300, 600, 900) for kind in ("list", "object", "both")),
    ["x.png"] * 5000, {str(i): i for i in range(5000)},
    [{"role": "user", "content": "x"}] * 2000, [{"role": ["user"], "content": "x"}],
    [{"role": "assistant", "content": "<|im_end|>"}, {"role": "user", "content": "and?"}],
]  # fmt: skip


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        kinds = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
        self.images = [picture_bytes(28 + 9 * i, 60 - 5 * i, seed=i, kind=kind) for i, kind in enumerate(kinds)]
        self.images += [self._saved(picture(30, 40, mode=mode), "PNG") for mode in ("RGBA", "P", "LA", "1", "I;16")]
        exif = Image.Exif()
        exif[0x0112] = 6
        self.images += [self._saved(picture(30, 40), kind, exif=exif) for kind in ("JPEG", "PNG", "TIFF", "WEBP")]
        self.images.append(self._saved(picture(30, 40, mode="CMYK"), "JPEG"))

    def _saved(self, image: Image.Image, kind: str, **options: Any) -> bytes:
        data = io.BytesIO()
        image.save(data, kind, **options)
        return data.getvalue()

    def bytes(self, data: bytes, most: int = 8) -> bytes:
        """Bits flipped, parts cut, doubled, or overwritten with other numbers."""
        changed = bytearray(data)
        for _ in range(self.random.randint(1, most)):
            if not changed:
                break
            at = self.random.randrange(len(changed))
            kind = self.random.randrange(7)
            if kind <= 1:
                changed[at] ^= 1 << self.random.randrange(8)
            elif kind == 2:
                del changed[at:]
            elif kind == 3:
                del changed[at : at + self.random.randint(1, 20)]
            elif kind == 4:
                changed[at:at] = changed[at : at + self.random.randint(1, 20)]
            elif kind == 5:  # sizes and lengths are near the front
                number = self.random.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 100_000])
                at = min(at, 40) if self.random.random() < 0.7 else at
                changed[at : at + 4] = struct.pack(self.random.choice(["<I", ">I"]), number)
            else:
                changed[at] = self.random.randrange(256)
        return bytes(changed)

    def image(self) -> bytes:
        data = self.random.choice(self.images)
        return self.bytes(data) if self.random.random() < 0.8 else data

    def row(self, directory: Path, number: int) -> dict[str, Any]:
        """A row that was good once."""
        count = self.random.randint(0, 3)
        values: list[Any] = []
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

    def mutate(self, row: dict[str, Any]) -> None:
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


# ------------------------------------------------------------------------------------------------------------- judging
@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(path: Path, cache_dir: Path, encoder: Any = None, template: Path | None = None) -> tuple[int, int]:
    """Counts (used, rejected) rows of a file; fails if a row is neither, or for any error but DataError."""
    encoder = encoder or FakeEncoder()
    settings = DataSettings(
        on_bad_row="skip", max_prompt_length=10**6, format_prompt=None if template is None else str(template)
    )
    try:
        with time_limit(6 * CASE_SECONDS):
            dataset = scan_dataset(str(path), settings, encoder, cache_dir=cache_dir, workers=1)
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error), str(error)
        return 0, 0
    loader = PromptLoader(dataset, encoder)
    loaded: dict[int, Prompt | BadRow] = {}
    for position in range(len(dataset)):
        with time_limit(CASE_SECONDS):
            result = loaded[position] = loader.load(position)
        if isinstance(result, BadRow):
            assert result.file == str(path) and result.row == dataset.locate(position)[1] and result.reason
        else:
            assert len(result.ids) == dataset.lengths[position]
    for bad in dataset.bad_rows:
        assert bad.file == str(path) and bad.row >= 1 and bad.reason and "\n" not in str(bad) and len(str(bad)) < 1000
    rows = [bad.row for bad in dataset.bad_rows] + [dataset.locate(i)[1] for i in range(len(dataset))]
    assert len(set(rows)) == len(rows) == dataset.counts.total, "a row is lost"
    used = {position for position, result in loaded.items() if isinstance(result, Prompt)}
    check_sampler(dataset, encoder, used)
    with time_limit(6 * CASE_SECONDS):  # the report must handle all rows too
        data_report.run(str(path), settings, encoder, io.StringIO(), cache_dir=cache_dir)
    return len(used), dataset.counts.total - len(used)


def check_sampler(dataset: Any, encoder: Any, used: set[int]) -> None:
    """An epoch reads every row once, returns the usable ones, and counts the others."""
    if not used:
        return
    with Sampler(dataset, encoder) as sampler, time_limit(6 * CASE_SECONDS):
        ids = sorted(prompt.task.id for prompt in sampler.take(len(used)))
        assert ids == sorted(dataset.task(position).id for position in used), "the sampler lost a row"
        state = json.loads(json.dumps(sampler.state()))
        asked = state["epoch"] * len(dataset) + state["position"]
        assert asked == len(used) + len(state["skipped"]) and not used & set(state["skipped"])


# --------------------------------------------------------------------------------------------------------------- kinds
def mutated_rows(fuzzer: Fuzzer, folder: Path, count: int, encoder: Any = None) -> tuple[int, int]:
    lines = [json.dumps(fuzzer.row(folder, number)) for number in range(count)]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines))
    template = None
    if fuzzer.random.random() < 0.3:
        template = folder / "format.jinja"
        template.write_text("{{ content }}{% for option in options %} {{ option }}{% endfor %} {{ answer }}")
    used, refused = judge(path, folder / "cache", encoder, template)
    assert used + refused == count, "a row is lost"
    return used, refused


def mutated_lines(fuzzer: Fuzzer, folder: Path, count: int, encoder: Any = None) -> tuple[int, int]:
    good = json.dumps({"prompt": "<image>what?", "images": ["a.png"], "answer": "A"}).encode()
    (folder / "a.png").write_bytes(picture_bytes())
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(fuzzer.bytes(good, most=3) for _ in range(count)))
    return judge(path, folder / "cache", encoder)


def table() -> pa.Table:
    images = [[{"bytes": picture_bytes(28, 28, seed=i), "path": None}] for i in range(4)]
    return pa.Table.from_pylist(
        [{"prompt": f"what {i}?", "images": image, "answer": str(i)} for i, image in enumerate(images)]
    )


def mutated_parquet(fuzzer: Fuzzer, folder: Path, count: int, encoder: Any = None) -> tuple[int, int]:
    data = io.BytesIO()
    checksums = fuzzer.random.random() < 0.5
    pq.write_table(table(), data, row_group_size=2, write_page_checksum=checksums)
    opened = 0
    for number in range(count):
        path = folder / f"{number}.parquet"
        path.write_bytes(fuzzer.bytes(data.getvalue(), most=2))
        opened += sum(judge(path, folder / "cache", encoder)) > 0
    return opened, count - opened


def mutated_arrow(fuzzer: Fuzzer, folder: Path, count: int, encoder: Any = None) -> tuple[int, int]:
    data = io.BytesIO()
    with pa.ipc.new_stream(data, table().schema) as writer:
        writer.write_table(table())
    opened = 0
    for number in range(count):
        path = folder / f"{number}"
        path.mkdir()
        (path / "data.arrow").write_bytes(fuzzer.bytes(data.getvalue(), most=2))
        state = json.dumps({"_data_files": [{"filename": "data.arrow"}]}).encode()
        (path / "state.json").write_bytes(fuzzer.bytes(state, most=2) if fuzzer.random.random() < 0.2 else state)
        opened += sum(judge(path, folder / "cache", encoder)) > 0
    return opened, count - opened


KINDS = {"rows": mutated_rows, "lines": mutated_lines, "parquet": mutated_parquet, "arrow": mutated_arrow}
PLAN = ("rows", "rows", "lines", "rows", "rows", "parquet", "rows", "arrow")  # five eighths are rows and their images


def tiny_encoder(folder: Path) -> Any:
    """The real encoder of a vision-language family, without weights worth the name."""
    from mtrl.models.families import load_encoder
    from pretraining.tiny_checkpoints import make_tiny_checkpoint

    return load_encoder(make_tiny_checkpoint(folder, "qwen2_5_vl"))


def quiet() -> None:
    """Silences the warnings of the code, of Pillow and of other libraries."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def batch(number: int, count: int, seed: int, real: Any) -> dict[str, int]:
    """Runs cases of one kind, every third with the encoder of a family; counts used and rejected rows."""
    kind, encoder = PLAN[number % len(PLAN)], real if number % 3 == 0 else None
    with tempfile.TemporaryDirectory() as folder:
        used, refused = KINDS[kind](Fuzzer(seed * 100_003 + number), Path(folder), count, encoder)
    return {kind: count, "used": used, "refused": refused}


def run(cases: int, seed: int) -> int:
    """All cases; the number of failures."""
    quiet()
    done: Counter[str] = Counter()
    failures, begin = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        real = tiny_encoder(Path(scratch))
        for number, first in enumerate(range(0, cases, ROWS_OF_A_FILE)):
            try:
                done.update(batch(number, min(ROWS_OF_A_FILE, cases - first), seed, real))
            except Exception:
                failures += 1
                print(f"FAILED: batch {number}, seed {seed}\n{traceback.format_exc()}", flush=True)
            print(f"{first + ROWS_OF_A_FILE} of {cases}, {failures} failures", file=sys.stderr, flush=True)
    seconds = round(time.perf_counter() - begin)
    print(json.dumps({"cases": cases, "seed": seed, **done, "failures": failures, "seconds": seconds}))
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    return 1 if run(arguments.cases, arguments.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
