"""Weights, gradients and optimizer state of a sharded model in CPU memory: bitwise the same numbers. On a GPU:
`tests/gpu/test_sharding_cuda.py`."""

from itertools import pairwise

import pytest
import torch
from rank_helpers import run_ranks
from sharded_helpers import LOSS, NEEDS, TEXT_AND_ONE_IMAGE, make_batches, make_worker
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from mtrl.models.parallel.fsdp import local_tensor
from mtrl.models.state_dicts import exported_weights
from mtrl.workers import offload
from mtrl.workers.micro_batches import MicroBatching

FAMILY, BEFORE = "qwen2_5_vl", 2
OFFLOADED = {"weights": {"cpu_offload": True}, "optimizer": {"offload_optimizer": True}}


def learnt(worker, batches):
    """The signals of the rows, metrics and weights; every rank has all rows."""
    signals = worker.probe(batches[0].rollouts, NEEDS, 4)
    metrics = [worker.update([batch], LOSS) for batch in batches]
    return signals, metrics, {name: weight.clone() for name, weight in exported_weights(worker.model).items()}


def all_ways(ranks, batches, folder):
    """Without offload, with each kind of it, and from a checkpoint that such a worker wrote in between."""
    offload.PIECE = 60_000  # in this process: a few weights per piece
    batching = MicroBatching(tokens=60, ranks=ranks)
    build = lambda options: make_worker("actor", FAMILY, batching, ranks, **options)  # noqa: E731
    found = {"plain": learnt(build({}), batches)}
    for name, options in OFFLOADED.items():
        worker = build(options)
        learnt(worker, batches[:BEFORE])
        check_where(worker, **options)
        snapshot = worker.snapshot()
        (folder / name).mkdir(exist_ok=True)
        snapshot.write(folder / name)
        found[name] = learnt(worker, batches[BEFORE:])
        again = build(options)
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
