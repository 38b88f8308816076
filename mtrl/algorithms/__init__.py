"""The method, pure: tensors in, tensors out. No config object, no I/O, no distributed call.

signals     how much a token depends on the image, where its attention goes
credit/     which tokens count and for how much: a file a rule, by name or file.py:name
advantages  grpo, rloo, remax, reinforce_plus_plus, gae
estimators  those by name: rewards to advantages and returns
divergence  distance to the reference, and its controllers
assemble    credit to the batches of optimizer steps
losses      policy losses, aggregation as term weights, the correction for sampler mismatch
rewards     parts to a total, schedules, attention rewards
filtering   which groups a step learns from
replay      groups worth seeing again
joining     groups of several calls or steps in one experience
packing     whole groups into optimizer steps, ranks and micro-batches
vocab       log-probs, entropy and KL over the vocabulary in chunks
metrics     what is reported of all this
groups      reductions over the `group` vector
"""
