"""The known key an unknown one was probably meant to be, wherever in the tree it lives."""

from difflib import SequenceMatcher

from mtrl.config.foreign_keys import moved, translation
from mtrl.config.tree import known_leaves, known_sections

_CLOSE_ENOUGH = 0.7
_MOST_NAMED = 3
_LONGEST = 120  # characters; nobody mistypes a longer key


def suggestion(unknown: str) -> str:
    """What an unknown key probably means, to be put behind the words `unknown key`."""
    if len(unknown) > _LONGEST:
        return ""
    if answer := translation(unknown):
        return f", {answer}"
    if near := nearest_keys(unknown):
        return f"; did you mean {' or '.join(near)}?"
    return f"; {keys_there(unknown)}"


def keys_there(key: str) -> str:
    parent, names = keys_of_section(key)
    return f"{parent or 'the configuration'} has the keys {', '.join(names)}"


def nearest_keys(unknown: str) -> list[str]:
    """Up to three keys, best first: those with the same last name anywhere, or almost the same in its own section."""
    unknown = moved(unknown)
    parent = keys_of_section(unknown)[0]
    scored = [(_leaf_likeness(unknown, known), _likeness(unknown, known), known) for known in known_leaves()]
    scored = [each for each in scored if each[0] == 1 or not parent or each[2].startswith(f"{parent}.")]
    best = max((leaf for leaf, _, _ in scored), default=0.0)
    if best < _CLOSE_ENOUGH:
        return []
    equals = sorted(((path, known) for leaf, path, known in scored if leaf == best), key=lambda pair: -pair[0])
    return [known for _, known in equals[:_MOST_NAMED]]


def keys_of_section(unknown: str) -> tuple[str, list[str]]:
    """The deepest known section above the key, and the names in it."""
    parts = moved(unknown).split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))
    parent = next((prefix for prefix in prefixes if prefix in known_sections()), "")
    depth = len(parent.split(".")) if parent else 0
    below = [key for key in known_leaves() if not parent or key.startswith(parent + ".")]
    return parent, list(dict.fromkeys(key.split(".")[depth] for key in below))


def _leaf_likeness(left: str, right: str) -> float:
    return _likeness(left.rsplit(".", 1)[-1], right.rsplit(".", 1)[-1])


def _likeness(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio()
