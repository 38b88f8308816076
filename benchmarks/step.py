"""One whole GRPO step on a Qwen2.5-VL of random weights: generation, probes, update, phase by phase.

    python -m benchmarks.step --size 3b --device cuda --prompts 8 --generations 8 \
        --image-side 672 --completion 256 --steps 3 [--trl TRL_STEP.py]

The real loop with the local engine and the local actor; rewards are random. Arguments and JSON keys are those of the
benchmark of TRL's trainer (`trl_step.py`), which `--trl` runs beside it, before, on the same device with the same
arguments. The first step is the warm-up. More switches: --tprl (perturbed view, filtering, trajectory shaping),
--attention (masses at every step), --unequal (responses cut at random between an eighth and all of --completion),
--master (float32 master weights, products in bf16), --no-share (each response reads its prompt, padded rows).
The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import finish
from benchmarks.forward import BUDGET
from benchmarks.random_model import TOKEN_PIXELS, random_backbone, random_prompts
from mtrl.algorithms.batches import BatchPlan
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.estimators import Grpo
from mtrl.algorithms.losses import Loss
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.rollout.awake import Awake
from mtrl.rollout.local import LocalGenerator
from mtrl.training.loop import Components, Loop
from mtrl.training.recipe import Recipe
from mtrl.types import Needs, Prompt, Rewards, Rollouts, Sampling, Signals
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

SHARED_ARGUMENTS = ("size", "prompts", "generations", "image_side", "completion", "steps", "device", "micro_batch",
                    "text_tokens", "seed")  # fmt: skip
PHASES = {  # TRL's name of a phase: ours
    "generation": ("generate",), "scoring_and_other_prep": ("probe", "reward", "credit"), "training": ("update",),
    "unaccounted": ("publish",),
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["tiny", "3b"], default="tiny")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--image-side", type=int, default=56)
    parser.add_argument("--completion", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of a pass of TRL, and of ours with --no-share")
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-gradient-checkpointing", action="store_true")
    for switch in ("tprl", "attention", "unequal", "master", "no-share", "no-compile"):
        parser.add_argument(f"--{switch}", action="store_true")
    parser.add_argument("--trl", type=Path, default=None, help="the script of the peer's benchmark, run before ours")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


@dataclass
class FreshPrompts:
    """A fake source: other pictures at every step."""

    prompts: list[Prompt]
    taken: int = 0

    def take(self, count: int) -> list[Prompt]:
        self.taken += count
        return self.prompts[self.taken - count : self.taken]

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, int]:
        return {"taken": self.taken}


@dataclass
class Cutting(Awake):
    """The local engine, its responses cut at random lengths: random weights never end one themselves."""

    engine: LocalGenerator

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        rollouts = self.engine.generate(prompts, sampling)
        longest = sampling.max_new_tokens
        draw = torch.Generator().manual_seed(sampling.step)
        lengths = torch.randint(longest // 8, longest + 1, (len(rollouts), 1), generator=draw)
        mask = rollouts.mask & (torch.arange(longest) < lengths)
        return replace(rollouts, mask=mask, tokens=rollouts.tokens.where(mask, 0))

    def load(self, weights: Any) -> None:
        self.engine.load(weights)


class RandomRewards:
    """A fake scorer."""

    def submit(self, rollouts: Rollouts, step: int | None) -> RandomRewards:
        total = torch.rand(len(rollouts), generator=torch.Generator().manual_seed(step or 0))
        self.rewards = Rewards(total, {}, torch.zeros(len(rollouts), dtype=torch.bool))
        return self

    def result(self, signals: Signals | None = None) -> Rewards:
        return self.rewards


class Nowhere:
    """A fake tracker."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def build(a: argparse.Namespace) -> Loop:
    weights = "bf16" if a.device == "cuda" and not a.master else "fp32"
    compute = "bf16" if a.device == "cuda" else "fp32"
    encoder, backbone = random_backbone(
        a.size, a.device, weights, compute, checkpointing=not a.no_gradient_checkpointing, seed=a.seed
    )
    backbone = Backbone(backbone.model, backbone.compute_dtype, compiled=a.device == "cuda" and not a.no_compile)
    encoder.stop_ids = ()  # no response ends early, as in the peer's benchmark
    forward = Forward(backbone, encoder, share_prefix=not a.no_share, packed=a.device == "cuda" and not a.no_share)
    rows = MicroBatching(rows=a.micro_batch, share_prefix=False)
    batching = {phase: rows if a.no_share else MicroBatching(at_least=tokens) for phase, tokens in BUDGET.items()}
    actor = LocalActor(
        forward, OptimizerSettings(lr=1e-6, warmup_steps=0), perturbation=Perturbation(), encoder_files={},
        update_batching=batching["update"], probe_batching=batching["probe"],
    )  # fmt: skip
    engine = LocalGenerator(backbone, encoder)
    prompts = random_prompts(encoder, a.prompts * a.steps, [a.image_side], a.text_tokens, a.seed)
    components: Any = Components(
        source=FreshPrompts(prompts), generator=Cutting(engine) if a.unequal else engine, scorer=RandomRewards(),
        probers=[actor], actor=actor, tracker=Nowhere(), store=Nowhere(), validation=None,
    )  # type: ignore[arg-type] # fmt: skip
    return Loop(components, recipe_of(a))


def recipe_of(a: argparse.Namespace) -> Recipe:
    names = [*(["dependency"] if a.tprl else []), *(["mass"] if a.attention else [])]
    return Recipe(
        total_steps=a.steps, prompts_per_step=a.prompts, batches=BatchPlan(a.prompts, max_response_length=a.completion),
        sampling=Sampling(n=a.generations, max_new_tokens=a.completion),
        needs=Needs(*names, "old", "entropy") if names else Needs(), attention_every=0, estimator=Grpo(),
        credit=(PerceptionFilter(0.4), TrajectoryScaling()) if a.tprl else (),
        divergence=None, loss=Loss(tis_clip=None), validate_every=-1, validate_first=False, save_every=-1,
    )  # fmt: skip


def run(a: argparse.Namespace) -> dict[str, Any]:
    loop = build(a)
    rows = [measured(loop, step, a) for step in range(a.steps)]
    model = loop.components.actor.model  # type: ignore[attr-defined]
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    later = rows[1:] or rows
    names = ("wall", *PHASES)
    summary = {name: round(statistics.median(row[name] for row in later), 4) for name in names}
    responses = a.prompts * a.generations
    sequence = a.text_tokens + (a.image_side // TOKEN_PIXELS) ** 2 + a.completion
    summary["completion_tokens_per_s_generation"] = round(later[-1]["completion_tokens"] / summary["generation"], 1)
    summary["train_tokens_per_s"] = round(responses * sequence / summary["training"], 1)
    summary["completions_per_s_step"] = round(responses / summary["wall"], 3)
    return {
        "bench": "mtrl_grpo_step",
        "args": {name: value for name, value in vars(a).items() if name not in ("trl", "out")},
        "params_m": round(sum(sizes.values()) / 1e6, 1),
        "vision_params_m": round(sum(n for name, n in sizes.items() if ".visual." in name) / 1e6, 1),
        "completions_per_step": responses,
        "image_tokens": (a.image_side // TOKEN_PIXELS) ** 2,
        "prompt_len": sequence - a.completion,
        "median_of_measured_steps": summary,
        "peak_gb": max(max(row["peak_gb_generation"], row["peak_gb_training"]) for row in rows),
        "peak_gb_generation": max(row["peak_gb_generation"] for row in rows),
        "peak_gb_training": max(row["peak_gb_training"] for row in rows),
        "steps": rows,
    }


def measured(loop: Loop, step: int, a: argparse.Namespace) -> dict[str, Any]:
    values = loop.step(step)
    row: dict[str, Any] = {"step": step + 1, "wall": values["perf/seconds_step"]}
    for name, phases in PHASES.items():
        row[name] = sum(values[f"perf/seconds_{phase}"] for phase in phases)
    row["detail"] = {phase: values[f"perf/seconds_{phase}"] for phases in PHASES.values() for phase in phases}
    row["peak_gb_generation"] = round(values["perf/peak_gb_generate"], 2)
    row["peak_gb_training"] = round(max(values["perf/peak_gb_probe"], values["perf/peak_gb_update"]), 2)
    row |= {"grad_norm": values["actor/grad_norm"], "loss": values["actor/pg_loss"]}
    row["completion_tokens"] = round(values["response_length/mean"] * a.prompts * a.generations)
    print(f"step {step + 1}: " + ", ".join(f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float)), flush=True)
    return row


def run_trl(script: Path, a: argparse.Namespace) -> dict[str, Any]:
    """The peer's own benchmark in a process of its own; its last line is JSON with the same keys."""
    words = [f"--{name.replace('_', '-')}={getattr(a, name)}" for name in SHARED_ARGUMENTS]
    finished = subprocess.run([sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True)
    lines = finished.stdout.strip().splitlines()
    if finished.returncode or not lines:
        raise SystemExit(f"{script} ended with status {finished.returncode}:\n" + "\n".join(lines[-20:]))
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main() -> None:
    a = parse()
    peer = None if a.trl is None else run_trl(a.trl, a)
    result = run(a)
    if peer is not None:
        result["trl"] = {key: peer[key] for key in ("median_of_measured_steps", "peak_gb", "peak_gb_training", "env")}
        theirs, ours = peer["median_of_measured_steps"], result["median_of_measured_steps"]
        result["trl_over_ours"] = {
            name: round(theirs[name] / ours[name], 2) for name in ("wall", "generation", "training")
        }
    finish(result, a.out)


if __name__ == "__main__":
    main()
