"""The loggers, each a wrapper of its library, which is imported on demand.

A resumed run continues the same run of wandb, mlflow, swanlab or trackio, whose id is in `loggers.json` in the run's
directory. Environment variables of a library (WANDB_MODE and so on) apply; without a key wandb and swanlab write
offline.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mtrl.report.markdown_text import shorten
from mtrl.tracking.feed import LoggedSample, RunInfo, Sink
from mtrl.tracking.table import Values

IDS = "loggers.json"
WANDB_INIT_S = 15  # time for wandb's server to respond, unless WANDB_INIT_TIMEOUT is set; its own default is 90

logger = logging.getLogger(__name__)


def get_run_id(directory: Path, name: str, make: Callable[[], str] = lambda: uuid.uuid4().hex[:12]) -> str:
    """The id of the run in a logger: that of earlier attempts, or a new one, which is stored."""
    file = directory / IDS
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ids = {}
    ids = ids if isinstance(ids, dict) else {}
    if not isinstance(ids.get(name), str):
        ids[name] = make()
        part = file.with_name(f".{IDS}.{os.getpid()}")
        part.write_text(json.dumps(ids), encoding="utf-8")
        part.replace(file)
    return ids[name]


def as_markdown(sample: LoggedSample) -> str:
    """A response as literal Markdown text: indented, so that nothing in it is markup."""
    answer = "" if sample.answer is None else f", answer {sample.answer}"
    head = f"{sample.id}: reward {sample.reward:.3g}{answer}"
    lines = [head, "", *sample.prompt.split("\n"), "", *sample.response.split("\n")]
    return "\n".join(f"    {line}" for line in lines)


class TensorboardSink:
    """Event files in `tensorboard/` of the run. Repeated steps replace those of the previous attempt."""

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.first_step, flush_secs=10)
        text = "\n".join(f"    {key}: {value}" for key, value in run.config.items())
        self.writer.add_text("config", text, run.first_step)

    def metrics(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def responses(self, step: int, samples: Sequence[LoggedSample]) -> None:
        for index, sample in enumerate(samples):
            self.writer.add_text(f"{sample.kind}/{index}", as_markdown(sample), step)
            if sample.image is not None:
                self.writer.add_image(f"{sample.kind}/{index}", sample.image, step, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class LibrarySink:
    """A sink whose library returns a run object with `log` and `finish`."""

    run: Any

    def metrics(self, step: int, values: Values) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class WandbSink(LibrarySink):
    """A run of Weights & Biases. Without a key or WANDB_MODE, and if its server does not respond, it is offline;
    `wandb sync` uploads it."""

    def __init__(self, run: RunInfo) -> None:
        os.environ.setdefault("WANDB__DISABLE_VIEWER", "true")  # the user's name, only to print it: 10 s more
        import wandb

        has_key = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or has_netrc_key()
        self.wandb = wandb
        try:
            self.run = self._start(run, None if has_key else "offline")
        except wandb.errors.CommError as error:
            message = "wandb cannot be reached (%s); the run is logged offline: wandb sync %s/wandb/offline-run-*"
            logger.warning(message, " ".join(shorten(str(error), 200).split()), run.directory)
            wandb.teardown()  # its service process still holds the run's id
            self.run = self._start(run, "offline")
        self.run.define_metric("*", step_metric="step")  # a resumed run repeats steps, and wandb's own only grow

    def _start(self, run: RunInfo, mode: Literal["offline"] | None) -> Any:
        settings: dict[str, Any] = {"console": "off"}  # leave stdout and stderr alone
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings["init_timeout"] = WANDB_INIT_S
        return self.wandb.init(
            project=run.project,
            name=run.name,
            id=get_run_id(run.directory, "wandb"),
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            mode=mode,
            settings=self.wandb.Settings(**settings),
        )

    def metrics(self, step: int, values: Values) -> None:
        self.run.log({**values, "step": step})

    def responses(self, step: int, samples: Sequence[LoggedSample]) -> None:
        columns = ("kind", "id", "prompt", "response", "answer", "reward")
        rows = [[getattr(sample, name) for name in columns] for sample in samples]
        table = self.wandb.Table(columns=list(columns), data=rows)
        images = [self.wandb.Image(sample.image, caption=f"{sample.id}: {sample.response}") for sample in samples
                  if sample.image is not None]  # fmt: skip
        self.run.log({"responses": table, "step": step} | ({"images": images} if images else {}))


def has_netrc_key() -> bool:
    """Whether `wandb login` was done on this machine."""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return "wandb" in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


class MlflowSink:
    """A run of mlflow, at MLFLOW_TRACKING_URI or in `mlruns/` of the run's directory. mlflow-skinny is enough."""

    def __init__(self, run: RunInfo) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow requires this for a file store
        import mlflow
        from mlflow.entities import Metric, Param

        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.directory.absolute() / "mlruns").as_uri()
        self.client, self.metric = mlflow.MlflowClient(tracking_uri=uri), Metric
        experiment = self.client.get_experiment_by_name(run.project)
        number = self.client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        made = []

        def make() -> str:
            made.append(self.client.create_run(number, run_name=run.name).info.run_id)
            return made[0]

        self.id = get_run_id(run.directory, "mlflow", make)
        settings = [Param(key, str(value)[:500]) for key, value in run.config.items()] if made else []
        for start in range(0, len(settings), 100):  # mlflow's limit per call
            self.client.log_batch(self.id, params=settings[start : start + 100])
        self.client.update_run(self.id, status="RUNNING")

    def metrics(self, step: int, values: Values) -> None:
        now = int(time.time() * 1000)
        metrics = [self.metric(NOT_IN_MLFLOW.sub("_", name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):
            self.client.log_batch(self.id, metrics=metrics[start : start + 1000])

    def responses(self, step: int, samples: Sequence[LoggedSample]) -> None:
        self.client.log_text(self.id, "\n\n".join(map(as_markdown, samples)), f"responses/step_{step}.md")
        for index, sample in enumerate(samples):
            if sample.image is not None:
                self.client.log_image(self.id, sample.image, artifact_file=f"responses/step_{step}_{index}.png")

    def close(self) -> None:
        self.client.set_terminated(self.id)


class SwanlabSink(LibrarySink):
    """A run of SwanLab. Without a key or SWANLAB_MODE it is offline, in `swanlab/`; `swanlab sync` uploads it."""

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        log_dir = run.directory / "swanlab"
        log_dir.mkdir(parents=True, exist_ok=True)
        logins = [folder / ".swanlab" / ".netrc" for folder in (Path.home(), Path.cwd())]  # written by `swanlab login`
        has_key = any(map(os.environ.get, ("SWANLAB_MODE", "SWANLAB_API_KEY"))) or any(map(Path.is_file, logins))
        self.swanlab = swanlab
        self.run = swanlab.init(
            project=run.project,
            name=run.name,
            id=get_run_id(run.directory, "swanlab", lambda: uuid.uuid4().hex[:21]),
            resume="allow",
            log_dir=str(log_dir),
            config=dict(run.config),
            mode=None if has_key else "offline",
            settings=swanlab.Settings(terminal={"proxy_type": "none"}),  # leave stdout and stderr alone
        )

    def responses(self, step: int, samples: Sequence[LoggedSample]) -> None:
        entries: dict[str, Any] = {"responses": [self.swanlab.Text(as_markdown(sample)) for sample in samples]}
        images = [self.swanlab.Image(sample.image, caption=sample.id) for sample in samples if sample.image is not None]
        self.run.log(entries | ({"images": images} if images else {}), step=step)


class TrackioSink(LibrarySink):
    """A run of trackio: in its directory on this machine (TRACKIO_DIR), or at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.
    trackio identifies runs by name, so the name gets a random suffix."""

    def __init__(self, run: RunInfo) -> None:
        import trackio

        for name in ("trackio", "trackio.utils", "trackio.run"):
            vars(sys.modules[name])["print"] = lambda *texts, **options: None  # leave stdout alone
        self.trackio = trackio
        self.run = trackio.init(
            project=run.project,
            name=get_run_id(run.directory, "trackio", lambda: f"{run.name}-{uuid.uuid4().hex[:6]}"),
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,  # perf/* has the times and the memory
            auto_log_cpu=False,
        )

    def responses(self, step: int, samples: Sequence[LoggedSample]) -> None:
        rows = []
        for sample in samples:
            image = None if sample.image is None else self.trackio.Image(sample.image, caption=sample.id)
            rows.append([sample.kind, as_markdown(sample), sample.reward, image])
        table = self.trackio.Table(columns=["kind", "response", "reward", "image"], data=rows)
        self.run.log({"responses": table}, step=step)


NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]", re.ASCII)  # forbidden in its names: val/avg@1 becomes val/avg_1
SINKS: dict[str, Callable[[RunInfo], Sink]] = {
    "tensorboard": TensorboardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "swanlab": SwanlabSink,
    "trackio": TrackioSink,
}


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as plain values by dotted key, which every logger can show.

    >>> flatten({"a": {"b": 1, "c": [2]}})
    {'a.b': 1, 'a.c': '[2]'}
    """
    if not isinstance(tree, Mapping):
        return {prefix: tree if isinstance(tree, (str, int, float, bool, type(None))) else str(tree)}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
