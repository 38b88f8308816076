"""The method, pure: tensors in, tensors out. No config object, no I/O, no distributed call.

signals     how much a token depends on the image, where its attention goes
credit/     which tokens count and for how much: one file per rule, by name or file.py:Name
advantages  estimators: grpo, rloo, remax, reinforce_plus_plus, gae
divergence  divergence from the reference, and its controllers
batches     from credit to the batches of optimizer steps
losses      policy losses, aggregation as loss weights, truncated importance sampling
value_loss  the critic's loss
rewards     parts to a total, schedules, attention rewards
filtering   which groups a step learns from
replay      stored groups of earlier steps
joining     groups of several calls or steps in one experience
packing     whole groups into ranks and micro-batches
vocab       log-probs, entropy and KL over the vocabulary in chunks
metrics     metrics of a step
groups      reductions over tokens and groups
"""
