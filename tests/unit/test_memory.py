"""The memory formula of `mtrl doctor` against what real passes held: tensors counted here, peaks measured on a GPU."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import random_model
from benchmarks.memory import expected
from benchmarks.random_model import random_prompts, random_rollouts
from mtrl.algorithms.losses import Loss, term_weights
from mtrl.commands.memory import Estimate, Plan, estimate
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.models.size import size_by
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling, TrainBatch
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import Optimization
from mtrl.workers.micro_batches import MicroBatching

GIB = 2**30
SAMPLING = ("see", "read", "decode")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


# ------------------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_the_formula_against_peaks_of_a_3b_model(weights):
    """Never below what an H200 held, and at most a tenth above."""
    found, measured = expected("3b", weights), json.loads((RESULTS / "memory.json").read_text())[f"weights_{weights}"]
    told = {"held_gb": 0, "update_peak_gb": sum_of(found, "update"), "two_views_peak_gb": sum_of(found, "probe")}
    for name, size in told.items():
        size = (found.held_bytes + size) / GIB
        assert 1 <= size / measured[name] <= 1.1, f"{name}: {size:.2f}, measured {measured[name]}"


def test_the_formula_against_the_sampling_of_a_3b_model():
    """A whole step of the same shape; at its second, Adam's moments are there."""
    measured = json.loads((RESULTS / "step.json").read_text())["steps"][1]["peak_gb_generation"]
    found = expected("3b", "bf16")
    size = (found.held_bytes + max(sum_of(found, phase) for phase in SAMPLING)) / GIB
    assert 1 <= size / measured <= 1.1, f"{size:.2f}, measured {measured}"


def sum_of(found: Estimate, phase: str) -> int:
    return sum(found.phases[phase].values())


# ----------------------------------------------------------------------------------------------------------------- here
class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, for as long as their storage lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.watch((args, kwargs), made=False)  # a tensor from before is no news when it is changed in place
        result = function(*args, **(kwargs or {}))
        self.watch(result, made=True)
        return result

    def watch(self, values, made: bool) -> None:
        for tensor in (value for value in tree_leaves(values) if isinstance(value, torch.Tensor)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if made else 0
            if key not in self.known:
                self.known[key] = weakref.ref(storage, lambda _, key=key, size=size: self.forget(key, size))
                self.now += size
                self.peak = max(self.peak, self.now)

    def forget(self, key: int, size: int) -> None:
        del self.known[key]
        self.now -= size


def test_live_tensors_are_counted():
    before = torch.zeros(1000)
    with LiveTensors() as live:
        before.add_(1)
        big = torch.zeros(100)
        del big
        kept = torch.zeros(50).view(5, 10)
        assert (live.now, live.peak) == (200, 400), "a view is no tensor more, what was there before is none"
    assert kept.numel() == 50


# with the proportions of a large model, which tiny ones have not
TEXT = {
    "hidden_size": 128, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
}  # fmt: skip
VISION = {"depth": 3, "hidden_size": 64, "intermediate_size": 170, "num_heads": 4, "out_hidden_size": 128,
          "fullatt_block_indexes": [2]}  # fmt: skip
PROMPTS, RESPONSES, LENGTH, SIDE, TEXT_TOKENS = 4, 8, 16, 168, 66
PROMPT = TEXT_TOKENS + (SIDE // random_model.TOKEN_PIXELS) ** 2


def plan_of(weights: str, compute: str, checkpointing: bool) -> Plan:
    """Two passes of two groups learn, one pass probes under both views."""
    width = {"bf16": 2, "fp32": 4}
    return Plan(
        weight_bytes=width[weights], compute_bytes=width[compute], reference=False, train_vision=True,
        checkpointing=checkpointing, prompts_per_step=PROMPTS, responses_per_prompt=RESPONSES, prompt_tokens=PROMPT,
        response_tokens=LENGTH, max_pixels=SIDE**2, update=MicroBatching(2 * (PROMPT + RESPONSES * LENGTH)),
        probe=MicroBatching(at_least=1 << 20), views=2,
    )  # fmt: skip


def held_by(work) -> int:
    with LiveTensors() as live:
        work()
    return live.peak


@pytest.mark.parametrize(
    ("weights", "compute", "checkpointing"),
    [
        ("fp32", "fp32", True),
        ("fp32", "fp32", False),
        pytest.param("fp32", "bf16", True, marks=pytest.mark.slow),
        pytest.param("fp32", "bf16", False, marks=pytest.mark.slow),
        pytest.param("bf16", "bf16", True, marks=pytest.mark.slow),
    ],
)
def test_the_formula_against_tensors_counted(weights, compute, checkpointing, monkeypatch):
    """Real passes of a real model on the CPU, by the masks and padded rows that it has there."""
    monkeypatch.setitem(random_model.TEXT, "tiny", TEXT)
    monkeypatch.setitem(random_model.VISION, "tiny", VISION)
    encoder, backbone = random_model.random_backbone("tiny", "cpu", weights, compute, checkpointing=checkpointing)
    plan, shape = plan_of(weights, compute, checkpointing), backbone.model.config
    found = estimate(size_by(type(shape).from_dict(shape.to_dict())), plan)  # a shape without our attention
    rollouts = random_rollouts(random_prompts(encoder, PROMPTS, [SIDE], TEXT_TOKENS), RESPONSES, (LENGTH, LENGTH))
    mask = rollouts.mask
    advantage = torch.ones(mask.shape)
    batch = TrainBatch(rollouts, None, advantage, None, term_weights(mask.float(), mask, "dapo", LENGTH))
    actor = LocalActor(
        Forward(backbone, encoder), Optimization(), perturbation=Perturbation(), encoder_files={},
        update_batching=plan.update, probe_batching=plan.probe,
    )  # fmt: skip
    actor.update([batch.rows(torch.arange(RESPONSES))], Loss())  # Adam's moments are made at its first step
    sampling = Sampling(n=RESPONSES, max_new_tokens=LENGTH, temperature=1.0, seed=1)
    needs = Needs(old=True, entropy=True, dependency="low_var_kl", mass=True)
    held = {
        "update": held_by(lambda: actor.update([batch], Loss())),
        "probe": held_by(lambda: actor.probe(rollouts, needs, 0)),
        "sampling": held_by(lambda: LocalGenerator(backbone, encoder).generate(rollouts.prompts, sampling)),
    }
    told = {"sampling": max(sum_of(found, phase) for phase in SAMPLING)}
    for phase, counted in held.items():
        size = told.get(phase) or sum_of(found, phase)
        assert 1 <= size / counted <= 1.15, f"{phase}: {counted} bytes were held, {found.phases.get(phase)}"
