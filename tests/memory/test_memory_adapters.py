"""The memory of a run that trains only adapters."""

from dataclasses import replace

import pytest
import torch
from test_memory import LIMITS
from tiny_models import checkpoint, get_encoder

from mtrl.compose.memory_limits import make_plan
from mtrl.config import load_config
from mtrl.memory.estimate import estimate
from mtrl.memory.plan import Plan, list_savings
from mtrl.memory.preflight import preflight
from mtrl.models.adapters import AdapterSettings, adapter_parameters, add_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_model_config
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES, load_model
from mtrl.rollout.local import LocalGenerator

pytest.importorskip("peft")

FAMILY = "qwen2_5_vl"
ADAPTERS = AdapterSettings(lora_rank=4, lora_alpha=8)


@pytest.mark.slow  # 3 s each
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_base_is_counted_once_and_adapters_alone_learn(compute):
    model = load_model(checkpoint(FAMILY), dtype=compute)
    base = sum(p.nbytes for p in model.parameters())
    add_adapters(model, ADAPTERS)
    learning = sum(p.nbytes for p in adapter_parameters(model).values())
    plan = Plan(LIMITS, compute=compute, adapters=ADAPTERS, checkpointing=True)
    found = estimate(load_model_config(str(checkpoint(FAMILY))), plan)
    assert found.held == {"weights": base + learning, "optimizer state": 2 * learning}
    assert learning < 0.2 * base
    model.gradient_checkpointing_enable({"use_reentrant": False})
    encoder = get_encoder(FAMILY)
    backbone = Backbone(model, DTYPES[compute])
    forward = Forward(backbone, encoder, share_prefix=LIMITS.update.share_prefix)
    peaks = preflight(forward, encoder, LIMITS, LocalGenerator(backbone, encoder), has_states=False)
    assert peaks["optimizer"] == found.held["optimizer state"]
    for phase, parts in found.phases.items():
        result = sum(parts.values()) / peaks[phase]
        assert 0.95 <= result <= 1.05, f"{phase}: {peaks[phase]:,} bytes were held, {result:.3f} of them told"


def test_the_plan_of_a_configuration():
    words = {"worker.actor.model.peft_type": "lora", "worker.actor.model.lora_rank": 3}
    whole, adapted = make_plan(load_config(None, {}), True), make_plan(load_config(None, words), True)
    assert whole.reference and whole.adapters is None and whole.frozen_dtype == "fp32"
    assert not adapted.reference, "it is the base under the adapters"
    assert adapted.adapters == AdapterSettings(
        lora_rank=3, dtype=torch.float32, seed=load_config(None, {}).dataset.seed
    )
    assert (adapted.frozen_dtype, adapted.weights) == ("bf16", "fp32")
    ways = list_savings(adapted)
    assert not any("disable_divergence" in way or "freeze_vision_tower" in way for way in ways), "neither would help"


@pytest.mark.slow  # 3 s
def test_a_base_in_four_bits_and_states_of_a_byte():
    """Seven projections of a layer leave their two bytes a number for half of one and its part of scales."""
    config = load_model_config(str(checkpoint(FAMILY)))
    plan = Plan(LIMITS, compute="bf16", adapters=ADAPTERS, checkpointing=True, graphs=True, eight_bit=True)
    plain, packed = (estimate(config, replace(plan, four_bit=each), ["sample"]) for each in (False, True))
    model = load_model(checkpoint(FAMILY))
    sizes = [each.weight.numel() for name, each in model.named_modules() if "language_model.layers" in name
             and isinstance(each, torch.nn.Linear)]  # fmt: skip
    assert len(sizes) == 7 * config.text_config.num_hidden_layers
    less = plain.held["weights"] - packed.held["weights"]
    assert less == pytest.approx(sum(sizes) * (2 - 0.5 - 1 / 64), rel=1e-3)
    add_adapters(model, ADAPTERS)
    assert packed.held["optimizer state"] == 2 * sum(p.numel() for p in adapter_parameters(model).values())
    assert packed.held["one dequantized weight"] == 2 * max(sizes)
    engines = [found.phases["sample"].keys() for found in (plain, packed)]
    assert "own copy of the weights" in engines[0] - engines[1], "the engine of graphs does not know such weights"
    words = {"worker.actor.model.peft_type": "qlora", "worker.actor.optim.name": "adamw_8bit"}
    found = make_plan(load_config(None, words), True)
    assert found.four_bit and found.eight_bit and not make_plan(load_config(None, {}), True).eight_bit
