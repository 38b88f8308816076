"""The control of `benchmarks.attention_curves`: the mdi rewards, shuffled within each group."""

from __future__ import annotations

import math
import random
from typing import Any

RATIO = 2.0  # worker.reward.mdi_balance_ratio


def reward_function(prompts: list[Any], completions: list[Any], signals: list[dict[str, Any]], **_: Any) -> list[Any]:
    rewards = [mdi(each) for each in signals]
    by_prompt: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_prompt.setdefault(str(prompt), []).append(row)
    shuffled = list(rewards)
    for rows in by_prompt.values():
        group_rewards = [rewards[row] for row in rows]
        random.Random(str(completions[rows[0]]) + str(group_rewards)).shuffle(group_rewards)
        for row, reward in zip(rows, group_rewards, strict=True):
            shuffled[row] = reward
    return shuffled


def mdi(signals: dict[str, Any]) -> float | None:
    if "vgr_late" not in signals:
        return None
    balance = 1 - abs(math.log(signals["vgr_late"])) / math.log(RATIO)
    return 2 * min(1.0, max(0.0, balance)) - 1
