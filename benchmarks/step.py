"""A complete GRPO step of `mtrl train` on a model of random weights: generation, probes, update, phase by phase.

    python -m benchmarks.step --size 3b --device cuda --prompts 8 --generations 8 \
        --image-side 672 --completion 256 --steps 4 [--trl TRL_STEP.py] [KEY=VALUE ..]

A checkpoint without weights, rows with pictures and a YAML are written to a temporary folder, and the code of
`mtrl train` configures, builds, preflights and steps the run: settings that the YAML omits have their defaults, and
those that it sets are in the result under `settings`. The weights are drawn on the device, in the dtype in which the
run would have loaded them. Sizes come from the arguments; --dtype chooses the dtype of the weights (fp32 master weights
are the default), --tprl turns on token gradient filtering and trajectory shaping, --attention measures attention at
every step, and any KEY=VALUE is an override as for `mtrl train`. Rewards are a meaningless function of the response.
There is no stop token: all responses have --completion tokens, as in TRL's benchmark.

Arguments and JSON keys are those of the benchmark of TRL's trainer (`trl_step.py`), which `--trl` runs first, on the
same device with the same arguments. TRL's plain GRPO has no reference model; MTRL's default has one, and
optimization.disable_divergence=true makes the two alike. The first step is the warm-up, and medians leave it out.
--stored writes the weights to disk, and the run reads them. This is always so when torchrun starts the benchmark, on
one rank whose models are sharded by FSDP2: `torchrun --nproc-per-node 1 -m benchmarks.step ..`.
--save saves a checkpoint after the last step and reports how long it blocked the loop. --profile writes the kernels of
the probes and the update of one more step.

--memory-gib 24 simulates a GPU of 24 GiB for everything that runs on it. Peaks are those of torch's allocator in each
phase; generation's memory outside the allocator is in `peak_gb_buffers`. `halved` names the sizes that had to be halved
to fit; null if everything fitted. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import commit, finish, hardware
from benchmarks.kernels import profile_methods
from benchmarks.measure import compute_device
from benchmarks.random_model import SIZES, random_model, token_pixels
from benchmarks.random_run import PATHS, step_settings, write_run
from mtrl.compose.policy import LoadedModel, base_dtype, build_encoder, build_policy, model_path
from mtrl.compose.run import build, configure
from mtrl.config import Config, read_overrides
from mtrl.distributed.generator_proxy import ENGINE, DistributedGenerator
from mtrl.distributed.learner_proxy import DistributedLearner
from mtrl.models.parallel.fsdp import is_sharded
from mtrl.protocols import Tracker
from mtrl.rollout.decode.arena import CudaArena
from mtrl.rollout.local import ROWS_AT_ONCE
from mtrl.training.loop import Components, Loop
from mtrl.training.resumable_run import Run
from mtrl.types import Experience
from mtrl.utils.machine import started_by_torchrun

SHARED_ARGUMENTS = ("size", "prompts", "generations", "image_side", "completion", "steps", "device", "micro_batch",
                    "text_tokens", "seed")  # fmt: skip
PHASES = {  # TRL's name of a phase: our phases
    "generation": ("generate",), "scoring_and_other_prep": ("probe", "reward", "credit"), "training": ("update",),
    "unaccounted": ("publish",),
}  # fmt: skip
TPRL = {"optimization.enable_perception_filtering": True, "optimization.enable_trajectory_reweighting": True}
PEAK = 989e12  # bf16 operations a second of an H200
BESIDE_SETTINGS = {"stop_ids": "none: no token ends a response"}  # facts without a configuration key


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="any other key of the run")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--image-side", type=int, default=56)
    parser.add_argument("--completion", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="dtype of the master weights")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of TRL's micro-batch")
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--memory-gib", type=float, default=None, help="simulate a smaller card")
    parser.add_argument("--seed", type=int, default=0)
    for switch in ("tprl", "attention", "stored", "save"):
        parser.add_argument(f"--{switch}", action="store_true")
    parser.add_argument("--trl", type=Path, default=None, help="script of TRL's benchmark, run before ours")
    parser.add_argument("--profile", type=Path, default=None, metavar="FILE", help="kernels of one more step, as text")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_intermixed_args(arguments)


class PromptLengths(Tracker):
    """Length of the longest prompt of the run, in tokens."""

    longest = 0

    def rollouts(self, step: int, experience: Experience) -> None:
        self.longest = max(self.longest, *(len(prompt.ids) for prompt in experience.rollouts.prompts))


def make_settings(a: argparse.Namespace) -> dict[str, Any]:
    """Settings of the YAML; the rest are the defaults of `mtrl train`."""
    prompt_tokens = a.text_tokens + (a.image_side // token_pixels(a.size)) ** 2
    settings = step_settings(a.prompts, a.generations, a.completion, a.steps, [a.image_side], prompt_tokens)
    if a.dtype != "fp32":
        settings["worker.actor.fsdp.param_dtype"] = a.dtype
    if a.attention:
        settings["optimization.compute_attention_metrics"] = True
    return settings | (TPRL if a.tprl else {})


def build_run(config: Config, a: argparse.Namespace, lengths: PromptLengths) -> Run:
    """The run of `mtrl train`, on a model of random weights that is made here; there is no stop token."""
    if a.stored:
        training = build(config, trackers=[lengths])
        generator = training.loop.components.generator
        engine = generator.workers.roles[ENGINE].generator if isinstance(generator, DistributedGenerator) else generator
        engine.encoder.stop_ids = ()
        return training
    encoder, path = build_encoder(config), model_path(config)
    base = random_model(Path(path), a.size, a.device, base_dtype(config), a.seed).eval()
    base.name_or_path = path
    loaded = LoadedModel(*build_policy(config, encoder, base))
    loaded.encoder.stop_ids = ()
    return build(config, trackers=[lengths], loaded=loaded)


def run(a: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mtrl-step-") as folder, compute_device(a.memory_gib):
        file = write_run(
            Path(folder), a.size, a.device, a.prompts * (a.steps + 1), [a.image_side], a.text_tokens, a.seed,
            make_settings(a), weights=a.stored,
        )  # fmt: skip
        config, _ = configure(file, a.overrides)
        lengths, begin = PromptLengths(), time.perf_counter()
        training = build_run(config, a, lengths)
        with training.closing:
            built = time.perf_counter()
            training.preflight()
            start = {"build": built - begin, "rehearsal": time.perf_counter() - built}
            rows = [measure_step(training.loop, step, a) for step in range(a.steps)]
            saving = timed_save(training.loop) if a.save else None
            if a.profile is not None:
                a.profile.write_text(profile_step(training.loop, a))
        return make_result(a, training, rows, lengths.longest, start, saving)


def measure_step(loop: Loop, step: int, a: argparse.Namespace) -> dict[str, Any]:
    values = loop.step(step)
    loop.components.tracker.metrics(step + 1, values)
    row: dict[str, Any] = {"step": step + 1, "wall": values["perf/seconds_step"]}
    for name, phases in PHASES.items():
        row[name] = sum(values[f"perf/seconds_{phase}"] for phase in phases)
    row["detail"] = {phase: values[f"perf/seconds_{phase}"] for phases in PHASES.values() for phase in phases}
    row["peak_gb_generation"] = round(values["perf/peak_gb_generate"], 2)
    row["peak_gb_buffers"] = round(bytes_outside_allocator(loop.components.generator) / 2**30, 2)
    row["peak_gb_training"] = round(max(values["perf/peak_gb_probe"], values["perf/peak_gb_update"]), 2)
    row |= {"grad_norm": values["actor/grad_norm"], "loss": values["actor/pg_loss"]}
    row["logprob_gap_mean"] = values["rollout/logprob_gap_mean"]  # of the engine and the trainer
    row["completion_tokens"] = round(values["response_length/mean"] * a.prompts * a.generations)
    print(f"step {step + 1}: " + ", ".join(f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float)), flush=True)
    return row


def profile_step(loop: Loop, a: argparse.Namespace) -> str:
    """The kernels of the probes and the update of one more step."""
    tables: dict[str, str] = {}
    profile_methods(own_actor(loop.components), ("probe", "update"), a.device, tables)
    loop.step(a.steps)
    title = f"# {hardware()['gpu' if a.device == 'cuda' else 'cpu']}, commit {commit()}: {' '.join(sys.argv[1:])}"
    return "\n".join([title, *(f"\n{name}\n{table}" for name, table in tables.items())])


def bytes_outside_allocator(generator: Any) -> int:
    """Bytes of generation outside torch's allocator, held until the engine sleeps."""
    holders = [getattr(generator, name, None) for name in ("weights", "buffers")]
    return sum(holder.arena.bytes for holder in holders if holder is not None and isinstance(holder.arena, CudaArena))


def halved(components: Components) -> dict[str, int] | None:
    """Responses sampled at once and tokens per pass of the update, if fewer than configured fitted; otherwise None."""
    rows, tokens = getattr(components.generator, "rows_at_once", ROWS_AT_ONCE), own_actor(components).learner.cut_to
    limits = {"responses_at_once": rows if rows < ROWS_AT_ONCE else 0, "tokens_of_an_update": tokens}
    return {name: value for name, value in limits.items() if value} or None


def own_actor(components: Components) -> Any:
    """The actor of this process."""
    actor: Any = components.actor
    return actor.workers.roles["actor"].worker if isinstance(actor, DistributedLearner) else actor


def timed_save(loop: Loop) -> dict[str, float]:
    """Seconds that a checkpoint blocks the loop, and seconds until it is on disk."""
    nbytes, begin = loop.components.actor.snapshot().nbytes, time.perf_counter()
    loop.save()
    held = time.perf_counter() - begin
    loop.components.store.close()
    return {"gb": nbytes / 2**30, "held": held, "written": time.perf_counter() - begin}


def make_result(
    a: argparse.Namespace, training: Run, rows: list[dict[str, Any]], prompt_len: int, start: Any, saving: Any
) -> dict[str, Any]:
    model = own_actor(training.loop.components).model
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    later = rows[1:] or rows
    summary = {name: round(statistics.median(row[name] for row in later), 4) for name in ("wall", *PHASES)}
    start = start | {"more_in_the_first_step": rows[0]["wall"] - summary["wall"]}  # compilation and capture
    responses = a.prompts * a.generations
    summary["completion_tokens_per_s_generation"] = round(later[-1]["completion_tokens"] / summary["generation"], 1)
    summary["train_tokens_per_s"] = round(responses * (prompt_len + a.completion) / summary["training"], 1)
    summary["completions_per_s_step"] = round(responses / summary["wall"], 3)
    summary |= training_mfu(a, sum(n for name, n in sizes.items() if ".visual." not in name), prompt_len, summary)
    settings = make_settings(a) | read_overrides(a.overrides)
    return {
        "bench": "mtrl_grpo_step",
        "args": {name: value for name, value in vars(a).items() if name not in ("trl", "out", "profile")},
        "settings": {key: value for key, value in settings.items() if key not in PATHS},
        "beside_settings": BESIDE_SETTINGS,
        "params_m": round(sum(sizes.values()) / 1e6, 1),
        "vision_params_m": round(sum(n for name, n in sizes.items() if ".visual." in name) / 1e6, 1),
        "ranks": 1 if is_sharded(model) else None,
        "completions_per_step": responses,
        "image_tokens": (a.image_side // token_pixels(a.size)) ** 2,
        "prompt_len": prompt_len,
        "median_of_measured_steps": summary,
        "peak_gb": max(
            max(row["peak_gb_generation"] + row["peak_gb_buffers"], row["peak_gb_training"]) for row in rows
        ),
        "peak_gb_generation": max(row["peak_gb_generation"] for row in rows),
        "peak_gb_buffers": max(row["peak_gb_buffers"] for row in rows),
        "peak_gb_training": max(row["peak_gb_training"] for row in rows),
        "halved": halved(training.loop.components),
        "seconds_before_the_first_step": start,
        "saving": saving,
        "steps": rows,
    }


def training_mfu(
    a: argparse.Namespace, parameters: int, prompt_len: int, summary: dict[str, float]
) -> dict[str, float]:
    """6 N T over the bf16 peak of an H200, of the update alone: T counts every prompt once per group, as it is computed
    where prompts are shared, or once per response, as peers count. N leaves the vision tower out."""
    if a.device != "cuda":
        return {}
    responses = a.prompts * a.generations
    tokens = {
        "mfu_training_prompts_once": a.prompts * prompt_len + responses * a.completion,
        "mfu_training_prompts_per_response": responses * (prompt_len + a.completion),
    }
    return {name: round(6 * parameters * count / summary["training"] / PEAK, 4) for name, count in tokens.items()}


def run_trl(script: Path, a: argparse.Namespace) -> dict[str, Any]:
    """Runs TRL's benchmark in a separate process; its last line is JSON with the same keys."""
    arguments = [f"--{name.replace('_', '-')}={getattr(a, name)}" for name in SHARED_ARGUMENTS]
    process = subprocess.run([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True)
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        raise SystemExit(f"{script} ended with status {process.returncode}:\n" + "\n".join(lines[-20:]))
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main() -> None:
    a = parse()
    if a.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a run uses any visible GPU
    elif not torch.cuda.is_available():
        raise SystemExit("no CUDA device; use --device cpu")
    a.stored = a.stored or started_by_torchrun()
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
