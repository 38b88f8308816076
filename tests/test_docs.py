"""What the documentation names must exist, and every switch of the algorithms must be documented."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from mtrl.algorithms.credit import Bonus, Filter, Weight
from mtrl.algorithms.credit.registry import RULES
from mtrl.config.foreign_keys import translate_key
from mtrl.config.tree import OptimizationConfig, known_leaves, known_sections
from mtrl.models.perturb import PERTURBATIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"])
ALGORITHMS = (ROOT / "docs/algorithms.md").read_text()
SECTIONS = ("dataset", "training", "optimization", "worker")


def literals(annotation):
    """Every text that the annotation allows by name."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [value for member in get_args(annotation) for value in literals(member)]


def backticked(text):
    """The quoted pieces of a page outside its blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("name", [f.name for f in fields(OptimizationConfig)])
def test_every_algorithm_key_and_value_is_explained(name):
    sections = [part for part in re.split(r"\n## ", ALGORITHMS) if re.search(rf"\b{name}\b", part)]
    assert sections, f"docs/algorithms.md does not say what optimization.{name} does"
    together = "\n".join(sections)
    for value in literals(get_type_hints(OptimizationConfig)[name]):
        assert re.search(rf"`([a-z_]+: )?{value}`", together), f"docs/algorithms.md: optimization.{name} may be {value}"


@pytest.mark.parametrize("kind", sorted(PERTURBATIONS))
def test_every_perturbation_is_explained(kind):
    assert f"| `{kind}`" in ALGORITHMS


@pytest.mark.parametrize("name", RULES)
def test_every_credit_rule_is_explained(name):
    """With each argument and its default, as a YAML would write it."""
    (line,) = [line for line in ALGORITHMS.splitlines() if line.startswith(f"| `{name}` |")]
    kind = RULES[name]
    message = next(
        (each.__name__.lower() for each in (Filter, Weight, Bonus) if issubclass(kind, each)), "that of its rule"
    )
    assert f"| {message}" in line
    for f in fields(kind):
        if f.default is MISSING:
            assert f"`{f.name}` (" in line
            continue
        default = f.default if isinstance(f.default, str) else json.dumps(f.default)
        assert f"`{f.name}` ({default}" in line, f"docs/algorithms.md: {name} takes {f.name}, {default} by default"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_keys_exist(page):
    for quoted in backticked(page.read_text()):
        key = re.match(rf"({'|'.join(SECTIONS)})(\.[a-z0-9_]+)+", quoted)
        if key is None or (quoted[key.end() :] and quoted[key.end()] not in "=: "):  # `training/loop.py` is a file
            continue
        known = {*known_leaves(), *known_sections()}
        assert key[0] in known or translate_key(key[0]), f"{page.name}: there is no key {key[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_name_keys(page):
    """`name: value` and `name=value` with an underscore in the name are settings of ours or of a neighbour's."""
    last_names = {key.rpartition(".")[2] for key in known_leaves()}
    for quoted in backticked(page.read_text()):
        setting = re.fullmatch(r"([a-z]+(?:_[a-z0-9]+)+)(?:: |=)(?:true|false|null|auto|[a-z_]+|[\d.]+)", quoted)
        if setting is not None:
            assert setting[1] in last_names or translate_key(setting[1]), f"{page.name}: there is no key {setting[1]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name}: {link} does not exist"
