"""A reward that reads signals of the model: right answers earn a little more if the model was certain.

    mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/with_signals.py

`signals` maps each signal that this run measures to a list with one number per token: old_logprobs, entropy and, if
measured, perturbed_logprobs, dependency, ref_logprobs, values; from attention `vgr` and the response's `vgr_late`.
Such a function runs after the probes. Validation measures only attention, and nothing for rows without an image.
"""


def reward_function(data, signals, bonus=0.2):
    right = float(str(data["ground_truth"]).lower() in data["response"].lower())
    entropy = signals.get("entropy")
    if not entropy:
        return right
    mean = sum(entropy) / len(entropy)
    return right * (1 + bonus / (1 + mean)), {"mean_entropy": mean}
