"""What the arms of a comparison differ in: their settings, and what their rules measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from mtrl.compare.arms import Arm
from mtrl.report.markdown_text import number, table
from mtrl.utils.metric_glossary import find_metric, metric_groups

OF_RULES, OF_TERMS = "Credit of tokens", "actor/{name}_loss"  # a group and a family of the glossary
NOT_TRAINED = ("perf/", "val/")  # metrics that say nothing about credit


def different_settings(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """The values of every arm by key, as JSON, for the keys in which they differ; empty: the arm has no such key."""
    keys = sorted({key for arm in arms for key in arm.settings})
    rows = {key: [arm.settings.get(key, "") for arm in arms] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def rule_metrics(arms: Sequence[Arm]) -> dict[str, list[float | None]]:
    """The last value of every arm, as a mean over seeds: of the metrics of credit rules and loss terms, those of users'
    rules among them, and of metrics that only some arms have."""
    names = [{name for run in arm.runs.values() for name in run.curves} for arm in arms]
    everywhere = set.intersection(*names)
    chosen = sorted(name for name in set.union(*names) if is_of_rule(name, name in everywhere))
    finals = {name: [arm.finals(name).values() for arm in arms] for name in chosen}
    return {name: [fmean(each) if each else None for each in values] for name, values in finals.items()}


def is_of_rule(name: str, everywhere: bool) -> bool:
    if name.startswith(NOT_TRAINED):
        return False
    metric = find_metric(name)
    entries = {entry.name for entry in metric_groups()[OF_RULES]} | {OF_TERMS}
    return not everywhere or metric is None or (metric.family or metric.name) in entries


def make_differences_page(arms: Sequence[Arm]) -> str:
    """Markdown; empty if there is nothing to say."""
    names, text = [arm.name for arm in arms], ""
    if settings := different_settings(arms):
        rows = [[f"`{each}`" if each else "" for each in (key, *values)] for key, values in settings.items()]
        text += f"\n## Settings that differ\n\n{table(['key', *names], rows)}\n"
    if metrics := rule_metrics(arms):
        cells = {name: ["" if value is None else number(value) for value in values] for name, values in metrics.items()}
        rows = [[f"`{name}`", *values] for name, values in cells.items()]
        text += f"\n## Metrics of rules, and of some arms only, in the last step\n\n{table(['metric', *names], rows)}\n"
    return text
