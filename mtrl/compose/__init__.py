"""Builds a run from the configuration: the only room that names concrete classes.

run              a whole run, and an evaluation
algorithm        the algorithm and the components that are filled from keys
policy           encoder, policy, actor, reference, engine
critic_worker    the critic
worker_groups    the same on several processes
task_source      rows, dataset, sampler, validation
reward_scorer    reward functions and the reward model
trackers         files, console, loggers, checkpoints
memory_limits    memory estimates and the preflight
"""
