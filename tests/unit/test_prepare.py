"""`mtrl prepare` on small copies of the real datasets: conversion and choice of rows, and determinism."""

import json
from collections import Counter

import datasets
import prepare_helpers as published
import pyarrow.parquet as pq
import pytest
from data_helpers import FakeEncoder, image_rows
from PIL import Image
from prepare_helpers import contents, read_rows

from mtrl.cli import main
from mtrl.config import load_config
from mtrl.data import DataSettings, open_dataset
from mtrl.prepare.shards import SCHEMA

EXPERIMENTS = [f"experiment{number}" for number in range(1, 6)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def prepared(capsys, *arguments):
    assert main(["prepare", *map(str, arguments)]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_aokvqa(tmp_path, capsys):
    said = prepared(capsys, "aokvqa", published.aokvqa(tmp_path / "hub"))
    rows = read_rows(tmp_path / "data/aokvqa")
    originals = published.aokvqa_rows(30)
    assert said["rows"] == {"train": 30} and said["left_out"] == {} and len(rows) == 30
    for row, was in zip(rows, originals, strict=True):
        assert row["id"] == row["question_id"] == f"aokvqa/{was['question_id']}" and row["source"] == "aokvqa"
        assert (row["prompt"], row["options"]) == (f"<image>{was['question']}", was["choices"])
        assert row["answer"] == "ABCD"[was["correct_choice_idx"]]
        assert row["images"] == [was["image"]], "the very bytes"
    card = (tmp_path / "data/aokvqa/README.md").read_text()
    assert "| aokvqa | 30 |" in card and "| aokvqa | 4: 30 | 1: 30 |" in card and "Nothing." in card
    with Image.open(tmp_path / "data/aokvqa/samples.png") as sheet:
        assert sheet.size == (1320, 1720) and len(sheet.crop((0, 0, 440, 240)).getcolors(1 << 20)) > 100, (
            "pictures in it"
        )
    loaded = datasets.load_dataset(str(tmp_path / "data/aokvqa"), split="train", cache_dir=str(tmp_path / "hf"))
    assert loaded[0]["images"][0].size == (32, 24) and loaded[0]["answer"] == "A"


def test_aokvqa_of_the_authors(tmp_path, capsys):
    """Image numbers of COCO; embedded, and as paths that a run resolves from any directory."""
    folder = published.aokvqa_json(tmp_path / "aokvqa")
    prepared(capsys, "aokvqa", folder, "--out", "a")
    prepared(capsys, "aokvqa", folder / "aokvqa_v1p0_train.json", "--images", "paths", "--out", "b")
    embedded, named = read_rows(tmp_path / "a"), read_rows(tmp_path / "b")
    assert [row["images"][0]["bytes"] for row in embedded] == [r["image"]["bytes"] for r in published.aokvqa_rows(6)]
    assert named[0]["images"] == [{"bytes": None, "path": "../../aokvqa/train2017/000000299207.jpg"}]
    assert len(open_dataset("b", DataSettings(), FakeEncoder())) == 6


def test_which_are_chosen(tmp_path, capsys):
    hub = published.aokvqa(tmp_path / "hub")
    said = prepared(capsys, "aokvqa", hub, "--subset", 10, "--seed", 3, "--out", "a")
    assert said["rows"] == {"train": 10} and said["left_out"] == {"it is not in the subset": 20}
    prepared(capsys, "aokvqa", hub, "--subset", 10, "--seed", 4, "--out", "b")
    prepared(capsys, "aokvqa", hub, "--subset", 20, "--seed", 3, "--out", "c")
    a, b, c = ({row["id"] for row in read_rows(tmp_path / name)} for name in "abc")
    assert a != b and a < c, "a larger subset of the same seed holds the smaller one"
    keys = [row["question_id"] for row in published.aokvqa_rows(30)]
    (tmp_path / "ids.txt").write_text("\n".join([*keys[3:6], "of no row", ""]))
    (tmp_path / "ids.json").write_text(json.dumps([{"question_id": key} for key in keys[3:6]]))
    for file in ("ids.txt", "ids.json"):
        prepared(capsys, "aokvqa", hub, "--ids", file, "--out", file[4:])
        assert [row["id"] for row in read_rows(tmp_path / file[4:])] == [f"aokvqa/{key}" for key in keys[3:6]]
    assert "No row has 1 of the ids in the file" in (tmp_path / "txt/README.md").read_text()


def test_a_split_without_answers_is_reported(tmp_path, capsys):
    hub = published.aokvqa(tmp_path / "hub")
    assert main(["prepare", "aokvqa", str(hub), "--split", "test"]) == 2
    assert "no row of aokvqa is left (3 rows: it has no answer)" in capsys.readouterr().err
    assert main(["prepare", "aokvqa", str(hub), "--split", "validation"]) == 2
    assert "has no split 'validation'; it has test, train" in capsys.readouterr().err


def test_arxivqa(tmp_path, capsys):
    said = prepared(capsys, "arxivqa", published.arxivqa(tmp_path / "hub"))
    assert said["rows"] == {"train": 11} and said["left_out"] == {"its answer is none of its options": 1}
    rows = {int(row["id"].rpartition("-")[2]): row for row in read_rows(tmp_path / "data/arxivqa")}
    for i, row in rows.items():
        texts = [f"a rise {i}", "a fall", "no trend", "a cycle"]
        assert row["options"] == (texts[:3] if i == 2 else texts), "without labels, which are the template's"
        assert row["answer"] == "ABCD"[i % 4] and row["prompt"] == f"<image>What does panel {i} show?"
        figure = published.image(100 + 2 * (12 - 1 - i), "JPEG")["bytes"]
        assert [each["bytes"] for each in row["images"]] == [figure], "the one named in the relations"


def test_a_missing_figure_ends_it_and_can_be_left_out(tmp_path, capsys):
    hub = published.arxivqa(tmp_path / "hub")
    file = hub / "corpus/train-00000-of-00001.parquet"
    pq.write_table(pq.read_table(file).slice(0, 20), file)
    assert main(["prepare", "arxivqa", str(hub)]) == 2
    assert "the figure that is related to it is not in the corpus" in capsys.readouterr().err
    said = prepared(capsys, "arxivqa", hub, "--skip-bad")
    assert said["rows"] == {"train": 10} and list(said["skipped"].values()) == [1]
    (listed,) = (tmp_path / "data/arxivqa/skipped.txt").read_text().splitlines()
    assert listed == "arxivqa/figures/0000.jpg-0: the figure that is related to it is not in the corpus"


def test_mmmu_pro(tmp_path, capsys):
    hub = published.mmmu_pro(tmp_path / "hub")
    said = prepared(capsys, "mmmu-pro", hub, "--options", "4,10,vision")
    assert said["rows"] == {"test": 30} and said["questions"] == 10
    rows = {row["id"]: row for row in read_rows(tmp_path / "data/mmmu-pro")}
    plain = rows["mmmu-pro-10/test_Art_5"]
    assert plain["prompt"] == "What is <image> in question 5?" and plain["answer"] == "F"
    assert plain["options"][3] == "choice 3 of Jane's" and len(plain["options"]) == 10
    several = rows["mmmu-pro-4/test_Art_1"]
    assert several["options"][:3] == ["<image>", "<image>", "as image 1"]
    shown = [each["bytes"] for each in several["images"]]
    assert shown == [published.image(seed)["bytes"] for seed in (301, 403, 402)], "in the order of the text"
    assert rows["mmmu-pro-4/test_Art_2"]["prompt"].count("<image>") == len(rows["mmmu-pro-4/test_Art_2"]["images"]) == 7
    vision = rows["mmmu-pro-vision/test_Art_7"]
    assert vision["prompt"] == "<image>Answer the question in the image." and vision["options"] is None
    assert {row["question_id"] for row in rows.values()} == {f"mmmu-pro/test_Art_{i}" for i in range(10)}
    said = prepared(capsys, "mmmu-pro", hub, "--subset", 3, "--out", "few")
    kept = Counter(row["question_id"] for row in read_rows(tmp_path / "few"))
    assert said["rows"] == {"test": 6} and set(kept.values()) == {2}, "both forms of three questions"


def all_three(tmp_path, capsys, *options):
    for name, copy in {
        "aokvqa": published.aokvqa,
        "arxivqa": published.arxivqa,
        "mmmu-pro": published.mmmu_pro,
    }.items():
        folder = tmp_path / "hub" / name
        prepared(capsys, name, folder if folder.exists() else copy(folder), *options)


@pytest.mark.parametrize("storage", ["embed", "paths"])
def test_the_experiments_read_the_merged_set(tmp_path, capsys, storage):
    all_three(tmp_path, capsys, "--images", storage)
    said = prepared(capsys, "merge", "--images", storage)
    assert said["questions"] == 30 + 11 + 10 and sum(said["rows"].values()) == 30 + 11 + 20
    questions = {}
    for split in ("train", "val"):
        for config in (load_config(f"mtrl:experiments/{name}") for name in EXPERIMENTS):
            assert getattr(config.dataset, f"{split}_files") == f"data/ddm/{split}"
        settings = DataSettings(format_prompt=config.dataset.format_prompt)
        dataset = open_dataset(f"data/ddm/{split}", settings, FakeEncoder())
        tasks = [dataset.task(i) for i in range(len(dataset))]
        assert len(tasks) == said["rows"][split] and all(task.media and task.answer in "ABCDEFGHIJ" for task in tasks)
        questions[split] = {task.columns["question_id"] for task in tasks}
    assert not questions["train"] & questions["val"], "by question, never by row"
    assert len(questions["val"]) == 5 and len(questions["train"]) == 46


def test_merging_other_files_and_a_repeated_row(tmp_path, capsys):
    image_rows(tmp_path, 6)
    (tmp_path / "more.jsonl").write_text(
        (tmp_path / "train.jsonl").read_text().replace('"answer": ', '"answer": "B", "n": ')
    )
    said = prepared(capsys, "merge", "more.jsonl", "more.jsonl", "--val", 0, "--out", "a")
    assert said["rows"] == {"train": 6} and said["left_out"] == {"an earlier row has the same id": 6}


def test_values_of_json_keep_their_types(tmp_path, capsys):
    """`datasets` reads these dates as timestamps, and a column of a path and a list as text."""
    image_rows(tmp_path, 2)
    images = sorted(str(file) for file in tmp_path.rglob("*.png"))[:2]
    rows = [
        {"prompt": "<image>When?", "answer": "A", "options": ["2020-01-01", "2021-01-01"], "images": images[0]},
        {"prompt": "<image><image>When?", "answer": "B", "options": ["2020-01-01", "2021-01-01"], "images": images},
    ]
    (tmp_path / "dates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared(capsys, "merge", "dates.jsonl", "--val", 0, "--out", "a")
    written = read_rows(tmp_path / "a")
    assert [row["options"] for row in written] == [row["options"] for row in rows]
    assert [len(row["images"]) for row in written] == [1, 2]


def test_the_schema_is_that_of_datasets():
    """It is written by hand, so that a local file is prepared without the library."""
    text = datasets.Value("string")
    lists = {"options": datasets.List(text), "images": datasets.List(datasets.Image())}
    features = datasets.Features({name: lists.get(name, text) for name in SCHEMA.names})
    assert SCHEMA.equals(features.arrow_schema, check_metadata=True)


@pytest.mark.parametrize("storage", ["embed", pytest.param("paths", marks=pytest.mark.slow)])
def test_twice_the_same_bytes(tmp_path, capsys, storage, monkeypatch):
    monkeypatch.setattr("mtrl.prepare.prepare_dataset.ROWS_PER_SHARD", 7)
    all_three(tmp_path, capsys, "--images", storage)
    first, ddm = contents(tmp_path / "data"), ("--images", storage)
    prepared(capsys, "merge", *ddm)
    merged = contents(tmp_path / "data/ddm")
    assert len([name for name in merged if name.endswith(".parquet")]) > 9, "shards"
    (tmp_path / "data").rename(tmp_path / "before")
    all_three(tmp_path, capsys, "--images", storage)
    assert contents(tmp_path / "data") == first
    prepared(capsys, "merge", *ddm)
    assert contents(tmp_path / "data/ddm") == merged
    said = prepared(capsys, "merge", *ddm)
    assert said["was_there"] and contents(tmp_path / "data/ddm") == merged


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which dataset? mtrl prepare aokvqa | arxivqa | mmmu-pro | merge"),
        (("coco",), "which dataset?"),
        (("aokvqa", "nowhere/at/all"), "nowhere/at/all does not exist"),
        (("aokvqa", "--subset", "many"), "--subset: many is no whole number of at least 1"),
        (("aokvqa", "--subset", "0"), "--subset: 0 is no whole number of at least 1"),
        (("aokvqa", "--options", "4"), "there is no option --options; mtrl prepare aokvqa takes --out"),
        (("mmmu-pro", "--options", "5"), "--options: '5' is none of 4, 10, vision"),
        (("merge", "--val", "1"), "--val: 1 is no share of at least 0 and less than 1"),
        (("aokvqa", "a", "b"), "b: one SOURCE is enough"),
        (("merge", "--images", "links"), "--images: invalid choice: 'links' (choose from"),
    ],
)
def test_wrong_arguments_get_one_clear_line(capsys, arguments, message):
    assert main(["prepare", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_by_its_id_on_the_hub(tmp_path, capsys, monkeypatch):
    """Each configuration of the dataset is loaded by its name."""
    hub, asked = published.mmmu_pro(tmp_path / "hub", 3), []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        (file,) = (hub / config).glob("*.parquet")
        return datasets.Dataset(pq.read_table(file))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("mtrl.data.hub.connection_error", lambda: None)
    assert prepared(capsys, "mmmu-pro", "--subset", 2)["rows"] == {"test": 4}
    assert asked == [("MMMU/MMMU_Pro", f"standard ({options} options)", "test") for options in (4, 10)]


def test_datasets_saved_to_disk(tmp_path, capsys):
    rows = published.aokvqa_rows(5)
    features = datasets.Features.from_arrow_schema(published.AOKVQA)
    made = datasets.Dataset.from_list(rows, features=features).cast_column("image", datasets.Image())
    datasets.DatasetDict(train=made).save_to_disk(str(tmp_path / "saved"))
    capsys.readouterr()
    prepared(capsys, "aokvqa", tmp_path / "saved")
    assert [row["images"] for row in read_rows(tmp_path / "data/aokvqa")] == [[row["image"]] for row in rows]
