"""Ranks whose device was full restart with smaller passes. There is no device here: fakes raise the error."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_models import get_encoder

from mtrl.config import load_config
from mtrl.memory.pass_sizes import PassSizes, fit_passes
from mtrl.memory.preflight import DoesNotFit, Limits
from mtrl.training.resumable_run import train_with_restarts
from mtrl.types import Needs, Sampling
from mtrl.utils.errors import PassesCut, RankLost, RunError
from mtrl.workers.micro_batches import MicroBatching

LIMITS = Limits(
    prompts=8, prompts_per_update=4, sampling=Sampling(n=8, max_new_tokens=16), prompt_tokens=90, max_pixels=56**2,
    update=MicroBatching(at_least=1000), probe=MicroBatching(4000), needs=Needs("old_logprobs"),
)  # fmt: skip
GROUP = 90 + 8 * 16  # tokens


def attempt(pass_sizes, room):
    """A start of a rank with room for an update of so many tokens: the size that its learners begin the first step
    with."""
    learners = [SimpleNamespace(name=name, cut_to=0) for name in ("actor", "critic")]
    for learner in learners:
        pass_sizes.apply(learner)

    def run_once(limits):
        if (limits.update.tokens or 4 * GROUP) > room:
            raise DoesNotFit("update", "memory: it does not fit")
        return {"update": 1}

    cut = learners[0].cut_to
    policy = SimpleNamespace(encoder=get_encoder("qwen2"))
    fit_passes(run_once, LIMITS.within(cut) if cut else LIMITS, policy, learners, pass_sizes)
    return [learner.cut_to for learner in learners]


def test_each_start_halves_the_passes_that_did_not_fit(tmp_path):
    pass_sizes = PassSizes(tmp_path / "passes.json")
    assert attempt(pass_sizes, 4 * GROUP) == [0, 0] and not pass_sizes.file.exists()
    for tokens in (2 * GROUP, GROUP):
        with pytest.raises(PassesCut, match=f"they are reduced to {tokens} tokens; $"):
            attempt(pass_sizes, GROUP)
        assert [file.name for file in tmp_path.iterdir()] == ["passes.json"]
    assert attempt(pass_sizes, GROUP) == [GROUP, GROUP]


def test_a_learner_that_fills_up_later_keeps_its_own_size(tmp_path):
    pass_sizes, learner = PassSizes(tmp_path / "passes.json"), SimpleNamespace(name="critic")
    pass_sizes.write("actor", 100)
    pass_sizes.apply(learner)
    learner.keep_cut(50)
    assert attempt(pass_sizes, 4 * GROUP) == [100, 50]


def test_rows_that_fit_in_no_pass_are_an_error_from_any_process(tmp_path):
    pass_sizes = PassSizes(tmp_path / "passes.json")
    with pytest.raises(DoesNotFit) as message:
        while True:
            with pytest.raises(PassesCut):
                attempt(pass_sizes, 3)
    again = pickle.loads(pickle.dumps(message.value))
    assert isinstance(again, DoesNotFit) and (again.phase, str(again)) == ("update", "memory: it does not fit")
    cut = pickle.loads(pickle.dumps(PassesCut("full; ")))
    assert isinstance(cut, PassesCut) and str(cut) == "full; "


def test_limits_of_one_of_several_ranks():
    each = LIMITS.on_each(ranks=4, sp_size=1)
    assert (each.prompts, each.prompts_per_update) == (2, 1) and each.update == LIMITS.update
    shared = LIMITS.on_each(ranks=4, sp_size=2)
    assert (shared.prompts, shared.prompts_per_update) == (4, 2), "two ranks have the same rows"
    assert (shared.probe.tokens, shared.update.at_least) == (8000, 2000), "and each a half of a pass"
    assert replace(LIMITS, prompts=9).on_each(4, 1).prompts == 3, "one has more than the others"


@pytest.mark.parametrize(("restarts", "ends"), [(1, "run"), (0, "lost")])
def test_smaller_passes_are_no_restart(restarts, ends, capfd):
    """Those are for ranks that die."""
    happens = [PassesCut("half; "), PassesCut("a quarter; "), RankLost("rank 1 is gone; "), PassesCut("less; "), None]
    fresh = []

    def begin(config):
        fresh.append(config.training.fresh)
        error = happens.pop(0)

        def train():
            if error is not None:
                raise error

        return SimpleNamespace(train=train)

    config = load_config(None, {"training.max_restarts": restarts, "training.fresh": True})
    if ends == "lost":
        with pytest.raises(RankLost, match="rank 1 is gone"):
            train_with_restarts(config, begin)
        return
    train_with_restarts(config, begin)
    assert fresh == [True, False, False, False, False]
    assert "half; the run resumes from its last checkpoint\n" in capfd.readouterr().err


def test_under_torchrun_the_command_restarts(monkeypatch):
    """torchrun ends all processes together; a single one cannot restart."""
    monkeypatch.setattr("mtrl.training.resumable_run.started_by_torchrun", lambda: True)

    def begin(config):
        raise PassesCut("half; ")

    with pytest.raises(RunError, match="half; the same command resumes from the last checkpoint"):
        train_with_restarts(load_config(None, {}), begin)
