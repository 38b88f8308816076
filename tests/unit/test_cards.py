"""Recipes by card: each fits its card as `mtrl doctor` counts, and the table of docs/memory.md is that of the committed
result."""

import json
from pathlib import Path

import pytest

from benchmarks.cards import CARDS, RECIPES, REST, table
from mtrl.config import load_config

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/cards.json").read_text())


def test_the_page_has_the_table_of_the_result():
    assert table(RESULT["rows"]) in (ROOT / "docs/memory.md").read_text(), "python -m benchmarks.cards --render"
    assert [row["recipe"] for row in RESULT["rows"]] == [spec.stem for spec in RECIPES]


@pytest.mark.parametrize("spec", RECIPES, ids=lambda spec: spec.stem)
def test_a_recipe_matches_its_name(spec):
    config = load_config(spec, {})
    size, card = spec.stem.split("_")[:2]
    assert config.worker.actor.model.model_path == f"Qwen/Qwen2.5-VL-{size.upper()}-Instruct"
    assert config.training.experiment_name == spec.stem and f"{card[:-2]} GB" in spec.read_text().splitlines()[0]


def test_every_size_has_a_recipe_for_every_card():
    assert {tuple(spec.stem.split("_")[:2]) for spec in RECIPES} == {(s, card) for s in ("3b", "7b") for card in CARDS}


@pytest.mark.parametrize("row", RESULT["rows"], ids=lambda row: row["recipe"])
def test_it_fits(row):
    assert row["room"] == CARDS[row["recipe"].split("_")[1]] - REST
    assert max(row["doctor"].values()) <= row["room"]
