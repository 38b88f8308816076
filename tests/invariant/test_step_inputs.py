"""What the passes of a step have in common is made once, with the same numbers, and is gone after the step."""

import copy
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import fake_batch, slow_but
from tiny_models import fresh_backbone, get_encoder, prompts_for, random_rollouts
from update_helpers import ALL_AT_ONCE, FULL_LOSS, GROUP, LENGTHS, copy_weights, make_actor, noise

from mtrl.algorithms.losses import Loss, Ppo
from mtrl.models import forward as passes
from mtrl.models import step_inputs
from mtrl.models.adapters import AdapterSettings, add_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.step_inputs import StepInputs, count_bytes
from mtrl.types import Needs
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.reference import Reference

FAMILY = "qwen3_vl"  # with deepstack layers
NEEDS = Needs("old_logprobs", "dependency", "ref_logprobs")
STEP = 4
IMAGES = 5  # in the three prompts with images, one of them three
EPOCHS = [[0, 1], [2, 3], [1, 2], [0, 3]]  # the prompts of each optimizer step: two in each of two epochs
FULL = Loss(Ppo(), divergence="full", divergence_coef=0.1)


def make_worker(kind, batching=ALL_AT_ONCE, lr=1e-4):
    backbone = fresh_backbone(FAMILY)
    if kind.startswith("adapters"):
        add_adapters(backbone.model, AdapterSettings(lora_vision_tower=kind == "adapters on the tower"))
        backbone = Backbone(backbone.model)
    elif kind == "frozen tower":
        backbone.vision_tower.requires_grad_(False)
    forward = Forward(backbone, get_encoder(FAMILY), share_prefix=batching.share_prefix)
    make = Reference.under_adapters if kind.startswith("adapters") else Reference.frozen
    return make_actor(FAMILY, batching, forward, make(forward), lr=lr)


def make_rollouts():
    return random_rollouts(prompts_for(FAMILY), GROUP, LENGTHS)


def make_batches(rollouts, old):
    mask = rollouts.mask
    advantage = noise(mask[:, :1], 1).expand(mask.shape).where(mask, 0.0)
    whole = replace(fake_batch(rollouts, old + noise(mask, 2, 0.3), advantage), ref_logprobs=old)
    return [whole.rows(torch.isin(rollouts.group, torch.tensor(prompts)).nonzero()[:, 0]) for prompts in EPOCHS]


def run_step(worker, loss=FULL_LOSS, needs=NEEDS, step=STEP, rollouts=None):
    rollouts = rollouts or make_rollouts()
    signals = worker.probe(rollouts, needs, step)
    metrics = worker.update(make_batches(rollouts, signals.old_logprobs), loss)
    return SimpleNamespace(signals=signals, metrics=metrics, weights=copy_weights(worker))


@pytest.fixture
def counts(monkeypatch):
    """What is made while a test runs."""
    found = SimpleNamespace(images=0, inputs=[], layouts=0, masks=0)
    encoder, kind = get_encoder(FAMILY), type(get_encoder(FAMILY))

    def run_tower(self, inputs, run=Backbone._run_tower):
        found.images += sum(len(each["image_grid_thw"]) for each in inputs)
        return run(self, inputs)

    def make_inputs(self, prompt, media=None, device=None, make=kind.inputs):
        found.inputs += [prompt.task.id] * (media is None)
        return make(self, prompt, media, device)

    def count(name, function):
        def run(*args, **options):
            setattr(found, name, getattr(found, name) + 1)
            return function(*args, **options)

        return run

    assert encoder.image_settings is not None
    monkeypatch.setattr(Backbone, "_run_tower", run_tower)
    monkeypatch.setattr(kind, "inputs", make_inputs)
    monkeypatch.setattr(passes, "lay_out", count("layouts", passes.lay_out))
    monkeypatch.setattr(Backbone, "make_masks", count("masks", Backbone.make_masks))
    return found


# ------------------------------------------------------------------------------------------------------ how often
@pytest.mark.parametrize("kind", ["adapters", "frozen tower"])
def test_images_that_nothing_learns_to_encode_are_encoded_once(kind, counts):
    run_step(make_worker(kind, MicroBatching(rows=3)))
    assert counts.images == IMAGES + perturbed_images(), "the original images once, the perturbed ones of the probe"


def perturbed_images():
    """Of the probe in passes of three rows, which cut the group of four."""
    groups = [GROUP[start : start + 3] for start in range(0, len(GROUP), 3)]
    sizes = [len(prompt.media) for prompt in prompts_for(FAMILY)]
    return sum(sizes[prompt] for part in groups for prompt in set(part))


@pytest.mark.parametrize("kind", slow_but(["trained tower", "adapters on the tower"], "adapters on the tower"))
def test_other_images_are_encoded_by_every_pass(kind, counts):
    run_step(make_worker(kind))
    assert counts.images == IMAGES * (2 + 1 + 2), "two views of the probe, the reference, and two epochs"


@pytest.mark.parametrize("kind", slow_but(["adapters", "frozen tower", "trained tower"], "trained tower"))
def test_the_inputs_of_a_prompt_are_made_once(kind, counts):
    run_step(make_worker(kind, MicroBatching(rows=3)))
    assert sorted(counts.inputs) == ["t:0", "t:1", "t:2", "t:3"]


def test_equal_passes_share_their_layout_and_masks(counts):
    """Probe and reference read all rows at once, each optimizer step half of them."""
    run_step(make_worker("trained tower"), needs=Needs("old_logprobs", "ref_logprobs"))
    assert (counts.layouts, counts.masks) == (1 + len(EPOCHS), 1 + len(EPOCHS))


def test_policy_and_reference_of_a_full_divergence_share_them(counts):
    """Also if nothing was probed: the update begins the step."""
    worker, rollouts = make_worker("frozen tower"), make_rollouts()
    batches = make_batches(rollouts, torch.zeros(rollouts.mask.shape))
    counts.images = counts.layouts = counts.masks = 0
    worker.update(batches, FULL)
    assert (counts.images, counts.layouts, counts.masks) == (IMAGES, len(EPOCHS), len(EPOCHS))


# ------------------------------------------------------------------------------------------------------ same numbers
def check_same(found, expected, exact=False):
    """Features of images that were encoded next to others may differ by rounding."""
    signals, weights = (0, 0) if exact else (5e-6, 1e-6)
    for name in ("old_logprobs", "perturbed_logprobs", "dependency", "ref_logprobs"):
        torch.testing.assert_close(getattr(found.signals, name), getattr(expected.signals, name), rtol=0, atol=signals)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=weights)


KINDS = ("adapters", "frozen tower", "trained tower", "adapters on the tower")
QUICK = (("adapters", FULL_LOSS), ("trained tower", FULL))


@pytest.mark.parametrize("case", slow_but([(kind, loss) for kind in KINDS for loss in (FULL_LOSS, FULL)], *QUICK))
def test_the_numbers_are_those_without_it(case, monkeypatch):
    kind, loss = case
    found = run_step(make_worker(kind, MicroBatching(rows=3)), loss)
    monkeypatch.setattr(StepInputs, "keep", lambda *_, **__: None)
    expected = run_step(make_worker(kind, MicroBatching(rows=3)), loss)
    check_same(found, expected, exact=kind in ("trained tower", "adapters on the tower"))


def test_stale_features_would_be_seen(monkeypatch):
    """The tower learns in every optimizer step: its features of the probe are those of other weights."""
    right = run_step(make_worker("trained tower", lr=1e-2))
    monkeypatch.setattr(step_inputs, "makes_fixed_features", lambda backbone: True)
    with pytest.raises(AssertionError):
        check_same(run_step(make_worker("trained tower", lr=1e-2)), right)


def test_without_room_all_is_made_again(monkeypatch, counts):
    found = run_step(make_worker("adapters"))
    monkeypatch.setattr(step_inputs, "CPU_BYTES", 0)
    monkeypatch.setattr(step_inputs, "DEVICE_BYTES", 0)
    counts.images, counts.inputs = 0, []
    check_same(run_step(make_worker("adapters")), found)
    assert counts.images == IMAGES * (2 + 1 + 2) and len(counts.inputs) == 4 * (1 + 1 + 2)


def test_room_for_a_part_of_the_images(monkeypatch, counts):
    """Of the first image alone: the others are encoded next to the known one."""
    worker, rollouts = make_worker("adapters"), make_rollouts()
    worker.probe(rollouts, NEEDS, STEP)
    first = worker.forward.kept.find("features", worker.forward.backbone, rollouts.prompts[0])
    assert first.deepstack and len(first.embeds) == 45
    positions = 24 * sum(len(prompt.ids) for prompt in rollouts.prompts)
    found = run_step(make_worker("adapters"))
    monkeypatch.setattr(step_inputs, "CPU_BYTES", positions + count_bytes(first))
    monkeypatch.setattr(passes.Forward, "_lay_out", lay_out_anew)
    counts.images = 0
    check_same(run_step(make_worker("adapters")), found)
    assert counts.images == IMAGES * (2 + 1 + 2) - 3, "one image in the reference's pass and in both epochs"


def lay_out_anew(forward, rollouts, prompts, positions, others):
    return passes.lay_out(rollouts, positions, share_prefix=True, views=1 + len(others))


# ------------------------------------------------------------------------------------------------------ which features
def test_ranks_get_new_objects_of_the_same_prompts(counts):
    worker, rollouts = make_worker("adapters"), make_rollouts()
    signals = worker.probe(rollouts, NEEDS, STEP)
    counts.images, again = 0, replace(rollouts, prompts=copy.deepcopy(rollouts.prompts))
    worker.update(make_batches(again, signals.old_logprobs), FULL_LOSS)
    assert counts.images == 0


def test_other_pixels_under_the_same_name_are_encoded(counts):
    worker, rollouts = make_worker("adapters"), make_rollouts()
    signals = worker.probe(rollouts, NEEDS, STEP)
    first = rollouts.prompts[0]
    other = replace(first, media=tuple(255 - medium for medium in first.media))
    counts.images = 0
    worker.update(make_batches(replace(rollouts, prompts=(other, *rollouts.prompts[1:])), signals.old_logprobs), FULL)
    assert counts.images == 1, "the other image alone, and once for policy and reference and both epochs"


def test_a_reference_with_another_tower_encodes_for_itself(counts):
    worker = make_worker("frozen tower")
    with torch.no_grad():
        next(worker.reference.forward.backbone.vision_tower.parameters()).view(-1)[-1].add_(1e-3)
    run_step(worker)
    assert counts.images == IMAGES * (2 + 1)


def test_a_reference_of_a_trained_tower_keeps_nothing():
    worker = make_worker("trained tower")
    worker.probe(make_rollouts(), NEEDS, STEP)
    assert not [key for key in worker.forward.kept._values if key[0] == "features"]


@pytest.mark.parametrize("change", ["tokens", "prompts"])
def test_rows_that_differ_are_other_passes(change):
    """Groups and lengths are the same."""
    worker, rollouts = make_worker("frozen tower"), make_rollouts()
    tokens, prompts = (rollouts.tokens + 1).where(rollouts.mask, 0), rollouts.prompts[::-1]
    other = replace(rollouts, **{change: tokens if change == "tokens" else prompts})
    worker.probe(rollouts, Needs("old_logprobs"), STEP)
    found = worker.probe(other, Needs("old_logprobs"), STEP).old_logprobs
    expected = make_worker("frozen tower").probe(other, Needs("old_logprobs"), STEP).old_logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


# ------------------------------------------------------------------------------------------------------ how long
def watch(worker, rollouts):
    """Weak references to all that is kept."""
    assert {key[0] for key in worker.forward.kept._values} == {"features", "positions", "layout", "masks"}
    kept = [each for value in worker.forward.kept._values.values() for each in tensors(value)]
    return [weakref.ref(each) for each in (*kept, *rollouts.prompts)]


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [each for part in (parts or getattr(value, "__dict__", {}).values()) for each in tensors(part)]


@pytest.mark.parametrize("end", ["update", "publish", "restore", "probe of the next step", "failed update"])
def test_nothing_is_kept_after_the_step(end, tmp_path):
    worker, rollouts = make_worker("adapters"), make_rollouts()
    signals = worker.probe(rollouts, Needs("old_logprobs", "ref_logprobs"), STEP)
    kept, batches = watch(worker, rollouts), make_batches(rollouts, signals.old_logprobs)
    assert len(kept) > 20
    if end == "update":
        worker.update(batches, FULL_LOSS)
    elif end == "publish":
        worker.publish()
    elif end == "restore":
        worker.snapshot().write(tmp_path)
        worker.restore(tmp_path)
    elif end == "failed update":
        with pytest.raises(AttributeError):
            worker.update([None], FULL_LOSS)
    else:
        worker.probe(fake_text(), Needs("old_logprobs"), STEP + 1)
    del rollouts, batches, signals
    gc.collect()
    assert not [each for each in kept if each() is not None]


def fake_text():
    return random_rollouts(prompts_for(FAMILY)[1:2], [0], [3])


def test_a_validation_keeps_nothing(counts):
    worker = make_worker("adapters")
    worker.probe(make_rollouts(), Needs("attention_mass"), None)
    assert not worker.forward.kept._values and not worker.forward.kept._prompts


def test_bytes_are_those_of_all_tensors():
    forks = SimpleNamespace(index=torch.zeros(3, dtype=torch.long), name="x")
    assert count_bytes((torch.zeros(2, 3), {"a": [torch.zeros(5, dtype=torch.bool)]}, None, 7, forks)) == 24 + 5 + 24
