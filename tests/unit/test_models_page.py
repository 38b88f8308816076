"""docs/models.md has every family and every check, as `make models` writes it; its digits are not compared."""

import re
from pathlib import Path

from benchmarks.model_checks import FACTS, find_by_name, make_page
from mtrl.models.check_candidate import Finding
from mtrl.models.families import FAMILIES
from mtrl.models.family_checks import CHECKS
from pretraining.tiny_checkpoints import CHECKED_FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def outline(page: str) -> list[str]:
    """The text without numbers."""
    return re.sub(r"\b\d[\d.e+-]*(cpu)?|(?<=\| )-(?= \|)", "#", page).splitlines()


def test_the_page_is_that_of_the_code():
    findings = {family: {check: Finding(check, 1e-6, 1e-3) for check in CHECKS} for family in CHECKED_FAMILIES}
    assert outline(PAGE.read_text()) == outline(make_page(findings, findings, 1e-7))


def test_every_family_is_described():
    assert FACTS.keys() == set(CHECKED_FAMILIES) >= FAMILIES.keys()


def test_no_check_failed():
    assert "FAILED" not in PAGE.read_text()


def test_families_that_vllm_refuses_are_said_to_be():
    refused = {name for name in CHECKED_FAMILIES if not find_by_name(name).runs_in_vllm}
    assert {name for name in CHECKED_FAMILIES if "vLLM is refused" in FACTS[name].engines} == refused
