"""Which recipe fits on which card: the peaks that `mtrl doctor` estimates for the recipes of mtrl/configs/cards.

    python -m benchmarks.cards [--out benchmarks/results/cards.json]    # some minutes of one core, no GPU
    python -m benchmarks.cards --render benchmarks/results/cards.json   # the table of docs/memory.md again

A recipe is named after its model and its card. The estimate uses the recipe's own limits and the micro-batches that its
run would choose on that card. The card's size is the memory that its driver leaves, less one GiB for CUDA's context,
graphs and fragmentation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mtrl
from benchmarks.environment import finish
from mtrl.bench.shapes import write_files
from mtrl.compose.memory_limits import make_plan
from mtrl.config import load_config
from mtrl.memory.estimate import estimate, shrink_to_fit
from mtrl.models.families import load_model_config

GIB = 2**30
CARDS = {"24gb": 24.0, "48gb": 44.5, "80gb": 79.1, "141gb": 139.8}  # GiB: RTX 4090, L40S, A100, H200
REST = 1.0  # GiB for CUDA's context, graphs and fragmentation
RECIPES = sorted(
    Path(mtrl.__file__).with_name("configs").glob("cards/*.yaml"),
    key=lambda file: (file.stem[:2], [*CARDS].index(file.stem.split("_")[1]), file.stem),
)


def row(spec: Path) -> dict[str, Any]:
    size, card = spec.stem.split("_")[:2]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_files(Path(folder), size)
        plan = make_plan(load_config(spec, {"worker.actor.model.model_path": str(checkpoint)}), on_gpu=True)
        model, room = load_model_config(str(checkpoint)), CARDS[card] - REST
        plan, found = shrink_to_fit(model, plan, estimate(model, plan), int(room * GIB))
    phases = {phase: found.held_bytes + sum(parts.values()) for phase, parts in found.phases.items()}
    doctor = {name: round(count / GIB, 1) for name, count in {"held": found.held_bytes, **phases}.items()}
    result = {"recipe": spec.stem, "room": room, "tokens": plan.limits.update.tokens, "doctor": doctor}
    print(result, flush=True)
    return result


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table of docs/memory.md."""
    lines = ["| recipe | settings | held | sampling | probe | update | tokens per pass |", 7 * "|---" + "|"]
    for each in rows:
        numbers = [f"{each['doctor'][name]:.1f}" for name in ("held", "sample", "probe", "update")]
        tokens = f"{each['tokens']:,}" if each["tokens"] else "32,768"
        lines.append(f"| `{each['recipe']}` | {read_settings(each['recipe'])} | {' | '.join([*numbers, tokens])} |")
    return "\n".join(lines)


def read_settings(spec: str) -> str:
    """The settings in the recipe's first line."""
    file = next(file for file in RECIPES if file.stem == spec)
    return file.read_text().splitlines()[0].partition("GB: ")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--render", type=Path, default=None, help="print this result as the table of docs/memory.md")
    a = parser.parse_args()
    if a.render is not None:
        print(table(json.loads(a.render.read_text())["rows"]))
        return
    rows = [row(spec) for spec in RECIPES]
    print(table(rows))
    finish({"bench": "cards", "rows": rows}, a.out)


if __name__ == "__main__":
    main()
