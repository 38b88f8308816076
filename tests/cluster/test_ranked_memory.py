"""The memory preflight and a full device on two ranks. No device is really full here: a loss raises the error."""

import pickle

import pytest
import torch
from rank_helpers import run_ranks
from sharded_helpers import LOSS, TEXT_AND_ONE_IMAGE, make_batches, make_worker
from tiny_models import get_encoder

from mtrl.memory.kept_layers import KeepableLayers, choose_kept_layers
from mtrl.memory.live_tensors import LiveTensors
from mtrl.memory.pass_sizes import PassSizes
from mtrl.memory.preflight import Limits, preflight
from mtrl.models.activation_checkpointing import keepable_layers, measure_recomputed
from mtrl.models.state_dicts import exported_weights
from mtrl.types import Needs, Sampling
from mtrl.workers.micro_batches import MicroBatching

FAMILY = "qwen2_5_vl"
LIMITS = Limits(
    prompts=2, prompts_per_update=2, sampling=Sampling(n=2, max_new_tokens=4), prompt_tokens=40, max_pixels=56**2,
    update=MicroBatching(60), probe=MicroBatching(60),
    needs=Needs("old_logprobs", "entropy", "dependency", "attention_mass"),
)  # fmt: skip


def copy_weights(worker):
    return {name: weight.clone() for name, weight in exported_weights(worker.model).items()}


def rehearsed(ranks, batches):
    """Updates after a rehearsal, and without one."""
    batching = MicroBatching(tokens=60, ranks=ranks)
    found = []
    for rehearses in (True, False):
        actor = make_worker("actor", FAMILY, batching, ranks)
        critic = make_worker("critic", FAMILY, batching, ranks)
        if rehearses:
            options = {"has_states": False, "critic": critic.forward}
            peaks = preflight(actor.forward, get_encoder(FAMILY), LIMITS, None, **options)
            assert list(peaks) == ["optimizer", "probe", "update", "critic"] and min(peaks.values()) > 0
            assert all(p.grad is None for p in [*actor.model.parameters(), *critic.model.parameters()])
        found.append(([actor.update([batch], LOSS) for batch in batches], copy_weights(actor)))
    return found


@pytest.mark.slow
def test_a_preflight_on_ranks_changes_no_state(tmp_path):
    batches = make_batches("actor", FAMILY, TEXT_AND_ONE_IMAGE)[:2]
    for after, without in run_ranks(2, rehearsed, tmp_path, batches):
        assert after[0] == without[0] and all(torch.equal(after[1][name], each) for name, each in without[1].items())


def with_kept_layers(ranks, batches):
    """Updates with all layers checkpointed, and with those that keep their activations after a choice: the first rank
    has room for all of them, the second one for two."""
    found = []
    for chooses in (False, True):
        actor = make_worker("actor", FAMILY, MicroBatching(tokens=60, ranks=ranks), ranks, checkpointing=True)
        if chooses:
            layers, live = keepable_layers(actor.model), LiveTensors()
            room = lambda: 1 << 40 if ranks.is_first else sum(costs[:2])  # noqa: E731
            keepable = KeepableLayers(layers, lambda live=live: live.now, room, ranks)
            with live, keepable.measure(), measure_recomputed(layers, keepable.allocated) as costs:
                preflight(actor.forward, get_encoder(FAMILY), LIMITS, None, has_states=True, only=["update"])
            arguments = (keepable, None, LIMITS, get_encoder(FAMILY), actor.learner)
            choose_kept_layers(*arguments, at_least=None, verify=False)
            assert [layer.gradient_checkpointing for layer in layers[:3]] == [False, False, True]
        metrics = [actor.update([batch], LOSS) for batch in batches]
        found.append((len(actor.learner.kept_layers), metrics, copy_weights(actor)))
    return found


def test_all_ranks_keep_the_same_layers_and_the_same_numbers(tmp_path):
    batches = make_batches("actor", FAMILY, TEXT_AND_ONE_IMAGE)[:2]
    for checkpointed, kept in run_ranks(2, with_kept_layers, tmp_path, batches):
        assert (checkpointed[0], kept[0]) == (0, 2) and kept[1] == checkpointed[1]
        assert all(torch.equal(kept[2][name], weight) for name, weight in checkpointed[2].items())


def one_is_full(ranks, batches, file):
    """The second rank's device is full in the middle of the second update. The first rank only notices that the other
    one has ended; the driver ends both."""
    kept = PassSizes(file)
    worker = make_worker("actor", FAMILY, MicroBatching(tokens=10**6, ranks=ranks), ranks)
    kept.apply(worker.learner)
    began_with = worker.learner.cut_to
    metrics = [worker.update(batches[:1], LOSS)]
    if not began_with and not ranks.is_first:
        fine = worker._loss

        def full(batch, loss, prepared):
            fine(batch, loss, prepared)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory ..")

        worker._loss = full
    metrics.append(worker.update(batches[1:2], LOSS))
    return began_with, len(worker.learner.batching.split(batches[0].rollouts)), metrics, copy_weights(worker)


def test_the_next_attempt_of_all_ranks_has_smaller_passes(tmp_path):
    """Both ranks have all rows."""
    batches, file = make_batches("actor", FAMILY, TEXT_AND_ONE_IMAGE), tmp_path / "passes.json"
    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 2: .*(Connection closed|reset) by peer"):
        run_ranks(2, one_is_full, tmp_path / "ranks", batches, file)
    message = pickle.loads((tmp_path / "ranks" / "result_1").read_bytes())[1]
    assert "PassesCut: the device of rank 1 has no room for its part of an update of the actor" in message
    expected = make_worker("actor", FAMILY, MicroBatching(tokens=10**6))
    whole = [expected.update([batch], LOSS) for batch in batches[:2]]
    for began_with, passes, metrics, _ in run_ranks(2, one_is_full, tmp_path / "again", batches, file):
        assert began_with > 0 and passes > 1
        for ours, theirs in zip(metrics, whole, strict=True):
            assert ours["grad_norm"] == pytest.approx(2 * theirs["grad_norm"], rel=1e-3)
