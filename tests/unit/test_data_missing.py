"""`dataset.on_missing`: images that nothing reads, marks without images, missing answers for a reward."""

import base64
import re
from pathlib import Path

import pytest
from data_helpers import FakeEncoder, picture, picture_bytes, write_jsonl

from mtrl import Trainer
from mtrl.cli import main
from mtrl.compose.task_source import open_data_sources, rewards_needing_answers, validation_sampler
from mtrl.config import load_config
from mtrl.data import DataError, DataSettings, open_dataset
from mtrl.embedded.embedded_rows import CONFIG_FILE

PNG = picture_bytes()


def opened(data, tmp_path, answer_rewards=(), **settings):
    data = str(data) if not isinstance(data, list) else open_data_sources(data, "train")
    return open_dataset(
        data, DataSettings(**settings), FakeEncoder(), cache_dir=tmp_path / "c", answer_rewards=answer_rewards
    )


def refusal(*arguments, **settings):
    with pytest.raises(DataError) as caught:
        opened(*arguments, **settings)
    assert str(caught.value).endswith("dataset.on_missing=warn.")
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("value", [PNG, picture(), {"bytes": PNG}, {"path": "a.jpg"}, [{"bytes": PNG}]])
def test_images_that_are_not_read(tmp_path, caplog, value):
    rows = [{"prompt": "a"}, {"prompt": "b", "photo": value}, {"prompt": "c", "photo": value}]
    message = refusal(rows, tmp_path)
    assert message == (
        "2 of 3 rows have images that no key reads, and no other media: the column 'photo' of rows given in Python, "
        "row 2 is the first; set dataset.image_key=photo, or dataset.on_unread_media=ignore if the prompts do not "
        "need them"
    )
    assert len(opened(rows, tmp_path, on_missing="warn")) == 3 and message in caplog.messages


FILES = {  # column and value; the key that reads it
    "image_path": "a/1.png", "image_file": "1.JPG", "img_path": ["1.webp", "2.webp"], "image_url": "https://x.org/1.jpg?a=2",
    "file_name": "000001.jpg", "figure": "fig 1.tiff", "photo": [["1.heic"]], "anything": "file:///data/1.bmp",
    "address": "data:image/png;base64,AAAA", "encoded": base64.b64encode(PNG).decode(), "listed": [{"url": "1.gif"}],
    "picture_link": "https://x.org/asset/17", "extra_info": {"media": {"shot": "1.avif"}}, "nulls": [None, "a.png"],
    "clip": "1.mp4", "movie": ["data:video/mp4;base64,AAAA"], "mp4": b"\0\0\0\x20ftypisom", "scan.heic": b"\0\0x",
    "python": Path("a.png"),
}  # fmt: skip
VIDEOS = ("clip", "movie", "mp4")


@pytest.mark.parametrize("column", FILES)
def test_files_under_any_name_are_refused_by_their_content(tmp_path, caplog, column):
    rows = [{"prompt": "a"}, {"prompt": "b", column: FILES[column]}]
    message, kind = refusal(rows, tmp_path), "video" if column in VIDEOS else "image"
    name = "extra_info.media.shot" if column == "extra_info" else column
    assert message.startswith(f"1 of 2 rows have {kind}s that no key reads, and no other media: the column {name!r} ")
    assert "rows given in Python, row 2 is the first" in message and f"set dataset.{kind}_key={name}," in message
    assert len(opened(rows, tmp_path, on_unread_media="ignore")) == 2 and not caplog.messages
    with pytest.raises(DataError, match=f"the column '{re.escape(name)}' holds {kind}s: set dataset.{kind}_key="):
        opened([{"prompt": "<image>b", column: FILES[column]}], tmp_path)
    beside = [{"prompt": "b", "images": [PNG], column: FILES[column]}]
    assert len(opened(beside, tmp_path)) == 1, "with media that a key reads it is metadata"


def test_images_and_videos_that_are_not_read_are_counted_apart(tmp_path):
    media = [{"clip": "1.mp4"}, {"shot": "1.png"}, {"film": "2.mp4"}, {"clip": "3.mp4", "shot": "3.png"}]
    rows = [{"prompt": "a", **each} for each in [*media, {"images": [PNG], "clip": "4.mp4"}]]
    with pytest.raises(DataError) as caught:
        opened(rows, tmp_path)
    images, videos, _ = str(caught.value).splitlines()
    assert images.startswith("2 of 5 rows have images") and "'shot' of rows given in Python, row 2 is" in images
    assert videos.startswith("3 of 5 rows have videos") and "'clip' of rows given in Python, row 1 is" in videos
    assert "dataset.image_key=shot" in images and "dataset.video_key=clip" in videos
    with pytest.raises(DataError, match=r"'clip' holds videos: set .*; the column 'shot' holds images: set data"):
        opened([{"prompt": "<video>a", "clip": "1.mp4", "shot": "1.png"}], tmp_path)


@pytest.mark.slow  # 3 s
def test_every_command_refuses_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "1.png").write_bytes(PNG)
    data = str(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "B", "image_path": "1.png"}]))
    files = {"dataset.train_files": data, "dataset.val_files": data, "training.output_dir": str(tmp_path / "runs")}
    options = [f"{key}={value}" for key, value in files.items()]
    wanted = "set dataset.image_key=image_path, or dataset.on_unread_media=ignore"
    for command in (["data", data], *([name, str(CONFIG_FILE), *options] for name in ("data", "doctor", "train"))):
        assert main(command) != 0
        captured = capsys.readouterr()
        assert wanted in " ".join((captured.out + captured.err).split()), command
    run = load_config(CONFIG_FILE, files)
    with pytest.raises(DataError, match="image_path"):
        validation_sampler(run, FakeEncoder())  # as `mtrl eval` opens its data
    with pytest.raises(DataError, match="image_path"):
        Trainer(data=[{"prompt": "a", "answer": "B", "image_path": "1.png"}], output_dir=str(tmp_path)).train()
    assert main(["data", data, "dataset.on_unread_media=ignore"]) == 0


def test_it_is_an_error_from_the_cache_too(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "picture": "a.png"}])
    assert refusal(path, tmp_path) == refusal(path, tmp_path)
    assert opened(path, tmp_path, image_key="picture").task(0).media


def test_a_wrong_key_is_reported_with_the_right_one(tmp_path):
    assert "set dataset.image_key=images" in refusal([{"prompt": "a", "images": [PNG]}], tmp_path, image_key="img")


def test_additional_images_are_reported_and_kept(tmp_path, caplog):
    dataset = opened([{"prompt": "a", "images": [PNG], "mask": PNG}], tmp_path)
    assert dataset.task(0).columns["mask"] == PNG
    assert caplog.messages == [
        "the column 'mask' holds more images, in 1 rows, for the rewards only (dataset.image_key)"
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "a", "file": "app.ts", "page": "https://example.org/a", "notes": "see <b>image</b>"}],
        [{"prompt": "a", "images": [PNG], "source_file": "a.png", "meta": {"thumbnail": "b.jpg", "url": "c.mp4"}}],
        [{"prompt": "what is in a.png", "answer": "b.png", "options": ["a.png", "b.png"], "text": "x\ny.png"}],
        [{"problem": "name it x.png", "solution": "y.png"}],
        [{"conversations": [{"from": "human", "value": "rename a.png"}, {"from": "gpt", "value": "mv a.png b.png"}]}],
        [
            {
                "prompt": "a",
                "log": "I saw <a.png>",
                "quote": 'open("a.png',
                "digits": "iVBORw0KGgo is the start of a PNG",
            }
        ],
        [{"prompt": "a"}, {"prompt": "b", "images": [PNG]}],
        [{"prompt": "a", "images": None, "image": None}, {"prompt": "b", "images": [], "blob": b"\0\1\2"}],
        [{"prompt": "a", "image": "a drawing of a cat"}],
    ],
)
def test_valid_data_is_no_error(tmp_path, caplog, rows):
    assert len(opened(rows, tmp_path)) == len(rows)
    assert all("read from the column" in message for message in caplog.messages), "only aliases are reported"


def test_the_embedded_task_is_fine(tmp_path, caplog, few_rows):
    dataset = open_dataset(open_data_sources("zoo@train", "train"), DataSettings(), FakeEncoder(), cache_dir=tmp_path,
                           answer_rewards=["accuracy"])  # fmt: skip
    assert len(dataset) == 64 and not caplog.messages


def test_marks_without_media_name_the_column_that_would_help(tmp_path):
    with pytest.raises(DataError, match=r"1 image mark for 0 images; the column 'photo' holds images: set "
                                        r"dataset\.image_key=photo"):  # fmt: skip
        opened([{"prompt": "<image>a", "photo": PNG}], tmp_path)
    for kind in ("image", "video"):
        with pytest.raises(DataError, match=rf"0 {kind}s; set dataset\.{kind}_key to their column, or dataset\.on_m"):
            opened([{"prompt": f"<{kind}>a"}], tmp_path)


def test_marks_without_media_may_be_text(tmp_path, caplog):
    rows = [{"prompt": "a"}, {"prompt": "what is <image> in SVG?"}, {"prompt": "<image>b", "images": [PNG]},
            {"prompt": "is <video> like <image> in HTML?"}]  # fmt: skip
    dataset = opened(rows, tmp_path, on_missing="warn")
    assert dataset.task(1).messages == ({"role": "user", "content": "what is <image> in SVG?"},)
    assert len(dataset.task(2).media) == 1
    for kind, count, row in (("image", 2, 2), ("video", 1, 4)):
        (message,) = [each for each in caplog.messages if f"have <{kind}> marks" in each]
        assert message.startswith(f"{count} of 4 prompts") and f"row {row} is the first" in message
        assert message.endswith(f"set dataset.{kind}_key to the column of the {kind}s")


def test_no_truth_where_a_reward_wants_one(tmp_path, caplog):
    rows = [{"prompt": "a", "truth": "B"}, {"prompt": "b", "answer": ""}, {"prompt": "c", "answer": None}]
    message = refusal(rows, tmp_path, ["accuracy", "math"])
    assert "no row has an answer in the column 'answer', and the reward accuracy and math needs one" in message
    assert "set dataset.answer_key" in message and "prompt, truth" in message
    assert len(opened(rows, tmp_path, ["accuracy"], answer_key="truth")) == 3
    assert len(opened(rows, tmp_path)) == 3 and not caplog.messages
    assert len(opened(rows, tmp_path, ["accuracy"], on_missing="warn")) == 3 and message.split(",")[0] in caplog.text
    assert len(opened([*rows, {"prompt": "d", "answer": 0}], tmp_path, ["accuracy"])) == 4, "one is enough"
    assert len(opened([{"prompt": "d", "label_idx": 0}], tmp_path, ["accuracy"])) == 1


def test_which_rewards_want_a_truth():
    assert rewards_needing_answers(load_config(None, {})) == ["accuracy"]
    assert rewards_needing_answers(load_config(None, {"worker.reward.functions": ["math", "format", "a.py:f"]})) == [
        "math"
    ]
    assert rewards_needing_answers(load_config(None, {"worker.reward.reward_fn_path": "a.py"})) == []
    assert rewards_needing_answers(load_config(None, {}), [len, "format"]) == []
