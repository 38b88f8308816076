"""An engine holds device memory only inside `with engine.resident()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from mtrl.types import Prompt, Rollouts, Sampling, Weights


class EngineLifecycle:
    """Base of engines: implements `resident` by `wake` and `sleep`.

    A new engine is asleep.

        >>> class Engine(EngineLifecycle):
        ...     def wake(self): print("wakes")
        ...     def sleep(self): print("sleeps")
        >>> engine = Engine()
        >>> with engine.resident():
        ...     with engine.resident():  # no effect
        ...         print("samples")
        wakes
        samples
        sleeps
    """

    colocated = True  # False: it has its own devices, and samples while others compute
    before_wake: Callable[[], object] = staticmethod(lambda: None)  # brings or offloads the trainer's weights
    _entered = 0  # open `resident` blocks

    @contextmanager
    def resident(self) -> Iterator[None]:
        with nullcontext() if self._entered else self._awake():
            self._entered += 1
            try:
                yield
            finally:
                self._entered -= 1

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self.before_wake()
        self.wake()
        try:
            yield
        finally:
            self.sleep()

    @property
    def is_resident(self) -> bool:
        return self._entered > 0

    def wake(self) -> None:
        """Allocates the device memory that sampling needs."""

    def sleep(self) -> None:
        """Frees the device memory for the trainer; the weights are kept."""

    def close(self) -> None:
        """Ends whatever the engine started; nothing by default."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        raise NotImplementedError

    def load(self, weights: Weights) -> None:
        """Loads a version of the weights; `generate` must then sample from them."""
        raise NotImplementedError

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Callable[[], Rollouts]:
        """Starts generation; the returned callable waits for the rollouts. A colocated engine generates at once."""
        rollouts = self.generate(prompts, sampling)
        return lambda: rollouts

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Allocates the most that `generate` could need, until the engine sleeps; nothing if `wake` has allocated
        it."""
