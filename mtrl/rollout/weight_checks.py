"""Whether what an actor publishes is what an engine holds."""

from __future__ import annotations

from collections.abc import Collection


def check_weight_names(own: Collection[str], published: Collection[str]) -> None:
    """Names of all weights of the engine's model, and of those that the actor publishes."""
    for told, names in (
        ("the model has no weight", set(published) - set(own)),
        ("the actor publishes no weight", set(own) - set(published)),
    ):
        if names:
            raise ValueError(f"{told} {min(names)!r}; do actor and engine hold the same model?")
