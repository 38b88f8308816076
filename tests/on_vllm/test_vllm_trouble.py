"""What goes wrong with a real vLLM: one clear line, or a new start from the weights that it held."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from tiny_models import checkpoint, get_encoder, plain_model_at, prompts_for
from vllm_engines import INSTALLED, arguments, child_process, engine_on, in_process

from mtrl.models.state_dicts import exported_weights
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.rollout.vllm.process_engine import VllmProcess
from mtrl.types import Sampling, Weights
from mtrl.utils.errors import RunError, StartError

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

FAMILY = "qwen2_5_vl"
SAMPLED = Sampling(n=4, max_new_tokens=32)


def same(a, b):
    return torch.equal(a.tokens, b.tokens) and (a.rollout_logprobs - b.rollout_logprobs).abs().max() < 1e-4


def endless():
    """An encoder whose responses never stop."""
    encoder = get_encoder(FAMILY)
    silent = type(encoder).__new__(type(encoder))
    silent.__dict__ = encoder.__dict__ | {"stop_ids": ()}
    return silent


@pytest.mark.parametrize("share", [0.0, 0.3], ids=["before", "meanwhile"])
def test_a_killed_process_restarts_with_its_weights(share, caplog):
    """Not with those of the checkpoint; and the interrupted call returns as usual. `share`: the share of the call's
    time after which the process is killed."""
    host = child_process(FAMILY)
    engine, model = engine_on(host, FAMILY, endless(), may_change=True), plain_model_at(checkpoint(FAMILY), FAMILY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    engine.load(Weights(1, exported_weights(model)))
    sampling = replace(SAMPLED, n=16, max_new_tokens=300, version=1)
    began = time.monotonic()
    expected = engine.generate(prompts_for(FAMILY), sampling)
    timer = threading.Timer(share * (time.monotonic() - began), host._process.kill)
    timer.start()
    if not share:
        timer.join()
    again = engine.generate(prompts_for(FAMILY), sampling)
    timer.join()
    assert same(again, expected)
    assert "signal 9): it is started again with the weights it held" in caplog.text


def test_a_process_that_dies_twice_of_the_same_call_ends_the_run(monkeypatch):
    """With one line; a third start would be no better."""
    host = child_process(FAMILY)
    engine, restart = engine_on(host, FAMILY), host._restart
    monkeypatch.setattr(host, "_restart", lambda: (restart(), host._process.kill(), host._process.wait()))
    host._process.kill()
    with pytest.raises(RunError, match=r"ended twice in the same call \(signal 9\)"):
        engine.generate(prompts_for(FAMILY), SAMPLED)
    monkeypatch.undo()
    assert len(engine.generate(prompts_for(FAMILY), SAMPLED)) == 16, "it goes on after that"


def test_a_full_cache_changes_nothing():
    """Rows that find no room wait, or are computed again."""
    roomy = engine_on(in_process(FAMILY), FAMILY, endless())
    sampling = replace(SAMPLED, n=8, max_new_tokens=100)
    expected = roomy.generate(prompts_for(FAMILY), sampling)
    narrow = engine_on(VllmInProcess(*arguments(FAMILY, num_gpu_blocks_override=12)), FAMILY, endless())
    found = narrow.generate(prompts_for(FAMILY), sampling)
    narrow.close()
    assert same(found, expected)


def test_a_prompt_over_the_length():
    engine = engine_on(in_process(FAMILY), FAMILY)
    with pytest.raises(RunError, match=r"a prompt of \d+ tokens and 500 new ones exceed the 512"):
        engine.generate(prompts_for(FAMILY), replace(SAMPLED, max_new_tokens=500))
    assert len(engine.generate(prompts_for(FAMILY), SAMPLED)) == 16, "it goes on after that"


@pytest.mark.parametrize("wrong", [{"no_such_argument": 1}, {"max_model_len": 10**6}], ids=str)
@pytest.mark.parametrize("mode", ["inprocess", "process"])
def test_an_engine_that_does_not_start_reports_why_in_one_line(mode, wrong):
    with pytest.raises(StartError, match=r"^vLLM does not start: .+$"):
        if mode == "process":
            VllmProcess(*arguments(FAMILY, **wrong), torch.float32)
        else:
            VllmInProcess(*arguments(FAMILY, **wrong))
