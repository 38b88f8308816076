"""Engines of two ranks return the rows of one engine, before and after a change of the gathered weights; rows are
distributed in whole groups."""

from dataclasses import dataclass, field

import pytest
import torch
from helpers import fake_rollouts
from rank_helpers import run_ranks
from sharded_helpers import LOSS, actor_batch, as_streams, same_responses
from tiny_models import checkpoint, fresh_backbone, get_encoder, prompts_for, shared_backbone

from mtrl.compose.policy import build_actor, make_forward
from mtrl.compose.worker_groups import WorkerPlan, build_roles
from mtrl.config import load_config
from mtrl.distributed.generator_proxy import DistributedGenerator, EngineHandle, partition_prompts
from mtrl.distributed.learner_proxy import DistributedLearner, partition_rows
from mtrl.distributed.torchrun_group import TorchrunWorkerGroup, serve
from mtrl.models.load_model import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling

FAMILY = "qwen2_5_vl"
SAMPLING = Sampling(n=3, max_new_tokens=6, seed=5, step=2)


def config_for(path):
    return load_config(
        None,
        {
            "worker.actor.model.model_path": str(path),
            "worker.actor.fsdp.mixed_precision_dtype": "fp32",
            "worker.actor.optim.lr": 1e-3,
            "worker.actor.optim.warmup_steps": 0,
            "worker.actor.global_batch_size": 2,
            "dataset.rollout_batch_size": 2,
            "training.n_gpus_per_node": 2,
            "optimization.advantage_estimator": "gae",
        },
    )


def prompts():
    """The samples of a task that a step takes twice are numbered consecutively, on whichever rank its prompts are."""
    found = prompts_for(FAMILY)
    return [*found, found[0]]


def steps(actor, generator):
    """Responses, an update on them, and responses of the new weights."""
    with generator.resident():
        first = generator.generate(prompts(), SAMPLING)
    signals = actor.probe(first, Needs("old_logprobs"), 0)
    actor.update([actor_batch("actor", first, signals, 1)], LOSS)
    with generator.resident():
        weights = actor.publish()
        generator.load(weights)
        second = generator.generate(prompts(), Sampling(**vars(SAMPLING) | {"version": weights.version}))
    return first, second


def on_rank(ranks, path):
    plan = WorkerPlan(config_for(path), steps=4, has_reference=True, syncs_reference=True, has_critic=True)
    roles = build_roles(plan, ranks)
    assert set(roles) == {"actor", "engine", "critic", "reference", "preflight"}
    if not ranks.is_first:
        return serve(ranks, roles)
    worker_group = TorchrunWorkerGroup(ranks, roles)
    actor = DistributedLearner(worker_group, "actor")
    found = steps(actor, DistributedGenerator(worker_group))
    moved = actor.probe(found[0], Needs("old_logprobs", "ref_logprobs"), 0)
    assert (moved.old_logprobs - moved.ref_logprobs).abs().max() > 1e-3, "the reference stays"
    worker_group.call("reference", "sync", [()] * 2)
    again = actor.probe(found[0], Needs("old_logprobs", "ref_logprobs"), 0)
    torch.testing.assert_close(again.old_logprobs, again.ref_logprobs)
    assert (
        DistributedLearner(worker_group, "critic").probe(found[0], Needs("values"), 0).values.shape
        == found[0].mask.shape
    )
    worker_group.close()
    return as_streams(found)


@pytest.mark.slow
def test_two_engines_return_the_rows_of_one(tmp_path):
    path = checkpoint(FAMILY)
    encoder = get_encoder(FAMILY)
    forward = make_forward(config_for(path), encoder, load_model(path))
    actor = build_actor(config_for(path), forward, encoder, 4)
    expected = steps(actor, LocalGenerator(forward.backbone, encoder))
    found, _ = run_ranks(2, on_rank, tmp_path, path)
    same_responses(found, expected)
    assert fresh_backbone(FAMILY).output_matrix.shape == forward.backbone.output_matrix.shape


@dataclass
class InTurn:
    """Ranks in this process, called one after the other; stores their calls."""

    size: int
    engine: EngineHandle
    asked: list = field(default_factory=list)

    def call(self, role, method, arguments):
        assert len(arguments) == self.size
        self.asked = [[prompt.task.id for prompt in prompts] for prompts, _ in arguments]
        return [getattr(self.engine, method)(*each) for each in arguments]


@pytest.mark.parametrize(("ranks", "tp_size"), [(2, 1), (2, 2), (4, 2), (6, 2), (6, 3)])
def test_ranks_of_one_engine_get_the_same_prompts(ranks, tp_size):
    """Their rows count once and equal those of a single engine for any number of ranks; some ranks have no rows."""
    alone = LocalGenerator(shared_backbone(FAMILY), get_encoder(FAMILY))
    worker_group = InTurn(ranks, EngineHandle(alone, publish=None))
    found = DistributedGenerator(worker_group, tp_size).generate(prompts(), SAMPLING)
    expected = alone.generate(prompts(), SAMPLING)
    assert found.text == expected.text and torch.equal(found.group, expected.group)
    assert torch.equal(found.tokens.where(found.mask, 0), expected.tokens.where(expected.mask, 0))
    engines = [worker_group.asked[first : first + tp_size] for first in range(0, ranks, tp_size)]
    assert all(each == [each[0]] * tp_size for each in engines)
    assert sum(len(each[0]) for each in engines) == len(prompts())


def test_prompts_of_a_task_stay_together():
    shares = partition_prompts(prompts(), 2)
    assert sorted(place for share in shares for place in share) == [0, 1, 2, 3, 4]
    assert any({0, 4} <= set(share) for share in shares) and all(share == sorted(share) for share in shares)
    assert partition_prompts(prompts()[:1], 3) == [[0], [], []]


def test_rows_are_dealt_out_in_whole_groups():
    rollouts = fake_rollouts([2, 9, 3, 3, 1, 8], group=[0, 0, 1, 2, 2, 3])
    dealt = partition_rows(rollouts, 2)
    assert torch.cat(dealt).sort().values.tolist() == list(range(6))
    groups = [set(rollouts.group[rows].tolist()) for rows in dealt]
    assert not groups[0] & groups[1]
    tokens = [int(rollouts.mask[rows].sum()) + 7 * len(found) for rows, found in zip(dealt, groups, strict=True)]
    assert max(tokens) - min(tokens) <= 18, "no more than the largest group"
    assert [len(rows) for rows in partition_rows(fake_rollouts([1, 2]), 3)] == [2, 0, 0]
