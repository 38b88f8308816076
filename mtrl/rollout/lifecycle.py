"""When an engine holds device memory: inside `with engine.awake()`, and at no other time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mtrl.types import Prompt, Rollouts, Sampling


class EngineLifecycle:
    """Gives an engine its `resident`. An engine is made asleep; `wake` and `sleep` are its own, and by default it holds
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

    apart = False  # it has devices of its own: what was begun goes on while others compute
    making_room: Callable[[], AbstractContextManager[None]] = nullcontext  # from before it wakes until it sleeps
    _entered = 0  # blocks that are open

    @contextmanager
    def resident(self) -> Iterator[None]:
        with nullcontext() if self._entered else self._woken():
            self._entered += 1
            try:
                yield
            finally:
                self._entered -= 1

    @contextmanager
    def _woken(self) -> Iterator[None]:
        with self.making_room():
            self.wake()
            try:
                yield
            finally:
                self.sleep()

    @property
    def is_resident(self) -> bool:
        return self._entered > 0

    def wake(self) -> None:
        """Takes the device memory that sampling needs."""

    def sleep(self) -> None:
        """Gives the device memory to the trainer; the weights outlast it."""

    def close(self) -> None:
        """By default there is nothing that would go on."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """Every engine's own."""
        raise NotImplementedError

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Callable[[], Rollouts]:
        """Begins to sample, and gives what waits for the rows. One that is not `apart` has them then."""
        rollouts = self.generate(prompts, sampling)
        return lambda: rollouts

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Takes the memory that `generate` would take at most, until the engine sleeps. One that takes nothing more
        than `wake` did has nothing to do."""
