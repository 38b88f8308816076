"""The scan at a start: reports all bad rows together, lengths without decoding, a cache that notices changes."""

import json
import logging
import os
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import FakeEncoder, image_rows, picture_bytes, write_jsonl
from PIL import Image

import mtrl.data.parallel as parallel
from mtrl.data import DataError, DataSettings, RowList, open_dataset


def opened(data, tmp_path, encoder=None, **settings):
    encoder = encoder or FakeEncoder()
    return open_dataset(data if isinstance(data, list) else str(data), DataSettings(**settings), encoder,
                        cache_dir=tmp_path / "cache", bad_rows_path=tmp_path / "run/bad_rows.jsonl")  # fmt: skip


@pytest.fixture
def bad_file(tmp_path):
    """Good rows 1, 4 and 10; everything else is bad in its own way."""
    png = picture_bytes(100, 100)
    files = {"good.png": png, "cut.png": png[:-40], "cut.jpg": picture_bytes(100, 100, kind="JPEG")[:-300],
             "text.png": b"hello", "strip.png": picture_bytes(2, 500)}  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    rows = [
        {"prompt": "<image>fine", "images": ["good.png"]},
        {"prompt": "<image>gone", "images": ["gone.png"]},
        {"prompt": "<image>cut", "images": ["cut.png"]},
        {"prompt": "text alone is fine"},
        {"prompt": "<image>cut", "images": ["cut.jpg"]},
        {"prompt": "<image>text", "images": ["text.png"]},
        {"prompt": "<image>strip", "images": ["strip.png"]},
        {"prompt": "a <pad> in the text"},
        "not json",
        {"prompt": "fine", "images": "good.png"},
        {"prompt": ""},
    ]
    return write_jsonl(tmp_path / "train.jsonl", rows)


REASONS = {
    2: "gone.png does not exist", 3: "cut.png is truncated", 5: "cut.jpg is truncated", 6: "not an image",
    7: "aspect ratio", 8: "media token <pad>", 9: "not valid JSON", 11: "empty",
}  # fmt: skip


def test_one_error_names_all_bad_rows(bad_file, tmp_path):
    with pytest.raises(DataError) as caught:
        opened(bad_file, tmp_path)
    assert isinstance(caught.value, ValueError)
    assert [bad.row for bad in caught.value.bad_rows] == list(REASONS)
    for row, reason in REASONS.items():
        lines = [line for line in str(caught.value).splitlines() if f"{bad_file}, row {row}:" in line]
        assert len(lines) == 1 and reason in lines[0]
    assert "8 of 11 rows" in str(caught.value) and "on_bad_row=skip" in str(caught.value)


def test_the_error_is_bounded(tmp_path):
    with pytest.raises(DataError) as caught:
        opened(write_jsonl(tmp_path / "a.jsonl", [{"prompt": ""}] * 50), tmp_path, on_bad_row="skip")
    assert "none of 50 rows can be used: 50 bad" in str(caught.value)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "a.jsonl", tmp_path)
    assert len(str(caught.value).splitlines()) == 3 and "(and 49 more rows like it)" in str(caught.value)
    assert len(caught.value.bad_rows) == 50
    columns = "abcdefghijklmnopqrstuvwxyz"
    with pytest.raises(DataError) as caught:
        opened(write_jsonl(tmp_path / "b.jsonl", [{name: ""} for name in columns]), tmp_path)
    assert len(str(caught.value).splitlines()) == 23 and "... and rows with 6 other causes" in str(caught.value)


def test_skip_continues_without_them_and_lists_them_once(bad_file, tmp_path, caplog):
    for _ in range(2):  # the second time from the cache
        dataset = opened(bad_file, tmp_path, on_bad_row="skip")
        assert [dataset.locate(i)[1] for i in range(len(dataset))] == [1, 4, 10]
        assert dataset.counts.total == 11 and dataset.counts.bad == 8 and dataset.counts.used == 3
    listed = [json.loads(line) for line in (tmp_path / "run/bad_rows.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["row"]) for entry in listed] == [(str(bad_file), row) for row in REASONS]
    assert all(REASONS[entry["row"]] in entry["reason"] for entry in listed)
    assert "8 of 11 rows cannot be used and are skipped" in caplog.text


def test_parquet_rows_are_counted_from_one_across_row_groups(tmp_path):
    rows = [{"prompt": "hi", "images": [{"bytes": picture_bytes(seed=i), "path": None}]} for i in range(7)]
    rows[5]["images"] = [{"bytes": b"junk", "path": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(DataError, match=r"a\.parquet, row 6: an image in the row is not an image"):
        opened(tmp_path / "a.parquet", tmp_path)


def test_lengths_need_no_pixels(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("pixels were decoded")

    path = image_rows(tmp_path, 6)
    monkeypatch.setattr("mtrl.data.media._load", never)
    monkeypatch.setattr("mtrl.data.media._to_rgb", never)
    monkeypatch.setattr("mtrl.data.dataset.SAMPLED_ROWS", 0)  # else some are decoded, to find damage
    dataset = opened(path, tmp_path)
    assert dataset.lengths.tolist() == [1 + 10 + 2 * (1 + i % 3) for i in range(6)]
    assert dataset.pixels.tolist() == [28 * 56 * (1 + i % 3) for i in range(6)]


def hollow(path):
    """A PNG without pixels, between an intact header and end."""
    data = bytearray(picture_bytes(56, 56))
    data[60:-12] = b"\0" * (len(data) - 72)
    path.write_bytes(bytes(data))


def test_damage_that_no_header_shows_is_found_in_the_scan(tmp_path):
    path = image_rows(tmp_path, 6)
    hollow(tmp_path / "images/3.png")
    for _ in range(2):  # the second time from the cache
        with pytest.raises(DataError, match=r"1 of 6 rows(.|\n)*row 4: the image .*3\.png is truncated or damaged"):
            opened(path, tmp_path)
    assert opened(path, tmp_path, on_bad_row="skip").counts.bad == 1
    (tmp_path / "images/3.png").write_bytes(picture_bytes(28, 28))
    assert len(opened(path, tmp_path)) == 6


def test_the_sample_is_bounded_and_spread_over_all_files(tmp_path, monkeypatch):
    decoded = []
    monkeypatch.setattr("mtrl.data.lengths.check_pixels", decoded.extend)
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        image_rows(tmp_path / name, 80 if name != "b" else 8)
    files = [str(tmp_path / name / "train.jsonl") for name in ("a", "b", "c")]
    opened(",".join(files), tmp_path)
    parts = [sum(f"/{name}/" in medium.source for medium in decoded) for name in ("a", "b", "c")]
    assert len(decoded) == 64 and min(parts) >= 3 and parts[0] in (30, 31)
    places = [int(medium.source.split("/")[-1][:-4]) for medium in decoded if "/a/" in medium.source]
    assert places[0] == 0 and places[-1] == 79 and max(np.diff(places)) <= 3
    decoded.clear()
    opened(",".join(files), tmp_path)
    assert not decoded, "nothing changed"
    opened(",".join(files), tmp_path, check_images="full")
    assert len(decoded) == 168


def test_a_full_check_finds_what_a_sample_misses(tmp_path, monkeypatch):
    monkeypatch.setattr("mtrl.data.dataset.SAMPLED_ROWS", 2)  # the first and the last
    path = image_rows(tmp_path, 6)
    hollow(tmp_path / "images/3.png")
    assert len(opened(path, tmp_path)) == 6
    with pytest.raises(DataError, match=r"row 4: .*truncated or damaged"):
        opened(path, tmp_path, check_images="full")


@pytest.mark.parametrize("mode", ["scan", "error", "skip"])
def test_rows_that_turned_bad_keep_their_index_in_a_started_run(tmp_path, mode, caplog):
    path = image_rows(tmp_path, 6)
    if mode == "skip":
        (tmp_path / "images/1.png").unlink()  # it is left out from the start, and for ever

    def at_start(begun):
        return open_dataset(str(path), DataSettings(on_bad_row=mode), FakeEncoder(), cache_dir=tmp_path / "cache",
                            bad_rows_path=tmp_path / "bad_rows.jsonl", resuming=begun)  # fmt: skip

    whole = at_start(begun=False)
    (tmp_path / "images/3.png").unlink()
    if mode == "error":
        with pytest.raises(DataError, match="1 of 6 rows"):
            at_start(begun=True)
        return
    for _ in range(2):
        later = at_start(begun=True)
        assert later.fingerprint == whole.fingerprint and len(later) == len(whole) == (5 if mode == "skip" else 6)
        assert later.late == 1 and "1 of 6 rows have become unusable since the run began" in caplog.text
    assert later.lengths.min() == -1


def test_overlong_prompts_are_left_out_or_errors(tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * n} for n in (5, 50, 9, 10, 60)])
    dataset = opened(path, tmp_path, max_prompt_length=10)  # the start token counts
    assert [dataset.locate(i)[1] for i in range(len(dataset))] == [1, 3]
    assert dataset.counts.overlong == 3
    assert "3 of 5 prompts (60%) are longer than dataset.max_prompt_length=10" in caplog.text
    with pytest.raises(DataError, match=r"row 2: the prompt has 51 tokens, more than dataset.max_prompt_length=10"):
        opened(path, tmp_path, max_prompt_length=10, filter_overlong_prompts=False)
    skipping = {"filter_overlong_prompts": False, "on_bad_row": "skip"}
    assert opened(path, tmp_path, max_prompt_length=10, **skipping).counts.bad == 3
    with pytest.raises(DataError, match="rows can be used"):
        opened(path, tmp_path, max_prompt_length=2)


def test_few_overlong_prompts_are_no_warning(tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * (50 if n == 0 else 5)} for n in range(10)])
    with caplog.at_level(logging.WARNING):
        assert opened(path, tmp_path, max_prompt_length=10).counts.overlong == 1
    assert not caplog.records


def test_big_images(tmp_path):
    path = image_rows(tmp_path, 6)
    filtered = opened(path, tmp_path, max_image_side=56, big_images="filter")
    assert filtered.counts.too_big == 2 and len(filtered) == 4
    resized = opened(path, tmp_path, max_image_side=28)
    assert len(resized) == 6 and set(resized.pixels.tolist()) == {28 * 28}


def scans(dataset_path, tmp_path, **options):
    """The number of rows that a start reads."""
    encoder = options.pop("encoder", None) or FakeEncoder()
    encoder.calls = 0
    opened(dataset_path, tmp_path, encoder, **options)
    return encoder.calls


def test_the_cache_holds_until_something_changes(tmp_path):
    path = image_rows(tmp_path, 6)
    assert scans(path, tmp_path) == 6
    assert scans(path, tmp_path) == 0
    assert scans(path, tmp_path, max_prompt_length=14, answer_key="other") == 0  # the limit is applied afterwards
    assert scans(path, tmp_path, max_image_side=28) == 6
    assert scans(path, tmp_path, system_prompt="be kind") == 6
    assert scans(path, tmp_path, encoder=FakeEncoder("another")) == 6
    template = tmp_path / "format.jinja"
    template.write_text("{{ content }}!")
    assert scans(path, tmp_path, format_prompt=str(template)) == 6
    template.write_text("{{ content }}?!")
    assert scans(path, tmp_path, format_prompt=str(template)) == 6
    os.utime(path, ns=(1, 1))
    assert scans(path, tmp_path) == 6
    write_jsonl(path, [{"prompt": "new"}])
    assert scans(path, tmp_path) == 1


def test_a_misspelt_name_in_the_template_is_reported_once(tmp_path, caplog):
    path, template = image_rows(tmp_path, 6, every=2), tmp_path / "format.jinja"
    template.write_text("{{ content }}{% if optoins %}{{ optoins }}{% endif %}{{ level }}{% for i in range(2) %}"
                        "{{ i }}{% endfor %}{% if options or images %}!{% endif %}")  # fmt: skip
    for _ in range(2):
        caplog.clear()
        opened(path, tmp_path, format_prompt=str(template))
        (said,) = caplog.messages
        assert said.startswith("dataset.format_prompt uses 'optoins', a column that none of the inspected rows has")


def test_changed_images_are_scanned_again_and_only_they(tmp_path):
    path = image_rows(tmp_path, 6)
    assert opened(path, tmp_path).lengths[2] == 17
    (tmp_path / "images/2.png").write_bytes(picture_bytes(28, 28))
    assert scans(path, tmp_path) == 1
    dataset = opened(path, tmp_path)
    assert dataset.lengths.tolist() == [13, 15, 12, 13, 15, 17]
    (tmp_path / "images/4.png").unlink()
    with pytest.raises(DataError, match=r"row 5: .*4\.png does not exist"):
        opened(path, tmp_path)
    with pytest.raises(DataError, match=r"1 of 6 rows"):  # now from the cache
        opened(path, tmp_path)
    (tmp_path / "images/4.png").write_bytes(picture_bytes(28, 28))
    assert opened(path, tmp_path).lengths.tolist() == [13, 15, 12, 13, 12, 17]


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_cache_is_rebuilt(tmp_path, damage):
    path = image_rows(tmp_path, 4)
    opened(path, tmp_path)
    for entry in (tmp_path / "cache").rglob("*.cache"):
        entry.write_bytes(entry.read_bytes()[:-30] if damage is None else damage)
    assert scans(path, tmp_path) == 4
    assert scans(path, tmp_path) == 0
    assert not [entry for entry in (tmp_path / "cache").rglob("*") if entry.name.startswith(".")]


def test_flipped_bits_in_the_cache_are_noticed(tmp_path):
    path = image_rows(tmp_path, 4)
    expected = opened(path, tmp_path).lengths.tolist()
    (entry,) = (tmp_path / "cache/scan").iterdir()
    whole = entry.read_bytes()
    for at in range(0, len(whole), 29):
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        assert opened(path, tmp_path).lengths.tolist() == expected


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, caplog):
    path = image_rows(tmp_path, 4)
    (tmp_path / "cache").write_text("a file stands in the way")
    assert len(opened(path, tmp_path)) == 4
    assert "the next start repeats it" in caplog.text


def test_rows_in_memory(tmp_path):
    rows = [{"prompt": "<image>hi", "images": Image.new("RGB", (56, 28))}, {"prompt": "hi"}]
    dataset = opened([RowList(rows, "zoo")], tmp_path)
    assert dataset.lengths.tolist() == [5, 3] and dataset.task(0).origin == "zoo, row 1"


def test_the_fingerprint_follows_the_rows_used(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * n} for n in (5, 50, 9)])
    whole, part = opened(path, tmp_path), opened(path, tmp_path, max_prompt_length=20)
    assert whole.fingerprint == opened(path, tmp_path).fingerprint != part.fingerprint
    moved = tmp_path / "moved.jsonl"
    path.rename(moved)
    assert opened(moved, tmp_path).fingerprint == whole.fingerprint


# ------------------------------------------------------------------------------------------------------- in parallel


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(parallel, "CHUNK", 4)
    monkeypatch.setattr(parallel, "MIN_ROWS_TO_FORK", 0)


def test_forked_workers_give_the_same(small_chunks):
    here, seen = os.getpid(), set()
    for workers in (1, 2, 3):
        found = parallel.map_rows(lambda row: (row * row, os.getpid()), range(50), "x", workers=workers)
        assert [square for square, _ in found] == [row * row for row in range(50)]
        seen |= {pid for _, pid in found}
        assert (here in {pid for _, pid in found}) == (workers == 1)
    assert len(seen) > 2


def test_an_exception_of_the_job_is_raised(small_chunks):
    with pytest.raises(ZeroDivisionError):
        parallel.map_rows(lambda row: 1 / (row - 20), range(50), "x", workers=2)


def test_ctrl_c_is_for_the_parent_of_the_workers(small_chunks):
    """The parent ends them itself; otherwise each would print a traceback."""
    found = parallel.map_rows(lambda row: signal.getsignal(signal.SIGINT), range(50), "x", workers=2)
    assert set(found) == {signal.SIG_IGN}


def test_a_worker_that_dies_costs_time_only(small_chunks, caplog):
    here = os.getpid()
    job = lambda row: os._exit(9) if row == 20 and os.getpid() != here else row  # noqa: E731
    assert parallel.map_rows(job, range(50), "x", workers=2) == list(range(50))
    assert "a worker process died" in caplog.text


def test_a_hanging_worker_costs_only_time(small_chunks, caplog, tmp_path):
    here, note = os.getpid(), tmp_path / "woke up"

    def job(row):
        if row == 20 and os.getpid() != here:
            time.sleep(60)
            note.touch()
        return row

    assert parallel.map_rows(job, range(50), "x", workers=2, stalled_s=0.5) == list(range(50))
    assert "have stalled" in caplog.text and not note.exists(), "the scan did not wait for it"


def test_progress(capsys, monkeypatch):
    class Terminal:
        def __init__(self):
            self.text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    terminal = Terminal()
    with parallel.Progress(10, "checking", terminal) as progress:
        progress.bar.delay = 0
        progress.add(10)
    assert "checking: 100%" in terminal.text
    with parallel.Progress(10, "checking", None) as progress:
        progress.printed_at -= 20
        progress.add(5)
    assert "checking: 5 of 10 rows" in capsys.readouterr().err


def test_scan_in_processes_equals_scan_here(tmp_path, small_chunks):
    path = image_rows(tmp_path, 40, every=3)
    results = [
        open_dataset(str(path), DataSettings(), FakeEncoder(), cache_dir=tmp_path / str(workers), workers=workers)
        for workers in (1, 2)
    ]
    assert np.array_equal(results[0].lengths, results[1].lengths)
    assert results[0].fingerprint == results[1].fingerprint


def test_a_reason_is_one_line_of_bounded_length(tmp_path):
    rows = [{"prompt": "x", "images": "line\nbreak.png"}, {"prompt": "x", "images": "long" * 1000}]
    with pytest.raises(DataError) as caught:
        opened(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path)
    assert len(str(caught.value).splitlines()) == 4
    assert all(len(bad.reason) < 500 for bad in caught.value.bad_rows)
