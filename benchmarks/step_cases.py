"""Steps of several settings of one run, one after the other in one process, each measured as `benchmarks.step` does.

    python -m benchmarks.step_cases views --size 3b --device cuda --prompts 8 --generations 8 --image-side 672 \
        --completion 256 --text-tokens 66 --dtype bf16 --steps 3 [--only "one view"] [--out FILE] [KEY=VALUE ..]

views      how often a response is read: plain GRPO, rules that compare it under one and two other views of the image,
           and loss terms whose other view is read before the updates, or in them with gradients through both views
precision  weights in bf16, in float32, and a LoRA adapter beside a base in bf16

Arguments are those of `benchmarks.step`. A case that fails is reported, and the others follow. The last line is one
JSON object, with the result of each case by its name.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import step
from benchmarks.environment import finish
from benchmarks.measure import free_memory

CREDIT, TERMS = "optimization.credit", "optimization.loss_terms"
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "views": {
        "one view": (),
        "two views: TPRL": ("--tprl",),
        "two views: pgpo": (f"{CREDIT}=[pgpo]",),
        "two views: vepo": (f"{CREDIT}=[vepo]",),
        "three views: pgpo and vepo": (f"{CREDIT}=[pgpo,vepo]",),
        "papo": (f"{TERMS}=[papo]",),
        "papo, gradients through both views": (f"{TERMS}=[{{name: papo, both_views: true}}]",),
        "cfpo": (f"{TERMS}=[cfpo]",),
        "cfpo, gradients through both views": (f"{TERMS}=[{{name: cfpo, both_views: true}}]",),
    },
    "precision": {
        "bf16": ("--dtype=bf16",),
        "fp32": ("--dtype=fp32",),
        "lora": ("--dtype=bf16", "worker.actor.model.peft_type=lora"),
    },
}


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", choices=CASES)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, default=None)
    a, arguments = parser.parse_known_args()
    if unknown := sorted({*(a.only or ())} - CASES[a.cases].keys()):
        parser.error(f"no case {', '.join(unknown)}; choose from {', '.join(CASES[a.cases])}")
    return a, arguments


def measure(arguments: Sequence[str]) -> dict[str, Any]:
    try:
        return step.run(step.parse(arguments))
    except Exception as error:  # the others are worth measuring
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        free_memory()


def describe(result: dict[str, Any]) -> str:
    if "failed" in result:
        return str(result["failed"])
    seconds = result["median_of_measured_steps"]
    names = ("wall", "generation", "scoring_and_other_prep", "training")
    return ", ".join(f"{name} {seconds[name]:.2f} s" for name in names) + f", peak {result['peak_gb']:.1f} GiB"


def main() -> None:
    a, arguments = parse()
    results: dict[str, Any] = {}
    for name in a.only or CASES[a.cases]:
        print(f"== {name}", flush=True)
        results[name] = measure([*arguments, *CASES[a.cases][name]])
        print(f"== {name}: {describe(results[name])}", flush=True)
        finish({"bench": f"step_cases {a.cases}", "cases": results}, a.out)


if __name__ == "__main__":
    main()
