"""Suggestions for unknown keys and metrics."""

from difflib import SequenceMatcher

from mtrl.config.foreign_keys import rename_section, translate_key
from mtrl.config.tree import known_leaves, known_sections
from mtrl.utils.metric_glossary import known_metrics

_CLOSE_ENOUGH = 0.7
_MAX_SUGGESTED = 3
_MAX_CHARS = 120  # longer keys are not typing mistakes


def suggest(unknown: str, metrics: bool = False) -> str:
    """The end of the message `unknown key..`: the probable key, or the keys of the section. With `metrics` it may also
    be a metric."""
    if len(unknown) > _MAX_CHARS:
        return ""
    if translated := translate_key(unknown):
        return f", {translated}"
    if near := [*find_nearest_keys(unknown), *(find_nearest_metrics(unknown) if metrics else ())]:
        return f"; did you mean {' or '.join(near)}?"
    if metrics and "/" in unknown:
        return f"; metrics begin with {', '.join(dict.fromkeys(name.split('/')[0] + '/' for name in known_metrics()))}"
    return f"; {list_section(unknown)}"


def list_section(key: str) -> str:
    parent, names = find_section(key)
    return f"{parent or 'the configuration'} has the keys {', '.join(names)}"


def find_nearest_keys(unknown: str) -> list[str]:
    """Up to three keys, best first: those with the same last name anywhere, or a similar one in the same section."""
    unknown = rename_section(unknown)
    parent = find_section(unknown)[0]
    scored = [
        (_similarity(unknown.rpartition(".")[2], known.rpartition(".")[2]), _similarity(unknown, known), known)
        for known in known_leaves()
    ]
    scored = [each for each in scored if each[0] == 1 or not parent or each[2].startswith(f"{parent}.")]
    best = max((leaf for leaf, _, _ in scored), default=0.0)
    if best < _CLOSE_ENOUGH:
        return []
    ties = sorted(((path, known) for leaf, path, known in scored if leaf == best), key=lambda pair: -pair[0])
    return [known for _, known in ties[:_MAX_SUGGESTED]]


def find_nearest_metrics(unknown: str) -> list[str]:
    """Up to three metrics, those whose name or last name is the most similar."""
    scores = {
        name: max(_similarity(unknown, name), _similarity(unknown, name.rpartition("/")[2])) for name in known_metrics()
    }
    best = max(scores.values())
    return [name for name, score in scores.items() if score == best >= _CLOSE_ENOUGH][:_MAX_SUGGESTED]


def find_section(unknown: str) -> tuple[str, list[str]]:
    """The deepest known section above the key, and the names in it."""
    parts = rename_section(unknown).split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))
    parent = next((prefix for prefix in prefixes if prefix in known_sections()), "")
    depth = len(parent.split(".")) if parent else 0
    below = [key for key in known_leaves() if not parent or key.startswith(parent + ".")]
    return parent, list(dict.fromkeys(key.split(".")[depth] for key in below))


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio()
