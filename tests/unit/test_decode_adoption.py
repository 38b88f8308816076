"""Weights that the engine shares with the model: training, saving and loading work as without the engine."""

import pytest
import torch
from decode_helpers import engine, same, stopping_encoder
from tiny_models import fresh_backbone, prompts_for

from mtrl.checkpoint.learner_snapshot import LearnerSnapshot
from mtrl.models.backbone import Backbone
from mtrl.models.load_model import load_model
from mtrl.models.state_dicts import exported_weights, load_weights, save_model
from mtrl.rollout.decode.fused_weights import DecodeWeights
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling

FAMILY = "qwen2_5_vl"
GREEDY = Sampling(temperature=0, max_new_tokens=4)


def in_bf16():
    return Backbone(fresh_backbone(FAMILY).model.bfloat16())


def get_fused_parameters(backbone, layer=1):
    """The parameters that are fused, by the name of their matrix."""
    attention, mlp = backbone.language_model.layers[layer].self_attn, backbone.language_model.layers[layer].mlp
    return {
        "qkv": [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
        "bias": [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias],
        "gate_up": [mlp.gate_proj.weight, mlp.up_proj.weight],
        "out": [attention.o_proj.weight],
        "down": [mlp.down_proj.weight],
    }


def find_fused(weights, name, layer=1):
    """The fused matrix or bias of that name."""
    attention, mlp = weights.layers[layer].mixer, weights.layers[layer].mlp
    found = getattr(mlp if name in ("gate_up", "down") else attention, name)
    return found if name == "bias" else found.weight


def assert_adopted(weights, backbone):
    assert not weights.copied
    for name, parts in get_fused_parameters(backbone).items():
        whole = find_fused(weights, name)
        assert torch.equal(whole, torch.cat(parts)), name
        ends = whole.data_ptr() + whole.nbytes
        assert [part.data_ptr() for part in parts] == [
            ends - sum(after.nbytes for after in parts[i:]) for i in range(len(parts))
        ], f"parts of {name} lie in it, one after the other"


def held(backbone):
    """Bytes of the memory behind all parameters."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in backbone.model.parameters()}
    return sum(storages.values())


def test_a_model_in_the_dtype_of_products_is_held_once():
    backbone = in_bf16()
    before, memory = {name: p.clone() for name, p in backbone.model.named_parameters()}, held(backbone)
    assert_adopted(DecodeWeights(backbone.model, torch.bfloat16), backbone)
    assert held(backbone) == memory
    assert all(torch.equal(p, before[name]) for name, p in backbone.model.named_parameters())


def test_a_narrow_matrix_among_wide_ones_is_adopted():
    """As a frozen base is among parameters that train in float32: each matrix by its own dtype."""
    backbone = fresh_backbone(FAMILY)
    layer = backbone.language_model.layers[1]
    for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.down_proj):
        linear.to(torch.bfloat16).requires_grad_(False)
    weights = DecodeWeights(backbone.model, torch.bfloat16)
    assert find_fused(weights, "qkv").data_ptr() == layer.self_attn.q_proj.weight.data_ptr()
    assert find_fused(weights, "down").data_ptr() == layer.mlp.down_proj.weight.data_ptr()
    copied = {id(parameter) for _, parameter in weights.copied}
    for name, parts in get_fused_parameters(backbone).items():
        assert [id(part) in copied for part in parts] == [name in ("gate_up", "out")] * len(parts), name


def test_fused_weights_stay_in_the_same_memory():
    """After a sleep the engine rebuilds its weights without copying."""
    backbone = in_bf16()
    first, names = DecodeWeights(backbone.model, torch.bfloat16), ("qkv", "bias", "gate_up")
    places = [find_fused(first, name).data_ptr() for name in names]
    again = DecodeWeights(backbone.model, torch.bfloat16)
    assert_adopted(again, backbone)
    assert places == [find_fused(again, name).data_ptr() for name in names]
    moved = get_fused_parameters(backbone)["qkv"][1]
    moved.data = moved.data.clone()
    assert not again.refresh()
    assert_adopted(DecodeWeights(backbone.model, torch.bfloat16), backbone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_works_as_before_and_the_engine_sees_it_without_a_copy(dtype):
    """A twin that no engine adopted has the same gradients and the same weights after AdamW steps."""
    ids = torch.arange(20, 32)[None]
    positions = torch.arange(12).expand(3, 1, 12)
    trained = []
    for adopted in (False, True):
        backbone = Backbone(fresh_backbone(FAMILY).model.to(dtype))
        weights = DecodeWeights(backbone.model, dtype) if adopted else None
        optimizer = torch.optim.AdamW(backbone.model.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            backbone.forward_text(ids, positions).float().square().mean().backward()
            gradient = get_fused_parameters(backbone)["qkv"][1].grad.clone()
            optimizer.step()
        trained.append((gradient, backbone))
    assert weights is not None
    assert_adopted(weights, backbone)  # without a refresh
    assert torch.equal(trained[0][0], trained[1][0]) and trained[0][0].any()
    for (name, one), other in zip(trained[0][1].model.named_parameters(), backbone.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_an_adopted_model_is_saved_and_loaded_as_any_other(tmp_path):
    """safetensors rejects tensors that share memory, and files of views may contain too much."""
    backbone, twin = in_bf16(), in_bf16()
    weights = DecodeWeights(backbone.model, torch.bfloat16)
    sizes = []
    for name, model in (("plain", twin.model), ("adopted", backbone.model)):
        save_model(model, exported_weights(model), tmp_path / name)
        sizes.append(sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")))
    assert sizes[0] == sizes[1]
    assert_adopted(weights, backbone)
    expected, found = twin.model.state_dict(), load_model(tmp_path / "adopted", dtype="bf16").state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

    with torch.no_grad():
        for parameter in backbone.model.parameters():
            parameter.mul_(1.5)
    load_weights(backbone.model, tmp_path / "plain")
    assert weights.refresh(), "weights are loaded into the same memory"
    assert_adopted(weights, backbone)
    assert torch.equal(find_fused(weights, "qkv"), torch.cat(get_fused_parameters(twin)["qkv"]))


def test_a_snapshot_of_an_adopted_model_counts_and_copies_each_weight_once(tmp_path):
    def snapshot(model):
        return LearnerSnapshot(model, exported_weights(model), {}, {"version": 1}, {})

    backbone, twin = in_bf16(), in_bf16()
    DecodeWeights(backbone.model, torch.bfloat16)
    assert snapshot(backbone.model).nbytes == snapshot(twin.model).nbytes
    detached = snapshot(backbone.model).detached()
    with torch.no_grad():
        for parameter in backbone.model.parameters():
            parameter.zero_()
    (tmp_path / "saved").mkdir()
    detached.write(tmp_path / "saved")
    expected, found = twin.model.state_dict(), load_model(tmp_path / "saved", dtype="bf16").state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_plain_engine_decodes_an_adopted_model():
    encoder, prompts = stopping_encoder(FAMILY), prompts_for(FAMILY)[1:]
    backbone = fresh_backbone(FAMILY)
    expected = LocalGenerator(backbone, encoder).generate(prompts, GREEDY)
    decode = engine(backbone, encoder)
    with decode.resident():
        same(decode.generate(prompts, GREEDY), expected)
    same(LocalGenerator(backbone, encoder).generate(prompts, GREEDY), expected)
    same(decode.generate(prompts, GREEDY), expected)
