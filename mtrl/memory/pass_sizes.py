"""Reduces the passes of a run until they fit into device memory, and stores their size for the next attempt."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mtrl.memory.preflight import DOES_NOT_FIT, DoesNotFit, Limits, half_pass_tokens
from mtrl.models.forward import Forward
from mtrl.utils.errors import PassesCut
from mtrl.utils.terminal import say_at_once
from mtrl.workers.learner import Learner

KEPT_LAYERS = "kept_layers"  # an entry next to those of the learners; 0: none keeps its activations


@dataclass(frozen=True)
class PassSizes:
    """The maximum size of a pass of each learner, and whether layers may keep their activations, in a file in the run
    directory: a rank that runs out of memory writes it before all ranks end, and all read it when they restart."""

    file: Path

    def write(self, name: str, size: int) -> None:
        """Store the new maximum; if several ranks write at once, any of them may win."""
        temporary = self.file.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        temporary.write_text(json.dumps(self._read() | {name: size}))
        temporary.replace(self.file)

    def apply(self, learner: Learner) -> None:
        """Limit the learner to the size found by earlier attempts, and have it write smaller ones here."""
        learner.cut_to, learner.keep_cut = self._read().get(learner.name, 0), partial(self.write, learner.name)
        learner.forbid_kept_layers = partial(self.write, KEPT_LAYERS, 0)

    @property
    def may_keep_layers(self) -> bool:
        """False after an earlier attempt ran out of memory with layers that kept their activations."""
        return KEPT_LAYERS not in self._read()

    def _read(self) -> dict[str, int]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}


def fit_passes(
    run_once: Callable[[Limits], dict[str, int]],
    limits: Limits,
    policy: Forward,
    learners: Sequence[Learner],
    pass_sizes: PassSizes | None = None,
) -> dict[str, int]:
    """Halve the passes, and those of the learners, until they fit; return their peak memory. Raise if no size fits, or
    without learners. Ranks cannot continue after a failed pass: they store the size in `pass_sizes` and end."""
    while True:
        try:
            return run_once(limits)
        except DoesNotFit as error:
            tokens = half_pass_tokens(limits, policy.encoder, error.phase) if learners else None
            if tokens is None:
                raise
            phase = error.phase
        message = f"{DOES_NOT_FIT[phase]} in passes of this size: they are reduced to {tokens:,} tokens"
        if pass_sizes is not None:
            for learner in learners:
                pass_sizes.write(learner.name, tokens)
            raise PassesCut(f"memory: {message}; ")
        say_at_once(message)
        limits = limits.within(tokens)
        for learner in learners:
            learner.cut_to = tokens
