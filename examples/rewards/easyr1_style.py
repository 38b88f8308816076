"""A reward function as EasyR1 documents it: dicts in, dicts out. All keys but `overall` are logged as reward/<key>.

mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/easyr1_style.py
"""

import re
from typing import Any

REWARD_NAME = "answer"
REWARD_TYPE = "batch"  # "sequential": one dict at a time


def tagged_answers(response: str) -> list[str]:
    return re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)


def compute_score(reward_inputs: list[dict[str, Any]], untagged: float = 0.5) -> list[dict[str, float]]:
    scores = []
    for each in reward_inputs:
        response, truth = each["response"], str(each["ground_truth"]).strip().lower()
        tagged = tagged_answers(response)
        if tagged:
            overall = float(tagged[-1].strip().lower() == truth)
        else:
            overall = untagged if re.search(rf"\b{re.escape(truth)}\b", response.lower()) else 0.0
        scores.append({"overall": overall, "tagged": float(bool(tagged)), "tokens": float(each["response_length"])})
    return scores
