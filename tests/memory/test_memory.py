"""The memory estimate against numbers by hand, real passes here, and peaks measured on a GPU."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import checkpoint
from torch import nn

from benchmarks.memory import expected
from mtrl.algorithms.losses import Loss, loss_weights
from mtrl.compose import memory_limits as build_memory
from mtrl.config import find_warnings, load_config
from mtrl.memory import estimate as memory
from mtrl.memory.estimate import MemoryEstimate, count_bytes, count_held, estimate, find_savings
from mtrl.memory.fake_model import FakeModel
from mtrl.memory.live_tensors import LiveTensors
from mtrl.memory.plan import Plan, list_savings
from mtrl.memory.preflight import Limits, MemoryPreflight, longest_prompt, preflight
from mtrl.models.activation_checkpointing import enable_activation_checkpointing
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder, load_model_config
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES, load_model
from mtrl.models.model_size import ModelSize, model_size
from mtrl.models.perturb import Perturbation
from mtrl.models.views import ImageViews
from mtrl.protocols import PromptEncoder
from mtrl.rollout.local import LocalGenerator, peak_decode_bytes
from mtrl.types import VISION_POOL, Needs, Sampling, TrainBatch
from mtrl.utils.errors import StartError
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching
from pretraining.tiny_checkpoints import QWEN_FAMILIES, make_tiny_checkpoint

GIB, MIB = 2**30, 2**20
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
LIMITS = Limits(
    prompts=4, prompts_per_update=4, sampling=Sampling(n=8, max_new_tokens=16), prompt_tokens=90, max_pixels=168**2,
    update=MicroBatching(2 * (90 + 8 * 16)), probe=MicroBatching(at_least=1 << 20),
    needs=Needs("old_logprobs", "entropy", "dependency", "attention_mass"),
)  # fmt: skip
SIZE = ModelSize(tensors=(700, 300), learning=(700,), vocabulary=10, output=80, layers=3, keys=4, read=600)


def sum_phase(found: MemoryEstimate, phase: str) -> int:
    return sum(found.phases[phase].values())


# --------------------------------------------------------------------------------------------------------- by formula
def test_held_bytes_by_hand():
    assert count_held(SIZE, Plan(LIMITS)) == {"weights": 4000, "optimizer state": 2 * 2800}
    plan = Plan(LIMITS, "bf16", "bf16", reference=True, reward_model_parameters=50, on_gpu=True)
    assert count_held(SIZE, plan) == {
        "weights": 2000, "weights of the reference": 2000, "weights of the reward model": 100,
        "optimizer state": 2 * 1400, "workspaces of cuBLAS": 96 * MIB,
    }  # fmt: skip


def test_memory_that_the_allocator_leaves_unused():
    """Blocks of 2 MiB for 10 MiB or more; a remainder over 1 MiB is reused."""
    on_gpu = Plan(LIMITS, on_gpu=True)
    sizes = {3: 3, 9.5: 9.5, 12: 12, 13.5: 14, 12.5: 12.5}  # MiB
    for size, taken in sizes.items():
        numbers = int(size * MIB) // 4
        assert count_bytes([numbers], on_gpu) == taken * MIB
        assert count_bytes([numbers], Plan(LIMITS)) == size * MIB


def test_decoding_by_hand():
    """32 rows of 106 tokens: two widths of 4, in two bytes, of three layers; 680 weights that are read, narrowed."""
    layer, (wide, narrow) = 32 * 106 * 2 * 4 * 2, (torch.float32, torch.bfloat16)
    found = peak_decode_bytes(SIZE, wide, narrow, 32, 106, cut=False)
    assert found == {
        "narrow copies of the weights": 2 * 680, "keys and values": 3 * layer, "a layer of them as it grows": layer,
        "recurrent states": 0, "logits": 32 * 10 * 24,
    }  # fmt: skip
    assert peak_decode_bytes(replace(SIZE, state=7), wide, narrow, 32, 106, cut=False)["recurrent states"] == 32 * 7 * 4
    cut = peak_decode_bytes(SIZE, narrow, narrow, 512, 106, cut=True)
    assert cut["narrow copies of the weights"] == 0 and cut["logits"] == 512 * 10 * 32


def test_rows_sampled_at_once():
    """The rows of a batch, and those that are decoded at a time."""

    def rows(prompts, n):
        batch = replace(LIMITS, prompts=prompts, sampling=Sampling(n=n)).batch
        return batch.rows, batch.slots

    assert (rows(4, 8), rows(1000, 8)) == ((32, 32), (2048, 512))
    assert (rows(1000, 7), rows(3, 1000)) == ((2044, 512), (2000, 512))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logits_of_a_step_against_a_real_one(top_p):
    from mtrl.rollout.sampling import choose

    sampling = Sampling(top_p=top_p, temperature=0.9)
    with LiveTensors() as live:
        logits = torch.randn(32, 5000)
        choose(logits, torch.rand(32, dtype=torch.float64), sampling)
    result = peak_decode_bytes(replace(SIZE, vocabulary=5000), logits.dtype, logits.dtype, 32, 1, sampling.cut)[
        "logits"
    ]
    assert 0.99 <= result / live.peak <= 1.15


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2"])
def test_sizes_without_weights(family):
    """Compares the fake model with the loaded one."""
    path = str(checkpoint(family))
    real = load_model(path)
    fake = FakeModel(load_model_config(path), Plan(LIMITS))
    assert model_size(fake.model) == model_size(real)
    assert model_size(real).parameters == sum(p.numel() for p in real.parameters())
    keys = next(module for name, module in real.named_modules() if name.endswith("k_proj"))
    assert model_size(real).keys == keys.out_features
    if fake.tower is not None:
        frozen = model_size(FakeModel(load_model_config(path), Plan(LIMITS, train_vision=False)).model)
        tower = sum(p.numel() for p in real.model.visual.parameters())
        assert sum(frozen.learning) == frozen.parameters - tower


# ----------------------------------------------------------------------------------------------------------- counting
def test_live_tensors_are_counted():
    before = torch.zeros(1000)
    with LiveTensors() as live:
        before.add_(1)
        big = torch.zeros(100)
        del big
        live.begin("later")
        kept = torch.zeros(50).view(5, 10)
        assert (live.now, live.peak) == (200, 400), "neither a view nor an earlier tensor counts"
        assert live.peaks == {"": 400, "later": 200}
    assert kept.numel() == 50


def test_it_counts_as_torch_does():
    mem_tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    model, x = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4))), torch.ones(50, 100)
    own = sum(p.nbytes for p in model.parameters()) + x.nbytes
    tracker = mem_tracker.MemTracker()
    tracker.track_external(model, x)
    with tracker:
        model(x).relu().sum().backward()
    model.zero_grad()
    with LiveTensors() as live:
        model(x).relu().sum().backward()
    assert live.peak == tracker.get_tracker_snapshot("peak")[x.device]["Total"] - own


# --------------------------------------------------------------------------------------------------- the longest step
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2"])
def test_the_longest_prompt(family):
    encoder = load_encoder(checkpoint(family))
    prompt = longest_prompt(encoder, LIMITS)
    assert len(prompt.ids) == len(prompt.token_pool) == 90
    if family != "qwen2":
        side = encoder.image_settings.factor if encoder.image_settings else 1
        most = min(168**2 // side**2, 90)
        assert 0.8 * most - 1 <= int((prompt.token_pool == VISION_POOL).sum()) <= most
        small = longest_prompt(encoder, replace(LIMITS, max_pixels=4 * side**2))
        assert int((small.token_pool == VISION_POOL).sum()) == 4 and len(small.ids) == 90
        tight = longest_prompt(encoder, replace(LIMITS, prompt_tokens=60))
        assert len(tight.ids) == 60, "the image leaves room for the template"


def test_the_passes_of_an_update():
    """The first, which is the largest, and the next."""
    encoder = load_encoder(checkpoint("qwen2"))
    sizes = {}
    for budget in (2 * 218, 3 * 218, 4 * 218):
        limits = replace(LIMITS, update=MicroBatching(budget))
        sizes[budget] = [len(part) for part in MemoryPreflight(None, encoder, limits).updates()]
    assert sizes == {436: [16, 16], 654: [24, 8], 872: [32]}


# ------------------------------------------------------------------------------------------------- against real passes
def deep_checkpoint(directory, family):
    """Eight layers, with the proportions of a large model, which tiny ones have not."""
    limits = {"max_pixels": 10**8} if family in QWEN_FAMILIES else {}
    return make_tiny_checkpoint(directory, family, hidden=128, layers=8, vision_layers=8, **limits)


def real_forward(path, plan: Plan) -> Forward:
    model = load_model(path, dtype=plan.weights)
    if not plan.train_vision:
        model.model.visual.requires_grad_(False)
    backbone = Backbone(model, DTYPES[plan.compute])
    enable_activation_checkpointing(model, plan.checkpointing)
    return Forward(backbone, load_encoder(path, max_pixels=LIMITS.max_pixels))


def preflight_arguments(forward: Forward) -> tuple[Forward, PromptEncoder, Limits, LocalGenerator]:
    return forward, forward.encoder, LIMITS, LocalGenerator(forward.backbone, forward.encoder)


CASES = [
    pytest.param("qwen2_5_vl", {"checkpointing": True}, id="checkpointing", marks=pytest.mark.slow),
    pytest.param("qwen2_5_vl", {}, id="all activations", marks=pytest.mark.slow),
    pytest.param("qwen2_5_vl", {"checkpointing": "mlp"}, id="all but those of MLPs", marks=pytest.mark.slow),
    pytest.param("qwen3_vl", {"checkpointing": True}, id="qwen3_vl", marks=pytest.mark.slow),
    pytest.param("qwen2", {}, id="text"),
    pytest.param("qwen2_5_vl", {"compute": "bf16", "checkpointing": True}, id="narrow", marks=pytest.mark.slow),
    pytest.param("qwen2_5_vl", {"train_vision": False}, id="frozen tower", marks=pytest.mark.slow),
    pytest.param("qwen2_vl", {}, id="qwen2_vl", marks=pytest.mark.slow),
    pytest.param("gemma3", {"checkpointing": True}, id="windows and image blocks", marks=pytest.mark.slow),
    pytest.param("internvl", {}, id="tiles", marks=pytest.mark.slow),
    pytest.param("smolvlm", {}, id="tiles and marks", marks=pytest.mark.slow),
    pytest.param("glm4v", {}, id="glm4v", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_the_bytes_of_eight_layers_follow_from_a_few(family, settings, tmp_path, monkeypatch):
    """An estimate of 2 and 4 layers without numbers against the tensors of real passes of 8, on the CPU."""
    monkeypatch.setattr(memory, "MEASURED_LAYERS", 0)
    path = deep_checkpoint(tmp_path, family)
    plan = Plan(LIMITS, make_encoder=lambda max_pixels: load_encoder(path, max_pixels=max_pixels), **settings)
    found = estimate(load_model_config(str(path)), plan)
    assert "extrapolated to 8" in found.method
    forward = real_forward(path, plan)
    peaks = preflight(*preflight_arguments(forward), has_states=False)
    assert peaks["optimizer"] == found.held["optimizer state"]
    for phase in found.phases:
        result = sum_phase(found, phase) / peaks[phase]
        assert 0.97 <= result <= 1.03, f"{phase}: {peaks[phase]:,} bytes were held, {result:.3f} of them told"


@pytest.mark.slow  # 2 s
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_packed_on_a_gpu_no_matrix_is_counted(family, tmp_path):
    """If the target packs sequences, no memory of the pass grows with the square of its length."""
    config = load_model_config(str(make_tiny_checkpoint(tmp_path, family)))
    once, twice = (
        estimate(
            config, Plan(replace(LIMITS, probe=MicroBatching(rows=8), prompt_tokens=tokens), packed=True), ["probe"]
        )
        for tokens in (2000, 4000)
    )
    assert sum_phase(twice, "probe") < 2.1 * sum_phase(once, "probe")
    dense = estimate(config, Plan(replace(LIMITS, probe=MicroBatching(rows=8), prompt_tokens=4000)), ["probe"])
    assert sum_phase(dense, "probe") > 2 * sum_phase(twice, "probe")


# ------------------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_an_estimate_against_peaks_of_a_3b_model(weights):
    """Against an H200: computed bytes agree to 0.1%; measured ones are never below and at most 10% above."""
    found, measured = expected("3b", weights), json.loads((RESULTS / "memory.json").read_text())[f"weights_{weights}"]
    assert found.method.startswith("measured on fake tensors with 2 and 4 layers, extrapolated to 36 and 32")
    assert found.held_bytes / GIB == pytest.approx(measured["held_gb"], rel=1e-3)
    for name, phase in {"update_peak_gb": "update", "two_views_peak_gb": "probe"}.items():
        size = (found.held_bytes + sum_phase(found, phase)) / GIB
        assert 1 <= size / measured[name] <= 1.1, f"{name}: {size:.2f}, measured {measured[name]}"
    if weights == "bf16":  # a whole step of the same shape; at its second, the optimizer has its state
        measured = json.loads((RESULTS / "step.json").read_text())["steps"][1]["peak_gb_generation"]
        assert 1 <= (found.held_bytes + sum_phase(found, "sample")) / GIB / measured <= 1.1


# ------------------------------------------------------------------------------------------------- before a first step
def an_actor(forward: Forward) -> LocalActor:
    return LocalActor(
        forward, OptimizerSettings(lr=1e-3), views=ImageViews(Perturbation()), update_batching=LIMITS.update,
        probe_batching=LIMITS.probe, encoder_files={},
    )  # fmt: skip


def a_step(actor: LocalActor) -> dict[str, float]:
    rollouts = MemoryPreflight(actor.forward, actor.forward.encoder, LIMITS).rollouts(2)
    mask = rollouts.mask
    weights = loss_weights(mask.float(), mask, "dapo", mask.shape[1])
    return actor.update([TrainBatch(rollouts, None, torch.ones(mask.shape), None, weights)], Loss())


def test_a_preflight_leaves_no_trace():
    """Two runs of two steps, one with a preflight before each: the same numbers bitwise."""
    path, results = checkpoint("qwen2_5_vl"), []
    for runs_preflight in (False, True):
        torch.manual_seed(0)
        actor = an_actor(real_forward(path, Plan(LIMITS, checkpointing=True)))
        result = []
        for step in range(2):
            before = copy.deepcopy((actor.model.state_dict(), actor.learner.optimizer.state_dict()))
            random = torch.get_rng_state()
            if runs_preflight:
                peaks = preflight(*preflight_arguments(actor.forward), has_states=step > 0)
                assert (peaks["optimizer"] > 0) == (step == 0) and min(peaks["update"], peaks["probe"]) > 0
            assert torch.equal(random, torch.get_rng_state())
            assert not actor.model.training and all(p.grad is None for p in actor.model.parameters())
            torch.testing.assert_close(
                (actor.model.state_dict(), actor.learner.optimizer.state_dict()), before, rtol=0, atol=0
            )
            result.append(a_step(actor))
        results.append((result, actor.model.state_dict()))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)


def test_gradients_that_were_there_stay():
    forward = real_forward(checkpoint("qwen2"), Plan(LIMITS))
    weight = forward.backbone.output_matrix
    weight.grad = torch.ones_like(weight)
    preflight(*preflight_arguments(forward), has_states=True)
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_a_full_divergence_as_a_loss_is_rehearsed():
    """The gradient of the output matrix exists twice, and the hidden states of a second model next to the policy's."""
    forward, peaks = real_forward(checkpoint("qwen2"), Plan(LIMITS)), {}
    for full in (False, True):
        passes = MemoryPreflight(forward, forward.encoder, replace(LIMITS, full_divergence=full))
        (part, *_) = passes.updates()
        forward.backbone.model.zero_grad()
        with LiveTensors() as live:
            passes.learn(part)
        peaks[full] = live.peak
    hidden = int(part.mask.sum()) * forward.backbone.output_matrix.shape[1] * 4
    assert peaks[True] >= peaks[False] + hidden


def test_a_second_view_of_an_update_is_rehearsed():
    """A pass has twice the tokens, in a budget that counts them all."""
    term = {"optimization.loss_terms": [{"name": "papo", "both_views": True}]}
    found = {}
    for name, overrides in {"one": {}, "two": term}.items():
        plan = build_memory.make_plan(load_config(None, overrides), on_gpu=False)
        found[name] = plan.limits.update.views, plan.limits.live_needs.other_views
    assert found == {"one": (1, ()), "two": (2, ("perturbed",))}
    forward, peaks = real_forward(checkpoint("qwen2_5_vl"), Plan(LIMITS)), {}
    for live in (Needs(), Needs("logprobs@perturbed"), Needs("logprobs@counterfactual(2)", "logprobs@perturbed")):
        passes = MemoryPreflight(forward, forward.encoder, replace(LIMITS, live_needs=live))
        (part, *_) = passes.updates()
        forward.backbone.model.zero_grad()
        with LiveTensors() as tensors:
            passes.learn(part)
        peaks[live.views] = tensors.peak
    assert 1.5 * peaks[1] < peaks[2] < 2.5 * peaks[1]
    assert peaks[3] > peaks[2] + 2 * (peaks[2] - peaks[1]), "responses of this view share no prompt"


@pytest.mark.parametrize("packed", [False, True])
def test_a_view_that_changes_attention_is_estimated(packed):
    """In probes and updates, also in passes that are packed on a GPU."""
    model, needs = load_model_config(str(checkpoint("qwen2_5_vl"))), Needs("logprobs@counterfactual(2)")
    plain, changed = (
        estimate(model, Plan(limits, packed=packed), ["probe", "update"])
        for limits in (LIMITS, replace(LIMITS, needs=LIMITS.needs | needs, live_needs=needs))
    )
    assert sum_phase(changed, "update") > 1.3 * sum_phase(plain, "update")
    grows = 1.0 if packed else 1.3  # a packed probe of these sizes holds most in the tower, which reads no view twice
    assert sum_phase(changed, "probe") >= grows * sum_phase(plain, "probe")


@pytest.mark.parametrize(
    ("overrides", "on"),
    [
        ({}, False),
        ({"optimization.divergence_penalty": "full"}, False),
        ({"optimization.divergence_penalty": "full", "optimization.use_divergence_loss": True}, True),
        ({"optimization.divergence_penalty": "low_var_kl", "optimization.use_divergence_loss": True}, False),
    ],
)
def test_which_configurations_run_it_in_preflight(overrides, on):
    plan = build_memory.make_plan(load_config(None, overrides), on_gpu=False)
    assert plan.limits.full_divergence is on and plan.reference


def test_a_pass_that_does_not_fit_is_reported(monkeypatch):
    """Raises torch's error of a GPU; there is no GPU here."""
    forward = real_forward(checkpoint("qwen2"), Plan(LIMITS))

    def full(self, part, following=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory ..")

    monkeypatch.setattr(MemoryPreflight, "learn", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    with pytest.raises(StartError) as result:
        preflight(*preflight_arguments(forward), has_states=False, savings=["a.b=c"])
    said = str(result.value)
    assert said.startswith("memory: the update does not fit at the limits of the configuration")
    assert "of 80.00 GiB" in said and "Tried to allocate 2.00 GiB" in said and "Of the allocated" not in said
    assert "\n    a.b=c\n" in said and not forward.backbone.model.training


def test_on_a_cpu_a_run_has_no_preflight(monkeypatch):
    monkeypatch.setattr(build_memory, "preflight", lambda *_, **__: pytest.fail("it did"))
    forward = real_forward(checkpoint("qwen2"), Plan(LIMITS))
    generator = preflight_arguments(forward)[3]
    build_memory.preflight_on_gpu(
        load_config(None, {}), forward, generator, LIMITS.needs, has_states=False, learners=[]
    )


@pytest.mark.slow
def test_a_change_leaves_the_peak_of_its_own_estimate():
    """Although not every phase is measured again for it."""
    config = load_model_config(str(checkpoint("qwen2_5_vl")))
    plan = Plan(LIMITS, reference=True)
    found = estimate(config, plan)
    result = dict(find_savings(config, plan, found))
    assert "optimization.disable_divergence=true" in result
    for way, peak in result.items():
        assert peak == estimate(config, list_savings(plan)[way]).peak_bytes < found.peak_bytes, way


def test_advice_names_keys_that_load():
    ways = list_savings(Plan(replace(LIMITS, max_pixels=1 << 22), reference=True))
    assert "dataset.rollout_batch_size=1 worker.actor.global_batch_size=1" in ways, "always at least one"
    assert f"worker.actor.tokens_per_micro_batch={2 * 218 // 2}" in ways
    advised = load_config(None, [word for way in ways for word in way.split()])
    assert list(find_warnings(advised)) == [] and advised.worker.actor.fsdp.param_dtype == "fp32", (
        "it would hardly learn"
    )
    assert "optimization.disable_divergence=true" not in list_savings(Plan(LIMITS)), "there is no reference"
