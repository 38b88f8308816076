"""`dataset.on_missing`: images that nothing reads, marks without images, missing answers for a reward."""

import pytest
from data_helpers import FakeEncoder, picture, picture_bytes, write_jsonl

from mtrl.compose.task_source import open_data_sources, rewards_needing_answers
from mtrl.config import load_config
from mtrl.data import DataError, DataSettings, open_dataset

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
        "the column 'photo' holds images that nothing reads, in 2 of 3 rows without other images "
        "(rows given in Python, row 2 is the first); set dataset.image_key=photo"
    )
    assert len(opened(rows, tmp_path, on_missing="warn")) == 3 and message in caplog.messages


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
        [{"prompt": "a", "mask_file": "a.png", "page": "b.jpg", "notes": "see <b>image</b>"}],
        [{"prompt": "a"}, {"prompt": "b", "images": [PNG]}],
        [{"prompt": "a", "images": None, "image": None}, {"prompt": "b", "images": [], "blob": b"\0\1\2"}],
        [{"prompt": "a", "image": "a drawing of a cat"}],
    ],
)
def test_valid_data_is_no_error(tmp_path, caplog, rows):
    assert len(opened(rows, tmp_path)) == len(rows) and not caplog.messages


def test_the_embedded_task_is_fine(tmp_path, caplog, few_rows):
    dataset = open_dataset(open_data_sources("zoo@train", "train"), DataSettings(), FakeEncoder(), cache_dir=tmp_path,
                           answer_rewards=["accuracy"])  # fmt: skip
    assert len(dataset) == 64 and not caplog.messages


def test_marks_without_media_name_the_column_that_would_help(tmp_path):
    with pytest.raises(DataError, match=r"1 image mark for 0 images; the column 'photo' holds images: set "
                                        r"dataset\.image_key=photo"):  # fmt: skip
        opened([{"prompt": "<image>a", "photo": PNG}], tmp_path)
    with pytest.raises(DataError, match=r"0 images; set dataset\.image_key to their column, or dataset\.on_missing"):
        opened([{"prompt": "<image>a"}], tmp_path)


def test_marks_without_media_may_be_text(tmp_path, caplog):
    rows = [{"prompt": "a"}, {"prompt": "what is <image> in SVG?"}, {"prompt": "<image>b", "images": [PNG]}]
    dataset = opened(rows, tmp_path, on_missing="warn")
    assert dataset.task(1).messages == ({"role": "user", "content": "what is <image> in SVG?"},)
    assert len(dataset.task(2).media) == 1
    assert "1 of 3 prompts have an <image> or <video> that is read as text" in caplog.text


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
