"""LoRA adapters in the decoding kernels, against the plain engine, which runs peft's own layers."""

from dataclasses import replace

import pytest
import torch
from decode_helpers import engine, same, stopping_encoder
from tiny_models import fresh_backbone, get_encoder, prompts_for

from mtrl.models.adapters import AdapterSettings, adapter_parameters, add_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.rollout.decode.blocks import product
from mtrl.rollout.decode.explain import explain_unsupported
from mtrl.rollout.decode.fused_weights import DecodeWeights
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling

peft = pytest.importorskip("peft")

FAMILY = "qwen2_5_vl"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SAMPLED = Sampling(n=3, max_new_tokens=5)
GREEDY = replace(SAMPLED, n=1, temperature=0)


def inject_adapters(model, targets, name="default", **more):
    """Adapters that change the model's output: B is initially zero."""
    settings = peft.LoraConfig(target_modules=list(targets), **{"r": 4, "lora_alpha": 6, **more})
    peft.inject_adapter_in_model(settings, model, adapter_name=name)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in adapter_weights(model, name):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)


def adapter_weights(model, name="default"):
    return [p for key, p in model.named_parameters() if f"lora_A.{name}." in key or f"lora_B.{name}." in key]


def adapted(family=FAMILY, targets=ALL, **more):
    backbone = fresh_backbone(family)
    inject_adapters(backbone.model, targets, **more)
    return Backbone(backbone.model)


def enable(model, enabled):
    for module in model.modules():
        if hasattr(module, "enable_adapters") and hasattr(module, "lora_A"):
            module.enable_adapters(enabled)


def tuner_layers(language_model):
    return [module for module in language_model.modules() if hasattr(module, "lora_A")]


@pytest.mark.parametrize("family", [FAMILY, "qwen2"])
@pytest.mark.parametrize(
    "targets, ranks", [(ALL, {"k_proj": 3, "up_proj": 9}), (["q_proj", "down_proj"], {})], ids=["all", "two"]
)
def test_tokens_and_log_probs_equal_those_of_the_plain_engine(family, targets, ranks):
    """Also after an update of the adapter, which does not move memory that a graph reads."""
    encoder, prompts = stopping_encoder(family), prompts_for(family)
    backbone = adapted(family, targets, rank_pattern=ranks)
    decode, expected = engine(backbone, encoder), LocalGenerator(backbone, encoder)
    same(decode.generate(prompts, SAMPLED), expected.generate(prompts, SAMPLED))
    before, weights = decode.generate(prompts, GREEDY), decode.weights
    places = [place.data_ptr() for place, _ in weights.copied + weights.scaled]
    with torch.no_grad():
        for parameter in adapter_weights(backbone.model):
            parameter.mul_(-1.5).add_(0.02)
    after = decode.generate(prompts, GREEDY)
    same(after, expected.generate(prompts, GREEDY))
    assert decode.weights is weights and places == [place.data_ptr() for place, _ in weights.copied + weights.scaled]
    assert not torch.equal(before.tokens, after.tokens), "the adapter changes the output"


@pytest.mark.parametrize("family", ["glm4v", "glm4v_moe"])
def test_adapters_of_one_matrix_for_gate_and_up_and_of_shared_experts(family):
    backbone, encoder, prompts = fresh_backbone(family), stopping_encoder(family), prompts_for(family)[1:3]
    before = LocalGenerator(backbone, encoder).generate(prompts, GREEDY)
    add_adapters(backbone.model, AdapterSettings(lora_rank=2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter_parameters(backbone.model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    backbone = Backbone(backbone.model)
    decode, expected = engine(backbone, encoder), LocalGenerator(backbone, encoder).generate(prompts, GREEDY)
    same(decode.generate(prompts, GREEDY), expected)
    assert not torch.equal(before.tokens, expected.tokens)
    mlp = decode.weights.layers[1].mlp if family == "glm4v" else decode.weights.layers[1].mlp.shared.mlp
    assert mlp.gate_up.adapter is not None and mlp.down.adapter is not None


def test_projections_without_an_adapter_have_rank_zero():
    layer = DecodeWeights(adapted(targets=["k_proj", "up_proj"]).model, torch.float32).layers[0]
    assert layer.mixer.out.adapter is None and layer.mlp.down.adapter is None
    adapter = layer.mixer.qkv.adapter
    assert adapter.rank == 8, "4, rounded up"
    keys = fresh_backbone(FAMILY).language_model.layers[0].self_attn.k_proj.out_features
    low, up = adapter.low, adapter.up
    first = len(up) - 2 * keys
    assert up[first : first + keys, :4].all() and low[:4].all()
    assert int(up.count_nonzero()) == 4 * keys and not low[4:].any()


def test_memory_lost_in_a_sleep_is_rewritten():
    """On a GPU the memory returns with arbitrary contents, also where there were zeros between the adapters."""
    weights = DecodeWeights(adapted(targets=["k_proj", "up_proj"]).model, torch.float32)
    written = [each.clone() for each in weights.padded]
    for each in weights.padded:
        each.fill_(torch.nan)
    assert weights.refresh() and len(written) == 2 * 2 * len(weights.layers)
    assert all(torch.equal(now, before) for now, before in zip(weights.padded, written, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_product_is_that_of_the_layers_alone(dtype):
    backbone = adapted(rank_pattern={"k_proj": 3})
    weights = DecodeWeights(backbone.model, dtype)
    attention, fused = backbone.language_model.layers[0].self_attn, weights.layers[0].mixer
    x = torch.randn(5, weights.shape.hidden, generator=torch.Generator().manual_seed(0))
    out, scratch = torch.empty(5, len(fused.bias), dtype=dtype), torch.empty(5 * weights.rank, dtype=dtype)
    product(x.to(dtype), fused.qkv, out, scratch)
    with torch.no_grad():
        expected = torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], -1)
    error = (out + fused.bias - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32], ids=str)
def test_a_frozen_base_is_adopted_and_float32_adapters_are_narrowed(base):
    """Products in bf16, from a bf16 base and by autocast from a float32 one: either way log-probs are the trainer's."""
    model = fresh_backbone(FAMILY).model.to(base)
    inject_adapters(model, ALL)
    for part in adapter_weights(model):
        part.data = part.data.float()
    backbone, encoder, prompts = Backbone(model, torch.bfloat16), get_encoder(FAMILY), prompts_for(FAMILY)[1:2]
    assert backbone.model.dtype == base, "and not that of the adapters"
    decode = engine(backbone, encoder)
    rollouts = decode.generate(prompts, replace(SAMPLED, max_new_tokens=3))
    layer, weights = backbone.language_model.layers[0], decode.weights
    frozen = layer.self_attn.q_proj.base_layer.weight
    assert not frozen.requires_grad
    assert (weights.layers[0].mixer.qkv.weight.data_ptr() == frozen.data_ptr()) == (base == torch.bfloat16)
    down = layer.mlp.down_proj
    assert torch.equal(weights.layers[0].mlp.down.adapter.low[:4], down.lora_A.default.weight.bfloat16())
    scaled = (down.lora_B.default.weight * down.scaling["default"]).bfloat16()
    assert torch.equal(weights.layers[0].mlp.down.adapter.up[:, :4], scaled)

    forward = Forward(backbone, encoder)
    noise = (rollouts.rollout_logprobs - forward.signals(rollouts).old_logprobs)[rollouts.mask].abs().mean()
    enable(model, False)
    without = (rollouts.rollout_logprobs - forward.signals(rollouts).old_logprobs)[rollouts.mask].abs().mean()
    assert noise < 0.1 * without, (noise, without)


def test_another_adapter_than_before_is_noticed():
    encoder, prompts = stopping_encoder(FAMILY), prompts_for(FAMILY)[1:]
    backbone = fresh_backbone(FAMILY)
    decode, expected = engine(backbone, encoder), LocalGenerator(backbone, encoder)

    def second():
        inject_adapters(backbone.model, ["o_proj"], name="second", r=5)
        for layer in tuner_layers(backbone.model):
            layer.set_adapter("second")

    said = set()
    for change in (
        lambda: None,
        lambda: inject_adapters(backbone.model, ALL),
        lambda: enable(backbone.model, False),
        lambda: enable(backbone.model, True),
        lambda: [layer.scaling.update(default=-2.0) for layer in tuner_layers(backbone.model)],
        second,
    ):
        change()
        found = decode.generate(prompts, GREEDY)
        same(found, expected.generate(prompts, GREEDY))
        said.add(found.text)
    assert len(said) == 4, "without an adapter, with it, scaled otherwise, with the second"


def why(backbone):
    return explain_unsupported(backbone.language_model, backbone.model.get_output_embeddings())


def test_unsupported_kinds_of_lora_are_named():
    assert why(adapted()) is None
    dora = adapted(use_dora=True)
    assert why(dora) == "the adapter of q_proj is a peft DoraLinearVariant, not plain LoRA"
    with pytest.raises(ValueError, match="cannot decode with the model: the adapter of q_proj is a peft Dora"):
        DecodeWeights(dora.model, torch.float32)
    assert why(adapted(targets=["v_proj"], lora_bias=True)) == "the adapter of v_proj has a bias"

    several = adapted(targets=["o_proj"])
    inject_adapters(several.model, ["o_proj"], name="second")
    for layer in tuner_layers(several.model):
        layer.set_adapter(["default", "second"])
    assert why(several) == "the adapter of o_proj is one of several (default, second): make one of them active"

    merged = adapted(targets=["k_proj"])
    for layer in tuner_layers(merged.language_model):
        layer.merge()
    assert why(merged) == "the adapter of k_proj is merged into its weight: unmerge it"

    other = fresh_backbone(FAMILY)
    peft.inject_adapter_in_model(peft.IA3Config(target_modules=["up_proj"], feedforward_modules=[]), other.model)
    assert why(other) == "the adapter of up_proj is a peft Linear, not LoRA"


def test_adapted_embeddings_and_output_layers_are_named():
    assert why(adapted(targets=["embed_tokens"])) == "the embedding is a peft Embedding"
    backbone = fresh_backbone(FAMILY)
    inject_adapters(backbone.model, ["lm_head"])
    assert why(backbone) == "the head is a peft Linear"
    with pytest.raises(ValueError, match="an output layer with an adapter"):
        Backbone(backbone.model)


def test_adapters_of_the_vision_tower_are_no_hindrance():
    """Its MLPs have projections of the same names."""
    encoder, prompts = stopping_encoder(FAMILY), prompts_for(FAMILY)
    backbone = adapted(targets=["down_proj", "qkv"])
    assert tuner_layers(backbone.vision_tower)
    same(
        engine(backbone, encoder).generate(prompts, GREEDY),
        LocalGenerator(backbone, encoder).generate(prompts, GREEDY),
    )
