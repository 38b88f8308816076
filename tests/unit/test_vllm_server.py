"""The client of a vLLM server, against a small HTTP server with vLLM's endpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_vllm_server import FakeServer, Handler

from mtrl.rollout.vllm import server_engine
from mtrl.rollout.vllm.requests import Request
from mtrl.rollout.vllm.server_engine import MAX_RESPONSES, VllmServer
from mtrl.utils.errors import RunError, StartError

PARAMS = {"n": 2, "temperature": 1.0, "logit_bias": {5: -1e9}}
TEXT = Request([1, 2, 3], (), 3, 11, 2)
SEEN = Request([1, 9, 3], (np.zeros((28, 28, 3), np.uint8),), 6, 12, 2)


@pytest.fixture
def start():
    servers = []

    def begin(**options):
        servers.append(FakeServer(**options))
        return servers[-1]

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def connect(fake, model="elsewhere/tiny"):
    return VllmServer(fake.address, model, torch.float32)


def test_a_server_that_other_machines_can_reach_is_refused(start, monkeypatch):
    """127.0.0.2 stands for another address of this machine."""
    monkeypatch.setattr(server_engine, "public_addresses", lambda: ["127.0.0.2"])
    assert connect(start()).takes_weights, "127.0.0.1 alone"
    everywhere = start(host="0.0.0.0")
    with pytest.raises(StartError, match=r"answers on 127\.0\.0\.2.*--host 127\.0\.0\.1"):
        connect(everywhere)
    assert not connect(start(host="0.0.0.0", development=False)).takes_weights, "nothing can be replaced there"
    monkeypatch.setenv("MTRL_TRUSTED_NETWORK", "1")
    assert connect(everywhere).takes_weights


def test_the_addresses_of_this_machine_are_not_loopback():
    assert not [
        address for address in server_engine.public_addresses() if address.startswith("127.") or address == "::1"
    ]


def test_the_key_is_sent(start, monkeypatch):
    locked = start(key="secret")
    with pytest.raises(StartError, match="401"):
        connect(locked)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert connect(locked).takes_weights


def test_requests_and_responses(start):
    fake = start()
    server = connect(fake)
    assert server.max_length == 99 and server.takes_weights
    answers = server.generate([TEXT, SEEN], PARAMS)
    assert [[row.tokens for row in answer] for answer in answers] == [[[11, 0], [11, 1]], [[12, 0], [12, 1]]]
    assert answers[0][0].logps == [-0.5, -1.5] and answers[0][0].version == "0"
    bodies = {body["sampling_params"]["seed"]: body for path, body in fake.asked}
    assert bodies[11]["token_ids"] == [1, 2, 3] and "content_parts" not in bodies[11]
    assert bodies[12]["content_parts"][0]["url"].startswith("data:image/png;base64,")


def test_no_request_exceeds_the_servers_limit(start):
    """Responses have the seeds of their indices, as in a single request."""
    fake = start()
    answers = connect(fake).generate([TEXT, SEEN], PARAMS | {"n": 2 * MAX_RESPONSES + 1})
    for answer, seed in zip(answers, (11, 12), strict=True):
        assert [sum(row.tokens) for row in answer] == [seed + i for i in range(2 * MAX_RESPONSES + 1)]
    assert sorted(body["sampling_params"]["n"] for _, body in fake.asked) == [1, 1, *4 * [MAX_RESPONSES]]


def test_weights_go_by_a_folder_and_every_cache_is_emptied(start):
    fake = start()
    server = connect(fake)
    tied = torch.ones(2, 2)
    server.load("run:4", {"a": tied, "b": tied})
    paths = [path for path, _ in fake.asked]
    assert paths == [
        "/collective_rpc", "file", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
        "/update_weight_version",
    ]  # fmt: skip
    assert dict(fake.asked)["file"].keys() == {"a", "b"}, "tied weights under both names"
    assert server.generate([TEXT], PARAMS)[0][0].version == "run:4"
    folder = Path(dict(fake.asked)["/collective_rpc"]["kwargs"]["weights_path"])
    server.close()
    assert not folder.exists()


def test_a_server_in_use_is_reported(start):
    fake = start()
    fake.busy = True
    server = connect(fake)
    with pytest.raises(RunError, match="did not empty its prefix cache, because another run uses it"):
        server.load("run:1", {"a": torch.ones(1)})
    server.close()


def test_without_development_endpoints_it_evaluates_alone(start):
    server = connect(start(development=False))
    assert not server.takes_weights and server.generate([TEXT], PARAMS)
    with pytest.raises(
        RunError, match=r"without VLLM_SERVER_DEV_MODE=1, so it accepts no weights and can only evaluate"
    ):
        server.load("run:1", {})


def test_a_server_without_the_token_endpoint_is_an_error_at_the_start(start):
    with pytest.raises(StartError, match=r"does not accept tokens; start the server with --enable-scale-out"):
        connect(start(tokens=False))


def test_log_probs_of_another_distribution_are_an_error_at_the_start(start):
    with pytest.raises(StartError, match=r"start the server with --logprobs-mode processed_logprobs"):
        connect(start(raw=True))


def test_other_images_are_noticed(start):
    server = connect(start(prompt_lengths=(3, 8)))
    with pytest.raises(RunError, match="reads a prompt as 8 tokens, the trainer as 6"):
        server.generate([SEEN], PARAMS)


def test_another_model_is_an_error(start):
    with pytest.raises(StartError, match="serves models/tiny, but the run uses elsewhere/large"):
        connect(start(), "elsewhere/large")


def test_no_server():
    with pytest.raises(StartError, match=r"127\.0\.0\.1:9 cannot be reached: .*; is the server running\?"):
        VllmServer("127.0.0.1:9", "tiny", torch.float32)


def test_something_else_there(start, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.answer(200, {"hello": "world"}))
    with pytest.raises(StartError, match="answers, but is not a vLLM server"):
        connect(start())


def test_an_error_of_the_server_is_one_line(start, monkeypatch):
    server = connect(start())
    said = {"error": {"message": "the prompt is\ntoo long", "code": 400}}
    monkeypatch.setattr(Handler, "do_POST", lambda self: self.answer(400, said))
    with pytest.raises(RunError, match=r"answers 400: the prompt is too long$"):
        server.generate([TEXT], PARAMS)
