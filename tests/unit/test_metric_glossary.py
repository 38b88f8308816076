"""The entries of the metrics: every metric has one, each belongs to a metric, and they name only what exists.

`metric_watch.py` checks the metrics of every run that any test makes. Here are those of recorded runs and those in the
source.
"""

import ast
import gzip
import json
import re
import tarfile

import pytest
from metric_watch import check_explained
from run_helpers import tiny_arguments
from sources import ROOT, SOURCES, nodes

import mtrl.compose.run  # noqa: F401 (imported before the tests, so that runs are watched)
from mtrl.algorithms.metrics import gap_name
from mtrl.cli import main
from mtrl.config.tree import known_leaves, known_sections
from mtrl.report.metrics_page import make_page
from mtrl.rewards.builtin_names import REWARDS
from mtrl.training.dynamic_sampling import PromptCounts
from mtrl.utils.metric_glossary import PLACEHOLDER, describe_metric, fill, find_metric, known_metrics
from mtrl.utils.metric_history import HEAD

PREFIXES = "|".join(sorted({name.split("/")[0] for name in known_metrics()}))
ROOMS = tuple(f"mtrl.{room}." for room in ("algorithms", "training", "workers", "data", "rollout", "distributed"))
UPDATES = ("mtrl.algorithms.losses", "mtrl.algorithms.value_loss", "mtrl.workers.actor", "mtrl.workers.learner")
MEMBERS = {
    "function": "format", "k": "4", "name": "vgr_late", "layers": "late", "statistic": "mean", "count": "used",
    "number": "turns",
}  # fmt: skip


def recorded_names():
    """The metrics of the archived run, and of all runs whose curves are in the results of benchmarks and studies."""
    with tarfile.open(next((ROOT / "tests/data").glob("run_*.tar.xz"))) as archive:
        rows = archive.extractfile(next(name for name in archive.getnames() if name.endswith("/metrics.jsonl")))
        names = {name for line in rows for name in json.loads(line)} - set(HEAD)
    for path in (*ROOT.glob("benchmarks/results/*.json*"), *ROOT.glob("docs/*.json")):
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        names.update(re.findall(rf'"((?:{PREFIXES})/[^"]+)"', text))
    return names


def written_keys(module):
    """The texts that a file uses as keys of a dict that it makes or fills."""
    keys = [key for node in nodes(module) if isinstance(node, ast.Dict) for key in node.keys]
    filled = [node for node in nodes(module) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    keys += [node.slice for node in filled]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def source_names():
    """The metrics that are written out in the rooms that compute them."""
    return {key for module in SOURCES if module.startswith(ROOMS) for key in written_keys(module) if "/" in key}


def test_every_recorded_metric_has_an_entry():
    names = recorded_names()
    assert len(names) > 100 and {"critic/value_loss", "replay/hits", "val/by_kind/count", "reward/vgr"} <= names
    check_explained(names)


def test_every_metric_in_the_source_has_an_entry_of_its_own():
    """`reward/{function}` explains the functions of users; `reward/failed` and built-in rewards must not rely on it."""
    names = source_names()
    assert {"reward/failed", "data/skipped_rows", "actor/kl_coef", "critic/explained_variance"} <= names
    assert names | {f"reward/{name}" for name in REWARDS} <= known_metrics().keys()


def test_a_metric_without_an_entry_fails_the_test_whose_run_writes_it(tmp_path):
    rule = tmp_path / "rule.py"
    rule.write_text(
        "from dataclasses import dataclass\nfrom mtrl import Weight\n\n@dataclass(frozen=True)\nclass Counts(Weight):\n"
        "    def apply(self, experience, key):\n        return None\n\n"
        "    def metrics(self, experience):\n        return {'actor/unheard_of': 1.0}\n"
    )
    settings = ("training.max_steps=1", "training.val_freq=-1", f"optimization.credit=['{rule}:Counts']")
    with pytest.raises(AssertionError, match=r"metrics\.yaml has no entry for actor/unheard_of"):
        main(tiny_arguments(tmp_path, *settings))


def test_every_entry_is_of_a_metric_that_exists():
    names = source_names() | recorded_names() | {f"reward/{name}" for name in REWARDS}
    names |= {f"{prefix}/{key}" for prefix in ("actor", "critic") for module in UPDATES for key in written_keys(module)}
    names |= {name.removeprefix("val/") for name in names}
    names |= {*PromptCounts().metrics(), *PromptCounts().metrics(""), f"{gap_name(cut=True)}_mean", "signal/margin"}
    names |= {f"val/{name}" for name in names if name.startswith("tools/")}
    for entry in known_metrics().values():
        assert entry.name in names or any(map(entry.member, names)), f"no run has {entry.name}"


@pytest.mark.parametrize("entry", known_metrics().values(), ids=known_metrics())
def test_an_entry_is_complete_and_names_only_what_exists(entry):
    assert entry.unit and not entry.meaning.endswith(".") and entry.reading.endswith(".")
    assert 40 < len(entry.line) < 420, "a line that a tooltip can show"
    text = f"{entry.unit} {entry.meaning} {entry.reading}"
    assert set(PLACEHOLDER.findall(text)) <= set(PLACEHOLDER.findall(entry.name))
    for word in re.findall(r"(?<![\w`])[a-z]\w*(?:[./][\w@]+)+", fill(text, MEMBERS)):
        if word.startswith("docs/"):
            assert (ROOT / word).is_file(), word
        elif "/" in word:
            assert find_metric(word) is not None, word
        else:
            assert word in known_leaves() or word in known_sections(), word


def test_single_metrics_go_before_families():
    assert find_metric("reward/accuracy").family is None
    own = find_metric("reward/brief")
    assert own.name == "reward/brief" and own.family == "reward/{function}" and "function `brief`" in own.meaning
    assert find_metric("val/reward/accuracy").reading == "See reward/accuracy."
    assert find_metric("val/avg@8").meaning.startswith("accuracy") and "among 8 " in find_metric("val/avg@8").meaning


def test_names_of_users_may_contain_anything():
    assert "column `a` is `b/c\n{value}`" in find_metric("val/by_a/b/c\n{value}").meaning
    assert find_metric("reward/") is None and find_metric("my/metric") is None and describe_metric("my/metric") == ""
    assert find_metric("reward/{function}").family is None, "a family itself can be looked up"


def test_the_page_equals_the_entries():
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert page == make_page(), "out of date: make reference"
