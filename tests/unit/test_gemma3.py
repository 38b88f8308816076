"""Prompts of Gemma 3, equal to those of transformers' own processor, and what is refused."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from mtrl.compose.policy import build_encoder
from mtrl.config import ConfigError, load_config
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.tiny_families.gemma import SIDE, TOKENS
from mtrl.types import NO_POOL, VISION_POOL, Medium, Task
from pretraining.tiny_checkpoints import make_tiny_checkpoint

IMAGE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


CASES = {  # name -> (messages, sizes of the pictures)
    "text": ([("user", "Which colour is the cat?")], []),
    "first": ([("user", [IMAGE, text("Which colour?")])], [(56, 84)]),
    "last": ([("user", [text("Which colour?\n"), IMAGE])], [(SIDE, SIDE)]),
    "neighbours": ([("user", [IMAGE, IMAGE, text("left"), IMAGE])], [(37, 131), (203, 61), (SIDE, SIDE)]),
    "system": ([("system", [text("You count.")]), ("user", [text("How many?"), IMAGE])], [(101, 99)]),
    "turns": (
        [
            ("user", [IMAGE, text("What is it?")]),
            ("assistant", [text("A cat, naïve 猫.")]),
            ("user", [text("And this?\n\n"), IMAGE]),
        ],
        [(90, 90), (30, 250)],
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "gemma3", "gemma3")


@pytest.fixture(scope="module")
def encoder(path):
    return load_encoder(path)


def make_task(messages, images):
    chat = tuple({"role": role, "content": content} for role, content in messages)
    return Task("test:0", "test", chat, media=(Medium("image", None),) * images)


def pictures(encoder, sizes):
    """Noise, resized once, as the data side does it."""
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    return [np.asarray(each.resize(encoder.target_size(each.height, each.width)[::-1])) for each in images]


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_pixels_equal_the_processor(path, encoder, case):
    messages, sizes = CASES[case]
    task, media = make_task(messages, len(sizes)), pictures(encoder, sizes)
    prompt, processor = encoder.encode(task, media), AutoProcessor.from_pretrained(path)
    rendered = processor.apply_chat_template(list(task.messages), add_generation_prompt=True, tokenize=False)
    images = {"images": [Image.fromarray(each) for each in media]} if media else {}
    expected = processor(text=[rendered], add_special_tokens=False, return_tensors="pt", **images)
    assert torch.equal(prompt.ids, expected["input_ids"][0])
    assert encoder.length(task, sizes) == len(prompt.ids)
    inputs = encoder.inputs(prompt)
    assert torch.equal(inputs["token_type_ids"], expected["token_type_ids"][0])
    assert torch.equal(inputs["position_ids"], torch.arange(len(prompt.ids)))
    assert ("pixel_values" in inputs) == bool(sizes)
    if sizes:
        torch.testing.assert_close(inputs["pixel_values"], expected["pixel_values"], rtol=0, atol=1e-6)
    assert int((prompt.token_pool == VISION_POOL).sum()) == TOKENS * len(sizes)
    assert len(prompt.engine_ids) == len(prompt.ids) - (TOKENS - 1) * len(sizes)


def test_line_breaks_merge_with_those_of_the_template(encoder):
    """As in Gemma's vocabulary, three line breaks are other tokens than one and two."""
    prompt = encoder.encode(make_task(CASES["first"][0], 1), pictures(encoder, [(56, 84)]))
    words = encoder.tokenizer.convert_ids_to_tokens(prompt.ids.tolist())
    begin = words.index("<start_of_image>")
    assert words[begin - 2 : begin] == ["ĊĊ", "Ċ"] != ["Ċ", "ĊĊ"], "the template alone ends in one, the mark adds two"
    assert words[begin + TOKENS + 1] == "<end_of_image>"
    assert prompt.token_pool[begin] == prompt.token_pool[begin + TOKENS + 1] == NO_POOL


def test_without_a_template_the_mark_is_the_same(encoder):
    plain = copy.copy(encoder)
    plain.chat_template = None
    prompt = plain.encode(make_task([("user", [text("look"), IMAGE])], 1), pictures(encoder, [(9, 9)]))
    assert "".join(plain.decode_tokens(prompt.engine_ids)) == (
        "look\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    )


def test_every_picture_is_the_square_of_the_tower(encoder):
    assert encoder.target_size(30, 2000) == encoder.largest_image(10**6) == (SIDE, SIDE)
    assert encoder.image_settings.factor**2 * TOKENS == SIDE**2
    with pytest.raises(ValueError, match="longer than 200 times"):
        encoder.target_size(1, 300)


@pytest.mark.parametrize("token", ["<start_of_image>", "<end_of_image>", "<image_soft_token>"])
def test_marks_are_refused_in_texts_and_forbidden_in_responses(encoder, token):
    assert encoder.tokenizer.convert_tokens_to_ids(token) in encoder.forbidden_ids
    with pytest.raises(ValueError, match=f"contains the media token {token}"):
        encoder.length(make_task([("user", f"look at {token}")], 0), [])
    with pytest.raises(ValueError, match=r"has 1 <start_of_image> for 0 images"):
        encoder.length(make_task([("user", [text("<start_of_"), text("image>")])], 0), [])


def test_videos_are_refused_in_a_line(encoder):
    video = Task("t", "t", ({"role": "user", "content": [{"type": "video"}]},), media=(Medium("video", None),))
    for call in (
        lambda: encoder.length(video, [(9, 9)]),
        lambda: encoder.clip(9, 2.0),
        lambda: encoder.frame_size(9, 9),
    ):
        with pytest.raises(ValueError, match=r"^this model takes no videos$"):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_pan_and_scan": True}, r"pan and scan.*set do_pan_and_scan to false"),
        ({"size": {"height": 224, "width": 224}}, "a square of 112 pixels; they do not belong together"),
        ({"size": {"shortest_edge": 112}}, "do not belong together"),
    ],
)
def test_other_image_settings_are_refused(path, tmp_path, change, message):
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_encoder(tmp_path)


def test_tokens_that_are_no_square_are_refused(path, tmp_path):
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(path)
    config.mm_tokens_per_image = 9  # 8 x 8 patches are no 3 x 3 tokens
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be a square of whole patches"):
        load_encoder(tmp_path)


def test_settings_that_are_off_do_nothing(path, tmp_path):
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_rescale": False, "do_normalize": False}))
    found = load_encoder(tmp_path).image_settings
    assert (found.rescale_factor, found.image_mean, found.image_std) == (1.0, (0.0,) * 3, (1.0,) * 3)


def test_embeddings_are_scaled_as_in_a_narrow_checkpoint(path):
    """With float32 weights too: the root of 48 is 6.928, and 6.9375 in bf16. Features of images are not scaled."""
    config = AutoConfig.from_pretrained(path)
    text = config.text_config
    text.hidden_size, text.pad_token_id = 48, None
    wide = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    narrow, ids = copy.deepcopy(wide).bfloat16(), torch.arange(9)[None]
    backbone = Backbone(wide, torch.bfloat16)
    found = backbone.model.get_input_embeddings()(ids)
    assert torch.equal(found, wide.get_input_embeddings().weight[ids] * 6.9375)
    torch.testing.assert_close(found.bfloat16(), narrow.get_input_embeddings()(ids), rtol=2**-7, atol=0)


def test_vllm_is_refused_by_its_key(path):
    keys = [f"worker.actor.model.model_path={path}", "worker.rollout.name=vllm"]
    with pytest.raises(ConfigError, match=r"worker\.rollout\.name: vLLM is not available for the family 'gemma3'"):
        build_encoder(load_config(None, keys))
