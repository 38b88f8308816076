"""A 4-bit base with adapters. Skipped without bitsandbytes, whose kernels run on a CPU too."""

import pytest
import torch
from tiny_models import checkpoint, get_encoder, plain_logp, prompts_for, random_rollouts
from torch import nn

import mtrl
from mtrl.models.adapters import AdapterSettings, adapter_parameters, adapters_off, add_adapters, quantize_base
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.quantized import BYTES, FourBitLinear, four_bit_layers
from mtrl.models.state_dicts import exported_weights
from mtrl.rollout.decode.explain import explain_unsupported

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
CPU = torch.device("cpu")


def quantized(family="qwen2", learnt=True):
    model = load_model(checkpoint(family))
    quantize_base(model, CPU)
    add_adapters(model, AdapterSettings(lora_rank=4, lora_alpha=8))
    if learnt:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in adapter_parameters(model).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_and_its_gradient_equal_those_of_the_dequantized_weight(bias):
    torch.manual_seed(0)
    linear = nn.Linear(192, 320, bias=bias)
    packed = FourBitLinear(linear, CPU)
    x, other = (torch.randn(7, 192, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2))
    ours, theirs = packed(x), nn.functional.linear(other, packed.weight, linear.bias)
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-6, atol=1e-6)
    assert 0.02 < (packed.weight - linear.weight).norm() / linear.weight.norm() < 0.12, "four bits, not eight or two"
    assert [name for name, _ in packed.named_parameters()] == (["bias"] if bias else [])
    assert not any(parameter.requires_grad for parameter in packed.parameters())


def test_bytes_of_a_weight():
    packed = FourBitLinear(nn.Linear(1024, 2048, bias=False), CPU)
    scales = packed.scales
    held = packed.packed.nbytes + scales.absmax.nbytes + scales.state2.absmax.nbytes
    assert held == pytest.approx(BYTES * 1024 * 2048, rel=1e-3)


@pytest.mark.parametrize("shape", [(320, 192), (7, 9), (1000, 130)])
def test_without_numbers_it_has_the_same_tensors(shape):
    full = FourBitLinear(nn.Linear(*shape), CPU)
    empty = FourBitLinear(nn.Linear(*shape, device="meta"), CPU, torch.device("meta"))
    formats = [{name: (each.shape, each.dtype) for name, each in made.named_buffers()} for made in (full, empty)]
    assert formats[0] == formats[1] and all(each.is_meta for each in empty.buffers())
    assert empty.weight.shape == full.weight.shape and empty.weight.is_meta
    assert not full.state_dict().keys() - {"bias"}, "no checkpoint holds them"


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_layers_of_the_language_model_alone(family):
    model = quantized(family)
    names = set(four_bit_layers(model))
    assert names and all(".layers." in name and "visual" not in name for name in names)
    assert not [name for name, each in model.named_modules() if ".layers." in name and "visual" not in name
                and type(each) is nn.Linear and ".lora_" not in name]  # fmt: skip
    assert {name for name, each in model.named_parameters() if each.requires_grad} == adapter_parameters(model).keys()
    language = getattr(model.model, "language_model", model.model)
    assert "FourBitLinear" in explain_unsupported(language, model.get_output_embeddings()), (
        "the graph engine does not support it"
    )


def test_published_weights_are_the_merged_model():
    """All weights by their own names, merged: plain transformers gives the trainer's log-probs, up to rounding."""
    model = quantized()
    weights, plain = exported_weights(model), load_model(checkpoint("qwen2"))
    assert weights.keys() == plain.state_dict().keys() and len(weights) == len(plain.state_dict())
    rollouts = random_rollouts(prompts_for("qwen2")[:2], [0, 1], [6, 9])
    forward = Forward(Backbone(model), get_encoder("qwen2"))
    before = plain_logp("qwen2", rollouts, model=plain)
    plain.load_state_dict(dict(weights))
    with torch.no_grad():
        theirs, ours = plain_logp("qwen2", rollouts, model=plain), forward.signals(rollouts).old_logprobs
    torch.testing.assert_close(ours[rollouts.mask], theirs[rollouts.mask], atol=1e-4, rtol=1e-4)
    assert (ours - before)[rollouts.mask].abs().max() > 0.01
    with adapters_off(model):
        base = forward.signals(rollouts).old_logprobs
    fresh = Forward(Backbone(quantized(learnt=False)), get_encoder("qwen2")).signals(rollouts).old_logprobs
    assert torch.equal(base, fresh), "the reference is the base in 4 bits"


def test_a_run_learns_and_saves_adapters(tmp_path):
    rows = [{"prompt": f"Say {word}.", "answer": word} for word in ("red", "blue")]
    keys = {"rollout_batch_size": 2, "global_batch_size": 2, "n": 3, "max_response_length": 8, "logger": [], "lr": 1e-3}
    keys |= {"mixed_precision_dtype": "fp32", "peft_type": "qlora", "lora_rank": 2, "lora_dropout": 0.1}
    keys |= {"config": {"worker.actor.optim.name": "adamw_8bit"}}
    keys |= {"rewards": lambda data: float(len(data["response"])), "data": rows, "save_freq": 1}

    def trained(place, steps, **more):
        trainer = mtrl.Trainer(output_dir=str(tmp_path / place), experiment_name="q", max_steps=steps, **keys, **more)
        trainer.train()
        return trainer

    whole = trained("whole", 2, warmup_steps=0)
    checkpoint = whole.directory / "checkpoints" / "step_1"
    parts = trained("parts", 2, load_checkpoint_path=str(checkpoint), warmup_steps=0)
    ours, theirs = (adapter_parameters(trainer.model) for trainer in (whole, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "it resumes bitwise"
    assert (checkpoint / "adapter_model.safetensors").is_file() and not (checkpoint / "model.safetensors").exists()
    assert [row["actor/grad_norm"] > 0 for row in whole.history] == [True, True]
    assert not four_bit_layers(load_model(checkpoint)), "merged into the original base"
