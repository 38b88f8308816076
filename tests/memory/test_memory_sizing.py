"""Passes are as large as the device allows: they are halved before the first step until they fit, estimated in the same
way by `mtrl doctor`, and used by the learners."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_models import checkpoint, get_encoder

from mtrl.compose.memory_limits import is_sized_by_memory
from mtrl.config import load_config
from mtrl.memory.estimate import estimate, shrink_to_fit
from mtrl.memory.pass_sizes import fit_passes
from mtrl.memory.plan import Plan
from mtrl.memory.preflight import DoesNotFit, Limits, half_pass_tokens
from mtrl.models.families import load_model_config
from mtrl.types import Needs, Sampling
from mtrl.workers.micro_batches import MicroBatching

FAMILY = "qwen2_5_vl"
LIMITS = Limits(
    prompts=4, prompts_per_update=4, sampling=Sampling(n=8, max_new_tokens=16), prompt_tokens=90, max_pixels=56**2,
    update=MicroBatching(at_least=1000), probe=MicroBatching(at_least=4000), needs=Needs("old_logprobs", "dependency"),
)  # fmt: skip
GROUP = 90 + 8 * 16  # tokens; a step has four: 872


def passes_that_fit(**most):
    """Passes on a device with room for this many tokens in each phase; records the tried sizes."""
    tried = []

    def run_once(limits):
        tried.append((limits.probe.tokens, limits.update.tokens))
        for phase, batching, given in (("probe", limits.probe, 2 * 872), ("update", limits.update, 872)):
            if (batching.tokens or given) > most.get(phase, 1 << 30):
                raise DoesNotFit(phase, "memory: it does not fit")
        return {"update": 1}

    return run_once, tried


@pytest.mark.parametrize(
    ("most", "tried"),
    [
        ({}, [(None, None)]),
        ({"update": 500}, [(None, None), (436, 436)]),
        ({"update": 250}, [(None, None), (436, 436), (218, 218)]),
        ({"probe": 900}, [(None, None), (872, 872)]),  # two views
        ({"probe": 900, "update": 500}, [(None, None), (872, 872), (436, 436)]),
    ],
)
def test_passes_are_halved_until_they_fit(most, tried, capfd):
    run_once, found = passes_that_fit(**most)
    learners = [SimpleNamespace(cut_to=0), SimpleNamespace(cut_to=0)]
    assert fit_passes(run_once, LIMITS, SimpleNamespace(encoder=get_encoder(FAMILY)), learners) == {"update": 1}
    assert found == tried
    assert [learner.cut_to for learner in learners] == 2 * [tried[-1][1] or 0]
    assert capfd.readouterr().err.count("they are reduced to") == len(tried) - 1


def test_configured_or_indivisible_passes_are_an_error():
    policy, learner = SimpleNamespace(encoder=get_encoder(FAMILY)), SimpleNamespace(cut_to=0)
    run_once, tried = passes_that_fit(update=500)
    with pytest.raises(DoesNotFit):
        fit_passes(run_once, LIMITS, policy, [])
    run_once, tried = passes_that_fit(update=3)  # less than a response takes
    with pytest.raises(DoesNotFit):
        fit_passes(run_once, LIMITS, policy, [learner])
    assert len(tried) > 3
    assert half_pass_tokens(LIMITS, policy.encoder, "sample") is None, "the engine cuts its own batches"


def test_a_configured_budget_is_kept():
    key = "worker.actor.tokens_per_micro_batch"
    assert is_sized_by_memory(load_config(None, {}))
    assert not is_sized_by_memory(load_config(None, {key: 4096}))
    assert not is_sized_by_memory(load_config(None, {"worker.actor.dynamic_batching": False}))


def test_a_cut_makes_no_pass_larger():
    assert MicroBatching(100).within(200) == MicroBatching(100)
    assert MicroBatching(100).within(50) == MicroBatching(50)
    assert MicroBatching(at_least=100).within(200) == MicroBatching(200, at_least=100)
    assert MicroBatching(rows=4).within(8) == MicroBatching(rows=4)


@pytest.mark.slow  # 4 s
def test_the_estimate_uses_the_size_of_a_run():
    config = load_model_config(str(checkpoint(FAMILY)))
    plan = Plan(LIMITS)
    whole = estimate(config, plan)
    assert shrink_to_fit(config, plan, whole, whole.peak_bytes) == (plan, whole)
    halved = replace(plan, limits=LIMITS.within(half_pass_tokens(LIMITS, get_encoder(FAMILY), whole.fullest)))
    less = estimate(config, halved)
    assert whole.held_bytes < less.peak_bytes < whole.peak_bytes
    cut, found = shrink_to_fit(config, plan, whole, less.peak_bytes)
    assert (cut, found.phases, found.held) == (halved, less.phases, less.held)
    assert shrink_to_fit(config, plan, whole, whole.held_bytes // 2) == (plan, whole), "smaller passes are no help"
