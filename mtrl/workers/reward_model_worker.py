"""A reward model, on the trainer's device or sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mtrl.models.reward_model import RewardModel
from mtrl.types import Prompt, Rollouts
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import STAYING, StayingWeights


class RewardModelWorker:
    """Scores in the calling thread: next to the probes, which use the same device, it would be ready no sooner and need
    the memory of two passes. Reward functions run meanwhile, in separate processes. If ranks hold the model together,
    each scores its own rows, in the same number of passes."""

    def __init__(self, model: RewardModel, batching: MicroBatching) -> None:
        self.model, self.batching = model, batching
        self.policy_weights: StayingWeights = STAYING

    def score(self, rollouts: Rollouts) -> list[float | str]:
        """The score of each response, or the reason why it has none."""
        self.policy_weights.offload()
        results: dict[int, float | str] = {}
        for rows, counts in self.batching.passes(rollouts):
            readable, unreadable = self._encode(rollouts.rows(rows))
            scores = self._scores(list(readable.values()))
            if not counts:
                continue
            outcomes = unreadable | dict(zip(readable, map(check_score, scores), strict=True))
            results |= {int(rows[index]): outcome for index, outcome in outcomes.items()}
        return [results[row] for row in range(len(rollouts))]

    def _scores(self, conversations: list[Prompt]) -> list[float]:
        """A rank that has nothing to read makes a dummy pass if another one has."""
        if not self.batching.ranks.any_rank(bool(conversations)):
            return []
        scores: list[float] = self.model.scores(conversations or [self.model.dummy_conversation()]).tolist()
        return scores[: len(conversations)]

    def _encode(self, rollouts: Rollouts) -> tuple[dict[int, Prompt], dict[int, float | str]]:
        """The conversations by row, and the reasons why the other rows cannot be scored."""
        fitted: dict[int, Sequence[np.ndarray]] = {}
        readable: dict[int, Prompt] = {}
        unreadable: dict[int, float | str] = {}
        for row, (g, text) in enumerate(zip(rollouts.group.tolist(), rollouts.text, strict=True)):
            prompt = rollouts.prompts[g]
            try:
                if g not in fitted:
                    fitted[g] = self.model.resize_images(prompt.media)
                readable[row] = self.model.encode(prompt.task, fitted[g], text)
            except ValueError as error:
                unreadable[row] = f"the reward model cannot read it: {error}"
        return readable, unreadable


def check_score(score: float) -> float | str:
    return score if math.isfinite(score) else f"the reward model gave {score}"
