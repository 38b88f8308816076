"""What the metrics of a run mean, by their names in metrics.jsonl. The entries are in metrics.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ENTRIES = Path(__file__).with_name("metrics.yaml")
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Metric:
    """An entry, of one metric or of a family of metrics (`reward/{function}`)."""

    name: str
    unit: str
    meaning: str
    reading: str  # which way is good, and what to look at if a value is bad
    family: str | None = None  # the entry that this metric is a member of

    @property
    def line(self) -> str:
        return f"{self.meaning} [{self.unit}]. {self.reading}"

    def member(self, name: str) -> Metric | None:
        """The entry of a metric of this family; None if it is no member."""
        values = _pattern(self.name).fullmatch(name)
        if values is None:
            return None
        texts = {part: fill(getattr(self, part), values.groupdict()) for part in ("unit", "meaning", "reading")}
        return replace(self, name=name, family=self.name, **texts)


@cache
def metric_groups() -> dict[str, list[Metric]]:
    """All entries by the title of their group."""
    groups = yaml.safe_load(ENTRIES.read_text(encoding="utf-8"))
    return {title: [Metric(name, **entry) for name, entry in group.items()] for title, group in groups.items()}


@cache
def known_metrics() -> dict[str, Metric]:
    return {metric.name: metric for group in metric_groups().values() for metric in group}


def find_metric(name: str) -> Metric | None:
    """The entry of a metric, or None. Entries of single metrics go before families.

    >>> find_metric("reward/failed").family, find_metric("reward/brief").family, find_metric("reward")
    (None, 'reward/{function}', None)
    """
    known = known_metrics()
    return known.get(name) or next(filter(None, (metric.member(name) for metric in known.values())), None)


def describe_metric(name: str) -> str:
    """The entry in one line; empty if there is none, as for metrics of users' own credit rules."""
    metric = find_metric(name)
    return "" if metric is None else metric.line


def fill(text: str, values: dict[str, str]) -> str:
    """The text with the placeholders that have a value replaced.

    >>> fill("reward/{function} and {other}", {"function": "brief"})
    'reward/brief and {other}'
    """
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """A placeholder matches any text, as names come from users: `val/by_topic/a/b`."""
    parts = PLACEHOLDER.split(name)  # text and placeholder in turn
    return re.compile(
        "".join(f"(?P<{part}>.+?)" if i % 2 else re.escape(part) for i, part in enumerate(parts)), re.DOTALL
    )
