"""A reward function as TRL documents it: all responses at once, columns as keyword lists, one reward per response.

    mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/trl_style.py:answer_reward

Rows without an answer return None: "does not apply".
"""

import re


def answer_reward(completions, ground_truth, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [rated(text, truth) for text, truth in zip(texts, ground_truth, strict=True)]


def rated(text, truth):
    if truth is None:
        return None
    truth = str(truth).strip().lower()
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        return float(tagged[-1].strip().lower() == truth)
    return 0.5 if re.search(rf"\b{re.escape(truth)}\b", text.lower()) else 0.0
