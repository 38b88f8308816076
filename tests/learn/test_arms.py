"""One factor at a time: each algorithm switch learns, and resumes exactly after `kill -9`.

Every arm is plain GRPO except for the setting in its name, and runs 12 steps of the embedded model. It must beat a run
with a learning rate of 0 by three standard errors, prompt by prompt, on the prompts of its last four steps; compared
are the responses sampled before those prompts were trained on. One run with a rate of 0 serves all arms that sample in
the same way. A second run of each arm is killed in its third step and restarted: at the third step both are bitwise
equal.

About a minute of CPU time per arm (a step takes 2 to 3 s, a start 8 s), two processes at a time: 22 minutes for all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from arm import AIMS
from run_helpers import get_run_dir, read_metrics, read_tensors

from mtrl.compose.run import configure
from mtrl.config.unsupported import find_unsupported

pytestmark = pytest.mark.soak

STEPS, LAST, STANDARD_ERRORS = 12, 4, 3.0
RESUMED = 3  # where the run that was killed is compared
PATIENCE = 1800.0  # seconds: then something hangs
COMMON = (
    "optimization.enable_perception_filtering=false", "optimization.enable_trajectory_reweighting=false",
    "worker.actor.optim.lr=2e-4", "training.val_freq=-1", "training.val_before_train=false",
    "training.save_limit=-1", "training.best_metric=null",
)  # fmt: skip
SEVERAL = ("worker.actor.global_batch_size=8", "worker.actor.optim.lr=1e-4")  # optimizer steps: ratios leave 1
STEPS_WITHOUT = 2 * STEPS  # steps of the run that learns nothing: a filter draws more prompts than a step has


@dataclass(frozen=True)
class Arm:
    """`changes` override plain GRPO; all arms sample 16 prompts per step, 8 times each. Aim: accuracy or `vgr`."""

    changes: tuple[str, ...] = ()
    vgr: bool = False
    also: Callable[[list[dict]], None] = field(default=lambda rows: None)  # further condition on its steps

    @property
    def words(self) -> list[str]:
        attention = f"optimization.compute_attention_metrics={str(self.vgr).lower()}"
        return [*COMMON, attention, *self.changes, *(["--vgr"] if self.vgr else [])]


def moves_both_ways(rows: list[dict]) -> None:
    coefs = [row["actor/kl_coef"] for row in rows]
    steps = [b - a for a, b in pairwise(coefs)]
    assert min(steps) < 0 < max(steps), coefs


def counts(*names: str) -> Callable[[list[dict]], None]:
    """It really happened."""

    def check(rows: list[dict]) -> None:
        sums = {name: sum(row.get(name, 0.0) for row in rows) for name in names}
        assert min(sums.values()) > 0, sums

    return check


def algorithm(*changes: str, **settings: object) -> Arm:
    return Arm(tuple(f"optimization.{change}" for change in changes), **settings)  # type: ignore[arg-type]


def divergence(penalty: str, *more: str, coef: float = 0.02, also: object = None) -> Arm:
    on = ("disable_divergence=false", f"divergence_penalty={penalty}", f"divergence_coef={coef}")
    return algorithm(*on, *more, **({} if also is None else {"also": also}))


AS_LOSS = "use_divergence_loss=true"
FILTERED = ("online_filtering=true", "filter_key=accuracy")
REPLAYED = ("replay_buffer_size=64",)
ARMS = {
    # estimators
    "grpo": Arm(),
    "grpo, batch": algorithm("scale_rewards=batch"),
    "grpo, unscaled": algorithm("scale_rewards=none"),
    "rloo": algorithm("advantage_estimator=rloo"),
    "reinforce_plus_plus": algorithm("advantage_estimator=reinforce_plus_plus"),
    "remax": algorithm("advantage_estimator=remax"),
    "gae": Arm(
        ("optimization.advantage_estimator=gae", "worker.critic.optim.lr=1e-3", "worker.critic.optim.warmup_steps=2")
    ),
    # losses, each with ratios that differ from 1
    "ppo": Arm(SEVERAL),
    "ppo, two epochs": Arm((*SEVERAL, "worker.actor.ppo_epochs=2")),
    "gspo": Arm((*SEVERAL, "optimization.policy_loss=gspo", "optimization.loss_type=grpo")),
    "cispo": Arm((*SEVERAL, "optimization.policy_loss=cispo")),
    "sapo": Arm((*SEVERAL, "optimization.policy_loss=sapo")),
    # aggregations; dapo is everybody else's
    "mean of means": algorithm("loss_type=grpo"),
    "dr_grpo": algorithm("loss_type=dr_grpo", "scale_rewards=none"),
    # divergences, and where they act
    "kl in the reward": divergence("kl"),
    "abs in the reward": divergence("abs"),
    "mse in the reward": divergence("mse"),
    "low_var_kl in the reward": divergence("low_var_kl"),
    "full in the reward": divergence("full"),
    "mse as a loss": divergence("mse", AS_LOSS),
    "low_var_kl as a loss": divergence("low_var_kl", AS_LOSS),
    "full as a loss": divergence("full", AS_LOSS),
    # controllers
    "adaptive": divergence(
        "low_var_kl", "divergence_type=adaptive", "divergence_target=0.05", "divergence_horizon=640",
        also=moves_both_ways,
    ),
    "refreshed": Arm((*divergence("full", AS_LOSS).changes, "worker.ref.sync_every=2")),
    # the batch of a step
    "filtering by mean": algorithm(*FILTERED, also=counts("filtering/prompts_refilled")),
    "filtering by spread": algorithm(*FILTERED, "filter_by=spread", also=counts("filtering/prompts_refilled")),
    "replay": algorithm(*REPLAYED, also=counts("replay/hits")),
    "filtering and replay": algorithm(
        *FILTERED, *REPLAYED, "max_refills=0", also=counts("filtering/prompts_dropped", "replay/hits")
    ),
    # this reward ranks within a group; the aim is the mean of the ranked value
    "vgr": Arm(("worker.reward.functions=[vgr,format]",), vgr=True),
}  # fmt: skip


def to_come(arm: Arm) -> list[str]:
    """The settings of this arm that are not supported yet."""
    try:
        return find_unsupported(configure(None, [word for word in arm.words if word != "--vgr"])[0])
    except Exception as error:  # a key that is not there yet
        return [str(error)]


# ------------------------------------------------------------------------------------------------------------- running
def start(directory: Path, arm: Arm, steps: int, save_every: int, *more: str) -> subprocess.Popen:
    words = [*arm.words, *more, f"training.max_steps={steps}", f"training.save_freq={save_every}"]
    command = [sys.executable, str(Path(__file__).with_name("arm.py")), str(directory), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, said


def kill_in_step(process: subprocess.Popen, directory: Path, step: int) -> None:
    """SIGKILL once the step before has been logged."""
    metrics, began = get_run_dir(directory) / "metrics.jsonl", time.monotonic()
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < step - 1):
        assert time.monotonic() - began < PATIENCE, "the step never came"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == -signal.SIGKILL, said


def read_aims(directory: Path, steps: range) -> dict[str, float]:
    """The aim by task, for the responses sampled in these steps."""
    rows = [json.loads(line) for line in (directory / AIMS).read_text().splitlines()]
    return {task: aim for row in rows if row["step"] in steps for task, aim in row["aims"].items()}


@pytest.fixture(scope="module")
def without_learning(tmp_path_factory):
    """Maps an arm to the aims of a run that samples in the same way and learns nothing."""
    known: dict[bool, dict[str, float]] = {}

    def aims(arm: Arm) -> dict[str, float]:
        if arm.vgr not in known:
            directory, steps = tmp_path_factory.mktemp("without_learning"), STEPS if arm.vgr else STEPS_WITHOUT
            finish(start(directory, Arm(vgr=arm.vgr), steps, -1, "worker.actor.optim.lr=0"))
            known[arm.vgr] = read_aims(directory, range(1, steps + 1))
        return known[arm.vgr]

    return aims


def gain(aims: dict[str, float], others: dict[str, float]) -> tuple[float, float]:
    """The mean difference over the tasks of both, and its standard error."""
    pairs = [(aim, others[task]) for task, aim in aims.items() if task in others]
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    differences = torch.tensor([ours - theirs for ours, theirs in pairs], dtype=torch.float64)
    assert len(differences) >= 4 * LAST, "too few prompts to compare"
    return float(differences.mean()), float(differences.std() / math.sqrt(len(differences)))


@pytest.mark.parametrize("name", ARMS)
def test_it_learns_and_resumes_after_a_kill(name, without_learning, tmp_path, capsys):
    arm = ARMS[name]
    if missing := to_come(arm):
        pytest.skip("; ".join(missing))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    learning = start(whole, arm, STEPS, RESUMED)
    kill_in_step(start(killed, arm, RESUMED, 1), killed, RESUMED)
    finish(start(killed, arm, RESUMED, 1))
    finish(learning)
    same_at(whole, killed, RESUMED)
    aims = read_aims(whole, range(STEPS - LAST + 1, STEPS + 1))
    mean, error = gain(aims, without_learning(arm))
    with capsys.disabled():
        print(f"\n{name}: {mean:+.3f} +- {error:.3f}, {mean / error:.1f} standard errors")
    assert mean > STANDARD_ERRORS * error
    arm.also([row for _, row in sorted(read_metrics(get_run_dir(whole)).items())])
    shutil.rmtree(tmp_path)


def same_at(whole: Path, killed: Path, step: int) -> None:
    """Asserts bitwise equality of weights, optimizers, trainer state and all metrics up to that step."""
    ends = [get_run_dir(each) / "checkpoints" / f"step_{step}" for each in (whole, killed)]
    first, second = map(read_tensors, ends)
    assert first.keys() == second.keys() and len(first) > 100
    different = [tensor for tensor in first if not torch.equal(first[tensor], second[tensor])]
    assert not different, f"{len(different)} of {len(first)} tensors differ: {different[:3]}"
    states = [json.loads((end / "trainer_state.json").read_text()) for end in ends]
    assert states[0] == states[1]
    rows, others = (read_metrics(get_run_dir(each)) for each in (whole, killed))
    assert len(others) == step and max(read_attempts(killed)) == 2
    assert all(rows[place] == row for place, row in others.items())


def read_attempts(directory: Path) -> list[int]:
    lines = (get_run_dir(directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["attempt"] for line in lines]
