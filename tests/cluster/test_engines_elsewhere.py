"""Ranks that sample by a vLLM server, or by an engine from a user's file. The server is a fake with vLLM's endpoints
(tests/cluster/test_vllm_ranks.py has a real one)."""

from pathlib import Path

import pytest
import torch
from fake_vllm_server import FakeServer
from rank_helpers import run_ranks
from sharded_helpers import as_streams, same_responses
from test_engines_apart import ThreadedEngines, plan_for
from test_ranked_generation import FAMILY, SAMPLING, prompts, steps
from tiny_models import checkpoint, get_encoder, plain_model

from mtrl.compose.policy import build_actor, make_forward
from mtrl.compose.vllm_engine import build_vllm
from mtrl.compose.worker_groups import build_roles, make_generator
from mtrl.distributed.dedicated_engines import DedicatedGenerator
from mtrl.distributed.generator_proxy import FirstRankGenerator
from mtrl.distributed.learner_proxy import DistributedLearner
from mtrl.distributed.torchrun_group import TorchrunWorkerGroup, serve
from mtrl.models.load_model import load_model
from mtrl.models.state_dicts import exported_weights
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Weights
from mtrl.utils.errors import RunError, StartError

OWN = Path(__file__).with_name("own_engines.py")
SHARED_DEVICES = {"worker.hybrid_engine": True, "worker.rollout.n_gpus": None}


def on_rank(ranks, plan):
    """Responses by the ranks' engines before and after an update."""
    roles = build_roles(plan, ranks)
    if not ranks.is_first:
        return serve(ranks, roles)
    worker_group = TorchrunWorkerGroup(ranks, roles)
    generator = make_generator(plan, worker_group)
    assert isinstance(generator, FirstRankGenerator) == (plan.config.worker.rollout.mode == "server")
    found = steps(DistributedLearner(worker_group, "actor"), generator)
    worker_group.close()
    return as_streams(found)


# --------------------------------------------------------------------------------------------------------- one server
class FakeSampler(FakeServer):
    """Its responses depend on the seed and on the version of the weights, as vLLM's do."""

    def __init__(self, model):
        super().__init__(model=model)
        self.all_lengths = {tuple(prompt.engine_ids.tolist()): len(prompt.ids) for prompt in prompts()}

    def read_length(self, body):
        return self.all_lengths[tuple(body["token_ids"])]

    def sample(self, seed, number):
        version = int(self.label.partition(":")[2] or 0)
        return [40 + (seed + 7 * version) % 50, 40 + number]

    @property
    def files(self):
        return [content for path, content in self.asked if path == "file"]


@pytest.fixture
def start():
    servers = []

    def begin():
        servers.append(FakeSampler(str(checkpoint(FAMILY))))
        return servers[-1]

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def on_server(path, address):
    words = {"worker.rollout.name": "vllm", "worker.rollout.mode": "server", "worker.rollout.address": address}
    return plan_for(path, **words, **SHARED_DEVICES)


def test_ranks_sample_by_one_server_as_one_process_does(tmp_path, start):
    """The first rank alone speaks to it, and sends it the gathered weights of all."""
    path, alone, shared = checkpoint(FAMILY), start(), start()
    plan = on_server(path, alone.address)
    forward = make_forward(plan.config, get_encoder(FAMILY), load_model(path))
    engine = build_vllm(plan.config, str(path), forward, forward.encoder, gets_weights=True)
    expected = steps(build_actor(plan.config, forward, forward.encoder, 4), engine)
    engine.close()
    found, _ = run_ranks(2, on_rank, tmp_path, on_server(path, shared.address))
    same_responses(found, expected)
    asked = [[path for path, _ in server.asked if path.startswith("/inf")] for server in (alone, shared)]
    assert len(asked[0]) == len(asked[1]) == 2 * len(prompts()), "each prompt once"
    assert len(shared.files) == 2
    for mine, theirs in zip(shared.files, alone.files, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6)


def server_ends(ranks, plan):
    """The ranks serve on after the failed calls."""
    roles = build_roles(plan, ranks)
    if not ranks.is_first:
        return serve(ranks, roles)
    worker_group = TorchrunWorkerGroup(ranks, roles)
    generator, actor = make_generator(plan, worker_group), DistributedLearner(worker_group, "actor")
    roles["engine"].generator.host.url = "http://127.0.0.1:1"  # nothing is there
    said = []
    for call in (lambda: generator.generate(prompts(), SAMPLING), lambda: generator.load(actor.publish())):
        with pytest.raises(RunError) as raised, generator.resident():
            call()
        said.append(str(raised.value))
    assert actor.publish().version == 0
    worker_group.close()
    return said


def test_a_server_that_ends_leaves_ranks_that_can_save(tmp_path, start):
    said, _ = run_ranks(2, server_ends, tmp_path, on_server(checkpoint(FAMILY), start().address))
    assert len(said) == 2 and all("http://127.0.0.1:1 cannot be reached" in each for each in said)


def fails_to_start(ranks, plan):
    with pytest.raises(StartError) as raised:
        build_roles(plan, ranks)
    return str(raised.value)


def test_a_server_that_is_not_there_ends_all_ranks_at_the_start(tmp_path):
    said = run_ranks(2, fails_to_start, tmp_path, on_server(checkpoint(FAMILY), "127.0.0.1:1"))
    assert len(set(said)) == 1 and "http://127.0.0.1:1 cannot be reached" in said[0]
    assert "is the server running?" in said[0]


# -------------------------------------------------------------------------------------------- an engine of one's own
@pytest.fixture
def own():
    return lambda name, **keys: plan_for(checkpoint(FAMILY), **{"worker.rollout.name": f"{OWN}:{name}", **keys})


@pytest.fixture(scope="module")
def expected():
    """By the local engine, in one process."""
    path, encoder = checkpoint(FAMILY), get_encoder(FAMILY)
    config = plan_for(path).config
    forward = make_forward(config, encoder, load_model(path))
    return steps(build_actor(config, forward, encoder, 4), LocalGenerator(forward.backbone, encoder))


def test_an_own_engine_gets_a_whole_model_on_each_rank(tmp_path, own, expected):
    found, _ = run_ranks(2, on_rank, tmp_path, own("Samples", **SHARED_DEVICES))
    same_responses(found, expected)


def test_a_dedicated_engine_of_ones_own_has_the_weights_of_the_ranks(tmp_path, own, expected):
    found, _ = run_ranks(2, apart, tmp_path, own("Samples"))
    same_responses(found[0], expected)


def apart(ranks, plan):
    roles = build_roles(plan, ranks)
    if not ranks.is_first:
        return serve(ranks, roles)
    worker_group = TorchrunWorkerGroup(ranks, roles)
    engines = ThreadedEngines(plan, worker_group, 2)
    generator = DedicatedGenerator(engines)
    generator.load(Weights(0, {}))
    own = [each["engine"].generator for each in engines.roles]
    found = None
    if hasattr(own[0], "local"):
        found = as_streams(steps(DistributedLearner(worker_group, "actor"), generator))
    else:
        generator.load(Weights(0, {}))
    worker_group.close()
    return found, [getattr(each, "seen", None) for each in own]


def reads_on_a_rank(ranks, plan):
    roles = build_roles(plan, ranks)
    assert roles["engine"].copy is None
    return roles["engine"].generator.seen


def test_an_own_engine_without_a_model_reads_what_it_wants(tmp_path, own):
    """Of dedicated engines the rest of the weights is taken, so that the next version arrives."""
    weights = exported_weights(plain_model(FAMILY))
    first = 0, float(next(iter(weights.values())).sum())
    assert run_ranks(2, reads_on_a_rank, tmp_path, own("Reads", **SHARED_DEVICES)) == [pytest.approx(first)] * 2
    (_, seen), _ = run_ranks(2, apart, tmp_path, own("Reads"))
    assert seen == [pytest.approx(first)] * 2
