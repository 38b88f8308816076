"""`mtrl data`: the first report that a user sees."""

import io

import pytest
from data_helpers import FakeEncoder, image_rows, picture_bytes, write_jsonl

from mtrl.data import DataError, DataSettings
from mtrl.data.row_settings import IMAGE_DIR
from mtrl.report import data_page as data_report


def printed(path, tmp_path, encoder, **settings):
    stream = io.StringIO()
    code = data_report.run(str(path), DataSettings(**settings), encoder, stream, cache_dir=tmp_path / "cache")
    return code, stream.getvalue()


def test_everything_is_there(tmp_path):
    code, text = printed(image_rows(tmp_path, 20, every=2), tmp_path, FakeEncoder(), max_prompt_length=16)
    assert code == 0
    for line in [
        "       20  in all",
        "       17  to train on",
        "min 11   median 12   p90 17   max 18",
        "over dataset.max_prompt_length=16: 3 of 20 (15.0%), left out",
        "10 in 10 rows",
        "width   min 56   median 56   p90 56   max 56",
        "height  min 28   median 56   p90 84   max 84",
        "tokens  min 2   median 4   p90 6   max 6",
        "prompt: text",
        "images: list of text (not in 10 rows)",
        "level: number",
        "Bad rows\n  none",
        "  | [user]<pad> × 2question 0",
        "  answer: 0",
    ]:
        assert line in text, f"{line!r} is not in\n{text}"
    assert text.count("Sample ") == 3


def test_bad_rows_are_shown_and_counted(tmp_path):
    (tmp_path / "a.png").write_bytes(picture_bytes())
    rows = [{"prompt": ""}] * 30 + [{"prompt": "fine", "images": "a.png"}]
    code, text = printed(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path, FakeEncoder())
    assert code == 1
    assert "       30  cannot be used" in text and "a.jsonl, row 1: the prompt is empty" in text
    assert "row 1: the prompt is empty (and 29 more rows like it)" in text and "<pad> × 6fine" in text
    assert text.count("the prompt is empty") == 1


def test_missing_images_are_reported_once_with_the_key_that_helps(tmp_path):
    rows = [{"prompt": "<image>?", "images": f"my photos/{i} is.png"} for i in range(40)]
    rows += [{"prompt": "<image>?", "images": "b.png"}, {"prompt": 7}]
    (tmp_path / "b.png").write_bytes(b"")
    code, text = printed(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path, FakeEncoder())
    message = [line for line in text.splitlines() if ", row " in line]
    assert code == 1 and len(message) == 3
    assert message[0].endswith("0 is.png does not exist (and 39 more rows like it); " + IMAGE_DIR)
    assert message[1].endswith("b.png is empty") and ", row 42: the prompt is a int" in message[2]


def test_without_a_model(tmp_path):
    code, text = printed(image_rows(tmp_path, 4), tmp_path, None)
    assert code == 0 and "set worker.actor.model.model_path" in text
    assert "  | user: <image>question 0" in text and "width   min 56" in text


def test_no_usable_rows(tmp_path):
    code, text = printed(write_jsonl(tmp_path / "a.jsonl", ["no json"]), tmp_path, FakeEncoder())
    assert code == 1 and "not valid JSON" in text and "no row could be measured" in text
    with pytest.raises(DataError, match="does not exist"):
        printed(tmp_path / "gone.jsonl", tmp_path, None)


def test_other_columns_and_big_images(tmp_path):
    (tmp_path / "a.png").write_bytes(picture_bytes(10, 1000))
    rows = [
        {"prompt": "x", "images": [{"path": "a.png"}], "mixed": 1, "choices": ["a"]},
        {"prompt": "y", "mixed": None},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    code, text = printed(path, tmp_path, FakeEncoder(), max_image_side=100, big_images="filter")
    assert code == 0 and "left out: an image over dataset.max_image_side=100" in text
    assert "images: list of {path}" in text and "mixed: number, null" in text and "choices: list of text" in text
