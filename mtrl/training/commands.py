"""What the commands of `cli.py` do."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mtrl.config import Config, ConfigError, load_config, take_file, warnings
from mtrl.data import report
from mtrl.errors import StartError
from mtrl.rewards.trial_report import report as report_trial
from mtrl.rewards.trial_report import summary as summarize_trial
from mtrl.tracking.chart import draw_chart, running_mean
from mtrl.tracking.run_files import read_rows
from mtrl.training import build as house
from mtrl.training import recorded
from mtrl.training.checkpoint import checkpoints
from mtrl.training.evaluate import Result as Validated
from mtrl.training.resume import newest_intact
from mtrl.training.try_reward import try_reward as run_trial
from mtrl.workers.snapshot import MOMENTS
from mtrl.zoo.rows import CONFIG_FILE, MODEL_DIRECTORY

Result = TypeVar("Result")

DEMO_STEPS = 24
SMOOTHED_OVER = 5  # steps, in the learning curve of the demo


def train(words: Sequence[str]) -> int:
    file, overrides = take_file(words)
    config, embedded = house.configure(file, overrides)
    if embedded:
        say(f"no config file, model or data given: {CONFIG_FILE.name} of the embedded task lies under the overrides")
    _warn(config)
    run = started(house.build, config)
    say(f"run directory: {run.directory}, {run.start.told()}")
    run.train()
    return 0


def evaluate(words: Sequence[str]) -> int:
    path, data, overrides = take_path_and_data(words, "which model? mtrl eval CHECKPOINT|RUN [--data F] [a.b=c ...]")
    config = evaluation_config(path, [*overrides, *([f"dataset.val_files={data}"] if data else [])])
    result = started(house.evaluate, config)
    print(_table(result))
    print(json.dumps({"checkpoint": config.worker.actor.model.model_path, **result.metrics, "by": result.by}))
    return 0


def describe_data(words: Sequence[str]) -> int:
    file, overrides = take_file(words)
    if file is None:
        raise ConfigError(["which data? mtrl data FILE [a.b=c ...]"])
    embedded = file.startswith(house.EMBEDDED)
    config = load_config(CONFIG_FILE if embedded else None, overrides)
    knows_model = embedded or config.worker.actor.model.model_path is not None
    encoder = started(house.build_encoder, config) if knows_model else None
    sources = started(house.sources_of, file, "train")
    return started(report.run, sources, house.data_settings(config), encoder, sys.stdout)


def try_reward(words: Sequence[str]) -> int:
    function, data, overrides = take_path_and_data(words, "which reward? mtrl reward FILE --data F [a.b=c ...]")
    if data is None:
        raise ConfigError(["--data: name the rollouts.jsonl of a run, or a dataset"])
    file = recorded.rollouts_file(data)
    place = CONFIG_FILE if data.startswith(house.EMBEDDED) else None if file is None else file.parent / "config.yaml"
    config = load_config(place if place and place.is_file() else None, overrides)
    trial, notes = started(run_trial, config, function, data, file)
    for note in notes:
        say(f"note: {note}")
    print(report_trial(trial))
    print(json.dumps(summarize_trial(trial)))
    return 0


def demo(words: Sequence[str]) -> int:
    begin = time.perf_counter()
    defaults = [
        f"training.max_steps={DEMO_STEPS}",
        f"training.experiment_name=demo-{time.strftime('%Y%m%d-%H%M%S')}",
        "training.val_freq=-1",
        "training.val_generations_to_log=1",
        "optimization.compute_attention_metrics=false",  # a second pass over a thousand questions, twice
        "dataset.val_files=zoo@test",
    ]
    config, _ = house.configure(None, [*defaults, *words])
    say(
        "A vision-language model of 3 million parameters learns, by reinforcement, to answer questions about small\n"
        "pictures of coloured shapes. It can see them, but its teacher often answered from habit without looking, and\n"
        "called some things by a wrong name. Only the reward (right answer, right form) tells it so."
    )
    run = started(house.build, config)
    run.train()
    rows = read_rows(run.directory / "metrics.jsonl")
    accuracy = f"val/avg@{config.worker.rollout.val.n}"
    validated = [row for row in rows if accuracy in row]
    before, after = validated[0], validated[-1]
    _draw_learning_curve(run.directory / "learning_curve.png", rows, accuracy)
    print(_comparison(before, after, accuracy))
    print(
        f"\nLearning curve:  {run.directory}/learning_curve.png"
        f"\nEvery response:  {run.directory}/rollouts.jsonl"
        f"\nEvery number:    {run.directory}/metrics.jsonl"
        f"\nThe new model:   {checkpoints(run.directory / 'checkpoints')[-1]}  (plain from_pretrained loads it)"
        "\nNext: mtrl train optimization.enable_perception_filtering=false   # plain GRPO, for comparison"
        "\n      mtrl config                                               # every key\n"
    )
    seconds = round(time.perf_counter() - begin, 1)
    summary = {
        "accuracy_before": before[accuracy],
        "accuracy_after": after[accuracy],
        "steps": after["step"],
        "seconds": seconds,
        "run_dir": str(run.directory),
    }
    print(json.dumps(summary))
    return 0


def started(begin: Callable[..., Result], *arguments: Any) -> Result:
    """Before training a ValueError speaks to the user, of data, model or reward file. Later it would be our mistake."""
    try:
        return begin(*arguments)
    except ConfigError:
        raise
    except ValueError as error:
        raise StartError(str(error)) from error


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _warn(config: Config) -> None:
    for warning in warnings(config):
        say(f"warning: {warning}")


def take_option(words: Sequence[str], name: str, wanted: str) -> tuple[str | None, list[str]]:
    """The word after an option, and the others; `wanted` is said where there is none."""
    others = list(words)
    if name not in others:
        return None, others
    place = others.index(name)
    if place + 1 == len(others):
        raise ConfigError([f"{name}: {wanted}"])
    value = others[place + 1]
    del others[place : place + 2]
    return value, others


def take_path_and_data(words: Sequence[str], question: str) -> tuple[str, str | None, list[str]]:
    """PATH [--data F] and the overrides; the question is asked where there is no path."""
    data, others = take_option(words, "--data", "name a file, a directory or a dataset")
    path, overrides = take_file(others)
    if path is None:
        raise ConfigError([question])
    return path, data, overrides


def evaluation_config(path: str, overrides: list[str]) -> Config:
    """A run's own configuration with its newest checkpoint; for a bare checkpoint the defaults."""
    place = Path(path)
    run = next((each for each in (place, place.absolute().parent.parent) if (each / "config.yaml").is_file()), None)
    checkpoint = newest_intact(place / "checkpoints", but=(MOMENTS,)) if run == place else place
    if run == place and checkpoint is None:
        raise ConfigError([f"{path} is a run without a checkpoint"])
    file = run / "config.yaml" if run else CONFIG_FILE if place.resolve() == MODEL_DIRECTORY else None
    return load_config(file, [f"worker.actor.model.model_path={checkpoint}", *overrides])


def _table(result: Validated) -> str:
    lines = [f"{name.removeprefix('val/'):<24} {value:8.4f}" for name, value in result.metrics.items()]
    for column, table in result.by.items():
        lines += ["", f"by {column}", *(f"  {value:<22} {rate:8.4f}" for value, rate in table.items())]
    return "\n".join(lines)


def _comparison(before: Mapping[str, Any], after: Mapping[str, Any], accuracy: str) -> str:
    """Accuracy by kind of question before and after, as a table."""
    prefix = "val/by_kind/"
    kinds = [name for name in before if name.startswith(prefix)]
    rows = [(name.removeprefix(prefix), before[name], after[name]) for name in kinds]
    rows.append(("all", before[accuracy], after[accuracy]))
    lines = [f"\n{'accuracy':<12} {'before':>7} {'after':>7}"]
    lines += [f"{kind:<12} {old:7.3f} {new:7.3f}   {new - old:+.3f}" for kind, old, new in rows]
    return "\n".join(lines)


def _draw_learning_curve(path: Path, rows: Sequence[Mapping[str, Any]], accuracy: str) -> None:
    sampled = [(row["step"], row["reward/success_rate"]) for row in rows if "reward/success_rate" in row]
    validated = [(row["step"], row[accuracy]) for row in rows if accuracy in row]
    series = {
        f"training, sampled (mean of {SMOOTHED_OVER} steps)": running_mean(sampled, SMOOTHED_OVER),
        "test questions": validated,
    }
    draw_chart(path, "Accuracy of the embedded model", series, "step", "accuracy")
