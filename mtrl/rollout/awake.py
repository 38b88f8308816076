"""When an engine holds device memory: inside `with engine.awake()`, and at no other time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mtrl.types import Prompt, Sampling


class Awake:
    """Gives an engine its `awake`. An engine is made asleep; `wake` and `sleep` are its own, and by default it holds
    nothing that it could give back.

    >>> class Engine(Awake):
    ...     def wake(self): print("wakes")
    ...     def sleep(self): print("sleeps")
    >>> engine = Engine()
    >>> with engine.awake():
    ...     with engine.awake():  # already is
    ...         print("samples")
    wakes
    samples
    sleeps
    """

    _entered = 0  # blocks that are open

    @contextmanager
    def awake(self) -> Iterator[None]:
        if not self._entered:
            self.wake()
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1
            if not self._entered:
                self.sleep()

    @property
    def is_awake(self) -> bool:
        return self._entered > 0

    def wake(self) -> None:
        """Takes the device memory that sampling needs."""

    def sleep(self) -> None:
        """Gives the device memory to the trainer; the weights outlast it."""

    def close(self) -> None:
        """By default there is nothing that would go on."""

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Takes the memory that `generate` would take at most, until the engine sleeps. One that takes nothing more
        than `wake` did has nothing to do."""
