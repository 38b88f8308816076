"""A run with critic, adapters and replay goes on with another number of ranks: from exactly the state that was saved,
and to the numbers of an undisturbed run, up to rounding."""

import json
import os
import shutil

import pytest
from run_helpers import (
    COMBINED,
    check_combined,
    get_run_dir,
    read_metrics,
    read_tensors,
    same_checkpoint,
    tiny_arguments,
    tiny_run_files,
)
from soak.torchrun_ranks import fork_ranks, said

from mtrl.compose.run import build, configure

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.slow,  # a minute each
    pytest.mark.skipif(os.environ.get("OMP_NUM_THREADS") != "1", reason="they are forked: OMP_NUM_THREADS=1"),
]

SECONDS = 900  # longer is a hang, even on a busy machine
STEPS = 3  # with each number of ranks
SETTINGS = (
    *COMBINED, "dataset.rollout_batch_size=4", "worker.actor.global_batch_size=2", "dataset.val_files=''",
    "training.save_freq=1", "training.val_before_train=false", "worker.critic.optim.warmup_steps=2",
)  # fmt: skip


FOUR_BIT = ("worker.actor.model.peft_type=qlora",)


def on_ranks(count, output, steps, more, main=None):
    flat = f"worker.reward.functions=[{tiny_run_files() / 'rewards.py'}:accuracy,format]"  # so that replay has work
    sizes = (f"training.max_steps={steps}", f"training.n_gpus_per_node={count}")
    arguments = tiny_arguments(output, *SETTINGS, flat, *sizes, *more)
    processes = fork_ranks(count, output, arguments, main)
    for process in processes:
        process.join(SECONDS)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * count, said(output)


def save_again(arguments):
    """Load the newest checkpoint and write it, without a step in between."""
    config, _ = configure(None, arguments[1:])
    run = build(config)  # ends here on other ranks than the first
    with run.closing:
        run.loop.save()
        run.loop.components.store.close()
    return 0


@pytest.mark.parametrize(
    ("ranks", "more"), [((2, 1, 2), ()), ((1, 2), ()), ((2, 1), FOUR_BIT)], ids=["2-1-2", "1-2", "2-1 in 4 bits"]
)
def test_a_run_goes_on_with_another_number_of_ranks(ranks, more, tmp_path, monkeypatch):
    if more:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    run, kept, steps = get_run_dir(tmp_path), tmp_path / "kept", STEPS * len(ranks)
    on_ranks(ranks[0], tmp_path, STEPS, more)
    for done, count in enumerate(ranks[1:], 1):
        rows, saved = (run / "metrics.jsonl").read_bytes(), run / "checkpoints" / f"step_{STEPS * done}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.move(saved, kept)
        shutil.copytree(kept, saved)
        on_ranks(count, tmp_path, steps, more, save_again)
        written = [(folder / "mtrl_manifest.json").stat().st_mtime_ns for folder in (kept, saved)]
        assert written[0] < written[1], "it was written again"
        same_checkpoint(kept, saved)
        on_ranks(count, tmp_path, STEPS * (done + 1), more)
        assert (run / "metrics.jsonl").read_bytes().startswith(rows), "no row is lost or changed"
    check_combined(run, steps)
    whole = tmp_path / "whole"
    on_ranks(ranks[0], whole, steps, more)
    same_to_rounding(run, get_run_dir(whole), steps)


def same_to_rounding(found, expected, steps):
    """Sums over another number of ranks are in another order. So the weights, which have moved by 1e-3, are the same to
    a hundredth of that; responses and groups drawn from the buffer are the same, and the first steps bitwise."""
    assert responses(found) == responses(expected) and len(responses(found)) > 0
    rows, others = read_metrics(found), read_metrics(expected)
    assert rows.keys() == others.keys() == {(step, False) for step in range(1, steps + 1)}
    for (step, _), row in rows.items():
        assert step > STEPS or row == others[step, False], "before the change"
        for name, value in row.items():
            if "logprob_gap" not in name:  # rounding only
                assert value == pytest.approx(others[step, False][name], rel=1e-3, abs=1e-5), (step, name)
    ends = [read_tensors(run / f"checkpoints/step_{steps}") for run in (found, expected)]
    trained = [name for name in ends[0] if "optimizer" not in name and "replay" not in name]
    assert ends[0].keys() == ends[1].keys()
    apart = {name: float((ends[0][name] - ends[1][name]).abs().max()) for name in trained}
    assert max(apart.values()) < 1e-5, sorted(apart.items(), key=lambda each: -each[1])[:5]


def responses(run):
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    return [(row["step"], row["response"], row["version"]) for row in rows]
