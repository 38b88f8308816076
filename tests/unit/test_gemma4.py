"""Prompts of Gemma 4, equal to those of transformers' own processor, and what is refused."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from mtrl.compose.policy import build_encoder
from mtrl.config import ConfigError, load_config
from mtrl.models.families import load_encoder
from mtrl.models.families.gemma4 import BUDGETS, Gemma4Family
from mtrl.models.processors import load_processor, process_prompt
from mtrl.models.tiny_families.gemma4 import BUDGET, MARKS, PATCH, POOL
from mtrl.types import NO_POOL, VISION_POOL, Medium, Task
from pretraining.tiny_checkpoints import make_tiny_checkpoint

IMAGE, SIDE = {"type": "image"}, PATCH * POOL


def text(words):
    return {"type": "text", "text": words}


CASES = {  # name -> (messages, sizes of the pictures)
    "text": ([("user", "Which colour is the cat?")], []),
    "first": ([("user", [IMAGE, text("Which colour?")])], [(56, 84)]),
    "neighbours": ([("user", [IMAGE, IMAGE, text("left"), IMAGE])], [(37, 131), (203, 61), (1, 200)]),
    "system": ([("system", [text("You count.")]), ("user", [text("How many?"), IMAGE])], [(64, 64)]),
    "turns": (
        [
            ("user", [IMAGE, text("What is it?")]),
            ("assistant", [text("A cat, naïve 猫.")]),
            ("user", [text("And this?\n\n"), IMAGE]),
        ],
        [(300, 301), (30, 250)],
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "gemma4", "gemma4")


@pytest.fixture(scope="module")
def encoder(path):
    return load_encoder(path)


@pytest.fixture(scope="module")
def processor(path):
    return load_processor(str(path), AutoConfig.from_pretrained(path))


def make_task(messages, images):
    chat = tuple({"role": role, "content": content} for role, content in messages)
    return Task("test:0", "test", chat, media=(Medium("image", None),) * images)


def noise(sizes):
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def resized(encoder, image):
    """As the data side does it."""
    size = encoder.target_size(image.height, image.width)[::-1]
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_pixels_equal_the_processor(encoder, processor, case):
    """The processor gets the pictures as they come, and resizes them itself."""
    messages, sizes = CASES[case]
    images = noise(sizes)
    task = make_task(messages, len(sizes))
    prompt = encoder.encode(task, [resized(encoder, each) for each in images])
    rendered = processor.apply_chat_template(list(task.messages), add_generation_prompt=True, tokenize=False)
    given = {"images": images} if images else {}
    expected = processor(text=[rendered], add_special_tokens=False, return_tensors="pt", **given)
    assert torch.equal(prompt.ids, expected["input_ids"][0])
    assert encoder.length(task, sizes) == len(prompt.ids)
    inputs = encoder.inputs(prompt)
    assert torch.equal(inputs["mm_token_type_ids"], expected["mm_token_type_ids"][0])
    assert torch.equal(inputs["position_ids"], torch.arange(len(prompt.ids)))
    assert inputs.keys() >= {"pixel_values", "image_position_ids"} or not sizes
    for name in ("pixel_values", "image_position_ids") if sizes else ():
        assert inputs[name].shape == expected[name].shape
        torch.testing.assert_close(inputs[name], torch.as_tensor(expected[name]), rtol=0, atol=1e-6)
    counts = [encoder.count_tokens(Medium("image", None), *encoder.target_size(*size)) for size in sizes]
    assert int((prompt.token_pool == VISION_POOL).sum()) == sum(counts)
    assert len(prompt.engine_ids) == len(prompt.ids) - sum(counts) + len(counts)


def test_hundreds_of_sizes(encoder, processor):
    rng = np.random.default_rng(1)
    sizes = [tuple(int(each) for each in np.exp(rng.uniform(0, math.log(4000), 2))) for _ in range(600)]
    sizes = [(h, w) for h, w in sizes if max(h, w) <= 200 * min(h, w)] + [(1, 200), (200, 1), (3, 500), (24, 2048)]
    targets = [encoder.target_size(*size) for size in sizes]
    options = {"patch_size": PATCH, "max_patches": BUDGET * POOL**2, "pooling_kernel_size": POOL}
    assert targets == [get_aspect_ratio_preserving_size(*size, **options) for size in sizes]
    counts = [encoder.count_tokens(Medium("image", None), *target) for target in targets]
    assert counts == processor._get_num_multimodal_tokens(sizes).num_image_tokens
    assert len(sizes) > 400 and max(counts) == BUDGET and len(set(counts)) > 8
    shapes = {(h // SIDE, w // SIDE) for h, w in targets}
    assert any(min(shape) == 1 for shape in shapes) and all(math.prod(shape) <= BUDGET for shape in shapes)


@pytest.mark.parametrize("size", [(1, 200), (7, 9), (64, 64), (90, 31), (250, 333)])
def test_patches_and_their_positions(encoder, processor, size):
    """Of pictures that have their size already."""
    media = [resized(encoder, each) for each in noise([size])]
    prompt = encoder.encode(make_task(CASES["first"][0], 1), media)
    theirs = process_prompt(processor, prompt, resize=False)
    ours = encoder.inputs(prompt)
    torch.testing.assert_close(ours["pixel_values"], torch.as_tensor(theirs["pixel_values"]), rtol=0, atol=1e-6)
    assert torch.equal(ours["image_position_ids"], torch.as_tensor(theirs["image_position_ids"]))
    patches = media[0].shape[0] * media[0].shape[1] // PATCH**2
    assert (ours["image_position_ids"][0] >= 0).all(1).sum() == patches < ours["pixel_values"].shape[1] + 1


def test_marks_surround_the_tokens_of_an_image(encoder):
    prompt = encoder.encode(make_task(CASES["first"][0], 1), [resized(encoder, each) for each in noise([(64, 64)])])
    words, pool = encoder.tokenizer.convert_ids_to_tokens(prompt.ids.tolist()), prompt.token_pool
    begin, end = words.index(MARKS["boi"]), words.index(MARKS["eoi"])
    assert words[begin + 1 : end] == [MARKS["image"]] * (end - begin - 1) and end - begin - 1 == 64
    assert pool[begin] == pool[end] == NO_POOL and (pool[begin + 1 : end] == VISION_POOL).all()


@pytest.mark.parametrize("token", MARKS.values())
def test_marks_are_refused_in_texts_and_forbidden_in_responses(encoder, token):
    assert encoder.tokenizer.convert_tokens_to_ids(token) in encoder.forbidden_ids
    with pytest.raises(ValueError, match="contains the media token"):
        encoder.length(make_task([("user", f"look at {token}")], 0), [])


def test_videos_are_refused_in_a_line(encoder):
    video = Task("t", "t", ({"role": "user", "content": [{"type": "video"}]},), media=(Medium("video", None),))
    for call in (
        lambda: encoder.length(video, [(9, 9)]),
        lambda: encoder.clip(9, 2.0),
        lambda: encoder.frame_size(9, 9),
    ):
        with pytest.raises(ValueError, match=r"^this model takes no videos$"):
            call()


def change_settings(path, copied, **change):
    shutil.copytree(path, copied, dirs_exist_ok=True)
    file = copied / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"] |= change
    file.write_text(json.dumps(settings))
    return copied


def test_a_limit_of_pixels_lowers_the_budget(path, tmp_path):
    larger = change_settings(path, tmp_path, max_soft_tokens=280)
    for pixels, tokens in {None: 280, 10**9: 280, 280: 70, 1: 70, 140 * SIDE**2: 140, 140 * SIDE**2 - 1: 70}.items():
        found = load_encoder(larger, max_pixels=pixels)
        assert found.budget == tokens and tokens in BUDGETS
        height, width = found.largest_image(10**6)
        assert tokens - 16 < height * width // SIDE**2 <= tokens
    assert load_encoder(larger).largest_image(1) == (SIDE, SIDE)
    assert load_encoder(larger).fingerprint() != load_encoder(path).fingerprint()


@pytest.mark.parametrize("change", [{"patch_size": 16}, {"pooling_kernel_size": 3}])
def test_other_image_settings_are_refused(path, tmp_path, change):
    with pytest.raises(ValueError, match="they do not belong together"):
        load_encoder(change_settings(path, tmp_path, **change))


def test_vllm_is_refused_by_its_key(path):
    keys = [f"worker.actor.model.model_path={path}", "worker.rollout.name=vllm"]
    with pytest.raises(ConfigError, match=r"worker\.rollout\.name: vLLM is not available for the family 'gemma4'"):
        build_encoder(load_config(None, keys))


def test_images_see_all_of_themselves_where_the_config_says_so():
    family, config = Gemma4Family(), AutoConfig.for_model("gemma4_text")
    assert family.image_block_kinds(config) == ()
    config.use_bidirectional_attention = "vision"
    assert family.image_block_kinds(config) == ("sliding_attention",)
