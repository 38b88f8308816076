"""From a configuration to a run: the only room that names concrete classes.

run       a whole run, and an evaluation
recipe    the configuration as values; nothing is made there
model     encoder, policy, actor, reference, engine
data      rows, dataset, sampler, validation
rewards   functions and the reward model
trackers  files, console, checkpoints
unbuilt   switches that are refused, since their machinery is not there yet
"""
