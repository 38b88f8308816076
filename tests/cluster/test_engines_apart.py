"""Dedicated engines, which get the weights of two ranks one by one, return the rows of a single engine."""

import queue
import threading

import pytest
import torch
from helpers import same
from rank_helpers import run_ranks
from sharded_helpers import as_streams, same_responses
from test_ranked_generation import FAMILY, config_for, steps
from tiny_models import checkpoint, get_encoder

from mtrl.compose.policy import build_actor, build_policy, make_forward
from mtrl.compose.worker_groups import WorkerPlan, build_dedicated_engine, build_roles
from mtrl.config import load_config
from mtrl.distributed.dedicated_engines import SENDER, DedicatedGenerator, IncomingWeights
from mtrl.distributed.learner_proxy import DistributedLearner
from mtrl.distributed.torchrun_group import TorchrunWorkerGroup, serve
from mtrl.models.load_model import load_model
from mtrl.models.state_dicts import weight_forms
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Weights


class ThreadedEngines:
    """`RemoteEngines` in threads of the process that drives the ranks, each with a queue for one weight."""

    def __init__(self, plan, worker_group, size):
        self.worker_group, self.size = worker_group, size
        self.queues = [queue.Queue(maxsize=1) for _ in range(size)]
        self.roles = [build_dedicated_engine(plan, each.get) for each in self.queues]
        self.names = []  # names of the sent weights, in order

    def start(self, role, method, arguments):
        results = [getattr(roles[role], method)(*given) for roles, given in zip(self.roles, arguments, strict=True)]
        return lambda: results

    def call(self, role, method, arguments):
        return self.start(role, method, arguments)()

    def transfer_weights(self, sender, receiver):
        versions = []
        load = lambda roles: versions.append(roles[receiver].load())  # noqa: E731
        threads = [threading.Thread(target=load, args=(roles,)) for roles in self.roles]
        for thread in threads:
            thread.start()
        own = self.worker_group.roles[sender]
        own.send, plain = lambda channel: plain(self.send), own.send  # this channel cannot go to other processes
        self.worker_group.call(sender, "send", [(None,)] * self.worker_group.size)
        del own.send
        for thread in threads:
            thread.join()
        return versions

    def send(self, messages):
        for head, tensor in messages:
            self.names.append(head)
            for each in self.queues:
                each.put((head, None if tensor is None else tensor.clone()))


def plan_for(path, **changes):
    config = config_for(path)
    keys = {"worker.hybrid_engine": False, "worker.rollout.n_gpus": 2} | changes
    words = {
        "worker.actor.model.model_path": str(path),
        "worker.actor.fsdp.mixed_precision_dtype": "fp32",
        "worker.actor.optim.lr": config.worker.actor.optim.lr,
        "worker.actor.optim.warmup_steps": 0,
        "worker.actor.global_batch_size": 2,
        "dataset.rollout_batch_size": 2,
        "training.n_gpus_per_node": 2,
    }
    return WorkerPlan(load_config(None, words | keys), 4, has_reference=False, syncs_reference=False, has_critic=False)


def on_rank(ranks, path, changes):
    plan = plan_for(path, **changes)
    roles = build_roles(plan, ranks)
    assert set(roles) == {"actor", "preflight", SENDER}, "no engine"
    if not ranks.is_first:
        return serve(ranks, roles)
    worker_group = TorchrunWorkerGroup(ranks, roles)
    engines = ThreadedEngines(plan, worker_group, 2)
    generator = DedicatedGenerator(engines)
    generator.load(Weights(0, {}))
    found = steps(DistributedLearner(worker_group, "actor"), generator)
    worker_group.close()
    assert engines.names.count((0, engines.names[0][1])) == 1 and len(engines.names) == 2 * len(engines.names[0][1]) + 2
    return as_streams(found)


def test_dedicated_engines_return_the_rows_of_one_engine(tmp_path):
    """Before an update of two ranks, and after it."""
    path, encoder = checkpoint(FAMILY), get_encoder(FAMILY)
    config = plan_for(path).config
    forward = make_forward(config, encoder, load_model(path))
    expected = steps(build_actor(config, forward, encoder, 4), LocalGenerator(forward.backbone, encoder))
    found, _ = run_ranks(2, on_rank, tmp_path, path, {})
    same_responses(found, expected)


@pytest.mark.slow
def test_dedicated_engines_get_merged_weights_of_a_base_in_4_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    path, changes = checkpoint(FAMILY), {"worker.actor.model.peft_type": "qlora", "worker.actor.optim.lr": 1e-2}
    config = plan_for(path, **changes).config
    encoder, forward = build_policy(config)
    expected = steps(build_actor(config, forward, encoder, 4), LocalGenerator(forward.backbone, encoder))
    found, _ = run_ranks(2, on_rank, tmp_path, path, changes)
    same_responses(found, expected)


def test_weights_arrive_in_their_order():
    forms = {"a": (torch.float32, (2,)), "b": (torch.float32, (1,))}
    sent = iter([("a", torch.ones(2)), ("c", torch.zeros(1))])
    weights = IncomingWeights(forms, lambda: next(sent))
    assert list(weights) == ["a", "b"] and len(weights) == 2 and "b" in weights
    assert weight_forms(weights) == forms, "known before a weight is taken"
    same(weights["a"], torch.ones(2))
    with pytest.raises(KeyError, match="the weight b was requested, but the next one is c"):
        weights["b"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_a_tensor_by_its_bytes(dtype, shape):
    pytest.importorskip("ray")
    from mtrl.distributed.weight_channel import from_bytes, raw_bytes, tensor_form

    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    stored = raw_bytes(tensor)
    stored.flags.writeable = False  # as it is in the store
    found = from_bytes(tensor_form(tensor), stored)
    same(found, tensor)
    assert found.dtype == dtype and found.shape == shape
