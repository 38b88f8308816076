"""Does rewarding attention move it, and do token weights by attention help? Curves on the embedded task.

    python -m benchmarks.attention_curves --steps 16 --seeds 3 --jobs 2 --out docs/attention_curves

Compares the mdi reward alone, the same rewards shuffled within each group (the control), plain GRPO on accuracy and
format, and the same with token weights; all use the same seeds, with filtering and shaping off. The first two take
twice the steps at a third of the learning rate: Adam also makes full steps on pure noise, and at the demo's rate this
random walk alone evens out the attention. Writes OUT.json with every validation (200 questions, greedy: mean |ln MDI|
of the late layers, response length, accuracy) and every step's sampled mean, and OUT_mdi.png and OUT_weights.png with
the means. Each run is one process with one thread. --redraw only draws the pictures of an existing OUT.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.learning_curves import OFF, SEEDS, mean_curve, run_all, seed_line, train, write_report
from mtrl.bench.environment import environment
from mtrl.report.chart import Panel, draw_chart

ALWAYS = {**OFF, "optimization.compute_attention_metrics": "true"}
MDI = {**ALWAYS, "worker.reward.weights": "null", "worker.actor.optim.lr": "3e-5"}
GRPO = ALWAYS
VARIANTS = {
    "mdi": {**MDI, "worker.reward.functions": "[mdi]"},
    "mdi shuffled": {**MDI, "worker.reward.functions": f"[{Path(__file__).parent / 'shuffled_mdi.py'}]"},
    "GRPO": GRPO,
    "GRPO + token weights": {**GRPO, "optimization.enable_token_weights": "true"},
}
CHARTS = {  # file name suffix: title, metric, its label and bounds, runs (the control first)
    "_mdi": ("The reward mdi alone", "imbalance", "mean |ln MDI| of the late layers", None, ("mdi shuffled", "mdi")),
    "_weights": ("Token weights", "accuracy", "accuracy", (0.0, 1.0), ("GRPO", "GRPO + token weights")),
}
VALIDATED = {
    "imbalance": "val/attention/imbalance_late",
    "length": "val/response_length",
    "accuracy": "val/avg@1",
}


def learn(variant: str, seed: int, steps: int, validate_every: int, scratch: Path) -> dict[str, Any]:
    factor = 2 if variant.startswith("mdi") else 1
    rows = train(variant, VARIANTS[variant], seed, factor * steps, factor * validate_every, scratch)
    result: dict[str, Any] = {"variant": variant, "seed": seed}
    for name, metric in VALIDATED.items():
        result[name] = [[row["step"], round(row[metric], 4)] for row in rows if row.get(metric) is not None]
    sampled = "attention/imbalance_late"
    result["imbalance_sampled"] = [[row["step"], round(row[sampled], 4)] for row in rows if sampled in row]
    ends = {name: [result[name][0][1], result[name][-1][1]] for name in VALIDATED if result[name]}
    print(variant, seed, ends, flush=True)
    return result


def change(runs: list[dict[str, Any]], variant: str, name: str) -> float:
    """Relative change of the mean over the seeds, from the first to the last validation."""
    (_, first), *_, (_, last) = mean_curve(runs, variant, name)
    return round(last / first - 1, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=4, help="steps between validations")
    parser.add_argument("--out", type=Path, default=Path("docs/attention_curves"))
    parser.add_argument("--redraw", action="store_true", help="only draw the existing OUT.json")
    options = parser.parse_args()
    if not options.redraw:
        runs = run_all(learn, VARIANTS, options)
        summary = {
            variant: {name: change(runs, variant, name) for name in ("imbalance", "length")}
            for variant in ("mdi", "mdi shuffled")
        }
        settings = {"steps": options.steps, "seeds": options.seeds, "change": summary}
        write_report(options.out, {**settings, "runs": runs, **environment()})
        print(json.dumps(summary))
    report = json.loads(options.out.with_suffix(".json").read_text())
    for suffix, (title, name, label, bounds, (control, idea)) in CHARTS.items():
        lines = [seed_line(control, report["runs"], control, name, reference=True)]
        lines += [seed_line(idea, report["runs"], idea, name)]
        panel = Panel(f"{label}, 200 validation questions", lines, bounds)
        file = options.out.with_name(f"{options.out.name}{suffix}.png")
        draw_chart(file, title, [panel], SEEDS.format(report["seeds"]))


if __name__ == "__main__":
    main()
