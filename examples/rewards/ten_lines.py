"""A reward in ten lines: 1 for the right answer in its tag, 0.5 for the right answer anywhere, 0 otherwise.

    mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/ten_lines.py

The *_style.py files here are the same rule in the signatures of TRL, EasyR1 and verl.
"""

import re


def reward_function(data):
    truth = str(data["ground_truth"]).strip().lower()
    tagged = re.findall(r"<answer>(.*?)</answer>", data["response"], re.DOTALL)
    if tagged:
        return float(tagged[-1].strip().lower() == truth)
    return 0.5 if re.search(rf"\b{re.escape(truth)}\b", data["response"].lower()) else 0.0
