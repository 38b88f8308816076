"""`enable_gradient_checkpointing: auto` on a GPU: all layers keep their activations on the whole card, fewer or in
smaller passes on a part of it, and the gradients are the same. Skipped without a GPU."""

import gc
import logging

import pytest
import torch
from helpers import fake_batch

from benchmarks.measure import compute_device
from mtrl.algorithms.losses import Loss, Ppo
from mtrl.compose import memory_limits
from mtrl.compose.memory_limits import make_limits
from mtrl.compose.run import build, configure
from mtrl.memory.kept_layers import MARGIN
from mtrl.memory.preflight import MemoryPreflight, bytes_outside_allocator, longest_rollouts
from mtrl.models.activation_checkpointing import keep_activations, keepable_layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GIB = 2**30
TOKENS = 32768
WORDS = [
    "worker.actor.model.enable_gradient_checkpointing=auto", "dataset.max_response_length=512",
    "dataset.rollout_batch_size=16", "worker.actor.global_batch_size=16", "worker.rollout.n=8", "training.logger=[]",
    "training.val_before_train=false", "training.max_steps=1",
    "worker.actor.use_torch_compile=false", "optimization.enable_perception_filtering=false",
    "optimization.enable_trajectory_reweighting=false",
]  # fmt: skip


@pytest.fixture
def build_run(tmp_path):
    """Runs with passes of up to 32,768 tokens; all memory of earlier ones is free."""

    def build_one(*words, tokens="null"):
        gc.collect()
        torch.cuda.empty_cache()
        sizes = [f"worker.actor.tokens_per_micro_batch={tokens}", f"training.output_dir={tmp_path / str(len(built))}"]
        built.append(build(configure(None, [*WORDS, *sizes, *words])[0]))
        return built[-1]

    built = []
    yield build_one
    for run in built:
        run.closing.close()


def learner_of(run):
    return run.loop.components.actor.learner


def peak_of_an_update(run, limits):
    """Peak bytes of torch, with the memory of an optimizer's state."""
    passes = MemoryPreflight(run.loop.components.actor.forward, run.loaded.encoder, limits)
    model = learner_of(run).model.train()
    states = [torch.empty_like(p) for p in learner_of(run).parameters for _ in range(2)]
    torch.cuda.reset_peak_memory_stats()
    passes.update()
    peak = torch.cuda.max_memory_allocated()
    gradients = [p.grad.clone() for p in learner_of(run).parameters]
    model.zero_grad()
    model.eval()
    del states
    return peak, gradients


def limits_of(run):
    share_prefix = run.loop.components.actor.forward.share_prefix
    return make_limits(run.config, run.loop.spec.needs, on_gpu=True, share_prefix=share_prefix)


def measure_peaks(run):
    """Peaks with all layers checkpointed and with none; gradients must agree."""
    layers = keepable_layers(learner_of(run).model)
    limits, found = limits_of(run), []
    for keep in (False, True):
        keep_activations(layers, keep)
        found.append(peak_of_an_update(run, limits))
    (least, ours), (most, theirs) = found
    check_close(ours, theirs)
    keep_activations(layers, False)
    return least, most


def check_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()))


def card_for(peak):
    """GiB of a card on which torch has room for this peak, the margin and what is outside of its allocator."""
    torch.cuda.empty_cache()
    outside = bytes_outside_allocator(torch.device("cuda"))
    return (outside + peak / (1 - MARGIN)) / GIB


def test_all_layers_on_the_whole_card(build_run, capfd, caplog):
    run = build_run()
    layers = keepable_layers(learner_of(run).model)
    with caplog.at_level(logging.WARNING):
        run.train()
    assert len(learner_of(run).kept_layers) == len(layers) and not any(each.gradient_checkpointing for each in layers)
    said = capfd.readouterr().err
    assert f"gradient checkpointing: auto keeps the activations of {len(layers)} of {len(layers)} layers" in said
    assert "has no room" not in caplog.text and learner_of(run).cut_to == 0


def test_fewer_layers_on_a_part_of_it(build_run, caplog):
    """The pass size is given; there is room for half of the layers."""
    run = build_run(tokens=TOKENS)
    layers = keepable_layers(learner_of(run).model)
    least, most = measure_peaks(run)
    with compute_device(card_for((least + most) // 2)), caplog.at_level(logging.WARNING):
        run.train()
    kept = len(learner_of(run).kept_layers)
    assert 0 < kept < len(layers), f"{least / GIB:.2f} GiB with none, {most / GIB:.2f} with {len(layers)}: {kept} kept"
    assert [each.gradient_checkpointing for each in layers] == [i >= kept for i in range(len(layers))]
    assert "has no room" not in caplog.text


def test_smaller_passes_keep_more_layers(build_run, caplog, monkeypatch):
    """The same room, and no given size: half a pass needs about half of the activations."""
    monkeypatch.setattr(memory_limits, "full_speed_tokens", lambda weights, layers: 8192)
    run = build_run()
    layers = keepable_layers(learner_of(run).model)
    least, most = measure_peaks(run)
    with compute_device(card_for((least + most) // 2)), caplog.at_level(logging.WARNING):
        run.train()
    learner = learner_of(run)
    assert len(learner.kept_layers) > len(layers) // 2 and 8192 <= learner.batching.tokens < TOKENS
    assert "has no room" not in caplog.text


def test_activations_are_given_up_when_the_device_fills_up(build_run, caplog):
    """Between the preflight and an update of the longest responses torch loses half of the room for activations."""
    run = build_run(tokens=TOKENS)
    actor, layers = run.loop.components.actor, keepable_layers(learner_of(run).model)
    least, most = measure_peaks(run)
    run.preflight()
    assert len(actor.learner.kept_layers) == len(layers)
    rollouts = longest_rollouts(run.loaded.encoder, limits_of(run), 16)
    batch = fake_batch(rollouts, torch.zeros(rollouts.mask.shape), torch.ones(rollouts.mask.shape))
    expected = actor.gradient([batch], Loss(Ppo()))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((least + most) / 2 / torch.cuda.mem_get_info()[1])
    try:
        with caplog.at_level(logging.WARNING):
            found = actor.gradient([batch], Loss(Ppo()))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert f"no room for the activations that {len(layers)} layers keep" in caplog.text and actor.learner.cut_to == 0
    assert actor.learner.kept_layers == () and all(each.gradient_checkpointing for each in layers)
    check_close(found, expected)
