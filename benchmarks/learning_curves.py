"""Learning curves of the credit rules on the embedded task.

    python -m benchmarks.learning_curves --steps 24 --seeds 3 --jobs 2 --out docs/learning_curves

Plain GRPO, token gradient filtering (TGF, keeping 0.2 or 0.4 of the tokens), trajectory advantage shaping (TAS), both,
and the entropy filter; the same seeds for each. Writes OUT.json with every validation and OUT.png with the means. Each
run is one process with one thread. --redraw only draws the picture of an existing OUT.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mtrl.bench.environment import environment
from mtrl.report.chart import Curve, Panel, draw_chart
from mtrl.tracking.jsonl import read_rows

FILTER, SHAPE, ENTROPY = (
    f"optimization.enable_{name}" for name in ("perception_filtering", "trajectory_reweighting", "entropy_filtering")
)
RULE = "with the rule that its panel names"
SEEDS = "Line: mean of {} seeds; shaded: from the lowest to the highest."
Learn = Callable[[str, int, int, int, Path], dict[str, Any]]  # variant, seed, steps, steps between validations, scratch
OFF = {FILTER: "false", SHAPE: "false", ENTROPY: "false"}
VARIANTS = {
    "plain GRPO": OFF,
    "TGF 0.2": {**OFF, FILTER: "true", "optimization.top_p_perception_tokens": "0.2"},
    "TGF 0.4": {**OFF, FILTER: "true", "optimization.top_p_perception_tokens": "0.4"},
    "TAS": {**OFF, SHAPE: "true"},
    "TGF 0.2 + TAS": {**OFF, FILTER: "true", SHAPE: "true", "optimization.top_p_perception_tokens": "0.2"},
    "entropy 0.2": {**OFF, ENTROPY: "true", "optimization.top_p_entropy_tokens": "0.2"},
}


def learn(variant: str, seed: int, steps: int, validate_every: int, scratch: Path) -> dict[str, Any]:
    """Trains one run; returns its greedy accuracy on the validation questions by step."""
    rows = train(variant, VARIANTS[variant], seed, steps, validate_every, scratch)
    curve = [[row["step"], row["val/avg@1"]] for row in rows if "val/avg@1" in row]
    print(f"{variant} {seed}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f}", flush=True)
    return {"variant": variant, "seed": seed, "accuracy": curve}


def train(
    variant: str, switches: Mapping[str, str], seed: int, steps: int, validate_every: int, scratch: Path
) -> list[dict[str, Any]]:
    """Trains in a separate process and returns the rows of its metrics.jsonl."""
    name = f"{variant.replace(' ', '-').replace('+', 'and')}-{seed}"
    overrides = {
        **switches,
        "training.output_dir": str(scratch),
        "training.experiment_name": name,
        "training.max_steps": str(steps),
        "training.val_freq": str(validate_every),
        "dataset.seed": str(seed),
        "worker.rollout.seed": str(seed),
    }
    command = [sys.executable, "-m", "mtrl.cli", "train", *(f"{key}={value}" for key, value in overrides.items())]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, env=environ, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{name} failed:\n{process.stderr[-3000:]}")
    return read_rows(scratch / "mtrl" / name / "metrics.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=2, help="steps between validations")
    parser.add_argument("--out", type=Path, default=Path("docs/learning_curves"))
    parser.add_argument("--redraw", action="store_true", help="only draw the existing OUT.json")
    options = parser.parse_args()
    if not options.redraw:
        runs = run_all(learn, VARIANTS, options)
        settings = {"steps": options.steps, "seeds": options.seeds, "validation_questions": 200}
        write_report(options.out, {"environment": environment(), **settings, "runs": runs})
    draw_means(options.out.with_suffix(".png"), json.loads(options.out.with_suffix(".json").read_text()))


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


def run_all(learn: Learn, variants: Iterable[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs each variant with each seed, `options.jobs` at a time."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(learn, variant, seed, options.steps, options.every, Path(scratch))
            for seed in range(1, options.seeds + 1)
            for variant in variants
        ]
        return [job.result() for job in jobs]


def mean_curve(runs: Iterable[Mapping[str, Any]], variant: str, name: str) -> list[tuple[float, float]]:
    """Points (step, mean over the seeds) of one metric of a variant."""
    curves = [run[name] for run in runs if run["variant"] == variant]
    return [(points[0][0], sum(y for _, y in points) / len(points)) for points in zip(*curves, strict=True)]


def seed_line(
    name: str, runs: Iterable[Mapping[str, Any]], variant: str, metric: str, reference: bool = False
) -> Curve:
    """The mean over the seeds, with a band from the lowest to the highest."""
    curves = [run[metric] for run in runs if run["variant"] == variant]
    ends = (zip(*points, strict=True) for points in zip(*curves, strict=True))
    band = [(steps[0], min(values), max(values)) for steps, values in ends]
    return Curve(name, mean_curve(runs, variant, metric), reference=reference, band=band)


def draw_means(path: Path, report: Mapping[str, Any]) -> None:
    """Draws each rule against plain GRPO in a separate panel: in one panel the lines would cover each other."""
    runs, (plain, *ideas) = report["runs"], VARIANTS
    panels = [
        Panel(
            idea,
            [seed_line(plain, runs, plain, "accuracy", reference=True), seed_line(RULE, runs, idea, "accuracy")],
            bounds=(0, 1),
        )
        for idea in ideas
    ]
    title = f"Greedy accuracy on {report['validation_questions']} validation questions"
    draw_chart(path, title, panels, SEEDS.format(report["seeds"]))


if __name__ == "__main__":
    main()
