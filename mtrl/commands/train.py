"""Train a model.

mtrl train [FILE] [a.b=c ...]

FILE is YAML: your own, or a packaged one such as mtrl:zoo/tprl_full. mtrl config --list prints them.
Without a file, a model and data, the embedded model is trained on the embedded task, in sizes for a laptop.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtrl.commands.load_arguments import check_call, log_line, open_log
from mtrl.compose.run import build, configure
from mtrl.config import Config, find_warnings, take_file
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.resumable_run import Run, train_with_restarts
from mtrl.utils.machine import stop_with_parent


def run(arguments: Sequence[str]) -> int:
    stop_with_parent()
    file, overrides = take_file(arguments)
    config, embedded = configure(file, overrides)
    log = open_log()
    if embedded:
        why = "no config file, model or data given" if embedded.stem == "zoo" else "no config file given"
        log_line(f"{why}: the overrides apply to {embedded.name} of the embedded task", log)
    for warning in find_warnings(config):
        log_line(f"warning: {warning}", log)

    def build_run(config: Config) -> Run:
        training = check_call(build, config)
        log_line(f"run directory: {training.directory}, {training.start.describe()}", log)
        spec = training.loop.spec  # logged, since a large step takes long before it reports anything
        each = f"{spec.prompts_per_step} prompts x {spec.sampling.n} responses"
        log_line(f"steps: {spec.total_steps}, each {each} of at most {spec.sampling.max_new_tokens} tokens", log)
        log_line(f"checkpoints: {describe_saving(spec)}", log)
        return training

    train_with_restarts(config, build_run)
    return 0


def describe_saving(spec: AlgorithmSpec) -> str:
    """When a run saves, and so what a kill costs."""
    if spec.save_freq < 1 or (spec.save_freq >= spec.total_steps and spec.save_minutes is None):
        return "only at the end, so a kill costs the whole run; set training.save_freq"
    times = [f"{spec.save_freq} steps"] if spec.save_freq < spec.total_steps else []
    times += [] if spec.save_minutes is None else [f"{spec.save_minutes:g} minutes"]
    return f"every {' and every '.join(times)}; a kill costs the work since the last one"
