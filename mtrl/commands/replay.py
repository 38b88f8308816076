"""Execute the environment of recorded responses again, and compare what it says.

mtrl replay RUN STEP TASK [--sample N] [a.b=c ...]

TASK is an id in rollouts.jsonl, or what is behind its colon. Every tool is called again as the model called it in that
step, and each message is shown next to the recorded one, turn by turn. If the checkpoint that sampled the step is
still there (step 1: the initial model), the responses are sampled again, too, and compared. A seed makes random numbers
of tools the same; a clock or a server is not repeated. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrl.commands.load_arguments import OptionParser, check_call, whole_number
from mtrl.commands.recorded import ROLLOUTS, RunRecord, make_prompt
from mtrl.compose import algorithm
from mtrl.compose.environments import RunEnvironments
from mtrl.compose.policy import build_encoder, build_generator, build_policy, build_weights
from mtrl.compose.task_source import make_data_settings, open_data_sources
from mtrl.config import Config, ConfigError, load_config
from mtrl.config.unsupported import check_supported
from mtrl.data.prompts import TaskBuilder
from mtrl.environments.pool import Session
from mtrl.environments.records import RolloutKey
from mtrl.environments.tool_calls import parse_tool_calls
from mtrl.models.families import TextEncoder
from mtrl.report.conversation import conversation, digest_images
from mtrl.rollout.conversations import join_contents
from mtrl.tracking.jsonl import iter_rows
from mtrl.types import Prompt, Rollouts
from mtrl.utils.errors import StartError

OPTIONS = OptionParser(__doc__)
OPTIONS.add_argument("--sample", type=whole_number(0), default=None)
SAME, OTHER = "same", "DIFFERS"
Row = Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Recorded:
    """The responses of a step to one task, in the order of their samples."""

    step: int
    task: str
    rows: Sequence[Row]


def run(arguments: Sequence[str]) -> int:
    options, others = OPTIONS.parse_known_args(arguments)
    if len(others) < 3 or not others[1].isdecimal() or int(others[1]) < 1:
        OPTIONS.error("which run, step and task?")
    run_dir, step, task, *overrides = others
    directory = Path(run_dir)
    if not (directory / "config.yaml").is_file():
        raise StartError(f"{run_dir} is no run: it has no config.yaml")
    config = load_config(directory / "config.yaml", overrides, saved=True)
    if config.worker.rollout.environment is None:
        raise ConfigError([f"worker.rollout.environment: {run_dir} has no environment to replay"])
    recorded = check_call(read_step, directory / ROLLOUTS, int(step), task)
    samples = range(len(recorded.rows)) if options.sample is None else [options.sample]
    if samples[-1] >= len(recorded.rows):
        raise StartError(f"--sample: there are {len(recorded.rows)} responses, counted from 0")
    differing = check_call(replay, config, directory, recorded, samples)
    print(json.dumps({"step": recorded.step, "task": recorded.task, "responses": len(samples), **differing}))
    return int(any(differing.values()))


def read_step(file: Path, step: int, task: str) -> Recorded:
    """The last attempt of the step."""
    rows = [row for row in iter_rows(file) if row.get("step") == step]
    rows = [row for row in rows if row.get("attempt") == rows[-1].get("attempt")]
    if not rows:
        raise ValueError(f"{file} has no step {step}")
    ids = list(dict.fromkeys(row["id"] for row in rows))
    found = [each for each in ids if task in (each, each.rpartition(":")[2])]
    if len(found) != 1:
        raise ValueError(f"step {step} has no task {task}; it has {', '.join(ids[:20])}")
    return Recorded(step, found[0], [row for row in rows if row["id"] == found[0]])


def replay(config: Config, directory: Path, recorded: Recorded, samples: Sequence[int]) -> dict[str, int]:
    """Show every turn; returns how many messages and responses differ from the recorded ones."""
    check_supported(config)
    environments = RunEnvironments.open(config)
    assert environments is not None
    with closing(environments.pool):
        encoder = environments.show_tools(build_encoder(config))
        prompt = find_prompt(config, directory, recorded.task, encoder)
        messages = sum(replay_tools(config, environments, encoder, prompt, recorded, number) for number in samples)
        checkpoint = find_sampling_checkpoint(config, directory, recorded.step)
        if checkpoint is None:
            print(f"\nno checkpoint of step {recorded.step - 1}: nothing is sampled again")
            return {"messages_that_differ": messages}
        rollouts = sample_again(config, environments, prompt, recorded.step, checkpoint)
        texts = sum(compare_response(rollouts, number, recorded.rows[number], encoder) for number in samples)
    return {"messages_that_differ": messages, "responses_that_differ": texts}


# --------------------------------------------------------------------------------------------------------- the tools
def replay_tools(
    config: Config, environments: RunEnvironments, encoder: TextEncoder, prompt: Prompt, recorded: Recorded, number: int
) -> int:
    key = RolloutKey(config.worker.rollout.seed, recorded.step - 1, recorded.task, number)
    (session,) = environments.pool.open([environments.make_row(prompt)], [key])
    begun = session.reset().result()
    if begun.content:
        print(f"\nreset: {begun.text}")
    print(f"\nsample {number}")
    differing = 0
    for text, then in turns(recorded.rows[number]):
        print(f"  model: {text}")
        if then is None:
            continue
        now = call_again(environments, session, encoder, text)
        is_same = now["content"] == then["content"] and now["images"] == then["images"]
        differing += not is_same
        print(f"  tools ({', '.join(then['tools'])}), {SAME if is_same else OTHER}: {then['content']}")
        if not is_same:
            print(f"     now: {now['content']}" + (" (other pixels)" if now["content"] == then["content"] else ""))
    session.close()
    return differing


def turns(row: Row) -> Iterator[tuple[str, Message | None]]:
    """What the model wrote in each turn, and the message that answered it, if any."""
    written: list[Message] = row.get("response_turns") or [{"role": "assistant", "content": row["response"]}]
    for place, message in enumerate(written):
        if message["role"] == "assistant":
            yield message["content"], written[place + 1] if place + 1 < len(written) else None


def call_again(environments: RunEnvironments, session: Session, encoder: TextEncoder, text: str) -> Message:
    calls = parse_tool_calls(text, session.schemas)
    results = [future.result() for future in environments.pool.call([(session, call) for call in calls])]
    message = encoder.encode_message(join_contents(results), encoder.stop_ids[0], "replay")
    return {"content": message.task.text, "images": digest_images(message)}


# -------------------------------------------------------------------------------------------------------- the samples
def find_prompt(config: Config, directory: Path, task: str, encoder: TextEncoder) -> Prompt:
    sources = open_data_sources(config.dataset.train_files, "train")
    found = RunRecord(directory / ROLLOUTS, sources, TaskBuilder.from_settings(make_data_settings(config))).find(task)
    if found is None:
        raise ValueError(f"the task {task} is not in the run's data any more")
    prompt = make_prompt(found, encoder)
    return encoder.encode(prompt.task, prompt.media)


def find_sampling_checkpoint(config: Config, directory: Path, step: int) -> str | None:
    """The weights that sampled a step, with one version of the weights per step."""
    if step == 1:
        return config.worker.actor.model.model_path or ""
    checkpoint = directory / "checkpoints" / f"step_{step - 1}"
    return str(checkpoint) if checkpoint.is_dir() else None


def sample_again(
    config: Config, environments: RunEnvironments, prompt: Prompt, step: int, checkpoint: str
) -> Rollouts:  # fmt: skip
    model = replace(config.worker.actor.model, model_path=checkpoint or None)
    actor = replace(config.worker.actor, model=model)
    config = replace(config, worker=replace(config.worker, actor=actor))
    plain, policy = build_policy(config)
    encoder = environments.show_tools(plain)
    weights = build_weights(config, policy)
    sampling = replace(algorithm.make_training_sampling(config), step=step - 1)
    with closing(weights), closing(build_generator(config, policy, plain, weights=weights)) as engine:
        generator = environments.converse(engine, encoder)
        with generator.resident():
            return generator.generate([prompt], sampling)


def compare_response(rollouts: Rollouts, number: int, row: Row, encoder: TextEncoder) -> int:
    now = conversation(rollouts, number, encoder.decode) or [{"role": "assistant", "content": rollouts.text[number]}]
    then = list(turns(row))
    texts = [each["content"] for each in now if each["role"] == "assistant"]
    is_same = texts == [text for text, _ in then]
    print(f"\nsample {number} again: {SAME if is_same else OTHER}")
    if not is_same:
        for place, (text, (before, _)) in enumerate(zip(texts, then, strict=False), 1):
            if text != before:
                print(f"  turn {place}, recorded: {before}\n  turn {place}, now:      {text}")
                break
    return int(not is_same)
