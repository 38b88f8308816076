"""A reward that also returns token weights: the last tokens, which hold the answer, count three times as much.

    mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/token_weights.py \
        optimization.enable_token_weights=true

One weight for each of `response_token_ids` (including the end token); a shorter list is padded with 1.
"""


def reward_function(data, last=0.25, weight=3.0):
    tokens = len(data["response_token_ids"])
    tail = max(1, round(last * tokens))
    right = float(str(data["ground_truth"]).lower() in data["response"].lower())
    return right, {"token_weights": [1.0] * (tokens - tail) + [weight] * tail}
