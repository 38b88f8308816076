"""The estimated memory of the graph engine against its real memory: the same buffers and passes for real, on a CPU."""

from dataclasses import replace

import pytest
import torch
import torch_ops as plain
from tiny_models import checkpoint, fresh_backbone, get_encoder

from mtrl.memory import estimate as memory
from mtrl.memory.decode_footprint import count_graph_engine
from mtrl.memory.estimate import estimate
from mtrl.memory.live_tensors import LiveTensors
from mtrl.memory.plan import Plan
from mtrl.memory.preflight import Limits, MemoryPreflight, preflight
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder, load_model_config
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES, load_model
from mtrl.rollout.decode.engine import GraphGenerator
from mtrl.rollout.decode.fused_weights import DecodeWeights
from mtrl.rollout.decode.step import Ops
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling
from mtrl.utils.errors import StartError
from mtrl.workers.micro_batches import MicroBatching
from pretraining.tiny_checkpoints import make_tiny_checkpoint

GIB = 2**30
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen2"]
LIMITS = Limits(
    prompts=4, prompts_per_update=4, sampling=Sampling(n=8, max_new_tokens=16), prompt_tokens=90, max_pixels=168**2,
    update=MicroBatching(2 * (90 + 8 * 16)), probe=MicroBatching(rows=8), needs=Needs("old_logprobs"),
)  # fmt: skip


class Idle:
    """Kernels that do nothing and allocate nothing; those of a GPU allocate nothing beyond their buffers either."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def longest_prompts(backbone, encoder, limits=LIMITS):
    return MemoryPreflight(Forward(backbone, encoder), encoder, limits).prompts


def count_bytes(holder) -> int:
    """Bytes of the tensors that an object holds, directly and indirectly."""
    found, waiting = {}, [holder]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            found[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, tuple | list):
            waiting += each
        elif hasattr(each, "__dict__"):
            waiting += vars(each).values()
    return sum(found.values())


@pytest.mark.parametrize("sampling", [LIMITS.sampling, Sampling(n=3, max_new_tokens=5, top_p=0.9)], ids=["", "cut"])
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_counted(family, sampling):
    limits, backbone = replace(LIMITS, sampling=sampling), fresh_backbone(family)
    engine = GraphGenerator(backbone, get_encoder(family), ops=Ops(Idle(), Idle()))
    engine.preflight(longest_prompts(backbone, engine.encoder, limits), sampling)
    parts = count_graph_engine(backbone.model, torch.float32, limits.batch, on_gpu=False)
    (step,) = engine.steps.values()
    assert parts["keys and values"] == count_bytes(engine.buffers.cache)
    rest = count_bytes(engine.buffers) - count_bytes(engine.buffers.cache) + count_bytes(step.slot_table)
    assert parts["buffers of a step"] == rest - engine.buffers.rules.settings.nbytes, "but for three numbers"


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["adopted", "copied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_own_weights(family, compute):
    model = fresh_backbone(family).model
    result = count_graph_engine(model, compute, LIMITS.batch)["own copy of the weights"]
    assert result == sum(place.nbytes for place, _ in DecodeWeights(model, compute).copied)
    assert (result > 0) == (compute == torch.bfloat16)


CASES = [
    pytest.param("qwen2_5_vl", "fp32", id="qwen2_5_vl"),
    pytest.param("qwen2", "fp32", id="text"),
    pytest.param("qwen3_vl", "bf16", id="narrow", marks=pytest.mark.slow),  # most processors are slow at it
]


@pytest.mark.parametrize(("family", "compute"), CASES)
def test_the_bytes_of_eight_layers_follow_from_a_few(family, compute, tmp_path, monkeypatch):
    """An estimate of 2 and 4 layers without numbers against the tensors of a real preflight of 8."""
    path = make_tiny_checkpoint(tmp_path, family, hidden=128, layers=8, vision_layers=8, max_pixels=10**8)
    monkeypatch.setattr(memory, "MEASURED_LAYERS", 0)
    found = estimate(load_model_config(str(path)), Plan(LIMITS, compute=compute, graphs=True), ["sample"])
    backbone, encoder = Backbone(load_model(path), DTYPES[compute]), load_encoder(path)
    engine = GraphGenerator(backbone, encoder, ops=Ops(Idle(), Idle()))
    if compute == "fp32":  # the model adopts all of them in place of its own
        engine.weights = DecodeWeights(backbone.model, torch.float32)
    prompts = longest_prompts(backbone, encoder)
    with LiveTensors() as live:
        engine.preflight(prompts, LIMITS.batch.sampling)
    result, real = sum(found.phases["sample"].values()), live.peak
    assert 0.97 <= result / real <= 1.03, f"{real:,} bytes were held, {result / real:.3f} of them told"
    assert ("own copy of the weights" in found.phases["sample"]) == (compute == "bf16")


def test_layers_that_are_not_known_are_counted_as_the_plain_engine():
    config = load_model_config(str(checkpoint("qwen2")))
    known, plain_engine = (estimate(config, Plan(LIMITS, graphs=graphs), ["sample"]) for graphs in (True, False))
    assert "buffers of a step" in known.phases["sample"] and known.phases != plain_engine.phases
    config.get_text_config().hidden_act = "gelu"
    unknown = estimate(config, Plan(LIMITS, graphs=True), ["sample"])
    assert unknown.phases == plain_engine.phases and unknown.no_graphs == "an MLP with gelu"
    assert known.no_graphs is plain_engine.no_graphs is None


# ---------------------------------------------------------------------------------------------------- of a run's engine
@pytest.mark.parametrize("graphs", [False, True])
def test_a_preflight_changes_no_token(graphs):
    backbone, encoder = fresh_backbone("qwen2"), get_encoder("qwen2")
    engine = LocalGenerator(backbone, encoder)
    if graphs:
        engine = GraphGenerator(backbone, encoder, ops=Ops(plain, plain), buckets=(16, 32))
    sampling = Sampling(n=2, max_new_tokens=4)
    prompts = longest_prompts(backbone, encoder)[:2]
    before = engine.generate(prompts, sampling)
    with engine.resident():
        engine.preflight(prompts, LIMITS.sampling)
    after = engine.generate(prompts, sampling)
    assert torch.equal(before.tokens, after.tokens) and torch.equal(before.rollout_logprobs, after.rollout_logprobs)
    assert not graphs or engine.buffers.room.new == 4, "buffers of the preflight are not those of the run"


def test_a_batch_that_does_not_fit_is_halved_before_the_run(caplog):
    """Its room, of which the device here has little."""
    backbone, encoder = fresh_backbone("qwen2"), get_encoder("qwen2")
    forward, engine = Forward(backbone, encoder), LocalGenerator(backbone, encoder)
    allocate = engine.allocate_most

    def full(prompts, first, sampling):
        if len(prompts) * sampling.n > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory ..")
        return allocate(prompts, first, sampling)

    engine.allocate_most, room = full, 16
    preflight(forward, encoder, LIMITS, engine, has_states=True)
    assert engine.rows_at_once == 16 and "32 responses at once: 16 from now on" in caplog.text


def test_a_response_that_does_not_fit_is_reported_before_the_run(monkeypatch):
    backbone, encoder = fresh_backbone("qwen2"), get_encoder("qwen2")
    engine = LocalGenerator(backbone, encoder)

    def full(prompts, first, sampling):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory ..")

    engine.allocate_most = full
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    with pytest.raises(StartError) as result:
        preflight(Forward(backbone, encoder), encoder, LIMITS, engine, has_states=True, savings=["a.b=c"])
    said = str(result.value)
    assert said.startswith("memory: sampling does not fit at the limits of the configuration, with ")
    assert "The device has no room to sample a single response. CUDA out of memory." in said and "a.b=c" in said
