"""A reward that also says which tokens matter: the last ones, where the answer stands, count three times as much.

    mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/token_weights.py \
        optimization.enable_token_weights=true

One weight for each of `response_token_ids` (the end token is one of them); a shorter list goes on with 1.
"""


def reward_function(data, last=0.25, weight=3.0):
    tokens = len(data["response_token_ids"])
    tail = max(1, round(last * tokens))
    right = float(str(data["ground_truth"]).lower() in data["response"].lower())
    return right, {"token_weights": [1.0] * (tokens - tail) + [weight] * tail}
