"""`mtrl export`: writes a checkpoint as a standard model folder with a model card of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from mtrl.checkpoint.folder_store import SLACK, STATE, check_disk_space, checkpoint_step, write_folder
from mtrl.checkpoint.learner_snapshot import OPTIMIZER_STATE
from mtrl.checkpoint.manifest import MANIFEST, DamagedCheckpoint, check_manifest, sync_folder
from mtrl.config import Config, ConfigError, load_config
from mtrl.config.tree import known_leaves
from mtrl.config.yaml_io import write_yaml
from mtrl.data.hub import connection_error, is_model_id
from mtrl.models.checkpoint_files import base_path, is_adapter
from mtrl.models.families import is_vision_model
from mtrl.models.load_model import load_model
from mtrl.models.save_pretrained import read_dtype, read_encoder_files, size_on_disk, write_model
from mtrl.report.model_card import CURVE, SAMPLES, CardRun, ExportedModel, model_card
from mtrl.report.run_curves import draw_runs
from mtrl.tracking.jsonl import iter_rows
from mtrl.utils.errors import RunError, StartError
from mtrl.utils.machine import is_writable
from mtrl.utils.metric_history import History, history
from mtrl.utils.package_version import package_version

CARD = "README.md"
Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportSource:
    """The checkpoint to export, and its run if known."""

    checkpoint: Path
    run: Path | None = None
    config: Config | None = None

    @classmethod
    def of(cls, run: Path | None, checkpoint: Path) -> ExportSource:
        """Raise StartError if the checkpoint is damaged. Only checkpoints of runs have a manifest to compare with."""
        if not checkpoint.is_dir():
            raise StartError(
                f"there is no checkpoint {checkpoint}; name a run, one of its step directories or best_model"
            )
        if run is not None or any((checkpoint / name).exists() for name in (MANIFEST, STATE)):
            try:
                check_manifest(checkpoint, skip=(OPTIMIZER_STATE,))
            except DamagedCheckpoint as error:
                raise StartError(f"the checkpoint {checkpoint} is damaged: {error}; export another one") from error
        return cls(checkpoint.resolve(), run, None if run is None else load_config(run / "config.yaml", saved=True))

    @property
    def trusted(self) -> bool:
        """Whether Python code that comes with the model may run, as in the configuration of the run."""
        return self.config is not None and self.config.worker.actor.model.trust_remote_code

    @property
    def dtype(self) -> str:
        """The dtype in which the run computed, so that log-probs stay the same; else that of the checkpoint."""
        if self.config is None:
            return read_dtype(self.checkpoint)
        return self.config.worker.actor.fsdp.mixed_precision_dtype

    @property
    def step(self) -> int | None:
        return checkpoint_step(self.checkpoint) if self.checkpoint.name.startswith("step_") else None


def check_target(target: Path) -> None:
    """Check before loading a model that the target is new and can be written."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ConfigError([f"--to: {target} exists and is not empty; name a new directory"])
    if not is_writable(target):
        raise ConfigError([f"--to: {target} cannot be written; name another directory"])


def export(source: ExportSource, target: Path, dtype: str, name: str, say: Say) -> None:
    """Write the folder atomically. It has no manifest, since users may edit the card."""
    say(f"loading {source.checkpoint} in {dtype}")
    model = load_model(source.checkpoint, dtype=dtype, trust_remote_code=source.trusted)  # adapters are merged
    template = None if source.config is None else source.config.dataset.override_chat_template
    files = read_encoder_files(source.checkpoint, template, source.trusted)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    check_disk_space(target.absolute().parent, size_on_disk(model) + SLACK)
    say(f"writing {size_on_disk(model) / 1e9:.2f} GB to {target}")

    def write(folder: Path) -> None:
        write_model(model, folder)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        record = None if source.run is None else run_record(source, folder)
        base, base_id = base_model(source)
        card = ExportedModel(name, base, base_id, is_vision_model(model.config), dtype, package_version(), record)
        (folder / CARD).write_text(model_card(card), encoding="utf-8")

    write_folder(target, write, finish=partial(sync_folder, new_file=CARD))


# ------------------------------------------------------------------------------------------------- the model card
def run_record(source: ExportSource, folder: Path) -> CardRun:
    """Collect the facts about the run from its files, and draw its curve into the folder."""
    assert source.run is not None and source.config is not None
    run, config = source.run, source.config
    curves = history(iter_rows(run / "metrics.jsonl")) if (run / "metrics.jsonl").is_file() else {}
    return CardRun(
        name=config.training.experiment_name,
        step=source.step,
        algorithm=config.estimator_name,
        settings=changed_settings(config),
        data=data_description(config),
        rewards=reward_description(config),
        history=curves,
        samples=sample_responses(run, source.step),
        curve=draw_curve(folder / CURVE, config.training.experiment_name, curves),
    )


def draw_curve(path: Path, name: str, curves: History) -> bool:
    """Draw the curves; return False if there are none."""
    try:
        draw_runs(path, {name: curves})
    except ValueError:
        return False
    return True


def base_model(source: ExportSource) -> tuple[str, str | None]:
    """A description of the model that was trained, and its hub id if any. Only the last part of a path is shown."""
    path = None if source.config is None else source.config.worker.actor.model.model_path
    if is_adapter(source.checkpoint):
        path = base_path(source.checkpoint)
    if path is None:
        return ("another model" if source.config is None else "the embedded model of MTRL"), None
    if is_model_id(path) and "/" in path and not Path(path).exists():
        return f"[{path}](https://huggingface.co/{path})", path
    return f"`{Path(path).name}`", None


def data_description(config: Config) -> dict[str, str]:
    data = config.dataset
    description = {
        "training": strip_folders(data.train_files) or "the embedded task of MTRL",
        "validation": strip_folders(data.val_files),
        "pixels of an image": f"{data.min_pixels} to {data.max_pixels}",
        "system prompt": data.system_prompt,
        "template of the prompt": strip_folders(data.format_prompt),
    }
    return {kind: str(value) for kind, value in description.items() if value}


def reward_description(config: Config) -> dict[str, float]:
    """The reward functions with their weights at the end of the run."""
    reward = config.worker.reward
    names = [str(strip_folders(name)) for name in config.reward_functions]
    if reward.reward_type == "model":
        names.append(f"reward model {strip_folders(reward.model_path)}")
    weights = reward.weight_schedule[-1][1] if reward.weight_schedule else reward.weights
    return dict(zip(names, weights or (1.0,) * len(names), strict=False))


def sample_responses(run: Path, step: int | None) -> Sequence[Mapping[str, Any]]:
    """Responses of the last validation up to this step."""
    rows = [row for row in iter_rows(run / "validations.jsonl") if type(row.get("step")) is int and row.get("response")]
    until = [row for row in rows if step is None or row["step"] <= step]
    last = until[-1]["step"] if until else None
    return [row for row in until if row["step"] == last][:SAMPLES]


def changed_settings(config: Config) -> str:
    """YAML of the keys that differ from their defaults."""
    values = {key: (attrgetter(key)(config), leaf.default) for key, leaf in known_leaves().items()}
    return write_yaml({key: strip_folders(value) for key, (value, default) in values.items() if value != default})


def strip_folders(value: Any) -> Any:
    """The value for publication: only the last part of absolute paths.

    >>> strip_folders("/home/me/a.jsonl@train,/home/me/b.jsonl"), strip_folders(("org/rows", "/srv/r.py:score", 1))
    ('a.jsonl@train,b.jsonl', ['org/rows', 'r.py:score', 1])
    """
    if isinstance(value, Mapping):
        return {name: strip_folders(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strip_folders(each) for each in value]
    if not isinstance(value, str) or not value.startswith(("/", "~/")):
        return value
    return ",".join(Path(item.strip()).name for item in value.split(","))


# ---------------------------------------------------------------------------------------------------------- to a hub
def check_push(repository: str) -> None:
    """Check before loading a model that the repository name is valid and the hub can be reached."""
    if repository.count("/") != 1 or not is_model_id(repository):
        raise ConfigError([f"--push: {repository} is not the name of a repository; write ORG/NAME"])
    if (why := connection_error()) is not None:
        hint = f"export without it, and upload from another machine: hf upload {repository} DIR"
        raise ConfigError([f"--push: the Hugging Face hub cannot be reached ({why}); {hint}"])


def push(folder: Path, repository: str) -> str:
    """Upload the folder, and create the repository as private if it does not exist. Return its URL."""
    hub = HfApi()
    try:
        url = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by mtrl export")
    except (HfHubHTTPError, OSError, ValueError) as error:  # without a token ValueError, without a network OSError
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message = f"{folder} is complete, but could not be pushed to {repository}: {why}"
        raise RunError(f"{message}. Log in (hf auth login), then: hf upload {repository} {folder}") from error
    return str(url)
