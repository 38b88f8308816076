"""Pipes, sockets and devices instead of a file are errors that name them, and never read; so are broken links."""

import json
import os
import signal
import socket
from contextlib import contextmanager

import pyarrow as pa
import pytest
from data_helpers import FakeEncoder, image_rows, picture_bytes, write_jsonl

from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.checkpoint.manifest import DamagedCheckpoint, check_manifest, seal
from mtrl.checkpoint.run_directory import RunDirectory
from mtrl.config import ConfigError, load_config
from mtrl.data import DataError, DataSettings, open_dataset
from mtrl.models.families import load_encoder
from mtrl.tracking.jsonl import JsonlWriter, last_row, read_rows
from mtrl.training.resume import find_start
from mtrl.utils.errors import StartError, explain_os_errors
from mtrl.utils.files import check_regular_files, regular_file
from mtrl.utils.plugins import PluginError, load_plugin
from pretraining.tiny_checkpoints import make_tiny_checkpoint


@pytest.fixture(autouse=True)
def no_hang():
    """Whoever opens the pipe would wait for ever."""

    def ring(*_):
        raise AssertionError("it waits for the pipe")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path):
    os.mkfifo(path)
    return path


@contextmanager
def special(kind, path):
    if kind == "pipe":
        yield pipe(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
        yield path
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            yield path


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_a_path_that_is_no_file_is_named(tmp_path, kind):
    with special(kind, tmp_path / "x") as path:
        with pytest.raises(OSError, match=f"it is a {kind}, not a file") as caught:
            regular_file(path)
        assert caught.value.filename == str(path)
        with pytest.raises(OSError, match=f"it is a {kind}"):
            check_regular_files(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert regular_file(tmp_path / "link").read_text() == "x"
    with pytest.raises(IsADirectoryError):
        regular_file(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- data
@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_data_files(tmp_path, kind, suffix):
    with special(kind, tmp_path / f"a.{suffix}") as path:
        for place in [path] if suffix == "json" else [path, tmp_path]:  # by its name, and in a directory
            with pytest.raises(DataError, match=rf"a\.{suffix} cannot be read: it is a {kind}, not a file"):
                open_dataset(str(place), DataSettings(), FakeEncoder(), cache_dir=tmp_path / "cache")


def test_images(tmp_path):
    pipe(tmp_path / "a.png")
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "images": "a.png"}])
    with pytest.raises(DataError, match=r"row 1: the image .*a\.png cannot be opened \(it is a pipe, not a file\)"):
        open_dataset(str(path), DataSettings(), FakeEncoder(), cache_dir=tmp_path / "cache")


def test_format_prompts(tmp_path):
    path, template = image_rows(tmp_path, 2), pipe(tmp_path / "a.jinja")
    with pytest.raises(DataError, match=r"a\.jinja cannot be read: it is a pipe"):
        open_dataset(str(path), DataSettings(format_prompt=str(template)), FakeEncoder(), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ["state.json", "data.arrow"])
def test_saved_datasets(tmp_path, name):
    saved_dataset(tmp_path)
    (tmp_path / name).unlink()
    pipe(tmp_path / name)
    with pytest.raises(DataError, match="it is a pipe"):
        open_dataset(str(tmp_path), DataSettings(), FakeEncoder(), cache_dir=tmp_path / "cache")


def test_entries_of_the_cache_are_rebuilt(tmp_path):
    path = image_rows(tmp_path, 2)
    open_dataset(str(path), DataSettings(), FakeEncoder(), cache_dir=tmp_path / "cache")
    entries = list((tmp_path / "cache").rglob("*.cache"))
    for entry in entries:
        entry.unlink()
        pipe(entry)
    assert len(open_dataset(str(path), DataSettings(), FakeEncoder(), cache_dir=tmp_path / "cache")) == 2
    assert entries and all(entry.is_file() for entry in entries)


# ------------------------------------------------------------------------------------------- damage in Arrow and copies
def saved_dataset(folder, rows=6):
    table = pa.Table.from_pylist(
        [{"prompt": f"question {i}", "images": [{"bytes": picture_bytes(28, 28, seed=i)}]} for i in range(rows)]
    )
    with pa.OSFile(str(folder / "data.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder / "data.arrow"


def test_a_damaged_offset_in_an_arrow_file_is_one_line_with_its_name(tmp_path):
    file = saved_dataset(tmp_path)
    data = bytearray(file.read_bytes())
    offsets = b"".join(int.to_bytes(len("question 0") * i, 4, "little") for i in range(7))
    at = data.index(offsets)
    data[at + 4 : at + 8] = b"\xff\xff\xff\x7f"  # two gigabytes behind the end
    file.write_bytes(bytes(data))
    with pytest.raises(DataError) as caught:
        open_dataset(str(tmp_path), DataSettings(), FakeEncoder(), cache_dir=tmp_path / "cache")
    assert str(file) in str(caught.value) and "is damaged" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [10, 200, -5])
def test_an_arrow_file_cut_short_is_named(tmp_path, cut):
    file = saved_dataset(tmp_path)
    file.write_bytes(file.read_bytes()[:cut])
    try:
        dataset = open_dataset(str(tmp_path), DataSettings(), FakeEncoder(), cache_dir=tmp_path / "cache")
        assert len(dataset) == 6, "only the end mark is missing"
    except DataError as error:
        assert str(file) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("keeps_stamp", [False, True])
def test_a_damaged_copy_in_the_cache_is_noticed(tmp_path, monkeypatch, caplog, keeps_stamp):
    import pyarrow.parquet as pq

    monkeypatch.setattr("mtrl.data.arrow.MAX_ROW_GROUP", 1)
    rows = [{"prompt": f"question {i}"} for i in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")

    def lengths():
        dataset = open_dataset(str(tmp_path / "a.parquet"), DataSettings(), FakeEncoder(), cache_dir=tmp_path / "cache")
        return dataset.lengths.tolist()

    expected = lengths()
    (copy,) = (tmp_path / "cache" / "arrow").glob("*.arrow")
    stamp, data = copy.stat(), bytearray(copy.read_bytes())
    at = data.index(b"".join(int.to_bytes(len("question 0") * i, 4, "little") for i in range(7)))
    data[at + 4 : at + 8] = b"\xff\xff\xff\x7f"
    copy.write_bytes(bytes(data))
    for entry in (tmp_path / "cache" / "scan").iterdir():  # otherwise the scan reads nothing
        entry.unlink()
    if keeps_stamp:
        os.utime(copy, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        with pytest.raises(DataError, match=rf"the copy {copy} is damaged; remove it"):
            lengths()
    else:
        assert lengths() == expected and "has changed since it was written; it is made again" in caplog.text


# --------------------------------------------------------------------------------------- configuration, code and models
def test_configurations(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.yaml: cannot read the file: it is a pipe, not a file"):
        load_config(pipe(tmp_path / "run.yaml"))


def test_reward_files(tmp_path):
    with pytest.raises(PluginError, match=r"rewards\.py cannot be read: it is a pipe"):
        load_plugin(f"{pipe(tmp_path / 'rewards.py')}:score", "reward")
    with pytest.raises(PluginError, match="there is no reward file"):
        load_plugin(f"{tmp_path / 'other.py'}:score", "reward")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
def test_models(tmp_path, name):
    folder = make_tiny_checkpoint(tmp_path / "model", "qwen2_5_vl")
    (folder / name).unlink(missing_ok=True)
    pipe(folder / name)
    with pytest.raises(ValueError, match=rf"{name} cannot be read: it is a pipe"):
        load_encoder(folder)


# ---------------------------------------------------------------------------------------------------------- runs before
@pytest.mark.parametrize("name", ["run_id", "run.lock"])
def test_files_of_a_run(tmp_path, name):
    pipe(tmp_path / name)
    with pytest.raises(StartError, match=f"{name} is not a file, but something else"):
        RunDirectory(tmp_path)


def test_metrics_of_a_run(tmp_path):
    path = pipe(tmp_path / "metrics.jsonl")
    for read in (JsonlWriter, last_row, read_rows):
        with pytest.raises(OSError, match="it is a pipe"):
            read(path)


def test_checkpoints(tmp_path):
    step = tmp_path / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    (step / "trainer_state.json").write_text("{}")
    seal(step)
    check_manifest(step)
    (step / "trainer_state.json").unlink()
    pipe(step / "trainer_state.json")
    with pytest.raises(DamagedCheckpoint):
        check_manifest(step)
    (step / "mtrl_manifest.json").unlink()
    pipe(step / "mtrl_manifest.json")
    with opening_error(r"mtrl_manifest\.json is not a file"):
        find_start(tmp_path, 10)


@contextmanager
def opening_error(match):
    with pytest.raises(StartError, match=match), explain_os_errors():
        yield


@pytest.mark.parametrize("target", ["gone", "checkpoints"])
def test_a_link_to_checkpoints_that_leads_nowhere_is_no_new_start(tmp_path, target):
    assert list_checkpoints(tmp_path / "checkpoints") == []
    (tmp_path / "checkpoints").symlink_to(target)
    with opening_error(r"checkpoints cannot be used: .*check that it exists"):
        find_start(tmp_path, 10)
    with opening_error(r"checkpoints cannot be used"):
        find_start(tmp_path, 10, find_last=False)
    with pytest.raises(StartError, match="checkpoints is not a folder"):
        RunDirectory(tmp_path)
