"""One key in words, for `mtrl config explain`: what it means and takes, and what other projects call it."""

from collections.abc import Iterator

from mtrl.config.config_error import ConfigError
from mtrl.config.foreign_keys import names_elsewhere
from mtrl.config.key_reference import reference, section_lines, written
from mtrl.config.nearest import suggestion
from mtrl.config.tree import known_leaves, known_sections
from mtrl.config.value_types import describe


def explain(name: str | None) -> str:
    """A key in full, by its dotted or (where only one key has it) its last name; the keys of a section, one line each;
    without a name every key."""
    if name is None:
        return reference().rstrip()
    if name in known_sections():
        return "\n".join(section_lines(name))
    found = [key for key in known_leaves() if name in (key, key.rpartition(".")[2])]
    if len(found) != 1:
        raise ConfigError([f"{name}: unknown key{suggestion(name)}"])
    facts = list(_facts(found[0]))
    width = max(len(label) for label, _ in facts)
    return "\n".join([found[0], *(f"  {label:<{width}}  {text}" for label, text in facts)])


def _facts(key: str) -> Iterator[tuple[str, str]]:
    leaf = known_leaves()[key]
    yield "meaning", leaf.meaning
    yield "default", written(leaf.default)
    yield "takes", describe(leaf.annotation, leaf.within)
    yield "on resuming", "may be changed" if leaf.may_change else "must stay as it was; another value makes another run"
    if leaf.names:
        yield "paths", "those in a YAML are relative to it where they exist there, else to the working directory"
    for project, names in names_elsewhere(key).items():
        yield from zip([f"in {project}", *[""] * len(names)], names, strict=False)
