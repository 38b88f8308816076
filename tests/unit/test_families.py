"""Prompts as the model families see them, equal to Hugging Face's own processing in every number."""

# ruff: noqa: E402
import importlib.util
import json
import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

# The published torchvision wheel does not import with a CPU-only torch unless two operators exist. This must come
# before transformers looks for it. If torchvision is missing or works, this does nothing.
TORCHVISION = importlib.util.find_spec("torchvision") is not None
if TORCHVISION:
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mtrl.models.families import load_encoder
from mtrl.models.families.vision import patchify, target_size
from mtrl.protocols import ImageSettings
from mtrl.types import Medium, Task
from pretraining.tiny_checkpoints import QWEN_FAMILIES, make_tiny_checkpoint

IMAGE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def task(*messages, images=0):
    chat = tuple({"role": role, "content": content} for role, content in messages)
    return Task("test:0", "test, row 1", chat, media=(Medium("image", None),) * images)


# name -> (task, original sizes of its images)
CASES = {
    "text only": (task(("user", "Which colour is the cat?")), []),
    "one image": (task(("user", [IMAGE, text("Which colour?")]), images=1), [(56, 84)]),
    "odd sizes": (task(("user", [IMAGE, text("left"), IMAGE, text("right")]), images=2), [(37, 131), (203, 61)]),
    "system": (task(("system", "You count."), ("user", [text("How many?"), IMAGE]), images=1), [(101, 99)]),
    "neighbours": (task(("user", [IMAGE, IMAGE, IMAGE]), images=3), [(64, 64), (20, 300), (57, 57)]),
    "several turns": (
        task(
            ("system", [text("Be brief.")]),
            ("user", [IMAGE, text("What is it?")]),
            ("assistant", "A cat, naïve 猫."),
            ("user", [text("And this?"), IMAGE]),
            ("assistant", [text("A dog.")]),
            ("user", "Which is larger?"),
            images=2,
        ),
        [(90, 90), (30, 250)],
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {family: make_tiny_checkpoint(root / family, family) for family in QWEN_FAMILIES}


@pytest.fixture(scope="module", params=QWEN_FAMILIES)
def path(request, checkpoints):
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def encoder(path):
    return load_encoder(path)


@pytest.fixture(scope="module")
def model(path):
    return AutoModelForImageTextToText.from_pretrained(path).eval()


def pictures(encoder, sizes, seed=0):
    """Random images of these sizes, resized once, as the data side does it."""
    rng = np.random.default_rng(seed)
    arrays = []
    for height, width in sizes:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        new_height, new_width = encoder.target_size(height, width)
        arrays.append(np.asarray(image.resize((new_width, new_height), Image.Resampling.BICUBIC)))
    return arrays


def documented_rule(path, messages, arrays):
    """Tokenizer and image processor of transformers, put together as its processors document it."""
    tokenizer, processor = AutoTokenizer.from_pretrained(path), Qwen2VLImageProcessorPil.from_pretrained(path)
    rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    pixels = processor(arrays, do_resize=False, return_tensors="pt") if arrays else {}
    first, *rest = rendered.split("<|image_pad|>")
    counts = [int(grid.prod()) // processor.merge_size**2 for grid in pixels.get("image_grid_thw", ())]
    assert len(rest) == len(counts)
    expanded = first + "".join("<|image_pad|>" * n + after for n, after in zip(counts, rest, strict=True))
    ids = tokenizer(expanded, return_tensors="pt")["input_ids"]
    types = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).long()
    return {"input_ids": ids, "mm_token_type_ids": types, **pixels}


def assert_equal(encoder, prompt, expected, model):
    assert torch.equal(prompt.ids, expected["input_ids"][0])
    inputs = encoder.inputs(prompt)
    assert torch.equal(inputs["mm_token_type_ids"], torch.as_tensor(expected["mm_token_type_ids"])[0])
    assert ("pixel_values" in inputs) == ("pixel_values" in expected) == bool(prompt.media)
    if prompt.media:
        assert torch.equal(inputs["image_grid_thw"], expected["image_grid_thw"])
        torch.testing.assert_close(inputs["pixel_values"], expected["pixel_values"], rtol=0, atol=1e-6)
    positions, _ = model.model.get_rope_index(
        expected["input_ids"], torch.as_tensor(expected["mm_token_type_ids"]), expected.get("image_grid_thw")
    )
    assert torch.equal(inputs["position_ids"], positions[:, 0])


@pytest.mark.parametrize("case", CASES)
def test_equals_tokenizer_and_image_processor(path, encoder, model, case):
    row, sizes = CASES[case]
    arrays = pictures(encoder, sizes)
    prompt = encoder.encode(row, arrays)
    assert_equal(encoder, prompt, documented_rule(path, row.messages, arrays), model)
    assert encoder.length(row, sizes) == len(prompt.ids)


@pytest.mark.skipif(not TORCHVISION, reason="the combined processors of transformers need torchvision")
@pytest.mark.parametrize("case", CASES)
def test_equals_the_public_processor(path, encoder, model, case):
    row, sizes = CASES[case]
    arrays = pictures(encoder, sizes)
    processor = AutoProcessor.from_pretrained(path)
    rendered = processor.apply_chat_template(list(row.messages), add_generation_prompt=True, tokenize=False)
    images = [Image.fromarray(array) for array in arrays] or None
    # at a target size already, so that the processor's own resize has nothing to do
    expected = processor(text=[rendered], images=images, return_tensors="pt")
    assert_equal(encoder, encoder.encode(row, arrays), expected, model)


@pytest.mark.parametrize("case", CASES)
def test_the_model_takes_the_inputs(path, encoder, model, case):
    """The documented batching of `inputs`, against the model left to find its own positions."""
    row, sizes = CASES[case]
    arrays = pictures(encoder, sizes)
    prompt = encoder.encode(row, arrays)
    inputs = encoder.inputs(prompt)
    positions, types = inputs.pop("position_ids")[:, None], inputs.pop("mm_token_type_ids")[None]
    with torch.no_grad():
        ours = model(prompt.ids[None], position_ids=positions, mm_token_type_ids=types, **inputs).logits
        theirs = model(**documented_rule(path, row.messages, arrays)).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([28, 32]), st.integers(1, 10**6), st.integers(0, 10**7)
)
def test_target_size_is_hugging_faces(height, width, factor, low, more):
    limits = ImageSettings(factor // 2, 2, 2, low, low + more, 1 / 255, (0.5,) * 3, (0.5,) * 3)
    try:
        expected = smart_resize(height, width, factor, low, low + more)
    except ValueError:
        with pytest.raises(ValueError, match="longer than 200 times"):
            target_size(height, width, limits)
    else:
        assert target_size(height, width, limits) == expected


def test_pixel_limits_come_from_the_checkpoint_or_the_caller(checkpoints):
    own = load_encoder(checkpoints["qwen2_5_vl"])
    assert (own.image_settings.min_pixels, own.image_settings.max_pixels) == (4 * 28**2, 1280 * 28**2)  # legacy keys
    assert load_encoder(checkpoints["qwen3_vl"]).image_settings.max_pixels == 1280 * 32**2  # the "size" key
    small = load_encoder(checkpoints["qwen2_5_vl"], max_pixels=4 * 28**2)
    assert own.target_size(280, 280) == (280, 280)
    assert small.target_size(280, 280) == (56, 56)
    big = load_encoder(checkpoints["qwen2_5_vl"], min_pixels=100 * 28**2)
    assert big.target_size(28, 28) == (280, 280)
    with pytest.raises(ValueError, match="min_pixels"):
        load_encoder(checkpoints["qwen2_5_vl"], min_pixels=10**9)
    with pytest.raises(ValueError, match="no area"):
        own.target_size(0, 10)


CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]


@pytest.mark.parametrize(
    "written",
    [
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        {"min_pixels": 3136, "max_pixels": 12845056, "size": {"min_pixels": 3136, "max_pixels": 12845056}},
        {"max_pixels": 50176, "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        {"min_pixels": 4000, "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        {"do_normalize": False, "image_mean": CLIP_MEAN},
        {"do_rescale": False, "image_std": [1, 2, 3]},
        {"rescale_factor": 1 / 127.5, "temporal_patch_size": 3},
        {},
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_image_settings_are_read_as_transformers_reads_them(checkpoints, tmp_path, written, nested):
    shutil.copytree(checkpoints["qwen2_5_vl"], tmp_path, dirs_exist_ok=True)
    written = {"image_processor_type": "Qwen2VLImageProcessor", **written}
    (tmp_path / "preprocessor_config.json").unlink()
    name, content = ("processor", {"image_processor": written}) if nested else ("preprocessor", written)
    (tmp_path / f"{name}_config.json").write_text(json.dumps(content))
    theirs, encoder = Qwen2VLImageProcessorPil.from_pretrained(tmp_path), load_encoder(tmp_path)
    limits = (encoder.image_settings.min_pixels, encoder.image_settings.max_pixels)
    assert limits == (theirs.size["shortest_edge"], theirs.size["longest_edge"])
    array = pictures(encoder, [(60, 90)])[0]
    expected = theirs(array, do_resize=False, return_tensors="pt")["pixel_values"].float()
    # The arguments for an engine's own processor, which has other settings, lead to the same pixels.
    result = encoder.image_settings.processor_arguments()
    assert torch.equal(
        Qwen2VLImageProcessorPil()(array, **result, return_tensors="pt")["pixel_values"].float(), expected
    )
    # (value - mean) / std is in the hundreds where pixels are not scaled
    torch.testing.assert_close(patchify(array, encoder.image_settings), expected, rtol=1e-6, atol=1e-6)


def test_patches_take_read_only_and_strided_arrays(encoder, recwarn):
    factor = encoder.image_settings.factor
    image = np.random.default_rng(0).integers(0, 256, (2 * factor, 6 * factor, 3), dtype=np.uint8)
    strided = image[:, ::2]
    expected = patchify(np.ascontiguousarray(strided), encoder.image_settings)
    image.setflags(write=False)
    assert torch.equal(patchify(strided, encoder.image_settings), expected)
    assert not recwarn.list


def test_another_view_changes_only_the_pixels(encoder):
    row, sizes = CASES["odd sizes"]
    prompt = encoder.encode(row, pictures(encoder, sizes))
    plain = encoder.inputs(prompt)
    black = encoder.inputs(prompt, [np.zeros_like(array) for array in prompt.media])
    assert not torch.equal(plain["pixel_values"], black["pixel_values"])
    assert len(black["pixel_values"].unique()) <= 3  # one value a channel
    for key in ("position_ids", "mm_token_type_ids", "image_grid_thw"):
        assert torch.equal(plain[key], black[key])
    with pytest.raises(AssertionError, match="same sizes"):
        encoder.inputs(prompt, [prompt.media[0]])


def test_order_and_company_do_not_matter(encoder):
    rows = [(row, pictures(encoder, sizes, seed)) for seed, (row, sizes) in enumerate(CASES.values())]
    alone = [encoder.encode(row, arrays) for row, arrays in rows]
    for order in np.random.default_rng(0).permuted([range(len(rows))] * 5, axis=1):
        for i in order:
            again, inputs = encoder.encode(*rows[i]), encoder.inputs(encoder.encode(*rows[i]))
            assert torch.equal(again.ids, alone[i].ids)
            assert torch.equal(again.engine_ids, alone[i].engine_ids)
            assert torch.equal(again.token_pool, alone[i].token_pool)
            for key, value in encoder.inputs(alone[i]).items():
                assert torch.equal(inputs[key], value)


def test_engine_ids_have_one_pad_a_medium(encoder):
    row, sizes = CASES["odd sizes"]
    prompt = encoder.encode(row, pictures(encoder, sizes))
    pad = encoder.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (prompt.engine_ids == pad).sum() == 2
    assert torch.equal(prompt.engine_ids, torch.tensor(encoder.tokenizer.encode(encoder.render(row.messages))))
    assert torch.equal(prompt.ids[prompt.ids != pad], prompt.engine_ids[prompt.engine_ids != pad])
