"""Weights, gradients and optimizer state of a sharded model in CPU memory: bitwise the same numbers. On a GPU:
`tests/gpu/test_sharding_cuda.py`."""

from itertools import pairwise

import pytest
import torch
from offload_helpers import PoisonedWeights
from rank_helpers import run_ranks
from sharded_helpers import LOSS, NEEDS, TEXT_AND_ONE_IMAGE, actor_batch, make_batches, make_worker
from tiny_models import checkpoint, prompts_for
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from mtrl.compose import worker_groups
from mtrl.compose.worker_groups import WorkerPlan, build_roles
from mtrl.config import load_config
from mtrl.distributed.generator_proxy import DistributedGenerator
from mtrl.distributed.learner_proxy import DistributedLearner
from mtrl.distributed.torchrun_group import TorchrunWorkerGroup, serve
from mtrl.models.parallel.fsdp import local_tensor
from mtrl.models.state_dicts import exported_weights
from mtrl.types import Needs, Sampling
from mtrl.workers import offload
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import STAYING

FAMILY, BEFORE = "qwen2_5_vl", 2
OFFLOADED = {"weights": {"cpu_offload": True}, "optimizer": {"offload_optimizer": True}, "between phases": {}}


def learnt(worker, batches):
    """The signals of the rows, metrics and weights; every rank has all rows."""
    signals = worker.probe(batches[0].rollouts, NEEDS, 4)
    metrics = [worker.update([batch], LOSS) for batch in batches]
    return signals, metrics, {name: weight.clone() for name, weight in exported_weights(worker.model).items()}


def all_ways(ranks, batches, folder):
    """Without offload, with each kind of it, and from a checkpoint that such a worker wrote in between."""
    offload.PIECE = 60_000  # in this process: a few weights per piece
    batching = MicroBatching(tokens=60, ranks=ranks)

    def build(options, moves=False):
        worker = make_worker("actor", FAMILY, batching, ranks, **options)
        if moves:  # as for an engine that samples before the first pass
            worker.weights = PoisonedWeights(worker.model)
            worker.weights.offload()
        return worker

    found = {"plain": learnt(build({}), batches)}
    for name, options in OFFLOADED.items():
        moves = name == "between phases"
        worker = build(options, moves)
        learnt(worker, batches[:BEFORE])
        worker.weights.offload()
        check_where(worker, **options)
        snapshot = worker.snapshot()
        (folder / name).mkdir(exist_ok=True)
        snapshot.write(folder / name)
        found[name] = learnt(worker, batches[BEFORE:])
        again = build(options, moves)
        again.restore(ranks.broadcast_object(folder / name))
        found[f"{name} again"] = learnt(again, batches[BEFORE:])
        check_where(again, **options)
    return found


def check_where(worker, cpu_offload=False, offload_optimizer=False):
    units = [each for each in worker.model.modules() if isinstance(each, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    assert groups and all(isinstance(each.offload_policy, CPUOffloadPolicy) == cpu_offload for each in groups)
    if offload_optimizer:
        pieces = worker.learner.pieces
        parts = [[local_tensor(weight).nbytes for weight in piece] for piece, _ in pieces]
        assert len(parts) > 3
        for piece, following in pairwise(parts):
            assert sum(piece) + following[0] > offload.PIECE, "a piece is filled with this rank's shards"
        for piece, offloaded in pieces:
            states = [worker.learner.optimizer.state[p][kind] for p in piece for kind in ("exp_avg", "exp_avg_sq")]
            places = {place.data_ptr() for place in offloaded._buffers}
            assert {local_tensor(state).data_ptr() for state in states} == places, "they lie where they were parked"


@pytest.mark.slow
def test_numbers_are_bitwise_the_same(tmp_path):
    batches = make_batches("actor", FAMILY, TEXT_AND_ONE_IMAGE)[: BEFORE + 2]
    for found in run_ranks(2, all_ways, tmp_path / "ranks", batches, tmp_path):
        signals, metrics, weights = found.pop("plain")
        for way, (theirs, result, moved) in found.items():
            assert result == metrics[BEFORE:], way
            assert all(torch.equal(moved[name], weight) for name, weight in weights.items()), way
            assert theirs.ref_logprobs.equal(signals.ref_logprobs), f"{way}: the reference is what it was"


# ---------------------------------------------------------------------------------- engine and critic on the same ranks
def steps_on_rank(ranks, offloads):
    """Two steps of all roles as the loop takes them, and where the weights went on this rank."""
    moved = []

    def build_weights(config, policy):
        moved.extend([PoisonedWeights(policy.backbone.model)] if offloads else [])
        return moved[0] if offloads else STAYING

    worker_groups.build_weights = build_weights  # in this process
    keys = {
        "worker.actor.model.model_path": str(checkpoint(FAMILY)), "worker.actor.fsdp.mixed_precision_dtype": "fp32",
        "worker.actor.optim.lr": 1e-3, "worker.actor.optim.warmup_steps": 0, "worker.actor.global_batch_size": 2,
        "dataset.rollout_batch_size": 2, "training.n_gpus_per_node": 2, "optimization.advantage_estimator": "gae",
    }  # fmt: skip
    plan = WorkerPlan(load_config(None, keys), steps=4, has_reference=True, syncs_reference=True, has_critic=True)
    roles = build_roles(plan, ranks)
    numbers = []
    if ranks.is_first:
        group = TorchrunWorkerGroup(ranks, roles)
        numbers = take_steps(group)
        group.close()
    else:
        serve(ranks, roles)
    model = roles["actor"].worker.model
    weights = {name: weight.clone() for name, weight in exported_weights(model).items()}
    return numbers, weights, [each.moves for each in moved]


def take_steps(group):
    actor, critic, generator = (
        DistributedLearner(group, "actor"),
        DistributedLearner(group, "critic"),
        DistributedGenerator(group),
    )
    numbers = []
    for step in range(2):
        with generator.resident():
            sampling = Sampling(n=2, max_new_tokens=6, step=step, version=step)
            rollouts = generator.generate(prompts_for(FAMILY), sampling)
        signals = actor.probe(rollouts, Needs("old_logprobs", "ref_logprobs"), step)
        numbers += [rollouts.tokens.tolist(), signals.old_logprobs.tolist(), signals.ref_logprobs.tolist()]
        numbers.append(critic.probe(rollouts, Needs("values"), step).values.tolist())
        numbers.append(actor.update([actor_batch("actor", rollouts, signals, step)], LOSS))
        group.call("reference", "sync", [()] * 2)
        with generator.resident():
            generator.load(actor.publish())
    return numbers


@pytest.mark.slow
def test_weights_are_on_the_device_only_in_their_phases(tmp_path):
    plain, moved = (run_ranks(2, steps_on_rank, tmp_path / str(offloads), offloads) for offloads in (False, True))
    for (numbers, weights, _), (found, others, moves) in zip(plain, moved, strict=True):
        assert found == numbers
        assert all(torch.equal(others[name], weight) for name, weight in weights.items())
        # The engine's first weights; then probe, the critic's probe, update and publishing in each step.
        assert moves == [["off", *["on", "off", "on", "off"] * 2]]
