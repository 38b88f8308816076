"""A learner minimizes any loss: here a value loss, by hand, on a model with a single weight."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers import fake_batch, fake_rollouts
from torch import nn

from mtrl.models.parallel.ranks import Ranks
from mtrl.utils.errors import DeviceFull, Diverged, PassesCut
from mtrl.workers import learner
from mtrl.workers.learner import Learner, OptimizerSettings, make_optimizer
from mtrl.workers.micro_batches import MicroBatching

RETURNS = torch.tensor([1.0, 2.0, 6.0])  # three rows


class OneWeight(nn.Module):
    """Its value for everything is w. It may report any device; w is in CPU memory."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.device = torch.device(device)
        self.w = nn.Parameter(torch.zeros(()))


class DirectLearner(Learner):
    """Takes losses of a batch, which have nothing to start before."""

    def update(self, batches, loss):
        return super().update(batches, lambda batch: partial(loss, batch))

    def gradient(self, batches, loss):
        return super().gradient(batches, lambda batch: partial(loss, batch))


def make_learner(rows=2, lr=0.5, batching=None, device="cpu", **options):
    settings = OptimizerSettings(lr=lr, warmup_steps=0, weight_decay=0.0, max_grad_norm=math.inf)
    batching = batching or MicroBatching(rows=rows)
    return DirectLearner(OneWeight(device), settings, batching, name="critic", advice="Lower my.lr.", **options)


def make_batch():
    zeros = torch.zeros(3, 1)
    return replace(fake_batch(fake_rollouts([1, 1, 1]), zeros, zeros), returns=RETURNS[:, None])


def value_loss(model, seen):
    """Half the squared distance to the returns, a third per row."""

    def loss(batch):
        assert model.training
        seen.append(len(batch))
        part = 0.5 * ((model.w - batch.returns) ** 2).sum() / len(RETURNS)
        return part, {"value_loss": part.detach()}

    return loss


def test_reading_a_gradient_learns_nothing():
    """The gradient of two batches together, -3 each; a weight that the loss does not use has none."""
    learner = make_learner()
    learner.parameters.append(nn.Parameter(torch.ones(2)))
    of_w, of_other = learner.gradient([make_batch()] * 2, value_loss(learner.model, []))
    assert of_w.item() == pytest.approx(-6) and of_other.tolist() == [0, 0]
    assert learner.model.w.item() == 0 and learner.model.w.grad is None and not learner.model.training


@pytest.mark.parametrize(("rows", "slices"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3])])
def test_any_loss_in_any_slices(rows, slices):
    learner, seen = make_learner(rows), []
    metrics = learner.update([make_batch()], value_loss(learner.model, seen))
    assert seen == slices and not learner.model.training
    # (1 + 4 + 36) / 6; the gradient is the mean of w - return, -3; Adam's first step goes by the rate.
    assert metrics == pytest.approx({"value_loss": 41 / 6, "grad_norm": 3.0, "lr": 0.5, "skipped_steps": 0.0})
    assert learner.model.w.item() == pytest.approx(0.5) and (learner.version, learner.optimizer_step) == (1, 1)


def test_metrics_are_means_over_the_steps():
    learner = make_learner(lr=0.0)
    metrics = learner.update([make_batch(), make_batch(), make_batch()], value_loss(learner.model, []))
    assert metrics["value_loss"] == pytest.approx(41 / 6) and (learner.version, learner.optimizer_step) == (1, 3)


def test_values_that_are_not_finite_are_reported_with_the_learners_name(caplog):
    learner = make_learner()

    def bad(batch):
        return learner.model.w * math.nan, {}

    learner.update([make_batch(), make_batch()], bad)
    assert learner.model.w.item() == 0 and "optimizer step 1 of the critic" in caplog.text
    with pytest.raises(Diverged, match=r"^3 optimizer steps in a row of the critic .* Lower my\.lr\.$"):
        learner.update([make_batch()], bad)


def test_a_new_learner_has_no_state():
    learner = make_learner()
    assert (learner.version, learner.optimizer_step, learner.bad_steps_in_a_row) == (0, 0, 0)
    settings = learner.optimizer.defaults
    assert (settings["lr"], settings["weight_decay"], settings["betas"]) == (0.5, 0.0, (0.9, 0.95))
    assert not settings["fused"] and make_learner(device="cuda").optimizer.defaults["fused"], "that is for a GPU"
    assert not learner.pieces, "its state stays where the weights are"


def test_weights_that_do_not_learn_are_left_out():
    model = OneWeight()
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    learner = DirectLearner(model, OptimizerSettings(), MicroBatching(rows=1), name="critic", advice="")
    assert learner.parameters == [model.w] and learner.names == {model.w: "w"}


def test_metrics_are_of_the_steps_that_were_taken(caplog):
    """One of three is not finite: it is counted, moves no weights and is not in the means."""
    learner, parts = make_learner(rows=3), iter([1.0, math.nan, 3.0])

    def loss(batch):
        value = next(parts)
        return learner.model.w * value, {"value_loss": torch.tensor(value)}

    metrics = learner.update([make_batch()] * 3, loss)
    assert metrics == pytest.approx({"value_loss": 2.0, "grad_norm": 2.0, "lr": 0.5, "skipped_steps": 1.0})
    assert (learner.version, learner.optimizer_step, learner.bad_steps_in_a_row) == (1, 3, 0)
    (record,) = caplog.records
    assert record.getMessage() == "optimizer step 1 of the critic has a non-finite loss or gradient and is skipped"
    assert learner.model.w.grad is None


def test_a_metric_that_is_not_finite_skips_the_step_too():
    """The gradient may be finite where the loss is not."""
    learner = make_learner(rows=3)
    metrics = learner.update(
        [make_batch()], lambda batch: (learner.model.w * 2.0, {"value_loss": torch.tensor(math.inf)})
    )
    assert metrics["skipped_steps"] == 1.0 and metrics["grad_norm"] == 2.0 and learner.model.w.item() == 0


def test_only_bad_steps_in_a_row_end_the_run():
    learner, good = make_learner(rows=3), []

    def loss(batch):
        return learner.model.w * (1.0 if good else math.nan), {}

    for happens in ([], [], [1], [], []):  # two, a good one, two
        good[:] = happens
        learner.update([make_batch()], loss)
    assert learner.bad_steps_in_a_row == 2
    with pytest.raises(Diverged):
        good.clear()
        learner.update([make_batch()], loss)


@pytest.mark.parametrize(
    ("schedule", "floor", "expected"),
    [
        ("constant_with_warmup", 0.5, [1, 2, 3, 3, 3, 3, 3, 3]),
        ("linear", 0.0, [1, 2, 3, 2.25, 1.5, 0.75, 0, 0]),
        ("linear", 0.5, [1, 2, 3, 2.625, 2.25, 1.875, 1.5, 1.5]),
        ("cosine", 0.0, [1, 2, 3, 1.5 + 1.5 * math.sqrt(0.5), 1.5, 1.5 - 1.5 * math.sqrt(0.5), 0, 0]),
    ],
)
def test_the_learning_rate_of_each_step(schedule, floor, expected):
    """Two steps of warm-up, six in all; it stays at its end."""
    settings = OptimizerSettings(lr=3.0, warmup_steps=2, total_steps=6, lr_scheduler_type=schedule, min_lr_ratio=floor)
    assert [settings.lr_at(step) for step in range(8)] == pytest.approx(expected, abs=1e-12)


def test_the_defaults_of_an_optimizer():
    """Those of the configuration, which test_recipe.py compares."""
    expected = (1e-6, 0.01, (0.9, 0.95), 10, 1, "constant_with_warmup", 0.0, 1.0)
    assert OptimizerSettings() == OptimizerSettings(*expected)


def test_a_single_step_after_the_warm_up():
    settings = OptimizerSettings(lr=4.0, warmup_steps=1, total_steps=2, lr_scheduler_type="linear")
    assert [settings.lr_at(step) for step in range(3)] == [2.0, 4.0, 0.0]


def test_a_warm_up_longer_than_the_run():
    assert OptimizerSettings(lr=4.0, warmup_steps=3, total_steps=2, lr_scheduler_type="linear").lr_at(3) == 4.0


def test_the_rate_of_a_step_follows_the_schedule():
    learner = make_learner(rows=3)
    learner.optimization = OptimizerSettings(lr=3.0, warmup_steps=2, total_steps=6, lr_scheduler_type="linear")
    metrics = [learner.update([make_batch()], value_loss(learner.model, []))["lr"] for _ in range(4)]
    assert metrics == pytest.approx([1, 2, 3, 2.25])
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(2.25)


def test_counters_are_saved_and_restored(tmp_path, monkeypatch):
    learner = make_learner()
    learner.version, learner.optimizer_step, learner.bad_steps_in_a_row, learner.cut_to = 3, 7, 2, 1
    counters = learner.snapshot({"a.json": b"{}"}).counters
    assert counters == {"version": 3, "optimizer_step": 7, "bad_steps_in_a_row": 2, "cut_to": 1}
    monkeypatch.setattr("mtrl.workers.learner.load_weights", lambda model, directory, ranks: None)
    monkeypatch.setattr("mtrl.workers.learner.restore_optimizer_state", lambda *_: None)
    monkeypatch.setattr("mtrl.workers.learner.read_counters", lambda directory: json.loads(json.dumps(counters)))
    other = make_learner()
    other.restore(tmp_path)
    assert (other.version, other.optimizer_step, other.bad_steps_in_a_row) == (3, 7, 2)
    assert other.batching == MicroBatching(rows=1)


# ------------------------------------------------------------------------------------------------- state in main memory
def test_offloaded_state_is_all_but_the_counts_of_steps():
    learner, plain = make_learner(offload=True), make_learner()
    for each in (learner, plain):
        each.update([make_batch(), make_batch()], value_loss(each.model, []))
    ((piece, states),) = learner.pieces
    assert piece == [learner.model.w]
    state = learner.optimizer.state[learner.model.w]
    assert set(map(id, states.tensors())) == {id(state["exp_avg"]), id(state["exp_avg_sq"])}
    assert learner.model.w.item() == plain.model.w.item() and learner.model.w.grad is None


# -------------------------------------------------------------------------------------------------------------- dropout
def drawn(seed, micro_batch, step=0, **options):
    """The numbers that a pass draws, and those of a later draw."""
    learner = make_learner(dropout_seed=seed, **options)
    learner.optimizer_step = step
    torch.manual_seed(3)
    with learner._seed_dropout(micro_batch):
        inside = torch.rand(4).tolist()
    return inside, torch.rand(4).tolist()


def draw_numbers(number):
    return torch.rand(4, generator=torch.Generator().manual_seed(number)).tolist()


@pytest.mark.parametrize(
    ("numbers", "given"),
    [
        ([5, 0, 2], {}),
        ([5, 8, 2], {"step": 8}),
        ([5, 0, 2], {"ranks": Ranks(None, 0, 2)}),
        ([5, 0, 2, 1], {"ranks": Ranks(None, 1, 2)}),  # other rows than on the first rank
    ],
)
def test_dropout_depends_on_seed_step_micro_batch_and_rank(numbers, given):
    inside, after = drawn(5, 2, **given)
    assert inside == draw_numbers(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))
    assert after == draw_numbers(3), "the global random state is unchanged"


def test_without_dropout_nothing_is_seeded():
    inside, after = drawn(None, 2)
    assert inside == draw_numbers(3) and after != draw_numbers(3)


@pytest.mark.parametrize(("device", "forked"), [("cpu", []), ("cuda", [torch.device("cuda")])])
def test_the_device_s_own_random_numbers_are_left_alone_too(device, forked, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: seen.append(devices) or nullcontext())
    drawn(5, 2, device=device)
    assert seen == [forked]


# ---------------------------------------------------------------------------------------------------------- idle passes
class OneOfTwo(Ranks):
    """The other rank has three passes."""

    def all_reduce_max(self, number):
        return max(3, number)


def test_an_idle_pass_does_not_count():
    learner, weights = make_learner(batching=MicroBatching(rows=2, ranks=OneOfTwo(None, 0, 2))), []

    def loss(batch):
        weights.append(batch.weights.token.sum(1).tolist())
        given = [each for each in vars(batch.weights).values() if each is not None]
        assert len(given) == 3 and all(torch.equal(each, batch.weights.token) for each in given)
        return learner.model.w * batch.weights.token.sum(), {"value_loss": batch.weights.token.sum()}

    metrics = learner.update([make_batch()], loss)
    assert weights == [pytest.approx([1 / 3, 1 / 3]), pytest.approx([1 / 3]), [0.0]]
    assert metrics["value_loss"] == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------------- a full device
TORCH_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB."
LOWERS_MEMORY = (
    "worker.actor.tokens_per_micro_batch, worker.actor.model.enable_gradient_checkpointing=true, dataset.max_pixels or "
    "dataset.max_response_length"
)


def full_beyond(learner, rows, seen):
    """The loss of values on a device with room for so many rows."""
    loss = value_loss(learner.model, seen)

    def full(batch):
        part, metrics = loss(batch)
        if len(batch) > rows:
            part.backward()
            raise torch.OutOfMemoryError(f"{TORCH_SAYS} Of the allocated memory 1.00 GiB is allocated by PyTorch")
        return part, metrics

    return full


PROMPT = len(fake_rollouts([1]).prompts[0].ids)


@pytest.mark.parametrize(
    ("batching", "slices", "message"),
    [
        (MicroBatching(rows=3), [3, 1, 1, 1], "1 responses"),
        # A prompt and three tokens; half of this has room for only one row.
        (MicroBatching(), [3, 1, 1, 1], f"{(PROMPT + 3) // 2} tokens"),
    ],
)
def test_passes_that_do_not_fit_are_halved_and_reported(batching, slices, message, caplog):
    learner, seen = make_learner(batching=batching), []
    metrics = learner.update([make_batch()], full_beyond(learner, 2, seen))
    assert seen == slices
    assert metrics == pytest.approx({"value_loss": 41 / 6, "grad_norm": 3.0, "lr": 0.5, "skipped_steps": 0.0})
    (record,) = caplog.records
    assert record.getMessage() == (
        "the device has no room for an update of the critic in passes of this size; the step is repeated with half of "
        f"it, {message} per pass from now on, which is slower. To use less memory, set {LOWERS_MEMORY}"
    )


@pytest.mark.parametrize(
    ("rows", "room", "options", "message"),
    [
        (3, 0, {}, "the device has no room for half a pass of an update."),
        (1, 0, {}, "the device has no room to learn from a single response."),
        (1, 0, {"ranks": Ranks(None, 1, 2)}, "the device has no room to learn from a single response."),
    ],
    ids=["half", "one", "one of a rank"],
)
def test_a_pass_that_does_not_fit_is_reported_with_advice(rows, room, options, message):
    learner = make_learner(rows, **options)
    with pytest.raises(DeviceFull) as refused:
        learner.update([make_batch()], full_beyond(learner, room, []))
    assert str(refused.value) == f"{message} {TORCH_SAYS} Set {LOWERS_MEMORY}"
    assert learner.model.w.item() == 0 and learner.model.w.grad is None


def test_a_full_rank_stores_half_the_size_for_the_next_attempt():
    """Other ranks wait in the middle of their pass, so there is no retry here."""
    learner, seen, kept = make_learner(3, ranks=Ranks(None, 1, 2)), [], []
    learner.keep_cut = kept.append
    with pytest.raises(PassesCut) as message:
        learner.update([make_batch()], full_beyond(learner, 1, seen))
    assert (seen, kept) == ([3], [1]) and learner.model.w.item() == 0 and learner.model.w.grad is None
    assert str(message.value) == (
        "the device of rank 1 has no room for its part of an update of the critic; all ranks make passes of 1 "
        f"responses from now on, which is slower. {TORCH_SAYS} To use less memory, set {LOWERS_MEMORY}; "
    )


def full_with_kept_layers(learner, seen):
    """The loss of values on a device without room for the activations of kept layers; two rows fit otherwise."""
    inner = full_beyond(learner, 2, seen)

    def full(batch):
        if learner.kept_layers:
            seen.append("kept")
            raise torch.OutOfMemoryError(TORCH_SAYS)
        return inner(batch)

    return full


@pytest.mark.parametrize(("rows", "passes", "cut_to"), [(2, ["kept", 2, 1], 0), (3, ["kept", 3, 1, 1, 1], 1)])
def test_activations_are_given_up_before_passes_are_halved(rows, passes, cut_to, caplog):
    learner, seen, layers = make_learner(rows), [], [nn.Identity(), nn.Identity()]
    learner.kept_layers = layers
    metrics = learner.update([make_batch()], full_with_kept_layers(learner, seen))
    assert seen == passes and learner.cut_to == cut_to and learner.kept_layers == ()
    assert all(layer.gradient_checkpointing for layer in layers)
    assert metrics == pytest.approx({"value_loss": 41 / 6, "grad_norm": 3.0, "lr": 0.5, "skipped_steps": 0.0})
    assert len(caplog.records) == 1 + bool(cut_to)
    assert caplog.records[0].getMessage() == (
        "the device has no room for the activations that 2 layers keep (enable_gradient_checkpointing=auto); the step "
        "is repeated, and they are recomputed from now on, which is slower"
    )


def test_a_full_rank_forbids_kept_layers_for_the_next_attempt():
    learner, told = make_learner(3, ranks=Ranks(None, 1, 2)), []
    learner.kept_layers, learner.forbid_kept_layers = [nn.Identity()], lambda: told.append("none")
    learner.keep_cut = told.append
    with pytest.raises(PassesCut) as message:
        learner.update([make_batch()], full_with_kept_layers(learner, []))
    assert told == ["none"], "the size stays"
    assert str(message.value) == (
        "the device of rank 1 has no room for the activations that 1 layers keep (enable_gradient_checkpointing=auto). "
        f"{TORCH_SAYS} All ranks recompute them from now on, which is slower; "
    )


@pytest.mark.parametrize(("found", "saved", "then"), [(0, 0, 0), (0, 8, 8), (4, 0, 4), (4, 8, 4), (8, 4, 4)])
def test_the_size_is_the_smaller_of_checkpoint_and_last_attempt(found, saved, then, monkeypatch):
    learner = make_learner()
    monkeypatch.setattr("mtrl.workers.learner.load_weights", lambda *given: None)
    monkeypatch.setattr("mtrl.workers.learner.restore_optimizer_state", lambda *given: None)
    monkeypatch.setattr("mtrl.workers.learner.read_counters", lambda directory: {"version": 3, "cut_to": saved})
    learner.cut_to = found
    learner.restore("somewhere")
    assert (learner.cut_to, learner.version) == (then, 3)


@pytest.mark.parametrize(("name", "made"), [({}, torch.optim.AdamW), ({"name": "adamw_8bit"}, torch.optim.SGD)])
def test_the_optimizer_by_its_name(name, made, monkeypatch):
    """The 8-bit one needs bitsandbytes; any other stands for it here."""
    monkeypatch.setattr(learner, "EightBitAdamW", lambda parameters, **common: torch.optim.SGD(parameters))
    settings = OptimizerSettings(**name)
    assert settings.name == name.get("name", "adamw")
    assert isinstance(make_optimizer([torch.zeros(1, requires_grad=True)], settings, fused=False), made)
