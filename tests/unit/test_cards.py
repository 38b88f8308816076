"""Which settings fit on which card: the table of docs/memory.md is that of the committed result."""

import json
from pathlib import Path

import pytest

from benchmarks.cards import LIMIT, SIZES, WAYS, smallest, table
from mtrl.config import load_config

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/cards.json").read_text())


def test_the_page_has_the_table_of_the_result():
    assert table(RESULT["rows"]) in (ROOT / "docs/memory.md").read_text(), "python -m benchmarks.cards --render"
    assert [(row["size"], row["way"]) for row in RESULT["rows"]] == [(size, way) for size in SIZES for way in WAYS]
    assert all(row["keys"] == [LIMIT, *WAYS[row["way"]]] for row in RESULT["rows"])


@pytest.mark.parametrize("way", WAYS)
def test_its_settings_are_keys(way):
    load_config(None, WAYS[way])


def test_a_card_has_a_little_less_than_its_name_says():
    assert [smallest(peak) for peak in (18.6, 23.1, 43.5, 60, 90, 500)] == [
        "24 GB", "48 GB", "48 GB", "80 GB", "141 GB", "none",
    ]  # fmt: skip


def test_less_is_held_from_row_to_row_where_it_should_be():
    for size in SIZES:
        peak = {row["way"]: max(row["doctor"].values()) for row in RESULT["rows"] if row["size"] == size}
        whole, *others = peak.values()
        assert all(other < whole for other in others)
        assert peak["QLoRA, small passes"] < peak["LoRA, small passes"]
