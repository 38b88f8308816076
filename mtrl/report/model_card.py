"""The model card of an export: README.md, as model hubs show it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrl.report.markdown_pages import fenced, number, table
from mtrl.utils.metric_history import History

CURVE = "curve.png"
SAMPLES = 3


@dataclass(frozen=True)
class CardRun:
    """What a run knows of the model that it trained; what it does not know is empty and left out."""

    name: str
    step: int | None  # the checkpoint's
    algorithm: str
    settings: str  # YAML of the keys that are not at their defaults
    data: Mapping[str, str]  # what kind: which
    rewards: Mapping[str, float]  # the functions with their weights
    history: History = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()  # rows of validations.jsonl
    curve: bool = False  # whether the picture lies beside the card


@dataclass(frozen=True)
class Exported:
    """What the card says of the files beside it."""

    name: str
    base: str  # what was trained, in words
    base_id: str | None  # the same as an id of the hub
    images: bool  # whether it sees
    dtype: str
    version: str  # of MTRL
    run: CardRun | None = None


def model_card(model: Exported) -> str:
    parts = [front_matter(model), f"# {model.name}", opening_lines(model), usage(model)]
    if model.run is not None:
        parts += run_sections(model.run)
    return "\n\n".join(parts) + "\n"


def front_matter(model: Exported) -> str:
    """What a hub reads. Its YAML is written as JSON, which is YAML too and needs no thought about quotes."""
    tags = ["mtrl", "reinforcement-learning", *([model.run.algorithm] if model.run else [])]
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if model.images else "text-generation",
        "tags": tags,
    }
    if model.base_id is not None:
        head["base_model"] = model.base_id
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---"])


def opening_lines(model: Exported) -> str:
    told = f"Trained from {model.base} by reinforcement learning with MTRL {model.version}"
    if model.run is not None:
        step = "" if model.run.step is None else f", step {model.run.step}"
        told += f": {model.run.algorithm}, run `{model.run.name}`{step}"
    return f"{told}. Weights in {model.dtype}."


def usage(model: Exported) -> str:
    family = "AutoModelForImageTextToText" if model.images else "AutoModelForCausalLM"
    reader = "AutoProcessor" if model.images else "AutoTokenizer"
    code = [
        f"from transformers import {family}, {reader}",
        "",
        f'model = {family}.from_pretrained("{model.name}", dtype="auto")',
        f'{reader.removeprefix("Auto").lower()} = {reader}.from_pretrained("{model.name}")',
    ]
    return fenced("\n".join(code), "python")


def run_sections(run: CardRun) -> list[str]:
    parts = []
    if results := result_rows(run):
        parts += ["## Results", table(["validation", "before", "after"], results)]
    if run.curve:
        parts += ["## Curves", f"![reward and accuracy over the steps of the run]({CURVE})"]
    parts += ["## Data", table(["", ""], list(run.data.items()))]
    parts += ["## Rewards", table(["function", "weight"], [[name, number(w)] for name, w in run.rewards.items()])]
    if run.samples:
        parts += ["## Samples", *map(sample, run.samples)]
    return [*parts, "## Configuration", "Keys that are not at their defaults.", fenced(run.settings.strip(), "yaml")]


def result_rows(run: CardRun) -> list[list[str]]:
    """A row a metric of validation: the first value of the run, and the last one up to the exported step."""
    rows = []
    for name, points in sorted(run.history.items()):
        until = [value for step, value in points if run.step is None or step <= run.step]
        if name.startswith("val/") and not name.startswith("val/by_") and until:
            rows.append([name.removeprefix("val/"), number(until[0]) if len(until) > 1 else "", number(until[-1])])
    return rows


def sample(row: Mapping[str, Any]) -> str:
    """A prompt, what the model answered, and what that earned."""
    earned = number(row["reward"]) if isinstance(row.get("reward"), (int, float)) else "n/a"
    told = [fenced(str(row.get("prompt", ""))), fenced(str(row.get("response", "")))]
    return "\n\n".join([*told, f"Answer `{str(row.get('answer'))[:80]}`, reward {earned}."])
