"""A reward that reads what was measured of the model: right answers earn a little more the surer the model was.

    mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/with_signals.py

`signals` holds a list of numbers, one a token, for each that this run measures: old (log-probs), entropy, and where
they are on perturbed, dependency, reference, values; of attention `vgr` and the response's `vgr_late`. Such a function
runs after the probes. Validation measures attention alone, and nothing where there is no image.
"""


def reward_function(data, signals, bonus=0.2):
    right = float(str(data["ground_truth"]).lower() in data["response"].lower())
    entropy = signals.get("entropy")
    if not entropy:
        return right
    mean = sum(entropy) / len(entropy)
    return right * (1 + bonus / (1 + mean)), {"mean_entropy": mean}
