"""Explains one key or metric for `mtrl config explain`: of a key its meaning, allowed values and names in other
projects."""

from collections.abc import Iterable, Iterator

from mtrl.config.config_error import ConfigError
from mtrl.config.foreign_keys import foreign_names
from mtrl.config.key_reference import make_reference, section_lines
from mtrl.config.nearest import suggest
from mtrl.config.tree import RENAMED_KEYS, known_leaves, known_sections
from mtrl.config.yaml_io import to_inline_yaml
from mtrl.utils.metric_glossary import Metric, find_metric
from mtrl.utils.value_types import describe, describe_names


def explain(name: str | None) -> str:
    """Explain a metric (`actor/entropy`), a key by its dotted name, or all keys with this last name. For a section,
    list its keys, one per line; without a name, list all keys."""
    if name is None:
        return make_reference().rstrip()
    if name in known_sections():
        return "\n".join(section_lines(name))
    if (metric := find_metric(name)) is not None:
        return _format_facts(name, _metric_facts(metric))
    name = RENAMED_KEYS.get(name, name)
    keys = [key for key in known_leaves() if name in (key, key.rpartition(".")[2])]
    if not keys:
        raise ConfigError([f"{name}: unknown {'metric' if '/' in name else 'key'}{suggest(name, metrics=True)}"])
    return "\n\n".join(_format_facts(key, _key_facts(key)) for key in keys)


def _format_facts(name: str, facts: Iterable[tuple[str, str]]) -> str:
    facts = list(facts)
    width = max(len(label) for label, _ in facts)
    return "\n".join([name, *(f"  {label:<{width}}  {text}" for label, text in facts)])


def _metric_facts(metric: Metric) -> Iterator[tuple[str, str]]:
    yield "meaning", metric.meaning
    yield "unit", metric.unit
    yield "reading", metric.reading
    if metric.family is not None:
        yield "family", metric.family


def _key_facts(key: str) -> Iterator[tuple[str, str]]:
    leaf = known_leaves()[key]
    yield "meaning", leaf.meaning
    yield "default", to_inline_yaml(leaf.default)
    yield "takes", describe_names(leaf.names) if leaf.names else describe(leaf.annotation, leaf.within)
    yield "on resuming", "may be changed" if leaf.may_change else "must stay the same; another value is another run"
    if leaf.path_kind:
        yield "paths", "relative to the YAML that sets them if they exist there, else to the working directory"
    for project, names in foreign_names(key).items():
        yield from zip([f"in {project}", *[""] * len(names)], names, strict=False)
