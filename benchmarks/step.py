"""A complete GRPO step of `mtrl train` on a model of random weights: generation, probes, update, phase by phase.

    python -m benchmarks.step --size 3b --device cuda --prompts 8 --generations 8 \
        --image-side 672 --completion 256 --steps 4 [--trl TRL_STEP.py] [KEY=VALUE ..]

It measures as `mtrl bench` does (mtrl/bench), with the arguments and JSON keys of the benchmark of TRL's trainer
(`trl_step.py`), which `--trl` runs first, on the same device with the same arguments. A checkpoint without weights,
rows with pictures and a YAML are written to a temporary folder, and the code of `mtrl train` configures, builds,
preflights and steps the run: settings that the YAML omits have their defaults, and those that it sets are in the result
under `settings`. The weights are drawn on the device, in the dtype in which the run would have loaded them. Sizes come
from the arguments; --dtype chooses the dtype of the weights (fp32 master weights are the default), --tprl turns on
token gradient filtering and trajectory shaping, --attention measures attention at every step, and any KEY=VALUE is an
override as for `mtrl train`. Rewards are a meaningless function of the response. There is no stop token: all responses
have --completion tokens, as in TRL's benchmark.

TRL's plain GRPO has no reference model; MTRL's default has one, and optimization.disable_divergence=true makes the two
alike. The first step is the warm-up, and medians leave it out.
--stored writes the weights to disk, and the run reads them. This is always so when torchrun starts the benchmark, on
one rank whose models are sharded by FSDP2: `torchrun --nproc-per-node 1 -m benchmarks.step ..`.
--save saves a checkpoint after the last step and reports how long it blocked the loop. --profile writes the kernels of
the probes, the update and some steps of decoding of one more step.

--memory-gib 24 simulates a GPU of 24 GiB for everything that runs on it. Peaks are those of torch's allocator in each
phase; generation's memory outside the allocator is in `peak_gb_buffers`. `halved` names the sizes that had to be halved
to fit; null if everything fitted. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import finish
from benchmarks.kernels import profile_calls, profile_methods
from benchmarks.measure import compute_device
from mtrl.bench.environment import commit, hardware
from mtrl.bench.measure import MeasuredRun, make_result, open_run
from mtrl.bench.shapes import SHAPES
from mtrl.bench.workload import DTYPES, Workload
from mtrl.training.loop import Loop
from mtrl.utils.machine import started_by_torchrun

SHARED_ARGUMENTS = ("size", "prompts", "generations", "image_side", "completion", "steps", "device", "micro_batch",
                    "text_tokens", "seed")  # fmt: skip
DECODED_STEPS = 16  # in a profile


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="any other key of the run")
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--image-side", type=int, default=56)
    parser.add_argument("--completion", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of the master weights")
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


def run(a: argparse.Namespace) -> dict[str, Any]:
    with compute_device(a.memory_gib), open_run(make_workload(a)) as measured:
        rows = [measure_step(measured, step) for step in range(a.steps)]
        saving = timed_save(measured.training.loop) if a.save else None
        if a.profile is not None:
            a.profile.write_text(profile_step(measured))
        arguments = {name: value for name, value in vars(a).items() if name not in ("trl", "out", "profile")}
        return make_result(measured, rows, saving) | {"args": arguments}


def make_workload(a: argparse.Namespace) -> Workload:
    return Workload(**{field.name: getattr(a, field.name) for field in fields(Workload)})


def measure_step(measured: MeasuredRun, step: int) -> dict[str, Any]:
    row = measured.step(step)
    print(f"step {step + 1}: " + ", ".join(f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float)), flush=True)
    return row


def profile_step(measured: MeasuredRun) -> str:
    """The kernels of the probes, the update and some steps of decoding in the middle of one more step."""
    tables: dict[str, str] = {}
    device, steps = measured.workload.device, measured.workload.steps
    generator, middle = measured.components.generator, measured.workload.completion // 2
    if hasattr(generator, "_replay"):
        profile_calls(generator, "_replay", range(middle, middle + DECODED_STEPS), device, tables)
    profile_methods(measured.actor, ("probe", "update"), device, tables)
    measured.training.loop.step(steps)
    title = f"# {hardware()['gpu' if device == 'cuda' else 'cpu']}, commit {commit()}: {' '.join(sys.argv[1:])}"
    return "\n".join([title, *(f"\n{name}\n{table}" for name, table in tables.items())])


def timed_save(loop: Loop) -> dict[str, float]:
    """Seconds that a checkpoint blocks the loop, and seconds until it is on disk."""
    nbytes, begin = loop.components.actor.snapshot().nbytes, time.perf_counter()
    loop.save()
    held = time.perf_counter() - begin
    loop.components.store.close()
    return {"gb": nbytes / 2**30, "held": held, "written": time.perf_counter() - begin}


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
