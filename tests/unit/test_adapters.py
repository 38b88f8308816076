"""LoRA: which projections get adapters, their log-probs, and whether files, merges and other tools agree."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_models import checkpoint, fresh_backbone, get_encoder, prompts_for, random_rollouts

from mtrl.models.adapters import (
    AdapterSettings,
    MergedWeights,
    adapter_parameters,
    adapter_tensors,
    add_adapters,
    load_adapters,
    merge_adapters,
    reset_adapters,
)
from mtrl.models.backbone import Backbone
from mtrl.models.checkpoint_files import base_path, is_adapter
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.parallel.fsdp import COMPUTE_DEVICE
from mtrl.models.state_dicts import checkpoint_weights, exported_weights, load_weights, save_model, weight_forms
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling, Weights
from mtrl.workers.reference import Reference

peft = pytest.importorskip("peft")

FAMILY = "qwen2_5_vl"
ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(family=FAMILY, dtype=torch.float32, trained=True, **settings):
    """A backbone with adapters; `trained`: with adapters that change the model's output."""
    model = fresh_backbone(family).model.to(dtype)
    add_adapters(model, AdapterSettings(lora_rank=4, lora_alpha=6, **settings))
    if trained:
        stir(model)
    return Backbone(model, dtype)


@torch.no_grad()
def stir(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(model).values():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)


def make_rollouts(family=FAMILY):
    return random_rollouts(prompts_for(family), [0, 0, 1, 2, 3], [5, 3, 4, 6, 2])


def log_probs(backbone, family=FAMILY):
    return Forward(backbone, get_encoder(family)).signals(make_rollouts(family)).old_logprobs


# --------------------------------------------------------------------------------------------------- what gets adapters
@pytest.mark.parametrize("family", ["qwen2", "qwen2_vl", FAMILY, "qwen3_vl"])
def test_by_default_all_projections_of_the_layers_and_none_of_the_tower(family):
    model = adapted(family, trained=False).model
    names = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert {name.rpartition(".")[2] for name in names} == ALL
    assert not any("visual" in name for name in names)
    layers = getattr(model.model, "language_model", model.model).layers
    assert len(names) == len(ALL) * len(layers)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == adapter_parameters(model).keys() and len(learning) == 2 * len(names)


@pytest.mark.parametrize("family, inside", [("qwen2_vl", "fc1"), (FAMILY, "gate_proj"), ("qwen3_vl", "linear_fc1")])
def test_the_vision_tower_on_request(family, inside):
    model = adapted(family, lora_vision_tower=True).model
    of_tower = {name for name in adapter_parameters(model) if "visual" in name}
    assert any(f".{inside}.lora_A" in name for name in of_tower) and any(".qkv.lora_A" in name for name in of_tower)
    forward = Forward(Backbone(model), get_encoder(family))
    forward.logp(make_rollouts(family)).sum().backward()
    gradients = [p.grad for name, p in adapter_parameters(model).items() if name in of_tower]
    assert all(gradient is not None for gradient in gradients) and any(gradient.any() for gradient in gradients)


def test_targets_are_the_ends_of_names():
    model = adapted(lora_target_modules=("q_proj", "mlp.down_proj")).model
    assert {name.rpartition(".")[2] for name, m in model.named_modules() if hasattr(m, "lora_A")} == {
        "q_proj",
        "down_proj",
    }
    assert not any("visual" in name for name in adapter_parameters(model)), "its MLPs have a down_proj too"


@pytest.mark.parametrize(
    "family, settings, message",
    [
        (
            FAMILY,
            {"lora_target_modules": ("q_proj", "query")},
            "no projection is called query; its layers have down_proj, gate",
        ),
        (FAMILY, {"lora_target_modules": ("qkv",)}, r"vision tower \(lora_vision_tower=true\) has .*qkv"),
        (FAMILY, {"lora_target_modules": ("lm_head",)}, "no projection is called lm_head"),
        (FAMILY, {"lora_target_modules": ()}, "nothing would get an adapter; its layers have"),
        (
            FAMILY,
            {"lora_target_modules": ("q_proj",), "lora_vision_tower": True},
            "lora_vision_tower: nothing in it would get",
        ),
        ("qwen2", {"lora_vision_tower": True}, "lora_vision_tower: nothing in it would get an adapter"),
    ],
)
def test_a_target_without_a_match_is_an_error_that_lists_the_modules(family, settings, message):
    with pytest.raises(ValueError, match=message):
        adapted(family, **settings)


def test_they_start_as_identity_the_same_on_every_run():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = adapted(trained=False, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before), "the global random state is unchanged"
    assert torch.equal(log_probs(first), log_probs(fresh_backbone(FAMILY)))
    torch.manual_seed(2)
    second, other = adapted(trained=False, seed=7), adapted(trained=False, seed=8)
    tensors = [adapter_tensors(each.model) for each in (first, second, other)]
    low = next(name for name in tensors[0] if "lora_A" in name)
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert not torch.equal(tensors[0][low], tensors[2][low])
    stir(second.model)
    reset_adapters(second.model, 7)
    assert all(torch.equal(tensors[0][name], each) for name, each in adapter_tensors(second.model).items())


# -------------------------------------------------------------------------------------------------------- what they say
@pytest.mark.parametrize("family", [FAMILY, "qwen3_vl", "qwen2"])
def test_merged_log_probs_equal_those_of_the_adapters(family):
    backbone = adapted(family, lora_vision_tower=family != "qwen2")
    expected, base = log_probs(backbone, family), log_probs(fresh_backbone(family), family)
    merged = fresh_backbone(family)
    weights = MergedWeights(backbone.model)
    merged.model.load_state_dict(dict(weights))
    assert weight_forms(weights) == {name: (weight.dtype, tuple(weight.shape)) for name, weight in weights.items()}
    assert (expected - base).abs().max() > 0.1, "the adapters change the output"
    assert (log_probs(merged, family) - expected).abs().max() < 1e-4
    merge_adapters(backbone.model)
    assert not adapter_parameters(backbone.model) and all(p.requires_grad for p in backbone.model.parameters())
    assert torch.equal(log_probs(backbone, family), log_probs(merged, family))
    assert backbone.model.state_dict().keys() == fresh_backbone(family).model.state_dict().keys()


def test_the_reference_is_the_base_and_takes_no_copy():
    backbone, plain = adapted(), fresh_backbone(FAMILY)
    policy, rollouts = Forward(backbone, get_encoder(FAMILY)), make_rollouts()
    reference = Reference.under_adapters(policy)
    before = log_probs(backbone)
    found = reference.start_signals(rollouts, Needs("ref_logprobs", "divergence"), policy)()
    assert torch.equal(found.ref_logprobs, log_probs(plain))
    frozen = Reference.frozen(Forward(plain, get_encoder(FAMILY)))
    expected = frozen.start_signals(rollouts, Needs("ref_logprobs", "divergence"), policy)()
    assert torch.equal(found.divergence, expected.divergence) and found.divergence.max() > 0.01
    assert torch.equal(log_probs(backbone), before), "the adapters are back"
    assert all(parameter.requires_grad for parameter in adapter_parameters(backbone.model).values())
    assert reference.forward.backbone.model is backbone.model


def test_a_bf16_base_is_held_once_and_products_are_narrow():
    """Adapters are float32, and autocast narrows them: hidden states keep their dtype."""
    backbone = adapted(dtype=torch.bfloat16)
    assert {p.dtype for p in adapter_parameters(backbone.model).values()} == {torch.float32}
    layer = backbone.language_model.layers[0].mlp.down_proj
    seen = []
    layer.lora_A["default"].register_forward_hook(lambda _, x, y: seen.append((x[0].dtype, y.dtype)))
    wide = adapted()
    noise = (log_probs(backbone) - log_probs(wide)).abs().mean()
    trained = (log_probs(wide) - log_probs(fresh_backbone(FAMILY))).abs().mean()
    assert seen and set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert noise < 0.2 * trained, (noise, trained)


def test_dropout_is_for_updates_alone():
    backbone = adapted(lora_dropout=0.5)
    expected = log_probs(adapted())
    assert torch.equal(log_probs(backbone), expected)
    backbone.model.train()
    torch.manual_seed(0)
    assert not torch.equal(log_probs(backbone), expected)


def test_the_engine_samples_with_them():
    backbone = adapted()
    prompts, sampling = prompts_for(FAMILY), Sampling(n=2, max_new_tokens=4, version=3)
    own, other = (LocalGenerator(each, get_encoder(FAMILY)) for each in (backbone, fresh_backbone(FAMILY)))
    before = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    weights = Weights(3, exported_weights(backbone.model))
    own.load(weights)
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.model.state_dict().items())
    other.load(weights)  # without layers of peft: merged
    found, expected = other.generate(prompts, sampling), own.generate(prompts, sampling)
    assert torch.equal(found.tokens, expected.tokens)
    scored = Forward(backbone, get_encoder(FAMILY)).signals(expected).old_logprobs
    assert (expected.rollout_logprobs - scored)[expected.mask].abs().max() < 1e-4


# ----------------------------------------------------------------------------------------------------- to disk and back
@pytest.fixture
def saved(tmp_path):
    backbone = adapted()
    save_model(backbone.model, checkpoint_weights(backbone.model), tmp_path)
    return backbone, tmp_path


def test_files_are_in_peft_format(saved):
    """Loaded by peft and by transformers, they give the trainer's log-probs."""
    backbone, directory = saved
    assert {file.name for file in directory.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
    }
    plain = fresh_backbone(FAMILY).model
    theirs = peft.PeftModel.from_pretrained(plain, directory)
    assert torch.equal(log_probs(Backbone(theirs.base_model.model)), log_probs(backbone))
    assert base_path(directory) == str(checkpoint(FAMILY)) and is_adapter(directory)
    loaded = type(plain).from_pretrained(directory)
    assert torch.equal(log_probs(Backbone(loaded.eval())), log_probs(backbone))


def test_the_settings_are_the_same_bytes_each_time(saved):
    """peft keeps the names of modules in a set, whose order differs from process to process."""
    modules = json.loads((saved[1] / "adapter_config.json").read_text())["target_modules"]
    assert len(modules) > 3 and modules == sorted(modules)


def test_they_are_restored_bitwise_and_as_a_merged_model(saved):
    backbone, directory = saved
    other = adapted(trained=False)
    load_weights(other.model, directory)
    assert torch.equal(log_probs(other), log_probs(backbone))
    merged = load_model(directory)
    assert not adapter_parameters(merged)
    assert (log_probs(Backbone(merged)) - log_probs(backbone)).abs().max() < 1e-4


def test_other_adapters_are_an_error(saved):
    _, directory = saved
    for settings, message in (
        ({"lora_target_modules": ("q_proj",)}, "unknown"),
        ({"lora_target_modules": None, "lora_vision_tower": True}, "missing"),
        ({"lora_rank": 8}, "of another size"),
        ({"lora_alpha": 16}, "rank 4 and alpha 6"),
    ):
        model = fresh_backbone(FAMILY).model
        add_adapters(model, replace(AdapterSettings(lora_rank=4, lora_alpha=6), **settings))
        with pytest.raises(ValueError, match=f"holds another model than this run's: its adapters .*{message}"):
            load_weights(model, directory)
    with pytest.raises(ValueError, match="another model than this run's: it holds adapters"):
        load_weights(fresh_backbone(FAMILY).model, directory)
    with pytest.raises(ValueError, match="another model than this run's: it has no adapters"):
        load_weights(adapted().model, checkpoint(FAMILY))


def test_a_missing_base_is_named(saved):
    _, directory = saved
    file = directory / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"base_model_name_or_path": "/nowhere/model"}))
    with pytest.raises(ValueError, match="holds adapters of /nowhere/model, which does not exist"):
        load_model(directory)
    file.write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="does not say which model"):
        load_model(directory)
    (directory / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="cannot be read"):
        load_adapters(adapted().model, directory)


def test_offloaded_adapters_are_merged_on_the_device():
    """The meta device stands for it here."""
    model = adapted().model
    weights = MergedWeights(model)
    name, layer = next(iter(weights._layers.items()))
    expected = weights[name]
    setattr(model, COMPUTE_DEVICE, torch.device("meta"))
    assert weights[name].is_meta and weights[name].shape == expected.shape and weights[name].dtype == expected.dtype
    low, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert torch.equal((up @ low) * layer.scaling["default"], layer.get_delta_weight("default")), "the same formula"
