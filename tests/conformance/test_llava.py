"""A family from outside (examples/families/llava.py) against transformers' own LLaVA: tokens, pixels, log-probs,
gradients, generation, attention. Every number of the model goes through the seam that docs/extending.md describes."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import close
from PIL import Image
from tiny_llava import SIDE, TOKENS, make_tiny_llava
from tiny_models import random_rollouts
from transformers import AutoModelForImageTextToText, AutoTokenizer, CLIPImageProcessorPil, LlavaProcessor

from mtrl.memory.preflight import longest_prompt
from mtrl.models.adapters import AdapterSettings, adapter_parameters, add_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.families import FAMILIES, load_encoder, register_family
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.parallel.fsdp import find_units
from mtrl.models.parity import log_prob_gap, plain_inputs
from mtrl.models.step_inputs import makes_fixed_features
from mtrl.rollout.local import LocalGenerator
from mtrl.types import SEGMENTS, VISION_POOL, Medium, Needs, Sampling, Task
from mtrl.utils.plugins import load_plugin

ROOT = Path(__file__).resolve().parents[2]
IMAGE = {"type": "image"}
SIZES = [[(SIDE, SIDE)], [(37, 131), (203, 61)], [], [(100, 56)]]
TEXTS = ["which colour is it", "what is left of the red circle and why", "how many", "count the dogs"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = make_tiny_llava(tmp_path_factory.mktemp("llava"))
    register_family(str(directory), load_plugin(f"{ROOT}/examples/families/llava.py:Llava", "model family"))
    yield directory
    del FAMILIES["llava"]


@pytest.fixture(scope="module")
def encoder(path):
    return load_encoder(path)


@pytest.fixture(scope="module")
def model(path):
    return load_model(path)


@pytest.fixture(scope="module")
def plain(path):
    return AutoModelForImageTextToText.from_pretrained(path).eval()


def pictures(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def make_prompt(encoder, index):
    sizes, content = SIZES[index], [*len(SIZES[index]) * [IMAGE], {"type": "text", "text": TEXTS[index]}]
    media = [  # resized once, as the data side does it
        np.asarray(each.resize(encoder.target_size(each.height, each.width)[::-1], Image.Resampling.BICUBIC))
        for each in pictures(sizes)
    ]
    task = Task(f"t:{index}", "t", ({"role": "user", "content": content},), media=(Medium("image", None),) * len(media))
    return encoder.encode(task, media)


def make_rollouts(encoder):
    prompts = [make_prompt(encoder, index) for index in range(len(SIZES))]
    return random_rollouts(prompts, [0, 0, 1, 1, 1, 2, 3], [3, 5, 4, 2, 6, 4, 3])


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_tokens_and_pixels_equal_the_processor(path, encoder, index):
    prompt, tokenizer = make_prompt(encoder, index), AutoTokenizer.from_pretrained(path)
    processor = LlavaProcessor(
        CLIPImageProcessorPil.from_pretrained(path), tokenizer, patch_size=14, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", chat_template=tokenizer.chat_template,
    )  # fmt: skip
    text = processor.apply_chat_template(list(prompt.task.messages), add_generation_prompt=True, tokenize=False)
    expected = processor(text=text, images=pictures(SIZES[index]) or None, return_tensors="pt")
    assert torch.equal(prompt.ids, expected["input_ids"][0])
    assert encoder.length(prompt.task, SIZES[index]) == len(prompt.ids)
    assert int((prompt.token_pool == VISION_POOL).sum()) == TOKENS * len(SIZES[index])
    found = encoder.inputs(prompt)
    assert ("pixel_values" in found) == bool(SIZES[index])
    if SIZES[index]:
        torch.testing.assert_close(found["pixel_values"], expected["pixel_values"], rtol=0, atol=1e-6)
    assert encoder.forbidden_ids == (tokenizer.convert_tokens_to_ids("<image>"),)


def test_what_the_model_sees_is_the_centre(encoder):
    canvas = np.arange(SIDE * 80 * 3, dtype=np.int64).astype(np.uint8).reshape(SIDE, 80, 3)
    assert np.array_equal(encoder.visible_part(canvas), canvas[:, 12 : 12 + SIDE])
    with pytest.raises(ValueError, match="longer than 200 times"):
        encoder.target_size(1, 300)


def test_log_probs_and_gradients_with_shared_prompts(model, plain, encoder):
    """Shared prompts against a plain forward of every row, and against responses that each compute their prompt."""
    rollouts = make_rollouts(encoder)
    forward = Forward(Backbone(copy.deepcopy(model)), encoder)
    assert forward.backbone.can_share_prefix
    gap = log_prob_gap(
        forward.signals(rollouts).old_logprobs, rollouts, plain, encoder, temperature=1.0, compute_dtype=torch.float32
    )
    assert gap.largest < 1e-5 and gap.tokens == 27
    weights = torch.rand(rollouts.mask.shape, generator=torch.Generator().manual_seed(0)) * rollouts.mask
    gradients = []
    for each in (forward, replace(forward, share_prefix=False)):
        each.backbone.model.zero_grad()
        (each.logp(rollouts) * weights).sum().backward()
        gradients.append({name: p.grad for name, p in each.backbone.model.named_parameters() if p.grad is not None})
    shared, alone = gradients
    assert shared.keys() == alone.keys() and any("multi_modal_projector" in name for name in shared)
    vision = max(float(each.abs().max()) for name, each in alone.items() if "vision_tower" in name)
    assert vision > 1e-3, "the gradients differ enough from 0 to test"
    for name, gradient in shared.items():
        torch.testing.assert_close(gradient, alone[name], rtol=1e-4, atol=1e-5)


def test_greedy_equals_generate(model, plain, encoder):
    prompts = [make_prompt(encoder, index) for index in range(len(SIZES))]
    generator = LocalGenerator(Backbone(copy.deepcopy(model)), encoder)
    with generator.resident():
        found = generator.generate(prompts, Sampling(temperature=0, max_new_tokens=8))
    for row, prompt in enumerate(prompts):
        inputs = plain_inputs(encoder.inputs(prompt), prompt, torch.empty(0, dtype=torch.long))
        options = {"do_sample": False, "suppress_tokens": list(encoder.forbidden_ids)}
        expected = plain.generate(**inputs, max_new_tokens=8, eos_token_id=list(encoder.stop_ids), **options)
        expected = expected[0, len(prompt.ids) :]
        assert torch.equal(found.tokens[row, found.mask[row]], expected)


def test_attention_masses_equal_eager_matrices(path, model, encoder):
    rollouts = make_rollouts(encoder)
    eager = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    signals = Forward(Backbone(copy.deepcopy(model)), encoder).signals(rollouts, Needs("attention_mass"))
    for row, index in enumerate(rollouts.group.tolist()):
        prompt, response = rollouts.prompts[index], rollouts.tokens[row, rollouts.mask[row]]
        with torch.no_grad():
            layers = eager(**plain_inputs(encoder.inputs(prompt), prompt, response), output_attentions=True).attentions
        size = len(prompt.ids)
        seen = torch.cat(layers).mean(1)[:, size - 1 : -1, :size]  # mean over heads
        on_image = seen[..., prompt.token_pool == VISION_POOL].sum(-1) / seen[..., 1:].sum(-1)
        close(signals.attention_mass[row, : len(response), SEGMENTS.index("all"), 1], on_image.mean(0), atol=1e-5)


def test_adapters_and_units_of_sharding(model):
    adapted = copy.deepcopy(model)
    add_adapters(adapted, AdapterSettings(lora_rank=2, lora_alpha=4, lora_vision_tower=True))
    names = adapter_parameters(adapted)
    parts = ("language_model.layers.0.self_attn.q_proj", "vision_tower", "multi_modal_projector.linear_1")
    assert all(any(part in name for name in names) for part in parts) and not any("lm_head" in name for name in names)
    layers = [*model.model.vision_tower.encoder.layers, *model.model.language_model.layers]
    assert [each for each in find_units(model) if each in layers] == layers


def test_features_are_fixed_if_the_projector_is_frozen_too(model):
    backbone = Backbone(copy.deepcopy(model))
    assert len(backbone.vision_weights) == sum(
        1 for name in model.state_dict() if "vision" in name or "projector" in name
    )
    backbone.vision_tower.requires_grad_(False)
    assert not makes_fixed_features(backbone)
    backbone.family.find_projector(backbone.model).requires_grad_(False)
    assert makes_fixed_features(backbone)


def test_the_longest_prompt_of_the_preflight(encoder):
    limits = SimpleNamespace(max_pixels=10**6, prompt_tokens=90)
    prompt = longest_prompt(encoder, limits)
    assert len(prompt.ids) == 90 and prompt.media[0].shape == (SIDE, SIDE, 3)
