"""Train the same runs with two commits and check that all numbers are bitwise equal.

    python -m benchmarks.same_numbers BEFORE [AFTER] [--only tprl,demo] [--keep DIR] [--jobs 2] [--out FILE]

Each commit is checked out in a temporary worktree and trains through its own `mtrl train`, once per case below
(without AFTER: the working tree; a directory in place of a commit is used as it is, for machines without git). Every
number of metrics.jsonl except timings is compared, and every tensor of the last checkpoint. Differences are printed;
the exit status is 1 if there are any. Metrics that the first commit did not have are listed as added, not as
differences. `--out` writes a digest per case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from mtrl.bench.environment import commit
from pretraining.tiny_checkpoints import make_tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
NOT_COMPARED = ("perf/", "time", "attempt")  # timings, and how often a step was run
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
RULES = (
    "perception_filter", "entropy_filter", "trajectory_scaling", "attention_weights", "entropy_change", "mass_gate",
    "vision_entropy", "vision_entropy_weights", "hidden_similarity", "attention_anchors", "key_tokens",
    "perception_bonus", "random_filter", "bottom",
)  # fmt: skip
SCENES = ("worker.actor.model.model_path=scenes", "dataset.val_files={inputs}/mixed.jsonl")
MIXED = ("dataset.train_files={inputs}/mixed.jsonl", "dataset.val_files={inputs}/mixed.jsonl")
CASES |= {
    "gae": (*PLAIN, "optimization.advantage_estimator=gae", "worker.critic.warmup_steps=1", "worker.rollout.n=2"),
    "remax": (*PLAIN, "optimization.advantage_estimator=remax"),
    "replay": (*PLAIN, "optimization.replay_buffer_size=4"),
    "filtering": (*PLAIN, "optimization.online_filtering=true", "optimization.filter_key=accuracy"),
    "lora": (*PLAIN, "worker.actor.model.peft_type=lora", "optimization.enable_perception_filtering=true"),
    "one_step_ahead": ("worker.rollout.lag=1", "optimization.enable_perception_filtering=true"),
    "two_ranks": ("training.n_gpus_per_node=2", "optimization.enable_perception_filtering=true"),
    "text_rows": (
        *MIXED, "optimization.enable_perception_filtering=true", "optimization.enable_entropy_filtering=true",
    ),
    "qwen3_vl": (
        *MIXED, "worker.actor.model.model_path={inputs}/qwen3_vl", "optimization.enable_perception_filtering=true",
        "optimization.enable_token_weights=true", "dataset.max_response_length=24", "dataset.min_pixels=4096",
    ),
    "rule_shuffled": ("optimization.credit=[{name: shuffled, rule: perception_filter}]",),
    "rule_oracle": (*SCENES, "optimization.credit=[oracle]"),
} | {f"rule_{name}": (f"optimization.credit=[{name}]",) for name in RULES}  # fmt: skip
DEMO = "demo"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", help="a commit; default: the working tree")
    parser.add_argument("--only", help=f"comma-separated, from {', '.join([*CASES, DEMO])}")
    parser.add_argument("--keep", type=Path, help="directory that keeps the runs of commits for the next call")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at once")
    parser.add_argument("--out", type=Path, help="JSON with a digest of the numbers of each case")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [*CASES, DEMO]
    with tempfile.TemporaryDirectory() as scratch:
        keep = (options.keep or Path(scratch, "runs")).resolve()
        make_inputs(keep / "inputs")
        before = checkout(options.before, Path(scratch))
        after = checkout(options.after, Path(scratch)) if options.after else None
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(lambda name: compare(name, keep, before, after), names))
        for tree in {before, after} - {None}:
            if tree.is_relative_to(scratch):
                git("worktree", "remove", "--force", str(tree))
    equal = sum(not result["differences"] for result in results)
    print(f"{equal} of {len(names)} cases bitwise equal")
    if options.out is not None:
        after_name = after.name if after else commit()
        report = {"before": before.name, "after": after_name, "cases": dict(zip(names, results, strict=True))}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if equal == len(names) else 1


def make_inputs(directory: Path) -> None:
    """A file of rows with and without images, and a tiny Qwen3-VL: both commits read the same files."""
    if (directory / "done").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(8):
        colour = ("red", "green", "blue", "black")[number % 4]
        row = {"prompt": f"How many {colour} dogs? A 1, B 2.", "answer": "AB"[number % 2]}
        if number % 2:
            pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(directory / f"{number}.png")
            row |= {"images": [f"{number}.png"]}
        rows.append(json.dumps(row) + "\n")
    (directory / "mixed.jsonl").write_text("".join(rows))
    make_tiny_checkpoint(directory / "qwen3_vl", "qwen3_vl")
    (directory / "done").touch()


def compare(name: str, keep: Path, before: Path, after: Path | None) -> dict[str, Any]:
    first = run(name, before, keep / before.name, keep / "inputs")
    with tempfile.TemporaryDirectory() as fresh:
        second = run(name, after or ROOT, keep / after.name if after else Path(fresh), keep / "inputs")
        old, new = metrics(first), metrics(second)
        added = sorted({key.split(", ", 1)[1] for key in new.keys() - old.keys()})
        different = [
            *differences(old, {key: value for key, value in new.items() if key.split(", ", 1)[1] not in added}),
            *differences(digests(first), digests(second)),
        ]
    print(f"{name:<28} {'equal' if not different else f'{len(different)} DIFFERENCES'}", flush=True)
    for line in different[:8]:
        print(f"    {line}")
    numbers = {"metrics": len(old), "added": added, "tensors": len(digests(first)), "differences": different[:8]}
    everything = json.dumps([metrics(first), digests(first)], sort_keys=True)
    return numbers | {"digest": hashlib.sha256(everything.encode()).hexdigest()[:16]}


def run(name: str, tree: Path, directory: Path, inputs: Path) -> Path:
    """Trains a case unless its run is kept from an earlier call; returns the run directory."""
    output = directory / name
    done = list(output.glob("mtrl/*/checkpoints/best_model"))
    if not done:
        words = (
            ["demo"]
            if name == DEMO
            else ["train", *TINY, *(word.replace("{inputs}", str(inputs)) for word in CASES[name])]
        )
        command = [sys.executable, "-m", "mtrl", *words, f"training.output_dir={output}"]
        path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise SystemExit(f"{name} failed in {tree.name}:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
        done = list(output.glob("mtrl/*/checkpoints/best_model"))
    return done[0].parent.parent


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


def digests(run: Path) -> dict[str, str]:
    """A hash of every tensor of the last checkpoint: weights, optimizer state, replay buffer, responses sampled ahead.
    The tensors of a file are numbered by their content, since a commit may give one another name."""
    last = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    found = {}
    for path in sorted(last.rglob("*.safetensors")):
        hashes = sorted(digest(tensor) for tensor in load_file(path).values())
        found |= {f"{path.relative_to(last)}, tensor {number}": each for number, each in enumerate(hashes)}
    return found


def digest(tensor: Tensor) -> str:
    content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + content).hexdigest()[:16]


def checkout(wanted: str, scratch: Path) -> Path:
    if Path(wanted).is_dir():
        return Path(wanted).resolve()
    name = git("rev-parse", "--short", wanted)
    if not (scratch / name).exists():
        git("worktree", "add", "--detach", "--force", str(scratch / name), wanted)
    return scratch / name


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
