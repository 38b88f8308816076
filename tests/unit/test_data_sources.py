"""Every kind of file, split and list opens; ids follow the content; big files are not read into memory."""

import json
import os
import shutil
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import picture_bytes, write_jsonl

import mtrl.data.arrow as arrow
from mtrl.data import DataError, RowList, open_sources
from mtrl.data.cache import DiskCache
from mtrl.data.row_settings import RowError

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(7)]


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache")


def write_parquet(path, rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def contents(sources):
    return [source.read(i) for source in sources for i in range(len(source))]


def test_jsonl_parquet_and_json_give_the_same_rows(tmp_path, cache):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_parquet(tmp_path / "a.parquet", ROWS, row_group_size=3)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, ROWS)))
    for name in ("a.jsonl", "a.parquet", "a.json", "lines.json"):
        assert contents(open_sources(str(tmp_path / name), cache)) == ROWS, name


def test_jsonl_row_numbers_are_line_numbers(tmp_path, cache):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n\n  \r\n{"prompt": "y"}')
    (source,) = open_sources(str(tmp_path / "a.jsonl"), cache)
    assert contents([source]) == [{"prompt": "x"}, {"prompt": "y"}]
    assert [source.row_number(i) for i in range(2)] == [1, 4]


def test_lines_longer_than_a_block_keep_their_index(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("mtrl.data.sources.BLOCK", 10)
    assert contents(open_sources(str(write_jsonl(tmp_path / "a.jsonl", ROWS)), cache)) == ROWS


@pytest.mark.parametrize("line", ["[1]", "3", "{", '{"a": 1', "\x00", '{"a": ' + "[" * 100_000])
def test_a_bad_line_is_a_row_error(tmp_path, cache, line):
    (source,) = open_sources(str(write_jsonl(tmp_path / "a.jsonl", [line])), cache)
    with pytest.raises(RowError):
        source.read(0)


def test_fingerprint_survives_a_move_and_notices_an_edit(tmp_path, cache):
    def fingerprint(path):
        return open_sources(str(path), cache)[0].fingerprint

    lines = write_jsonl(tmp_path / "a.jsonl", ROWS)
    table = write_parquet(tmp_path / "a.parquet", ROWS)
    for path in (lines, table):
        before = fingerprint(path)
        copy = tmp_path / f"moved{path.suffix}"
        shutil.copy(path, copy)
        assert fingerprint(copy) == before
    before = fingerprint(lines), fingerprint(table)
    edited = [dict(row, answer="X") if i == 3 else row for i, row in enumerate(ROWS)]  # a label of the same length
    write_jsonl(lines, edited)
    write_parquet(table, edited)
    for path in (lines, table):
        os.utime(path, ns=(1, 1))
    assert lines.stat().st_size == (tmp_path / "moved.jsonl").stat().st_size
    assert fingerprint(lines) != before[0] and fingerprint(table) != before[1]


def test_lists_and_the_same_file_twice(tmp_path, cache):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    other = write_jsonl(tmp_path / "b, c.jsonl", ROWS[:2])
    first, second = open_sources(f"{path}, {path}", cache)
    assert first.fingerprint != second.fingerprint
    assert len(contents(open_sources(f" {path} ,{path}", cache))) == 14
    assert len(contents(open_sources(str(other), cache))) == 2  # a comma in the name


def test_directories_and_splits(tmp_path, cache):
    write_parquet(tmp_path / "hub/data/train-00000-of-00002.parquet", ROWS[:3])
    write_parquet(tmp_path / "hub/data/train-00001-of-00002.parquet", ROWS[3:5])
    write_parquet(tmp_path / "hub/data/testmini-00000-of-00001.parquet", ROWS[5:])
    (tmp_path / "hub/.cache").mkdir()
    write_jsonl(tmp_path / "hub/.cache/x.jsonl", ROWS)
    hub = str(tmp_path / "hub")
    assert contents(open_sources(f"{hub}@train", cache)) == ROWS[:5]
    assert contents(open_sources(f"{hub}@testmini", cache)) == ROWS[5:]
    with pytest.raises(DataError, match=r"several splits \(testmini, train\); name one"):
        open_sources(hub, cache)
    with pytest.raises(DataError, match="no split 'dev'"):
        open_sources(f"{hub}@dev", cache)
    (tmp_path / "plain").mkdir()
    write_jsonl(tmp_path / "plain/b.jsonl", ROWS[2:])
    write_jsonl(tmp_path / "plain/a.jsonl", ROWS[:2])
    assert contents(open_sources(str(tmp_path / "plain"), cache)) == ROWS


def test_saved_datasets_need_no_library(tmp_path, cache, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([4, 5])}).save_to_disk(tmp_path / "two")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert contents(open_sources(str(tmp_path / "one"), cache)) == ROWS
    assert contents(open_sources(f"{tmp_path / 'two'}@test", cache)) == ROWS[4:6]
    with pytest.raises(DataError, match="several splits"):
        open_sources(str(tmp_path / "two"), cache)
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    (here,), (there,) = (open_sources(str(tmp_path / name), cache) for name in ("one", "moved"))
    assert here.fingerprint == there.fingerprint


def test_a_saved_dataset_keeps_images_as_bytes(tmp_path, cache):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "images": [{"bytes": picture_bytes(), "path": None}]}]
    features = datasets.Features({"prompt": datasets.Value("string"), "images": [datasets.Image()]})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "one")
    assert contents(open_sources(str(tmp_path / "one"), cache)) == rows


def test_hub_datasets_in_the_cache_of_the_library(tmp_path, cache, monkeypatch):
    datasets = pytest.importorskip("datasets")
    load, files = datasets.load_dataset, {"test": str(write_parquet(tmp_path / "a.parquet", ROWS))}
    from_hub = lambda name, split: load("parquet", data_files=files, split=split, cache_dir=str(tmp_path / "hub"))  # noqa: E731
    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    (source,) = open_sources("someone/something@test[2:5]", cache)
    assert contents([source]) == ROWS[2:5] and source.stamp is not None
    (whole,) = open_sources("someone/something", cache)  # its only split
    assert contents([whole]) == ROWS and whole.name == "someone/something@test"
    assert whole.fingerprint != source.fingerprint


def test_hub_datasets(tmp_path, cache, monkeypatch):
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split=None: both[split] if split else both)
    (source,) = open_sources("someone/something@test", cache)
    assert contents([source]) == ROWS[:2] and source.name == "someone/something@test"
    with pytest.raises(DataError, match="several splits"):
        open_sources("someone/something", cache)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split=None: 1 / 0)
    with pytest.raises(DataError, match="cannot be loaded"):
        open_sources("someone/something@test", cache)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'mtrl\[hub\]'"):
        open_sources("someone/something@test", cache)


def test_a_long_list_is_not_taken_for_a_name(tmp_path, cache):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert len(open_sources(", ".join([str(path)] * 200), cache)) == 200


@pytest.mark.parametrize(
    "spec", ["", " , ", "x" * 300 + ".jsonl", "nul\0.jsonl", "nowhere/to/be.jsonl", "./nothing.parquet", "a/b/c/d"]
)
def test_missing_sources_are_reported(spec, cache):
    with pytest.raises(DataError, match=r"does not exist|no data file"):
        open_sources(spec, cache)


def test_files_that_are_no_data(tmp_path, cache):
    for name, content in {"a.csv": b"x", "a.parquet": b"PAR1 not really", "b.parquet": b"", "c.json": b"[1,"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            open_sources(str(tmp_path / name), cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.jsonl or \.parquet"):
        open_sources(str(tmp_path / "empty"), cache)
    with pytest.raises(DataError, match="no split"):
        open_sources(f"{write_jsonl(tmp_path / 'a.jsonl', ROWS)}@test", cache)


@pytest.mark.parametrize("levels", [50, 101, 500, 900, 100_000])
@pytest.mark.parametrize(("begin", "end"), ["[]", ('{"a":', "}")])
def test_rows_nested_too_deep_are_errors(tmp_path, cache, levels, begin, end):
    row = '{"prompt": "x", "extra": ' + begin * levels + "1" + end * levels + "}"
    path = tmp_path / "a.jsonl"
    path.write_text(f'{row}\n{{"prompt": "fine"}}')
    (source,) = open_sources(str(path), cache)
    if levels <= 50:
        assert source.read(0)["prompt"] == "x"
    else:
        with pytest.raises(RowError, match=r"nested more than 100 levels deep|not valid JSON"):
            source.read(0)
    assert source.read(1) == {"prompt": "fine"}


def test_python_rows_that_contain_themselves_are_errors():
    row = {"prompt": "x"}
    row["self"] = row
    with pytest.raises(RowError, match="nested more than"):
        RowList([row], "rows").read(0)


def test_large_row_groups_are_read_through_an_arrow_copy(tmp_path, cache, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    (small,) = open_sources(str(path), cache)
    monkeypatch.setattr(arrow, "MAX_ROW_GROUP", 10)
    (large,) = open_sources(str(path), cache)
    assert contents([small]) == contents([large]) == ROWS and small.fingerprint == large.fingerprint
    (copy,) = (tmp_path / "cache/arrow").glob("*.arrow")
    before = copy.stat().st_mtime_ns
    open_sources(str(path), cache)
    assert copy.stat().st_mtime_ns == before  # made once


@pytest.mark.parametrize("counts", [(3, 3), (-1, 8), (10**12, 7)])
def test_a_footer_with_impossible_row_counts_is_an_error(tmp_path, cache, monkeypatch, counts):
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    groups = [SimpleNamespace(num_rows=count, total_byte_size=1) for count in counts]
    damaged = SimpleNamespace(num_row_groups=2, num_rows=7, row_group=groups.__getitem__)
    monkeypatch.setattr(arrow.pq, "read_metadata", lambda _: damaged)
    with pytest.raises(DataError, match="row counts do not add up"):
        open_sources(str(path), cache)


def test_a_parquet_file_exchanged_before_a_worker_opens_it(tmp_path, cache):
    (source,) = open_sources(str(write_parquet(tmp_path / "a.parquet", ROWS)), cache)
    write_parquet(tmp_path / "a.parquet", [*ROWS, *ROWS])
    with pytest.raises(RowError, match="the file has changed since the run began"):
        source.read(0)


def test_rows_of_python(cache):
    first, same, other = RowList(ROWS), RowList([dict(row) for row in ROWS]), RowList(ROWS[1:])
    assert first.fingerprint == same.fingerprint != other.fingerprint
    with pytest.raises(RowError, match="a int"):
        RowList([3]).read(0)
