"""Minimal recorded runs for the viewer, and a server that shows them."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from helpers import NAN, fake_experience, fake_rollouts

from mtrl.tracking.record import RolloutRecord
from mtrl.types import SEGMENTS, Credit, Rewards, Signals
from mtrl.view.rollout_store import RecordedRollouts


def decode(ids):
    return [f"t{i} " for i in ids]


def picture(shade, side=4):
    return np.full((side, side, 3), shade, dtype=np.uint8)


def make_step(lengths=(2, 1, 2), group=(0, 0, 1), shades=(10, 20), **changes):
    """Three responses of 2, 1 and 2 tokens to two prompts, each about a picture of one shade."""
    rollouts = fake_rollouts(list(lengths), group=list(group))
    prompts = tuple(
        replace(prompt, media=(picture(shade),)) for prompt, shade in zip(rollouts.prompts, shades, strict=True)
    )
    rollouts = replace(rollouts, prompts=prompts, version=torch.zeros(len(rollouts), dtype=torch.long))
    shape = rollouts.mask.shape
    rewards = Rewards(
        torch.tensor([1.5, 0.5, 1.0])[: len(rollouts)],
        {"accuracy": torch.tensor([1.0, 0.0, NAN])[: len(rollouts)]},
        torch.tensor([False, False, True])[: len(rollouts)],
    )
    select = torch.zeros(shape, dtype=torch.bool)
    select[:, 0] = True
    credit = Credit(torch.full(shape, -0.5), select, rollouts.mask.float(), torch.full((len(rollouts),), 1.25))
    mass = torch.zeros(*shape, len(SEGMENTS), 2)
    mass[..., 2, 1] = 0.75  # late layers, vision
    signals = Signals(
        old_logprobs=torch.full(shape, -1.0),
        dependency=torch.arange(shape[0] * shape[1]).view(shape) / 4,
        attention_mass=mass,
    )
    return replace(fake_experience(rollouts, signals, torch.full(shape, -0.4), rewards, credit=credit), **changes)


def with_maps(step, maps, media):
    """The step with attention maps of its responses, which all have the same media."""
    prompts = tuple(replace(prompt, media=media) for prompt in step.rollouts.prompts)
    signals = replace(step.signals, attention_maps=tuple(maps))
    return replace(step, signals=signals, rollouts=replace(step.rollouts, prompts=prompts))


def recorded(directory, *steps, **options):
    record = RolloutRecord(
        directory, decode, str, lambda prompt, step: [medium // 2 for medium in prompt.media], **options
    )
    for number, step in enumerate(steps, 1):
        record.rollouts(number, step)
        while record._background._jobs.qsize():  # real steps take longer
            time.sleep(0.001)  # lets the writing thread run
    record.close()
    return opened(directory)


def opened(directory):
    store = RecordedRollouts(directory)
    store.refresh()
    return store


def replace_text(step, text, prompt="fake", name="p0"):
    """The step with another text of its first response, and another prompt and task id."""
    rollouts = step.rollouts
    first = rollouts.prompts[0]
    task = replace(first.task, id=name, messages=({"role": "user", "content": prompt},))
    prompts = (replace(first, task=task), *rollouts.prompts[1:])
    return replace(step, rollouts=replace(rollouts, text=(text, *rollouts.text[1:]), prompts=prompts))


def metrics_row(step, attempt=1, **values):
    return json.dumps({"step": step, "attempt": attempt, "time": 1.0, **values}) + "\n"


def fake_run(directory, steps=3, attempt=1):
    """An MTRL run: metrics, and a record of three responses per step."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        metrics_row(n, attempt, **{"reward/overall": n / 10, "perf/seconds_step": 2.0, "perf/seconds_update": 1.0})
        for n in range(1, steps + 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(rows))
    (directory / "config.yaml").write_text("dataset:\n  seed: 7\n")
    recorded(directory / "record", *[make_step(shades=(n % 100, 100 + n % 100)) for n in range(steps)])
    return directory


@contextmanager
def served(*paths, token=None):
    """The address of a server that shows these runs."""
    from mtrl.commands.view import listen, page_address
    from mtrl.view.http_server import make_server
    from mtrl.view.run_index import open_runs
    from mtrl.view.server import make_app

    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        app = make_app(open_runs([Path(path) for path in paths]), "127.0.0.1", port, token)
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield page_address("127.0.0.1", port, token)
        finally:
            server.should_exit = True
            thread.join(10)
