"""Columns as TRL, verl and EasyR1 name them, and keys that reach into structs."""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import FakeEncoder, picture, picture_bytes, write_jsonl

from mtrl.cli import main
from mtrl.compose.task_source import open_data_sources
from mtrl.data import DataError, DataSettings, open_dataset
from mtrl.data.media import looks_like_image

PNG = picture_bytes()


def opened(data, tmp_path, **settings):
    data = str(data) if not isinstance(data, list) else open_data_sources(data, "train")
    return open_dataset(data, DataSettings(**settings), FakeEncoder(), cache_dir=tmp_path / "cache")


def test_trl_jsonl(tmp_path, caplog):
    (tmp_path / "a.png").write_bytes(PNG)
    rows = [{"problem": "which?", "image": "a.png", "solution": "B"}, {"problem": "text alone", "solution": "C"}]
    for is_first in (True, False):  # the second time from the cache
        caplog.clear()
        dataset = opened(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path)
        first, second = dataset.task(0), dataset.task(1)
        assert first.answer == "B" and len(first.media) == 1 and first.text == "<image>which?" and not second.media
        assert first.columns == {"problem": "which?", "solution": "B"}, "rewards may read them by their own names"
        assert sorted(caplog.messages) == is_first * [
            "answers are read from the column 'solution' (dataset.answer_key)",
            "images are read from the column 'image' (dataset.image_key)",
            "prompts are read from the column 'problem' (dataset.prompt_key)",
        ], "reported once: each evaluation opens the data again"


def test_verl_parquet(tmp_path):
    shared = {"prompt": [{"role": "user", "content": "<image>which?"}], "images": [{"bytes": PNG, "path": None}]}
    rows = [{**shared, "reward_model": {"style": "rule", "ground_truth": str(i)}} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    dataset = opened(tmp_path / "a.parquet", tmp_path)
    assert [dataset.task(i).answer for i in range(3)] == ["0", "1", "2"]
    assert dataset.task(0).columns["reward_model"] == {"style": "rule", "ground_truth": "0"}


@pytest.mark.parametrize("image", [PNG, picture(), {"bytes": PNG, "path": None}, [picture()]])
def test_rows_given_in_python(tmp_path, image):
    dataset = opened([{"question": "which?", "image": image, "label": 1}], tmp_path)
    assert len(dataset.task(0).media) == 1 and dataset.task(0).answer == 1 and dataset.pixels[0]


def test_our_own_names_win(tmp_path, caplog):
    row = {"prompt": "p", "problem": "q", "answer": "A", "solution": "B", "images": [PNG], "image": PNG}
    task = opened([row], tmp_path).task(0)
    assert (task.text, task.answer) == ("<image>p", "A") and task.columns["image"] == PNG
    assert "are read from" not in caplog.text


def test_a_configured_key_is_used_as_is(tmp_path):
    with pytest.raises(DataError, match="no column 'ask'"):
        opened([{"problem": "q"}], tmp_path, prompt_key="ask")
    assert opened([{"prompt": "q", "solution": "B"}], tmp_path, answer_key="truth").task(0).answer is None


def test_values_that_are_no_images_are_not_used_as_images(tmp_path, caplog):
    assert opened([{"prompt": "q", "image": 391895}, {"prompt": "r", "image": None}], tmp_path).task(0).media == ()
    assert "are read from" not in caplog.text


def test_dotted_keys_reach_into_structs(tmp_path):
    row = {"a": {"b": {"c": "ask"}, "o": ["x", "y"], "i": PNG}, "t": {"u": 3}, "d.e": 4}
    keys = {"prompt_key": "a.b.c", "answer_key": "t.u", "options_key": "a.o", "image_key": "a.i"}
    task = opened([row], tmp_path, **keys).task(0)
    assert (task.text, task.answer, task.columns["options"]) == ("<image>ask", 3, ["x", "y"])
    assert opened([row], tmp_path, **keys | {"answer_key": "d.e"}).task(0).answer == 4, "a column of that very name"
    assert opened([row], tmp_path, **keys | {"answer_key": "t.u.v"}).task(0).answer is None
    with pytest.raises(DataError, match=r"no column 'a\.b\.d'"):
        opened([row], tmp_path, **keys | {"prompt_key": "a.b.d"})


def test_the_commands_read_them_too(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))
    data = write_jsonl(tmp_path / "a.jsonl", [{"problem": "which?", "solution": "B", "options": ["x", "y"]}])
    assert main(["reward", "accuracy", "--data", str(data)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mean"] == 1.0
    assert main(["data", str(data)]) == 0
    assert "problem: text, read as prompt" in capsys.readouterr().out


def test_a_directory_of_files_with_different_names(tmp_path, caplog):
    for name, row in {"a": {"prompt": "p", "answer": "A"}, "b": {"problem": "p", "solution": "B"}}.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [row])
    with caplog.at_level(logging.WARNING):
        dataset = opened(tmp_path, tmp_path)
    assert [dataset.task(i).answer for i in range(2)] == ["A", "B"]


@pytest.mark.parametrize(
    ("column", "value", "seen"),
    [
        ("x", PNG, True), ("x", picture_bytes(kind="JPEG"), True), ("x", picture_bytes(kind="WEBP"), True),
        ("x", picture_bytes(kind="BMP"), True), ("x", picture_bytes(kind="GIF"), True), ("x", picture(), True),
        ("x", [{"bytes": None, "path": "a.JPG"}], True), ("x", "data:image/png;base64,AAAA", True),
        ("IMAGE", "a/b.jpeg", True), ("img", ["a.png"], True),
        ("x", b"hello", False), ("x", b"", False), ("x", {"bytes": b"RIFF....WAVE", "path": "a.wav"}, False),
        ("mask_file", "a.png", False), ("image_id", 3, False), ("image", "a cat", False), ("image", [], False),
        ("images", None, False), ("x", {"path": 3}, False),
    ],
)  # fmt: skip
def test_what_looks_like_an_image(column, value, seen):
    assert looks_like_image(column, value) is seen
