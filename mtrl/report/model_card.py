"""The model card of an export: the README.md that model hubs show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrl.report.markdown_text import fenced, number, table
from mtrl.utils.metric_history import History

CURVE = "curve.png"
SAMPLES = 3


@dataclass(frozen=True)
class CardRun:
    """The run that trained the model. Empty fields are left out of the card."""

    name: str
    step: int | None  # the checkpoint's
    algorithm: str
    settings: str  # YAML of the keys that are not at their defaults
    data: Mapping[str, str]  # kind of data -> its source
    rewards: Mapping[str, float]  # function -> weight
    history: History = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()  # rows of validations.jsonl
    curve: bool = False  # whether the picture is next to the card


@dataclass(frozen=True)
class ExportedModel:
    """The exported model."""

    name: str
    base: str  # description of the base model
    base_id: str | None  # its id on the hub
    images: bool  # whether it accepts images
    dtype: str
    version: str  # MTRL's version
    run: CardRun | None = None


def model_card(model: ExportedModel) -> str:
    parts = [front_matter(model), f"# {model.name}", opening_lines(model), usage(model)]
    if model.run is not None:
        parts += run_sections(model.run)
    return "\n\n".join(parts) + "\n"


def front_matter(model: ExportedModel) -> str:
    """The metadata that a hub reads. Values are written as JSON, which is valid YAML with safe quoting."""
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if model.images else "text-generation",
        "tags": ["mtrl", "reinforcement-learning", *([model.run.algorithm] if model.run else [])],
    }
    if model.base_id is not None:
        head["base_model"] = model.base_id
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---"])


def opening_lines(model: ExportedModel) -> str:
    text = f"Trained from {model.base} by reinforcement learning with MTRL {model.version}"
    if model.run is not None:
        step = "" if model.run.step is None else f", step {model.run.step}"
        text += f": {model.run.algorithm}, run `{model.run.name}`{step}"
    return f"{text}. Weights in {model.dtype}."


def usage(model: ExportedModel) -> str:
    model_class = "AutoModelForImageTextToText" if model.images else "AutoModelForCausalLM"
    processor = "AutoProcessor" if model.images else "AutoTokenizer"
    install = ["# pip install torchvision, which the processors of transformers need", ""] if model.images else []
    code = [
        *install,
        f"from transformers import {model_class}, {processor}",
        "",
        f'model = {model_class}.from_pretrained("{model.name}", dtype="auto")',
        f'{processor.removeprefix("Auto").lower()} = {processor}.from_pretrained("{model.name}")',
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
        parts += ["## Samples", *map(make_sample, run.samples)]
    return [*parts, "## Configuration", "Keys that differ from their defaults.", fenced(run.settings.strip(), "yaml")]


def result_rows(run: CardRun) -> list[list[str]]:
    """One row per validation metric: its first value and its last value up to the exported step."""
    rows = []
    for name, points in sorted(run.history.items()):
        until = [value for step, value in points if run.step is None or step <= run.step]
        if name.startswith("val/") and not name.startswith("val/by_") and until:
            rows.append([name.removeprefix("val/"), number(until[0]) if len(until) > 1 else "", number(until[-1])])
    return rows


def make_sample(row: Mapping[str, Any]) -> str:
    reward = number(row["reward"]) if isinstance(row.get("reward"), (int, float)) else "n/a"
    texts = [fenced(str(row.get("prompt", ""))), fenced(str(row.get("response", "")))]
    return "\n\n".join([*texts, f"Answer `{str(row.get('answer'))[:80]}`, reward {reward}."])
