"""Which passes an actor runs, over which rows and views."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from helpers import fake_batch, fake_rollouts, same
from torch import nn

from mtrl.algorithms.losses import Loss
from mtrl.algorithms.vocab import TokenScores
from mtrl.checkpoint.records import record_tensors
from mtrl.models.parallel.ranks import SINGLE_PROCESS
from mtrl.types import Needs, Signals
from mtrl.workers.actor import ADVICE, LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching


class OneWeight(nn.Module):
    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))


@dataclass
class FakeForward:
    """A forward pass that records its calls and returns the number of each row (its version)."""

    backbone: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(model=OneWeight(), ranks=SINGLE_PROCESS, device=OneWeight.device)
    )
    asked: list = field(default_factory=list)
    support: float | None = None  # log of the probability mass that the sampler's cut keeps
    experts: float | None = None  # the share on which it and the sampler differ
    kept: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(begin=lambda *step: None, end=lambda: None))

    def start_signals(self, rollouts, needs=None, views=None):
        self.asked.append((rollouts.version.tolist(), needs, views))
        return lambda: Signals(
            old_logprobs=rollouts.version[:, None].float().expand(rollouts.mask.shape).where(rollouts.mask, 0.0)
        )

    def make_routing_reader(self, rollouts):
        return None if self.experts is None else self

    def gather_mismatch(self, routing, rollouts):
        return (self.experts * rollouts.mask)[rollouts.mask]

    def view_states(self, rollouts, routing=None, prepared=None):
        self.asked.append("policy")
        return [self.backbone.model.w.expand(int(rollouts.mask.sum()), 1)]

    def compare_views(self, original, others, rollouts, needs):
        return {}

    def prepare(self, rollouts, others=()):
        return None

    def score_tokens(self, hidden, rollouts, entropy=False):
        self.asked.append(entropy)
        logp = self.backbone.model.w.expand(int(rollouts.mask.sum()))
        support = None if self.support is None else torch.full(logp.shape, self.support)
        return TokenScores(logp, torch.full(logp.shape, 2.0) if entropy else None, support)


@dataclass
class FakeReference:
    asked: list = field(default_factory=list)
    forward: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(backbone=SimpleNamespace(model=None)))

    def start_signals(self, rollouts, needs, policy):
        self.asked.append((rollouts.version.tolist(), needs, policy))
        return lambda: Signals(ref_logprobs=-torch.ones(rollouts.mask.shape))

    def response_hidden(self, rollouts):
        self.asked.append(rollouts.version.tolist())
        return torch.zeros(int(rollouts.mask.sum()), 1)

    def divergence(self, ours, theirs, policy, rollouts):
        """The weight of the policy times three, at each token."""
        return 3 * (ours - theirs)[:, 0]


# Two groups of prompts of the same size, with four tokens each.
ROLLOUTS = fake_rollouts([2, 2, 3, 1], group=[0, 0, 1, 1])


def prompt_tokens():
    (size,) = {len(prompt.ids) for prompt in ROLLOUTS.prompts}
    return size


class Views:
    def media(self, name, prompt, step):
        return name, prompt.task.id, step


def make_actor(batching=None, reference=None, **options):
    batching = batching or MicroBatching(rows=2)
    return LocalActor(
        FakeForward(), OptimizerSettings(), views=Views(), update_batching=batching, probe_batching=batching,
        encoder_files={}, reference=reference, **options,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- probing
def test_a_probe_goes_over_the_rows_pass_by_pass():
    actor, rollouts = make_actor(), fake_rollouts([2, 1, 3])
    found = actor.probe(rollouts, Needs("old_logprobs"), 0)
    assert [rows for rows, _, _ in actor.forward.asked] == [[0, 1], [2]]
    same(found.old_logprobs, torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 2, 2]]))
    assert actor.forward.asked[0][1:] == (Needs("old_logprobs"), {}), "one view: nothing is perturbed"


def test_two_views_are_of_this_step():
    actor = make_actor(MicroBatching(rows=3))
    actor.probe(fake_rollouts([2, 1, 3], group=[0, 0, 1]), Needs("dependency"), 5)
    assert actor.forward.asked[0][2] == {"perturbed": [("perturbed", "p0", 5), ("perturbed", "p1", 5)]}


def test_without_needs_no_pass_runs():
    actor = make_actor()
    assert record_tensors(actor.probe(fake_rollouts([2, 1]), Needs(), 0)) == {}
    assert actor.forward.asked == []


@pytest.mark.parametrize("seen", [True, False])
def test_attention_is_read_only_for_rows_with_an_image(seen):
    actor = make_actor(MicroBatching(rows=2))
    actor.probe(
        fake_rollouts([2, 1], visual=[seen]), Needs("attention_mass", "prompt_attention_mass", "old_logprobs"), 0
    )
    assert actor.forward.asked[0][1] == (
        Needs("attention_mass", "prompt_attention_mass", "old_logprobs") if seen else Needs("old_logprobs")
    )
    actor.forward.asked.clear()
    actor.probe(fake_rollouts([2, 1], visual=[seen]), Needs("attention_mass"), 0)
    assert len(actor.forward.asked) == seen


def test_one_image_among_the_prompts_is_enough_to_read_attention():
    actor = make_actor()
    actor.probe(fake_rollouts([2, 1], group=[0, 1], visual=[False, True]), Needs("attention_mass"), 0)
    assert actor.forward.asked[0][1] == Needs("attention_mass")


@pytest.mark.parametrize("name", ["ref_logprobs", "divergence"])
def test_the_reference_computes_its_own_signals(name):
    actor = make_actor(reference=FakeReference())
    found = actor.probe(fake_rollouts([2, 1, 3]), Needs("old_logprobs", name, "values"), 0)
    assert [needs for _, needs, _ in actor.forward.asked] == [Needs("old_logprobs")] * 2
    assert [rows for rows, _, _ in actor.reference.asked] == [[0, 1], [2]]
    assert all(policy is actor.forward and name in needs for _, needs, policy in actor.reference.asked)
    assert found.old_logprobs is not None and found.ref_logprobs is not None
    actor.probe(fake_rollouts([2]), Needs("old_logprobs"), 0)
    assert len(actor.reference.asked) == 2, "not if it is not needed"


@pytest.mark.parametrize(("less", "passes"), [(0, [[0, 1, 2, 3]]), (1, [[0, 1], [2, 3]])])
def test_the_reference_reads_everything_once(less, passes):
    """Whatever the number of views of the policy's own pass."""
    actor = make_actor(MicroBatching(tokens=2 * (prompt_tokens() + 4) - less), reference=FakeReference())
    actor.probe(ROLLOUTS, Needs("dependency", "ref_logprobs"), 0)
    assert [rows for rows, _, _ in actor.reference.asked] == passes


def test_a_missing_reference_is_an_internal_error():
    with pytest.raises(AssertionError):
        make_actor().probe(fake_rollouts([1]), Needs("ref_logprobs"), 0)


# ------------------------------------------------------------------------------------------------------------- updating
@pytest.mark.parametrize("measured", [True, False])
def test_entropy_is_measured_by_the_update_where_no_probe_did(measured):
    actor, rollouts = make_actor(MicroBatching(rows=2)), fake_rollouts([2, 1])
    zeros = torch.zeros(2, 2)
    batch = fake_batch(rollouts, zeros if measured else None, zeros)
    metrics = actor.update([batch], Loss())
    assert actor.forward.asked == ["policy", not measured]
    assert ("entropy" in metrics) is not measured
    if not measured:
        assert metrics["entropy"] == pytest.approx(2.0), "the mean over its tokens"


@pytest.mark.parametrize("measured", [True, False])
def test_the_reference_computes_a_full_divergence_pass_by_pass(measured):
    """Before the policy's own pass, which then returns log-probs and divergence."""
    actor, rollouts = make_actor(MicroBatching(rows=2), reference=FakeReference()), fake_rollouts([2, 1, 3])
    zeros = torch.zeros(3, 3)
    batch = fake_batch(rollouts, zeros if measured else None, zeros)
    actor.model.w.data.fill_(0.5)
    metrics = actor.update([batch], Loss(divergence="full", divergence_coef=0.1))
    assert actor.reference.asked == [[0, 1], [2]]
    assert actor.forward.asked == ["policy", not measured] * 2
    assert metrics["divergence_loss"] == pytest.approx(1.5), "the mean over its tokens"
    assert metrics["grad_norm"] == pytest.approx(0.3), "only the coefficient is tripled"
    assert ("entropy" in metrics) is not measured
    with pytest.raises(AssertionError, match="reference"):
        make_actor().update([batch], Loss(divergence="full", divergence_coef=0.1))


def test_a_gradient_has_the_reference_where_its_loss_does(monkeypatch):
    batch = fake_batch(fake_rollouts([2, 1]), torch.zeros(2, 2), torch.zeros(2, 2))
    assert len(make_actor().gradient([batch], Loss())) == 1, "no reference is needed"
    actor, staged = make_actor(reference=FakeReference()), []
    monkeypatch.setattr(actor, "_with_reference", lambda work: staged.append(1) or work())
    (gradient,) = actor.gradient([batch], Loss(divergence="full", divergence_coef=0.1))
    assert staged == [1] and gradient.item() == pytest.approx(0.3)


def test_experts_are_compared_if_nothing_was_probed():
    actor, batch = make_actor(), fake_batch(fake_rollouts([2, 1]), torch.zeros(2, 2), torch.zeros(2, 2))
    fresh, probed = replace(batch, old_logprobs=None), batch
    assert "routing_mismatch" not in actor._start_pass(fresh, Loss())()[1], "a dense model"
    actor.forward.experts = 0.25
    assert actor._start_pass(fresh, Loss())()[1]["routing_mismatch"].item() == pytest.approx(0.25)
    assert "routing_mismatch" not in actor._start_pass(probed, Loss())()[1], "the probe has compared them"


def test_the_distance_to_the_sampler_is_measured_on_its_support():
    """The policy's log-prob is -1/2 for each token and log 1/2 for the support, so -1/2 - log 1/2 = 0.19 within it; the
    sampler's are 0, 1/4 and 1: distances of 0.19, 0.06 and 0.81, averaged."""
    actor, rollouts, zeros = make_actor(), fake_rollouts([2, 1]), torch.zeros(2, 2)
    behaviour = torch.tensor([[0.0, 0.25], [1.0, 9.0]])
    batch = fake_batch(replace(rollouts, rollout_logprobs=behaviour), zeros, zeros)
    actor.model.w.data.fill_(-0.5)
    _, metrics = actor._start_pass(batch, Loss())()
    assert "support_gap_mean" not in metrics, "nothing is cut"
    actor.forward.support = -math.log(2)
    _, metrics = actor._start_pass(batch, Loss())()
    within = math.log(2) - 0.5
    assert metrics["support_gap_mean"].item() == pytest.approx((within + (0.25 - within) + (1 - within)) / 3)
    assert not metrics["support_gap_mean"].requires_grad


# -------------------------------------------------------------------------------------------------- where weights lie
def make_reference(model):
    return FakeReference(forward=SimpleNamespace(backbone=SimpleNamespace(model=model)))


def test_nothing_is_offloaded_unless_requested():
    actor = make_actor(reference=make_reference(OneWeight()))
    assert actor.offloaded_reference is None and not actor.learner.pieces
    assert make_actor(offload_reference=True).offloaded_reference is None, "there is none"
    assert make_actor(offload_optimizer=True).learner.pieces


def test_an_offloaded_reference_is_on_the_device_during_its_pass():
    model = OneWeight()
    actor = make_actor(reference=make_reference(model), offload_reference=True)
    parked = model.w.data_ptr()
    seen = []
    actor._with_reference(lambda: seen.append(model.w.data_ptr()))
    assert list(actor.offloaded_reference.tensors()) == [model.w] and seen != [parked] and model.w.data_ptr() == parked


@pytest.mark.parametrize("own", [True, False])
def test_the_reference_is_unsharded_during_its_pass_unless_it_is_the_policy(own, monkeypatch):
    """The policy's own model is made whole pass by pass, and twice would be once too often."""
    whole = []
    monkeypatch.setattr("mtrl.workers.actor.run_frozen_forward", lambda model, work: whole.append(model) or work())
    actor = make_actor()
    model = actor.model if own else OneWeight()
    actor.reference = make_reference(model)
    actor.probe(fake_rollouts([2, 1, 3]), Needs("ref_logprobs"), 0)
    assert whole == ([] if own else [model]) and len(actor.reference.asked) == 2


def test_published_weights_and_snapshots():
    actor = make_actor()
    actor.learner.version = 4
    weights = actor.publish()
    assert weights.version == 4 and set(weights.tensors) == {"w"}
    assert actor.snapshot().counters["version"] == 4
    assert actor.learner.name == "actor" and actor.learner.advice == ADVICE
    assert ADVICE.startswith("Lower worker.actor.optim.lr, ") and ADVICE.endswith("mixed_precision_dtype).")
    assert "extreme values, or compute in fp32 (worker" in ADVICE
