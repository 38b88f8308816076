"""One proxy for every worker that lives in several processes: it calls a method of one role on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from mtrl.protocols import RemoteWorkers

Workers = TypeVar("Workers", bound=RemoteWorkers)
Arguments = tuple[Any, ...]


class RemoteProxy(Generic[Workers]):
    """Calls the worker that holds `role` in every process of `workers`.

    Each `group_size` neighbouring processes form one sequence-parallel or tensor-parallel group: they get the same
    arguments and return the same result.
    """

    def __init__(self, workers: Workers, role: str, group_size: int = 1) -> None:
        self.workers, self.role, self.group_size = workers, role, group_size

    @property
    def groups(self) -> int:
        return self.workers.size // self.group_size

    def call_groups(self, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        """Calls the method with one argument tuple per group; returns one result per group."""
        return self.first_of_groups(self.workers.call(self.role, method, self.repeat_in_groups(arguments)))

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls the method with the same arguments on every process; returns the result of each."""
        return self.workers.call(self.role, method, [arguments] * self.workers.size)

    def repeat_in_groups(self, arguments: Sequence[Arguments]) -> list[Arguments]:
        """Arguments per group -> per process."""
        return [each for each in arguments for _ in range(self.group_size)]

    def first_of_groups(self, results: Sequence[Any]) -> list[Any]:
        """Results per process -> per group."""
        return list(results[:: self.group_size])
