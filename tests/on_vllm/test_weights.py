"""Weights arrive in a real vLLM, in each of them, and in every mode: log-probs follow the trainer's."""

import pytest
import torch
from tiny_models import (
    TINY_FAMILIES,
    VISION_FAMILIES,
    checkpoint,
    get_encoder,
    plain_logp,
    plain_model,
    plain_model_at,
    prompt,
    prompts_for,
)
from vllm_engines import (
    INSTALLED,
    NOT_HERE,
    RECURRENT,
    child_process,
    count_parameters,
    end_servers,
    engine_on,
    in_process,
    server,
    start_server,
    tensor_parallel,
)

from mtrl.models.adapters import AdapterSettings, adapter_layers, add_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.state_dicts import exported_weights
from mtrl.types import Sampling, Weights

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

SAMPLED = Sampling(n=3, max_new_tokens=8)
HOSTS = {"inprocess": in_process, "process": child_process, "server": server, "parts": tensor_parallel}
MODES = [pytest.param(mode, marks=pytest.mark.slow if mode == "parts" else ()) for mode in HOSTS]
TOLERANCE = 1e-4
FAMILIES = [
    family for family in TINY_FAMILIES if family not in (*RECURRENT, *NOT_HERE)
]  # recurrent: test_recurrent_vllm.py
PLACES = {  # one weight of each part: a piece of its name
    "vision tower": ("visual.blocks.0", "mlp"),
    "merger": ("visual.merger", "weight"),
    "embedding": ("embed_tokens",),
    "last layer": ("layers.2.", "down_proj"),
}


@pytest.fixture(scope="module", autouse=True)
def servers():
    """Starts the servers while the other modes are tested."""
    for family in FAMILIES:
        start_server(str(checkpoint(family)))
    yield
    end_servers()


def gap(family, rollouts, model):
    """The largest distance between the engine's log-probs and those of a model."""
    with torch.no_grad():
        return float((plain_logp(family, rollouts, model=model) - rollouts.rollout_logprobs).abs().max())


def mixed_prompts(family):
    """One image, text alone, several images, and the first image once more."""
    prompts = prompts_for(family)
    if family not in VISION_FAMILIES:
        return prompts
    return [*prompts, prompt(get_encoder(family), "again", "is it round", [(5, 9)])]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family in VISION_FAMILIES])
@pytest.mark.parametrize("mode", ["inprocess", pytest.param("parts", marks=pytest.mark.slow)])
def test_each_weight_arrives(family, place, mode):
    engine, model = engine_on(HOSTS[mode](family), family, may_change=True), plain_model_at(checkpoint(family), family)
    named = [p for name, p in model.named_parameters() if all(part in name for part in PLACES[place]) and p.dim() > 1]
    with torch.no_grad():
        named[0].add_(0.5 * named[0].std() * torch.randn(named[0].shape, generator=torch.Generator().manual_seed(0)))
    engine.load(Weights(1, exported_weights(model)))
    rollouts = engine.generate(prompts_for(family), Sampling(n=2, max_new_tokens=8, version=1))
    assert gap(family, rollouts, model) < TOLERANCE
    assert gap(family, rollouts, plain_model(family)) > 100 * TOLERANCE, "the old weights would respond differently"


@pytest.mark.parametrize("mode", ["inprocess", "process"])
def test_adapters_arrive_merged(mode):
    """What a run with adapters publishes goes the same way; of each weight that the adapters change."""
    pytest.importorskip("peft")
    family = "qwen2_5_vl"
    model = load_model(checkpoint(family))
    add_adapters(model, AdapterSettings(lora_vision_tower=True))
    engine = engine_on(HOSTS[mode](family), family, may_change=True)
    forward = Forward(Backbone(model), get_encoder(family))
    for version in (1, 2):
        dice = torch.Generator().manual_seed(version)
        for layer in adapter_layers(model):
            up = layer.lora_B["default"].weight.data
            up.copy_(0.2 * torch.randn(up.shape, generator=dice))
        engine.load(Weights(version, exported_weights(model)))
        rollouts = engine.generate(mixed_prompts(family), Sampling(n=2, max_new_tokens=8, version=version))
        assert (forward.signals(rollouts).old_logprobs - rollouts.rollout_logprobs).abs().max() < TOLERANCE
        assert gap(family, rollouts, plain_model(family)) > 100 * TOLERANCE, "the base would respond differently"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_ten_updates(family, mode):
    """After each update the engine has the trainer's log-probs, also for images that it has cached before."""
    engine, model = engine_on(HOSTS[mode](family), family, may_change=True), plain_model_at(checkpoint(family), family)
    prompts = mixed_prompts(family)
    forward = Forward(Backbone(model), get_encoder(family))
    for version in range(1, 11):
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
        engine.load(Weights(version, exported_weights(model)))
        rollouts = engine.generate(prompts, Sampling(n=3, max_new_tokens=8, version=version, step=version))
        old = forward.signals(rollouts).old_logprobs
        assert (old - rollouts.rollout_logprobs).abs().max() < TOLERANCE
        assert rollouts.version.unique().tolist() == [version]


@pytest.mark.slow
def test_each_process_holds_its_part():
    """Half of each weight that vLLM leaves where it was (linear layers are packed elsewhere); a norm, whole."""
    split, whole = ("embed_tokens.weight", "qkv_proj.bias", "qkv.bias"), ("norm.weight",)
    first, second = tensor_parallel("qwen2_5_vl").sizes()
    alone = in_process("qwen2_5_vl").llm.apply_model(count_parameters)[0]
    assert first == second and first.keys() == alone.keys()
    for kinds, parts in ((split, 2), (whole, 1)):
        found = {name for name in alone if name.endswith(kinds)}
        assert found and all(alone[name] == parts * first[name] > 0 for name in found)
