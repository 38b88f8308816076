"""Command-line runs with the responses of a real vLLM server, started as described in docs/vllm.md."""

import json

import pytest
import torch
from run_helpers import get_run_dir, read_metrics, train_arguments
from vllm_engines import INSTALLED, end_servers, start_server, wait_until_ready

from mtrl import cli
from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY, SIZES
from mtrl.rollout.vllm.server_engine import TOKENS, VllmServer
from mtrl.utils.errors import StartError

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

ON_SERVER = ("worker.rollout.name=vllm", "worker.rollout.mode=server")


@pytest.fixture(scope="module")
def servers():
    """One that takes weights and one that does not."""
    yield [start_server(str(MODEL_DIRECTORY), development) for development in (True, False)]
    end_servers()


def training(output, address, *words):
    return cli.main(train_arguments(output, *ON_SERVER, f"worker.rollout.address={address}", *words))


def test_training(servers, tmp_path):
    """Also a second run, where the first one left its weights."""
    for name in ("first", "second"):
        assert (
            training(
                tmp_path / name, wait_until_ready(servers[0]), "training.max_steps=2", "worker.actor.optim.lr=1e-3"
            )
            == 0
        )
        rows = [row for row in read_metrics(get_run_dir(tmp_path / name)).values() if "actor/grad_norm" in row]
        assert len(rows) == 2 and max(row["rollout/logprob_gap_max"] for row in rows) < 1e-4


def test_one_that_takes_no_weights_evaluates_alone(servers, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "validation", 40)
    address, answers = wait_until_ready(servers[1]), []
    for engine in (["worker.rollout.name=local"], [*ON_SERVER, f"worker.rollout.address={address}"]):
        out = tmp_path / f"{len(engine)}.jsonl"
        words = [*engine, "worker.actor.fsdp.mixed_precision_dtype=fp32"]
        assert cli.main(["eval", str(MODEL_DIRECTORY), "--out", str(out), *words]) == 0
        answers.append([json.loads(line)["response"] for line in out.read_text().splitlines()])
    assert answers[0] == answers[1] and len(answers[0]) == 40
    capsys.readouterr()
    assert training(tmp_path / "run", address) != 0
    said = capsys.readouterr().err
    assert "was started without VLLM_SERVER_DEV_MODE=1, so it accepts no weights and can only evaluate" in said
    assert "Traceback" not in said


def test_another_model_is_an_error(servers):
    with pytest.raises(
        StartError, match=r"serves .*/zoo, but the run uses models/other; start the server with the model"
    ):
        VllmServer(wait_until_ready(servers[1]), "models/other", torch.float32)


def test_one_that_dies_in_the_middle_of_a_generation(servers, tmp_path, capsys, monkeypatch):
    """The run ends with one line, and its last complete step is saved. (This test is last: it ends the server.)"""
    address, ask = wait_until_ready(servers[0]), VllmServer._request

    def asked(server, method, path, *rest, **options):
        if path == TOKENS and (tmp_path / "mtrl/zoo/metrics.jsonl").exists():
            rows = [row for row in read_metrics(get_run_dir(tmp_path)).values() if "actor/grad_norm" in row]
            if len(rows) == 2:
                servers[0].kill()
        return ask(server, method, path, *rest, **options)

    monkeypatch.setattr(VllmServer, "_request", asked)
    words = ("training.max_steps=4", "training.val_freq=-1")
    assert training(tmp_path, address, *words) != 0
    said = capsys.readouterr().err
    assert f"http://{address} cannot be reached" in said and "Traceback" not in said
    assert [path.name for path in list_checkpoints(get_run_dir(tmp_path) / "checkpoints")] == ["step_2"]
