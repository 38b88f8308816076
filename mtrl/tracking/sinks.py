"""The loggers themselves, each around its library, which is imported when it is asked for.

A resumed run goes on in the same run of wandb, mlflow, swanlab or trackio: `loggers.json` in its directory has the id.
What the user's environment says to a library (WANDB_MODE and so on) holds; without a key wandb and swanlab write
offline.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrl.tracking.feed import About, Shown, Sink

IDS = "loggers.json"


def kept_id(directory: Path, name: str, make: Callable[[], str] = lambda: uuid.uuid4().hex[:12]) -> str:
    """The id of the run in a logger: the one of earlier attempts, or a new one that is written down."""
    file = directory / IDS
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ids = {}
    if not isinstance(ids, dict) or not isinstance(ids.get(name), str):
        ids = (ids if isinstance(ids, dict) else {}) | {name: make()}
        part = file.with_name(f".{IDS}.{os.getpid()}")
        part.write_text(json.dumps(ids), encoding="utf-8")
        part.replace(file)
    return ids[name]


def as_markdown(shown: Shown) -> str:
    """A response as text that shows as it is: indented, so that nothing in it is markup."""
    answer = "" if shown.answer is None else f", answer {shown.answer}"
    head = f"{shown.id}: reward {shown.reward:.3g}{answer}"
    lines = [head, "", *shown.prompt.split("\n"), "", *shown.response.split("\n")]
    return "\n".join(f"    {line}" for line in lines)


class TensorboardSink:
    """Event files in `tensorboard/` of the run. Steps that are done again replace those of the attempt before."""

    def __init__(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(about.directory / "tensorboard"), purge_step=about.first_step, flush_secs=10)
        text = "\n".join(f"    {key}: {value}" for key, value in about.config.items())
        self.writer.add_text("config", text, about.first_step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def responses(self, step: int, shown: Sequence[Shown]) -> None:
        for place, each in enumerate(shown):
            self.writer.add_text(f"{each.kind}/{place}", as_markdown(each), step)
            if each.image is not None:
                self.writer.add_image(f"{each.kind}/{place}", each.image, step, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A run of Weights & Biases. Without a key or WANDB_MODE it is offline; wandb sync sends it."""

    def __init__(self, about: About) -> None:
        import wandb

        told = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or has_netrc_key()
        self.wandb = wandb
        self.run = wandb.init(
            project=about.project,
            name=about.name,
            id=kept_id(about.directory, "wandb"),
            resume="allow",
            dir=str(about.directory),
            config=dict(about.config),
            mode=None if told else "offline",
            settings=wandb.Settings(console="off"),  # stdout and stderr stay ours
        )
        self.run.define_metric("*", step_metric="step")  # a step may be done again: wandb's own steps only grow

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "step": step})

    def responses(self, step: int, shown: Sequence[Shown]) -> None:
        rows = [[each.kind, each.id, each.prompt, each.response, each.answer, each.reward] for each in shown]
        table = self.wandb.Table(columns=["kind", "id", "prompt", "response", "answer", "reward"], data=rows)
        images = [self.wandb.Image(each.image, caption=f"{each.id}: {each.response}") for each in shown
                  if each.image is not None]  # fmt: skip
        self.run.log({"responses": table, "step": step} | ({"images": images} if images else {}))

    def close(self) -> None:
        self.run.finish()


def has_netrc_key() -> bool:
    """Whether `wandb login` was done here."""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return "wandb" in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


class MlflowSink:
    """A run of mlflow, at MLFLOW_TRACKING_URI or in `mlruns/` of the run's directory. mlflow-skinny is enough."""

    def __init__(self, about: About) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # files need no database; mlflow asks to say so
        import mlflow
        from mlflow.entities import Metric, Param

        place = os.environ.get("MLFLOW_TRACKING_URI") or (about.directory.absolute() / "mlruns").as_uri()
        self.client, self.metric = mlflow.MlflowClient(tracking_uri=place), Metric
        experiment = self.client.get_experiment_by_name(about.project)
        number = self.client.create_experiment(about.project) if experiment is None else experiment.experiment_id
        made = []

        def make() -> str:
            made.append(self.client.create_run(number, run_name=about.name).info.run_id)
            return made[0]

        self.id = kept_id(about.directory, "mlflow", make)
        settings = [Param(key, str(value)[:500]) for key, value in about.config.items()] if made else []
        for start in range(0, len(settings), 100):  # as many as it takes at once
            self.client.log_batch(self.id, params=settings[start : start + 100])
        self.client.update_run(self.id, status="RUNNING")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        found = [self.metric(NOT_IN_MLFLOW.sub("_", name), value, now, step) for name, value in values.items()]
        for start in range(0, len(found), 1000):
            self.client.log_batch(self.id, metrics=found[start : start + 1000])

    def responses(self, step: int, shown: Sequence[Shown]) -> None:
        self.client.log_text(self.id, "\n\n".join(map(as_markdown, shown)), f"responses/step_{step}.md")
        for place, each in enumerate(shown):
            if each.image is not None:
                self.client.log_image(self.id, each.image, artifact_file=f"responses/step_{step}_{place}.png")

    def close(self) -> None:
        self.client.set_terminated(self.id)


class SwanlabSink:
    """A run of SwanLab. Without a key or SWANLAB_MODE it is offline, in `swanlab/`; swanlab sync sends it."""

    def __init__(self, about: About) -> None:
        import swanlab

        place = about.directory / "swanlab"
        place.mkdir(parents=True, exist_ok=True)
        told = os.environ.get("SWANLAB_MODE") or os.environ.get("SWANLAB_API_KEY") or has_swanlab_key()
        self.swanlab = swanlab
        self.run = swanlab.init(
            project=about.project,
            name=about.name,
            id=kept_id(about.directory, "swanlab", lambda: uuid.uuid4().hex[:21]),
            resume="allow",
            log_dir=str(place),
            config=dict(about.config),
            mode=None if told else "offline",
            settings=swanlab.Settings(terminal={"proxy_type": "none"}),  # stdout and stderr stay ours
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def responses(self, step: int, shown: Sequence[Shown]) -> None:
        entries: dict[str, Any] = {"responses": [self.swanlab.Text(as_markdown(each)) for each in shown]}
        images = [self.swanlab.Image(each.image, caption=each.id) for each in shown if each.image is not None]
        self.run.log(entries | ({"images": images} if images else {}), step=step)

    def close(self) -> None:
        self.run.finish()


def has_swanlab_key() -> bool:
    """Whether `swanlab login` was done here."""
    return any((folder / ".swanlab" / ".netrc").is_file() for folder in (Path.home(), Path.cwd()))


class TrackioSink:
    """A run of trackio: in its own place on this machine (TRACKIO_DIR), or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL
    say. It knows runs by their names, so that the name carries a mark of this run."""

    def __init__(self, about: About) -> None:
        import trackio

        for name in ("trackio", "trackio.utils", "trackio.run"):
            vars(sys.modules[name])["print"] = lambda *words, **options: None  # stdout stays ours
        self.trackio = trackio
        self.run = trackio.init(
            project=about.project,
            name=kept_id(about.directory, "trackio", lambda: f"{about.name}-{uuid.uuid4().hex[:6]}"),
            resume="allow",
            config=dict(about.config),
            embed=False,
            auto_log_gpu=False,  # perf/* has what a step took
            auto_log_cpu=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def responses(self, step: int, shown: Sequence[Shown]) -> None:
        pictures = [None if each.image is None else self.trackio.Image(each.image, caption=each.id) for each in shown]
        rows = [[each.kind, as_markdown(each), each.reward, picture]
                for each, picture in zip(shown, pictures, strict=True)]  # fmt: skip
        table = self.trackio.Table(columns=["kind", "response", "reward", "image"], data=rows)
        self.run.log({"responses": table}, step=step)

    def close(self) -> None:
        self.run.finish()


NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]", re.ASCII)  # signs that names may not have there: val/avg@1 is val/avg_1
SINKS: dict[str, Callable[[About], Sink]] = {
    "tensorboard": TensorboardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "swanlab": SwanlabSink,
    "trackio": TrackioSink,
}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}: what every logger can show.

    >>> flat({"a": {"b": 1, "c": [2]}})
    {'a.b': 1, 'a.c': '[2]'}
    """
    if not isinstance(tree, Mapping):
        return {prefix: tree if isinstance(tree, (str, int, float, bool, type(None))) else str(tree)}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
