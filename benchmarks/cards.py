"""Which settings fit on which card: the peak that `mtrl doctor` counts for a TPRL step of a 3 B and a 7 B model.

    python -m benchmarks.cards [--out benchmarks/results/cards.json]    # some minutes of one core, no GPU
    python -m benchmarks.cards --render benchmarks/results/cards.json   # the table of docs/memory.md again

The step is that of `benchmarks.step`: 8 prompts x 8 responses x 256 tokens, an image of 576 tokens and 66 others, token
gradient filtering, trajectory shaping and attention at every step; all else is as users get it. A card is counted as
what its driver leaves of it, less a GiB for CUDA's context, graphs and fragments. `measured` is filled by hand from
`benchmarks.step --size SIZE --device cuda --memory-gib CARD .. KEY=VALUE ..`, its `peak_gb`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import step
from benchmarks.environment import finish
from benchmarks.random_model import checkpoint_without_weights, random_config
from mtrl.build.memory import plan_of
from mtrl.config import given_keys, load_config
from mtrl.memory.estimate import Estimate, Plan, apart, estimate, needed_in

GIB = 2**30
SIZES = ("3b", "7b")
CARDS = {"24 GB": 24.0, "48 GB": 44.5, "80 GB": 79.1, "141 GB": 139.8}  # GiB: RTX 4090, L40S, A100, H200
REST = 1.0  # GiB
STEP = ["--prompts=8", "--generations=8", "--image-side=672", "--text-tokens=66", "--completion=256", "--tprl"]
LIMIT = "dataset.max_prompt_length=642"
BF16 = ("worker.actor.fsdp.param_dtype=bf16", "worker.actor.fsdp.param_rounding=stochastic")
OFFLOADED = ("worker.actor.offload.offload_optimizer=true", "worker.ref.offload_params=true")
SMALL = "worker.actor.tokens_per_micro_batch=4096"
WAYS: dict[str, tuple[str, ...]] = {
    "all weights, float32 (the defaults)": (),
    "all weights, float32, offloaded": OFFLOADED,
    "all weights, bf16, offloaded, small passes": (*BF16, *OFFLOADED, SMALL),
    "LoRA, small passes": ("worker.actor.model.peft_type=lora", SMALL),
    "QLoRA, small passes": ("worker.actor.model.peft_type=qlora", SMALL),
}


def peaks(size: str, overrides: Sequence[str]) -> dict[str, float]:
    """GiB that are held, and at most in each phase."""
    settings = step.settings_of(step.parse([*STEP, "--attention", f"--size={size}"]))
    with tempfile.TemporaryDirectory() as folder:
        place = checkpoint_without_weights(Path(folder), size)
        here = {"worker.actor.model.model_path": str(place), "worker.reward.functions": ["accuracy"]}
        plan = plan_of(load_config(None, {**settings, **here, **given_keys([LIMIT, *overrides])}), on_gpu=True)
        found = passes(
            size, random_config(place, size), replace(plan, offload_optimizer=False, offload_reference=False)
        )
    always, away = apart(found.held, plan)  # what is offloaded changes nothing in the passes, which take the time
    held = sum(always.values())
    back = {phase: needed_in(phase, away, plan, found.piece) for phase in found.phases}
    phases = {phase: held + sum((parts | back[phase]).values()) for phase, parts in found.phases.items()}
    return {name: round(count / GIB, 1) for name, count in {"held": held, **phases}.items()}


def passes(size: str, model: Any, plan: Plan) -> Estimate:
    known = next((found for key, found in KNOWN if key == (size, plan)), None)
    if known is None:
        KNOWN.append(((size, plan), known := estimate(model, plan)))
    return known


KNOWN: list[tuple[tuple[str, Plan], Estimate]] = []


def row(size: str, way: str) -> dict[str, Any]:
    found = peaks(size, WAYS[way])
    print(f"{size}, {way}: {found}", flush=True)
    return {"size": size, "way": way, "keys": [LIMIT, *WAYS[way]], "doctor": found, "measured": None}


def smallest(peak: float) -> str:
    """
    >>> smallest(18.6), smallest(23.5), smallest(500)
    ('24 GB', '48 GB', 'none')
    """
    return next((card for card, room in CARDS.items() if peak + REST <= room), "none")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, as docs/memory.md has it."""
    lines = [
        "| model | settings | held | sampling | probe | update | smallest card | measured peak |",
        8 * "|---" + "|",
    ]
    for each in rows:
        doctor, measured = each["doctor"], each["measured"]
        peak = max(doctor[phase] for phase in ("sample", "probe", "update"))
        numbers = [f"{doctor[name]:.1f}" for name in ("held", "sample", "probe", "update")]
        cells = [each["size"].upper().replace("B", " B"), each["way"], *numbers, smallest(peak)]
        lines.append(f"| {' | '.join([*cells, '' if measured is None else f'{measured:.1f}'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--render", type=Path, default=None, help="a result, as the table of docs/memory.md")
    a = parser.parse_args()
    if a.render is not None:
        print(table(json.loads(a.render.read_text())["rows"]))
        return
    rows = [row(size, way) for size in SIZES for way in WAYS]
    print(table(rows))
    finish({"bench": "cards", "step": [*STEP, "--attention"], "rows": rows}, a.out)


if __name__ == "__main__":
    main()
