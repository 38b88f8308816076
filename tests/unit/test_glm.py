"""Prompts and images of GLM-4.1V and GLM-4.5V beside transformers' processor; adapters and routers of the latter."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from mtrl.compose.policy import check_vllm_family
from mtrl.config import ConfigError, load_config
from mtrl.models.adapters import (
    AdapterSettings,
    MergedWeights,
    adapter_layers,
    adapter_parameters,
    adapter_tensors,
    add_adapters,
    save_adapters,
)
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder, load_model_config
from mtrl.models.load_model import load_model
from mtrl.models.processors import load_processor
from mtrl.models.routing import ExpertRecorder, find_routers
from mtrl.types import Medium, Task
from pretraining.tiny_checkpoints import make_tiny_checkpoint

TOKEN = 28  # pixels of a side


@pytest.fixture(scope="module", params=["glm4v", "glm4v_moe"])
def path(request, tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.mark.parametrize("limits", [(4, 1280), (16, 64), (1, 1)])
def test_sizes_are_those_of_transformers(tmp_path, limits):
    area = TOKEN**2
    least, most = (each * area for each in limits)
    path = str(make_tiny_checkpoint(tmp_path, "glm4v", min_pixels=least, max_pixels=most))
    encoder, images = load_encoder(path), load_processor(path, load_model_config(path)).image_processor
    assert (encoder.image_settings.min_pixels, encoder.image_settings.max_pixels) == (least, most)
    random, seen = np.random.default_rng(0), set()
    for height, width in random.integers(6, 1500, (300, 2)).tolist():
        if max(height, width) <= 200 * min(height, width):
            target = encoder.target_size(height, width)
            assert target[0] * target[1] == images.get_number_of_image_patches(height, width) * 14**2, (height, width)
            assert all(side % TOKEN == 0 for side in target)
            seen.add(target)
    assert len(seen) > 10 or limits == (1, 1)


def test_limits_of_the_user_count_the_pixels_of_an_image(path):
    encoder = load_encoder(path, min_pixels=TOKEN**2, max_pixels=6 * TOKEN**2)
    assert encoder.image_settings.max_pixels == 6 * TOKEN**2
    height, width = encoder.target_size(1000, 1000)
    assert height * width == 4 * TOKEN**2


def ask(kind, words="which colour?"):
    content = [{"type": kind}, {"type": "text", "text": words}]
    return Task("t:0", "t", ({"role": "user", "content": content},), (Medium(kind, None),))


def test_videos_and_marks_in_the_text_are_refused(path):
    encode = partial(load_encoder(path).encode, media=[np.zeros((2 * TOKEN, TOKEN, 3), np.uint8)])
    assert int((encode(ask("image")).token_pool == 2).sum()) == 2
    with pytest.raises(ValueError, match="this model takes no videos"):
        encode(ask("video"))
    for mark in ("<|image|>", "<|begin_of_video|>"):
        with pytest.raises(ValueError, match="the text contains the media token"):
            encode(ask("image", f"a {mark}"))


def test_a_row_without_a_template_has_the_marks_around_its_image(path):
    encoder = load_encoder(path)
    encoder.chat_template = None
    tokens = encoder.tokenizer.convert_ids_to_tokens(
        encoder.encode(ask("image"), [np.zeros((28, 28, 3), np.uint8)]).ids
    )
    assert tokens[:3] == ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]


# ------------------------------------------------------------------------------------------------ experts (GLM-4.5V)
@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """One dense layer, two with four experts and a shared one."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "glm4v_moe", layers=3)


def test_adapters_are_added_to_shared_experts_and_not_to_all_of_them(mixture, tmp_path):
    """peft takes `gate_proj` and its like of such a model for the weights of all experts."""
    pytest.importorskip("peft")
    model = load_model(mixture)
    add_adapters(model, AdapterSettings(lora_rank=2))
    assert all(type(layer.get_base_layer()) is nn.Linear for layer in adapter_layers(model))
    names = {name.split(".lora_")[0].split("layers.")[1] for name in adapter_parameters(model)}
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    expected = {f"{layer}.self_attn.{name}" for layer in range(3) for name in attention}
    expected |= {
        f"{layer}.mlp.{part}{name}" for layer, part in enumerate(("", *2 * ("shared_experts.",))) for name in mlp
    }
    assert names == expected
    for each in adapter_parameters(model).values():
        nn.init.normal_(each)
    save_adapters(model, adapter_tensors(model), tmp_path)
    merged, weights, base = load_model(tmp_path).state_dict(), MergedWeights(model), load_model(mixture).state_dict()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5)
        moved = any(f"layers.{each}.weight" in name for each in expected)
        assert torch.equal(weight, base[name]) != moved, name


def test_the_experts_of_every_layer_but_the_dense_one_are_recorded(mixture):
    model = load_model(mixture)
    routers = find_routers(model.model.language_model)
    assert len(routers) == 2
    with torch.no_grad(), ExpertRecorder(routers) as recorder:
        model(input_ids=torch.arange(20, 40)[None])
    chosen = recorder.take(1, model.device)
    assert chosen.shape == (1, 20, 2, 2) and set(chosen.unique().tolist()) == {0, 1, 2, 3}


def test_routers_multiply_in_float32_whatever_the_products_of_a_model(mixture):
    """By autocast they would be in bf16, in which many scores are equal."""
    backbone, found = Backbone(load_model(mixture), torch.bfloat16), []
    for router in backbone.routers:
        router.register_forward_hook(lambda router, inputs, output: found.append((router, *inputs, *output)))
    with torch.no_grad():
        backbone.forward_text(torch.arange(20, 84)[None], torch.arange(64).expand(3, 1, 64))
    assert len(found) == 2
    for router, hidden, logits, weights, _ in found:
        assert weights.dtype == torch.float32
        assert torch.equal(logits, nn.functional.linear(hidden.flatten(0, -2).float(), router.weight))


def test_vllm_is_refused_where_it_would_leave_out_biases(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "glm4v")
    config = load_config(None, [f"worker.actor.model.model_path={path}", "worker.rollout.name=vllm"])
    check_vllm_family(config)
    file = path / "config.json"
    saved = json.loads(file.read_text())
    assert saved["text_config"].pop("attention_bias")
    file.write_text(json.dumps(saved))
    with pytest.raises(
        ConfigError, match=r"worker\.rollout\.name: .* \(without \"attention_bias\": true in the text_config"
    ):
        check_vllm_family(config)


def test_the_tower_gets_the_lengths_of_images_where_its_patches_are(path):
    """On CUDA it compares them with places on the device; `meta` stands for it here."""
    tower = load_model(path).model.visual
    Backbone(model := load_model(path))
    (hook,) = model.model.visual.embeddings._forward_pre_hooks.values()
    patches, lengths = torch.empty(6, 4, device="meta"), torch.tensor([4, 2], dtype=torch.int32)
    _, moved, shapes = hook(model.model.visual.embeddings, (patches, lengths, "shapes"))
    assert moved.device.type == "meta" and moved.shape == (2,) and shapes == "shapes"
    assert not tower.embeddings._forward_pre_hooks
