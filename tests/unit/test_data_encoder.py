"""The data path with the real Qwen2.5-VL encoder of a tiny checkpoint."""

import io
import random

import numpy as np
import pytest
from data_helpers import picture_bytes, write_jsonl

from mtrl.data import DataError, DataSettings, Sampler, open_dataset
from mtrl.models.families import load_encoder
from mtrl.report import data_page as data_report
from pretraining.tiny_checkpoints import make_tiny_checkpoint


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return load_encoder(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2_5_vl"))


@pytest.fixture
def rows(tmp_path):
    """Text-only, one image, several images, a chat, odd sizes: twelve rows."""
    for i in range(12):
        (tmp_path / f"{i}.jpg").write_bytes(picture_bytes(40 + 37 * i, 30 + 61 * ((5 * i) % 12), seed=i, kind="JPEG"))
    kinds = [
        {"prompt": "how many red objects?"},
        {"prompt": "<image>which colour?", "images": "{i}.jpg"},
        {"prompt": "first <image> then <image>: which is round?", "images": ["{i}.jpg", "{j}.jpg"]},
        {
            "prompt": [{"role": "system", "content": "be short"}, {"role": "user", "content": "and 你好?"}],
            "images": ["{j}.jpg"],
        },
    ]

    def filled(value, i):
        if isinstance(value, list):
            return [filled(item, i) for item in value]
        return value.format(i=i, j=(i * 7 + 3) % 12) if isinstance(value, str) else value

    return [kinds[i % 4] | ({"images": filled(kinds[i % 4].get("images"), i)}) | {"answer": i} for i in range(12)]


def make_prompts(rows, name, tmp_path, encoder, **settings):
    path = write_jsonl(tmp_path / name, rows)
    dataset = open_dataset(str(path), DataSettings(**settings), encoder, cache_dir=tmp_path / "cache")
    with Sampler(dataset, encoder, shuffle=False) as sampler:
        prompts = sampler.take(len(dataset))
    assert [len(prompt.ids) for prompt in prompts] == dataset.lengths.tolist()  # the scan promised these
    return {prompt.task.answer: prompt for prompt in prompts}


def same(a, b):
    return (
        a.ids.equal(b.ids) and a.engine_ids.equal(b.engine_ids) and a.token_pool.equal(b.token_pool)
        and len(a.media) == len(b.media) and all(np.array_equal(x, y) for x, y in zip(a.media, b.media, strict=True))
    )  # fmt: skip


def test_mixed_rows_in_any_order_encode_as_alone(rows, tmp_path, encoder):
    alone = {}
    for i, row in enumerate(rows):
        alone |= make_prompts([row], f"alone{i}.jsonl", tmp_path, encoder)
    for trial in range(3):
        shuffled = random.Random(trial).sample(rows, len(rows))
        mixed = make_prompts(shuffled, f"mixed{trial}.jsonl", tmp_path, encoder)
        assert mixed.keys() == alone.keys()
        assert all(same(mixed[i], alone[i]) for i in alone)
        for prompt in mixed.values():
            inputs, single = encoder.inputs(prompt), encoder.inputs(alone[prompt.task.answer])
            assert inputs.keys() == single.keys() and all(inputs[name].equal(single[name]) for name in inputs)


def test_lengths_hold_with_a_limited_side(rows, tmp_path, encoder):
    prompts = make_prompts(rows, "a.jsonl", tmp_path, encoder, max_image_side=100)
    assert max(max(image.shape) for prompt in prompts.values() for image in prompt.media) <= 112


def test_a_strip_that_shrinks_twice_is_measured_as_it_is_encoded(tmp_path):
    # 28 x 3000 at most 4 * 28 * 28 pixels: the width is cut, the height cannot go below one token
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny", "qwen2_5_vl", min_pixels=28 * 28, max_pixels=4 * 28 * 28)
    (tmp_path / "a.png").write_bytes(picture_bytes(28, 3000))
    make_prompts([{"prompt": "x", "images": "a.png", "answer": 0}], "a.jsonl", tmp_path, load_encoder(checkpoint))


@pytest.mark.parametrize("text", ["look <|image_pad|>", "<|vision_start|>", "a<|video_pad|>b"])
def test_text_with_a_media_token_is_an_error(text, tmp_path, encoder):
    with pytest.raises(DataError, match=r"row 2: the text contains the media token"):
        make_prompts([{"prompt": "fine"}, {"prompt": text}], "a.jsonl", tmp_path, encoder)


def test_the_report_shows_what_the_model_sees(rows, tmp_path, encoder):
    stream = io.StringIO()
    path = write_jsonl(tmp_path / "a.jsonl", rows[1:])
    assert data_report.run(str(path), DataSettings(), encoder, stream, cache_dir=tmp_path / "cache") == 0
    assert "<|vision_start|><|image_pad|> × " in stream.getvalue()
    assert "<|im_start|>assistant" in stream.getvalue()
