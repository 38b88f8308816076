"""Damaged and hostile tars and saved datasets: one clear line with the name of the file, and the rest is read. Every
format of docs/data.md and twenty malformed files: none trains without its images."""

import json
import tarfile

import pyarrow as pa
import pytest
from data_helpers import FakeEncoder, picture_bytes, write_jsonl
from test_data_formats import FORMATS, add

from mtrl.data import DataError, DataSettings, open_dataset

PNG = picture_bytes()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))


def opened(path, **settings):
    return open_dataset(str(path), DataSettings(**settings), FakeEncoder())


def pack(path, change=lambda tar: None, rows=3):
    """A tar of three rows; `change` adds members before the last row."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for number in range(rows):
            if number == rows - 1:
                change(tar)
            add(tar, f"{number}.txt", b"Which?")
            add(tar, f"{number}.png", PNG)
    return path


def header(name, size=0, kind=b"0", number=None):
    """A header block; `number`: the 12 bytes of the size field, or of the real size of a sparse member."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    if number is not None:
        field = 483 if kind == b"S" else 124
        block[field : field + 12] = number
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def raw(*blocks):
    def change(tar):
        add(tar, "bad.txt", b"Which?")
        for block in blocks:
            tar.fileobj.write(block)
            tar.offset += len(block)

    return change


def link(tar):
    add(tar, "bad.txt", b"Which?")
    member = tarfile.TarInfo("bad.png")
    member.type, member.linkname = tarfile.LNKTYPE, "0.png"
    tar.addfile(member)


def negative_pax(tar):
    add(tar, "bad.txt", b"Which?")
    record = b"15 size=-4096\n\n"
    tar.fileobj.write(header("x", len(record), b"x") + record.ljust(512, b"\0") + header("bad.png", 5) + b"\0" * 512)
    tar.offset += 4 * 512


def base256(value):
    return (value % 2**95 | (0x80 if value >= 0 else 0xFF) << 88).to_bytes(12, "big")


DAMAGE = {  # the last row can be read if what is damaged has a size that can be skipped
    "sparse": (raw(header("bad.png", 0, b"S", base256(2**62))), r"\.png is sparse \(4611686018427387904", 3),
    "link": (link, r"\.png is a link; pack it with", 3),
    "deep": (lambda tar: add(tar, "bad.json", b"[" * 500 + b"]" * 500), "nested more than 100 levels", 3),
    "deeper": (lambda tar: add(tar, "bad.json", b"[" * 100_000), r"\.json cannot be read", 3),
    "negative": (raw(header("bad.png", 0, b"0", base256(-4096))), "whatever follows it, cannot be read as a tar", 2),
    "negative in pax": (negative_pax, "whatever follows it, cannot be read as a tar", 2),
    "huge": (raw(header("bad.png", 0, b"0", base256(2**62))), "whatever follows it, cannot be read as a tar", 2),
    "more than 64 bits": (raw(header("bad.png", 0, b"0", base256(2**80))), "cannot be read as a tar", 2),
    "checksum": (raw(b"x" + header("bad.png")[1:]), "whatever follows it, cannot be read as a tar", 2),
    "digits": (raw(header("bad.png", 0, b"0", b"\xb2\xb2\xb2\xb2 7777777")), "cannot be read as a tar", 2),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_member_is_one_line_and_the_rest_is_read(tmp_path, name):
    change, message, good = DAMAGE[name]
    file, other = pack(tmp_path / "a.tar", change), pack(tmp_path / "b.tar")
    with pytest.raises(DataError, match=message) as caught:
        opened(f"{file},{other}")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and lines[1].startswith(f"  {file}, row 3: "), "a heading, one row, what to do"
    for _ in range(2):  # the second time from the cache
        dataset = opened(f"{file},{other}", on_bad_row="skip")
        assert len(dataset) == good + 3 and all(dataset.task(i).media for i in range(len(dataset)))


def test_a_row_divided_by_others_is_not_two_rows(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.txt", "1.txt", "0.png", "1.png", "2.txt", "2.png"):
            add(tar, name, PNG if name.endswith("png") else b"Which?")
    with pytest.raises(DataError, match=r"not next to each other; pack them sorted.*and 3 more rows"):
        opened(tmp_path / "a.tar")
    assert len(opened(tmp_path / "a.tar", on_bad_row="skip")) == 1


def test_tars_joined_by_cat_are_not_cut_silently(tmp_path):
    one, two = pack(tmp_path / "a.tar"), pack(tmp_path / "b.tar")
    (tmp_path / "ab.tar").write_bytes(one.read_bytes() + two.read_bytes())
    with pytest.raises(DataError, match="tars joined by cat"):
        opened(tmp_path / "ab.tar")


@pytest.mark.parametrize("digits", ["1²2", "²", "٣", "9" * 5000, "007"])
def test_names_with_odd_digits_are_sorted(tmp_path, digits):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("10", digits, "2"):
            add(tar, f"a.{name}.png", picture_bytes(seed=len(name)))
        add(tar, "a.txt", b"Which?")
    task = opened(tmp_path / "a.tar").task(0)
    assert len(task.media) == 3
    order = [medium.source for medium in task.media]
    assert order.index(picture_bytes(seed=1)) < order.index(picture_bytes(seed=2)) or len(digits) == 1


def save(folder, state):
    folder.mkdir(parents=True)
    table = pa.table({"prompt": ["a"], "image": pa.array([PNG], pa.binary())})
    for place in (folder / "data.arrow", folder.parent / "outside.arrow"):
        with pa.ipc.new_stream(str(place), table.schema) as out:
            out.write_table(table)
    (folder / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    return folder


STATES = {
    "absolute": ({"_data_files": [{"filename": "/etc/passwd"}]}, r"outside its folder \(/etc/passwd\)"),
    "above": ({"_data_files": [{"filename": "../outside.arrow"}]}, r"outside its folder \(\.\./outside\.arrow\)"),
    "within and above": ({"_data_files": [{"filename": "x/../../outside.arrow"}]}, "outside its folder"),
    "brackets": ("[" * 100_000, "not valid JSON"),
    "objects": ('{"_data_files":' * 100_000, "not valid JSON"),
    "no list": ({"_data_files": 3}, "does not list its files"),
    "no files": ({"_data_files": []}, "does not list its files"),
    "no names": ({"_data_files": [{"filename": None}]}, "does not list its files"),
    "a number": ({"_data_files": [{"filename": 3}]}, "cannot be read as a saved dataset|does not list"),
    "text": ("nothing", "not valid JSON"),
    "a list": ([1], "does not list its files"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_hostile_state_is_one_line_with_the_name_of_the_file(tmp_path, name):
    state, message = STATES[name]
    folder = save(tmp_path / "saved", state)
    with pytest.raises(DataError, match=message) as caught:
        opened(folder)
    assert str(folder) in str(caught.value) and len(str(caught.value).splitlines()) == 1


def jsonl(*rows):
    return lambda folder: write_jsonl(folder / "a.jsonl", rows)


def broken(name, content):
    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def image_file(content, **row):
    def make(folder):
        (folder / "1.png").write_bytes(content)
        return write_jsonl(folder / "a.jsonl", [{"prompt": "Which?", "images": ["1.png"], **row}])

    return make


MALFORMED = {
    "a column of files": jsonl({"prompt": "Which?", "image_path": "1.png"}),
    "files in a struct": jsonl({"prompt": "Which?", "meta": {"file": ["1.jpg"]}}),
    "addresses": jsonl({"prompt": "Which?", "image_url": "https://example.org/1"}),
    "a data address": jsonl({"prompt": "Which?", "shown": "data:image/png;base64,AAAA"}),
    "a video": jsonl({"prompt": "Which?", "clip": "1.mp4"}),
    "a mark without an image": jsonl({"prompt": "<image>Which?"}),
    "an image of the chat": jsonl({"prompt": [{"role": "user", "content": [{"type": "image", "url": "1.png"}]}]}),
    "an image_url of the chat": jsonl({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    "a missing file": jsonl({"prompt": "Which?", "images": ["gone.png"]}),
    "an empty name": jsonl({"prompt": "Which?", "images": [""]}),
    "null in a list": jsonl({"prompt": "Which?", "images": [None]}),
    "an empty object": jsonl({"prompt": "Which?", "image": {}, "images": {}}),
    "fewer images than marks": image_file(PNG, prompt="<image><image>Which?"),
    "an empty file": image_file(b""),
    "half a file": image_file(PNG[: len(PNG) // 2]),
    "text": image_file(b"<html>not found</html>"),
    "a cut line": broken("a.jsonl", b'{"prompt": "Which?", "images": ["1.png"'),
    "an array cut off": broken("a.json", b'[{"prompt": "Which?"'),
    "no Parquet": broken("a.parquet", b"PAR1nothing"),
    "no Arrow": broken("a.arrow", b"ARROW1nothing"),
    "no tar": broken("a.tar", b"nothing" * 200),
    "a tar with a link": lambda folder: pack(folder / "a.tar", link),
    "a tar of videos": lambda folder: _tar_of(folder, "0.mp4", b"\0\0\0\x20ftypisom"),
    "a tar of HEIC": lambda folder: _tar_of(folder, "0.heic", b"\0\0\0\x18heic"),
    "a saved dataset": lambda folder: save(folder / "saved", {"_data_files": [{"filename": "../outside.arrow"}]}),
}


def _tar_of(folder, name, content):
    with tarfile.open(folder / "a.tar", "w") as tar:
        add(tar, "0.txt", b"Which?")
        add(tar, name, content)
    return folder / "a.tar"


@pytest.mark.parametrize("written", FORMATS, ids=lambda each: each.__name__)
def test_no_format_trains_blind(written, tmp_path):
    dataset = opened(written(tmp_path))
    assert len(dataset) and all(dataset.task(index).media for index in range(len(dataset)))


@pytest.mark.parametrize("name", MALFORMED)
def test_no_malformed_file_trains_blind(name, tmp_path):
    file = MALFORMED[name](tmp_path)
    with pytest.raises(DataError) as caught:
        opened(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3, "one line about the file, a heading and what to do"
