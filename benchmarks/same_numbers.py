"""Two commits, the same runs: are all numbers equal to the bit?

    python -m benchmarks.same_numbers BEFORE [AFTER] [--only tprl,demo] [--keep DIR]

Each commit is checked out aside and trains the embedded model through its own `mtrl train`, once for each case below
(AFTER left out: the working tree). Every number of metrics.jsonl is compared except those of the clock, and every
tensor of the last checkpoint. What differs is printed; the exit status is 1 if anything does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOT_COMPARED = ("perf/", "time", "attempt")  # what the clock says, and how often a step was done
TINY = (
    "dataset.rollout_batch_size=4", "worker.actor.global_batch_size=2", "worker.rollout.n=4", "training.max_steps=3",
    "training.logger=[]", "training.val_before_train=false", "training.val_freq=-1",
    "training.val_generations_to_log=0", "dataset.val_batch_size=100",
)  # fmt: skip
PLAIN = ("optimization.enable_perception_filtering=false", "optimization.disable_divergence=true")
DIVERGENCE = ("optimization.disable_divergence=false", "optimization.divergence_coef=0.1")
CASES: dict[str, tuple[str, ...]] = {
    "plain": PLAIN,
    "one_pass": (*PLAIN, "worker.actor.global_batch_size=4"),
    "tprl": ("optimization.enable_perception_filtering=true", "optimization.enable_trajectory_reweighting=true"),
    "full_kl": (
        "optimization.enable_perception_filtering=true", "optimization.perception_estimator=full_kl",
        "optimization.enable_entropy_filtering=true", "optimization.loss_token_denominator=selected",
    ),
    "entropy": (*PLAIN, "optimization.enable_entropy_filtering=true", "optimization.use_entropy_penalty=true"),
    "weights": (*PLAIN, "optimization.enable_token_weights=true", "optimization.token_weight_smooth_sigma=1.0"),
    "weights_mask": (
        "optimization.enable_token_weights=true", "optimization.token_weight_target=mask",
        "optimization.token_weight_top_ratio=0.4", "optimization.enable_trajectory_reweighting=true",
    ),
    "vgr": (
        "worker.reward.functions=[accuracy,vgr,format,length]", "worker.reward.weights=[2.5,1,0.5,1]",
        "worker.reward.early_weights=[1,1,2,1]",
    ),
    "mdi": ("worker.reward.functions=[accuracy,mdi,vgr_hard_negative]", "worker.reward.weights=[4,1,1]"),
    "kl_reward": (*DIVERGENCE, "optimization.divergence_type=adaptive"),
    "kl_loss": (*DIVERGENCE, "optimization.use_divergence_loss=true", "optimization.divergence_penalty=low_var_kl"),
    "full_divergence": (*DIVERGENCE, "optimization.divergence_penalty=full"),
    "reinforce": (
        *DIVERGENCE, "optimization.advantage_estimator=reinforce_plus_plus", "optimization.gamma=0.99",
    ),
    "rloo": (*PLAIN, "optimization.advantage_estimator=rloo", "optimization.policy_loss=gspo"),
    "cispo": (*PLAIN, "optimization.policy_loss=cispo", "optimization.loss_type=grpo", "worker.actor.ppo_epochs=2"),
    "sapo": (
        *PLAIN, "optimization.policy_loss=sapo", "optimization.loss_type=dr_grpo", "optimization.tis_level=sequence",
        "optimization.scale_rewards=batch", "optimization.mask_truncated_responses=true", "worker.rollout.top_p=0.9",
    ),
    "no_attention": ("optimization.compute_attention_metrics=false",),
    "attention": ("optimization.compute_attention_metrics=true", "training.val_before_train=true"),
}  # fmt: skip
DEMO = "demo"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", help="a commit; left out: the working tree")
    parser.add_argument("--only", help=f"some of {', '.join([*CASES, DEMO])}")
    parser.add_argument("--keep", type=Path, help="where runs of commits are kept, to be used again")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [*CASES, DEMO]
    with tempfile.TemporaryDirectory() as scratch:
        keep = (options.keep or Path(scratch, "runs")).resolve()
        before = checkout(options.before, Path(scratch))
        after = checkout(options.after, Path(scratch)) if options.after else None
        different = [name for name in names if not compare(name, keep, before, after)]
        for tree in filter(None, (before, after)):
            git("worktree", "remove", "--force", str(tree))
    print(f"{len(names) - len(different)} of {len(names)} cases equal to the bit")
    return 1 if different else 0


def compare(name: str, keep: Path, before: Path, after: Path | None) -> bool:
    first = run(name, before, keep / before.name)
    with tempfile.TemporaryDirectory() as fresh:
        second = run(name, after or ROOT, keep / after.name if after else Path(fresh))
        found = [*differences(metrics(first), metrics(second)), *weight_differences(first, second)]
    print(f"{name:<16} {'equal' if not found else f'{len(found)} DIFFERENCES'}", flush=True)
    for line in found[:8]:
        print(f"    {line}")
    return not found


def run(name: str, tree: Path, place: Path) -> Path:
    """The run's directory; one that is kept is not made again."""
    output = place / name
    found = list(output.glob("mtrl/*/checkpoints/best_model"))
    if not found:
        words = ["demo"] if name == DEMO else ["train", *TINY, *CASES[name]]
        command = [sys.executable, "-m", "mtrl", *words, f"training.output_dir={output}"]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed in {tree.name}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found = list(output.glob("mtrl/*/checkpoints/best_model"))
    return found[0].parent.parent


def metrics(directory: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        f"row {number}, {name}": value
        for number, row in enumerate(rows)
        for name, value in row.items()
        if not name.startswith(NOT_COMPARED)
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    missing = object()
    pairs = {name: (before.get(name, missing), after.get(name, missing)) for name in {**before, **after}}
    return [
        f"{name}: {'absent' if old is missing else old} -> {'absent' if new is missing else new}"
        for name, (old, new) in pairs.items()
        if old != new and not (old != old and new != new)
    ]


def weight_differences(before: Path, after: Path) -> list[str]:
    """Weights and optimizer state of the last checkpoints, by the bytes of their files."""
    last = [max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:])) for run in (before, after)]
    files = {path.relative_to(last[0]) for path in last[0].rglob("*.safetensors")}
    return [f"{file}: other bytes" for file in files if (last[0] / file).read_bytes() != (last[1] / file).read_bytes()]


def checkout(commit: str, scratch: Path) -> Path:
    name = git("rev-parse", "--short", commit)
    git("worktree", "add", "--detach", "--force", str(scratch / name), commit)
    return scratch / name


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
