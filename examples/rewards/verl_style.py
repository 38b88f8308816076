"""A reward function as verl documents it: one response, the row's other columns in `extra_info`.

mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/verl_style.py
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    truth = str(ground_truth).strip().lower()
    tagged = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if tagged:
        return {"score": float(tagged[-1].strip().lower() == truth), "tagged": 1.0}
    found = re.search(rf"\b{re.escape(truth)}\b", solution_str.lower())
    return {"score": 0.5 if found else 0.0, "tagged": 0.0}
