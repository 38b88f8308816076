"""Chooses how many layers keep their activations in an update: `enable_gradient_checkpointing: auto`.

The preflight of an update runs with all layers checkpointed. It shows how much memory its peak leaves, and what each
layer would keep: as much as its recomputation allocates. So the choice is computed, and no size is tried that might not
fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from mtrl.memory.preflight import DoesNotFit, Limits, bytes_outside_allocator, longest_rollouts
from mtrl.models.activation_checkpointing import keep_activations, measure_recomputed
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.protocols import PromptEncoder
from mtrl.types import Rollouts
from mtrl.utils.terminal import say_at_once
from mtrl.workers.learner import Learner

MARGIN = 0.08  # of the device; for fragments between tensors, and prompts with more images than the preflight's
FULL_SPEED_WORK = 9e11  # weights of a layer times tokens of a pass

RunUpdate = Callable[..., dict[str, int]]  # the preflight of an update alone


def full_speed_tokens(weights: int, layers: int) -> int:
    """Tokens of a pass beside which the launching of a vision tower is short, for a model with so many weights.

    Meanwhile the GPU waits, about 90 ms in every pass of a model of 3.75 B and 68 layers on an H200: passes of 8,834
    tokens took 460 ms for 375 ms of kernels, passes of 17,668 817 for 727. Where images are encoded ahead it waits half
    as long. The rule for other sizes is arithmetic.

    >>> full_speed_tokens(3_755_000_000, 68), full_speed_tokens(8_292_000_000, 60)
    (16298, 6512)
    """
    return int(FULL_SPEED_WORK * layers / weights)


def count_fitting(costs: Sequence[int], room: int) -> int:
    """How many layers, the first ones, fit into the room together."""
    return sum(used <= room for used in accumulate(costs))


@dataclass(frozen=True)
class Measured:
    """What an update with all layers checkpointed has shown."""

    spare: int  # bytes left at its peak
    costs: Sequence[int]  # bytes that each layer would keep

    @property
    def fitting(self) -> int:
        return count_fitting(self.costs, self.spare)

    def towards(self, other: Measured, part: int, whole: int) -> Measured:
        """What an update shows whose passes are by `part` of `whole` tokens closer to the other's: both numbers are
        linear in the tokens of a pass.

        >>> Measured(10, [4, 2]).towards(Measured(30, [2, 2]), 50, 100)
        Measured(spare=20, costs=[3, 2])
        """
        move = lambda ours, theirs: ours + (theirs - ours) * part // whole  # noqa: E731
        return Measured(move(self.spare, other.spare), [*map(move, self.costs, other.costs)])


def spare_bytes(device: torch.device) -> int:
    """Bytes of a GPU that the peak since the last reset has left for more, with a margin."""
    own = torch.cuda.mem_get_info(device)[1] - bytes_outside_allocator(device)
    return int((1 - MARGIN) * own) - torch.cuda.max_memory_allocated(device)


@dataclass
class KeepableLayers:
    """The layers of a model that can keep their activations, in the order in which they do. `measured`: by the last
    update within `measure`; `fitting`: how many of them fit on every rank then."""

    layers: Sequence[Any]
    allocated: Callable[[], int]  # bytes in use
    spare: Callable[[], int]  # bytes left at the peak of the update
    ranks: Ranks = SINGLE_PROCESS
    twice: Collection[Any] = ()  # those that hold the activations of two passes at once
    measured: Measured = Measured(0, ())
    fitting: int = 0

    @classmethod
    def on_gpu(
        cls, layers: Sequence[Any], device: torch.device, ranks: Ranks, twice: Collection[Any] = ()
    ) -> KeepableLayers:  # fmt: skip
        return cls(layers, partial(torch.cuda.memory_allocated, device), partial(spare_bytes, device), ranks, twice)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Checkpoint all layers and measure what they would keep in the updates within the context."""
        self.keep(0)
        with measure_recomputed(self.layers, self.allocated) as costs:
            yield
        if self.layers:
            costs = [cost * (2 if layer in self.twice else 1) for layer, cost in zip(self.layers, costs, strict=True)]
            self.measured = Measured(self.spare(), costs)
            self.fitting = self.count_on_all(self.measured)

    def count_on_all(self, measured: Measured) -> int:
        """How many layers fit on every rank, from what this one has measured."""
        return -self.ranks.all_reduce_max(-measured.fitting)

    def keep(self, count: int) -> Sequence[Any]:
        """Let the first layers keep their activations, and checkpoint the others; returns the first ones."""
        keep_activations(self.layers[:count])
        keep_activations(self.layers[count:], False)
        return self.layers[:count]


def choose_kept_layers(
    layers: KeepableLayers,
    run_update: RunUpdate,
    limits: Limits,
    encoder: PromptEncoder,
    learner: Learner,
    *,
    at_least: int | None,
    verify: bool,
) -> dict[str, int]:
    """Have the learner's model keep the activations of as many layers as fit, in smaller passes if that helps, but of
    `at_least` so many tokens; None: the size stays. `limits` have been measured before. `verify` by running the chosen
    update once, and checkpoint all layers if it does not fit after all. Returns the peaks of that run."""
    given, kept, peaks = limits, layers.fitting, dict[str, int]()
    if at_least is not None:
        limits, kept = find_best_size(layers, run_update, limits, encoder, at_least)
    learner.kept_layers = layers.keep(kept)
    if verify and kept:
        try:
            peaks = run_update(limits)
        except DoesNotFit:
            say_at_once(f"gradient checkpointing: there was no room for the activations of {kept} layers after all")
            learner.kept_layers, limits = layers.keep(0), given
    if limits is not given:
        assert limits.update.tokens is not None
        learner.configured_batching = learner.configured_batching.within(limits.update.tokens)
    report_kept_layers(layers, learner, limits, encoder)
    return peaks


def report_kept_layers(layers: KeepableLayers, learner: Learner, limits: Limits, encoder: PromptEncoder) -> None:
    """One line about the choice, whose passes are those of `limits`."""
    if layers.ranks.is_first:
        size = limits.update.largest(longest_rollouts(encoder, limits, limits.prompts_per_update))
        unit = "tokens" if limits.update.rows is None else "responses"
        share = f"{len(learner.kept_layers)} of {len(layers.layers)}"
        say_at_once(
            f"gradient checkpointing: auto keeps the activations of {share} layers, in passes of {size:,} {unit}"
        )


def find_best_size(
    layers: KeepableLayers, run_update: RunUpdate, limits: Limits, encoder: PromptEncoder, at_least: int
) -> tuple[Limits, int]:
    """The pass size with which most layers keep their activations, the largest such size, and how many layers. It is
    the given one or a smaller one of `at_least` so many tokens.

    Smaller passes leave room for more layers, so the smallest size is measured first. Memory is linear in the tokens of
    a pass: what the sizes between would keep follows from both ends. The largest one that should keep as many layers
    is measured, too, so that only a size that was measured is chosen.
    """
    rollouts = longest_rollouts(encoder, limits, limits.prompts_per_update)
    smaller = list_smaller_sizes(limits, rollouts, at_least)
    kept, start = layers.fitting, layers.measured
    if not smaller or kept == len(layers.layers):
        return limits, kept
    best, between = smaller[-1], smaller[:-1]
    run_update(best, watch_update=layers.measure)
    if layers.fitting <= kept:
        return limits, kept
    kept, end = layers.fitting, layers.measured
    first, last = (each.update.largest(rollouts) for each in (limits, best))
    for size in between:
        expected = start.towards(end, first - size.update.largest(rollouts), first - last)
        if layers.count_on_all(expected) >= kept:
            run_update(size, watch_update=layers.measure)
            return (size, layers.fitting) if layers.fitting >= kept else (best, kept)
    return best, kept


def list_smaller_sizes(limits: Limits, rollouts: Rollouts, at_least: int) -> list[Limits]:
    """Each of three quarters of the size before, down to `at_least` tokens in the largest pass."""
    sizes: list[Limits] = []
    while (tokens := limits.update.smaller(rollouts)) is not None:
        limits = replace(limits, update=limits.update.within(tokens))
        if limits.update.largest(rollouts) < at_least:
            break
        sizes.append(limits)
    return sizes
