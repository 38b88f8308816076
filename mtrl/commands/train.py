"""`mtrl train`."""

from __future__ import annotations

from collections.abc import Sequence

from mtrl.commands.load_arguments import say, started, warnings_to_log
from mtrl.compose.run import Run, build, configure, train_through
from mtrl.config import Config, take_file, warnings
from mtrl.training.algorithm_spec import AlgorithmSpec


def run(arguments: Sequence[str]) -> int:
    file, overrides = take_file(arguments)
    config, embedded = configure(file, overrides)
    log = warnings_to_log()
    if embedded:
        why = "no config file, model or data given" if embedded.stem == "zoo" else "no config file given"
        say(f"{why}: {embedded.name} of the embedded task lies under the overrides", log)
    for warning in warnings(config):
        say(f"warning: {warning}", log)

    def begin(config: Config) -> Run:
        training = started(build, config)
        say(f"run directory: {training.directory}, {training.start.told()}", log)
        say(sizes(training.loop.algorithm_spec), log)
        return training

    train_through(config, begin)
    return 0


def sizes(algorithm_spec: AlgorithmSpec) -> str:
    """The sizes of a step in arguments: a large one takes long before it reports anything."""
    each = f"{algorithm_spec.prompts_per_step} prompts x {algorithm_spec.sampling.n} responses"
    return (
        f"steps: {algorithm_spec.total_steps}, each {each} of at most {algorithm_spec.sampling.max_new_tokens} tokens"
    )
