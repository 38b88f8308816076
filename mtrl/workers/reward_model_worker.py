"""A reward model, on the device of the trainer, or split over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mtrl.models.reward_model import RewardModel
from mtrl.types import Prompt, Rollouts
from mtrl.workers.micro_batches import MicroBatching


class RewardModelWorker:
    """Scores when it is asked, in the asking thread. The probes run next and want the same device: beside them it would
    be no sooner ready, and the memory of two passes would be needed at once. Reward functions run meanwhile, in
    processes of their own. Of ranks that hold the model together each scores rows of its own, in as many passes."""

    def __init__(self, model: RewardModel, batching: MicroBatching) -> None:
        self.model, self.batching = model, batching

    def score(self, rollouts: Rollouts) -> list[float | str]:
        """For each response its score, or the reason why it has none."""
        found: dict[int, float | str] = {}
        for rows, counts in self.batching.passes(rollouts):
            readable, unreadable = self._encode(rollouts.rows(rows))
            scores = self._scores(list(readable.values()))
            if not counts:
                continue
            outcomes = unreadable | dict(zip(readable, map(checked_score, scores), strict=True))
            found |= {int(rows[place]): outcome for place, outcome in outcomes.items()}
        return [found[row] for row in range(len(rollouts))]

    def _scores(self, conversations: list[Prompt]) -> list[float]:
        """A rank that has nothing to read goes along where another one has."""
        if not self.batching.ranks.any_rank(bool(conversations)):
            return []
        found: list[float] = self.model.scores(conversations or [self.model.blank()]).tolist()
        return found[: len(conversations)]

    def _encode(self, rollouts: Rollouts) -> tuple[dict[int, Prompt], dict[int, float | str]]:
        """The conversations by row, and for the other rows why they cannot be scored."""
        fitted: dict[int, Sequence[np.ndarray]] = {}
        readable: dict[int, Prompt] = {}
        unreadable: dict[int, float | str] = {}
        for row, (g, text) in enumerate(zip(rollouts.group.tolist(), rollouts.text, strict=True)):
            prompt = rollouts.prompts[g]
            try:
                if g not in fitted:
                    fitted[g] = self.model.fit(prompt.media)
                readable[row] = self.model.encode(prompt.task, fitted[g], text)
            except ValueError as error:
                unreadable[row] = f"the reward model cannot read it: {error}"
        return readable, unreadable


def checked_score(score: float) -> float | str:
    return score if math.isfinite(score) else f"the reward model gave {score}"
