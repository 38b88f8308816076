"""`mtrl export`: a checkpoint as a folder that every other tool loads, with a card of the run that trained it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from mtrl.checkpoint.folder_store import SLACK, STATE, check_disk_space, checkpoint_step, write_folder
from mtrl.checkpoint.learner_snapshot import OPTIMIZER_STATE
from mtrl.checkpoint.manifest import MANIFEST, DamagedCheckpoint, check, settle
from mtrl.compose.hub import is_model_id, unreachable
from mtrl.config import Config, ConfigError, load_config
from mtrl.config.tree import known_leaves
from mtrl.config.yaml_io import write_yaml
from mtrl.models.adapters import base_path, is_adapter
from mtrl.models.load_model import load_model
from mtrl.models.save_pretrained import files_beside, own_dtype, sees_images, size_on_disk, write_model
from mtrl.report.model_card import CURVE, SAMPLES, CardRun, Exported, model_card
from mtrl.report.run_curves import draw_runs
from mtrl.tracking.jsonl import read_rows_of
from mtrl.utils.errors import RunError, StartError
from mtrl.utils.machine import may_write
from mtrl.utils.metric_history import History, history

CARD = "README.md"
Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportSource:
    """What is exported: a checkpoint, and the run it belongs to where that is known."""

    checkpoint: Path
    run: Path | None = None
    config: Config | None = None

    @classmethod
    def of(cls, run: Path | None, checkpoint: Path) -> ExportSource:
        """Refused where it is not as it was written. What no run has written has no manifest to be held against."""
        if not checkpoint.is_dir():
            raise StartError(
                f"there is no checkpoint {checkpoint}; name a run, one of its step directories or best_model"
            )
        if run is not None or any((checkpoint / name).exists() for name in (MANIFEST, STATE)):
            try:
                check(checkpoint, but=(OPTIMIZER_STATE,))
            except DamagedCheckpoint as error:
                raise StartError(f"the checkpoint {checkpoint} is damaged: {error}; export another one") from error
        return cls(checkpoint.resolve(), run, None if run is None else load_config(run / "config.yaml", saved=True))

    @property
    def trusted(self) -> bool:
        """Whether Python that comes with the model may run, which the run's configuration decided."""
        return self.config is not None and self.config.worker.actor.model.trust_remote_code

    @property
    def dtype(self) -> str:
        """What the run computed in, so that its log-probs stay; else what the checkpoint is in."""
        if self.config is None:
            return own_dtype(self.checkpoint)
        return self.config.worker.actor.fsdp.mixed_precision_dtype

    @property
    def step(self) -> int | None:
        return checkpoint_step(self.checkpoint) if self.checkpoint.name.startswith("step_") else None


def check_target(target: Path) -> None:
    """Before a model is loaded: nothing is written over, and what cannot be written is said at once."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ConfigError([f"--to: {target} is there already and not empty; name a new directory"])
    if not may_write(target):
        raise ConfigError([f"--to: {target} cannot be written; name another directory"])


def export(source: ExportSource, target: Path, dtype: str, name: str, say: Say) -> None:
    """Writes the folder: whole, or not at all. It has no manifest, since its card is the user's to change."""
    say(f"loading {source.checkpoint} in {dtype}")
    model = load_model(source.checkpoint, dtype=dtype, trust_remote_code=source.trusted)  # with adapters merged
    template = None if source.config is None else source.config.dataset.override_chat_template
    files = files_beside(source.checkpoint, template, source.trusted)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    check_disk_space(target.absolute().parent, size_on_disk(model) + SLACK)
    say(f"writing {size_on_disk(model) / 1e9:.2f} GB to {target}")

    def write(folder: Path) -> None:
        write_model(model, folder)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        record = None if source.run is None else run_record(source, folder)
        base, base_id = base_model(source)
        card = Exported(name, base, base_id, sees_images(model), dtype, version("mtrl"), record)
        (folder / CARD).write_text(model_card(card), encoding="utf-8")

    write_folder(target, write, finish=partial(settle, plain=CARD))


# ------------------------------------------------------------------------------------------------ what the card says
def run_record(source: ExportSource, folder: Path) -> CardRun:
    """What the files of the run say; its curve is drawn into the folder."""
    assert source.run is not None and source.config is not None
    run, config = source.run, source.config
    curves = history(read_rows_of(run / "metrics.jsonl")) if (run / "metrics.jsonl").is_file() else {}
    return CardRun(
        name=config.training.experiment_name,
        step=source.step,
        algorithm=config.optimization.advantage_estimator,
        settings=changed_settings(config),
        data=data_description(config),
        rewards=reward_description(config),
        history=curves,
        samples=sample_responses(run, source.step),
        curve=draw(folder / CURVE, config.training.experiment_name, curves),
    )


def draw(path: Path, name: str, curves: History) -> bool:
    """Whether there was anything to draw."""
    try:
        draw_runs(path, {name: curves})
    except ValueError:
        return False
    return True


def base_model(source: ExportSource) -> tuple[str, str | None]:
    """The model that was trained, in words, and as an id of the hub where it is one. A path is nobody else's business
    but for its last part."""
    given = None if source.config is None else source.config.worker.actor.model.model_path
    if is_adapter(source.checkpoint):
        given = base_path(source.checkpoint)
    if given is None:
        return ("another model" if source.config is None else "the embedded model of MTRL"), None
    if is_model_id(given) and "/" in given and not Path(given).exists():
        return f"[{given}](https://huggingface.co/{given})", given
    return f"`{Path(given).name}`", None


def data_description(config: Config) -> dict[str, str]:
    data = config.dataset
    found = {
        "training": public(data.train_files) or "the embedded task of MTRL",
        "validation": public(data.val_files),
        "pixels of an image": f"{data.min_pixels} to {data.max_pixels}",
        "system prompt": data.system_prompt,
        "template of the prompt": public(data.format_prompt),
    }
    return {kind: str(value) for kind, value in found.items() if value}


def reward_description(config: Config) -> dict[str, float]:
    """The functions by name, with the weights that they have at the end of the run."""
    reward = config.worker.reward
    names = [str(public(name)) for name in config.reward_functions]
    if reward.reward_type == "model":
        names.append(f"reward model {public(reward.model_path)}")
    weights = reward.weight_schedule[-1][1] if reward.weight_schedule else reward.weights
    return dict(zip(names, weights or (1.0,) * len(names), strict=False))


def sample_responses(run: Path, step: int | None) -> Sequence[Mapping[str, Any]]:
    """Responses of the last validation up to the step."""
    rows = [
        row for row in read_rows_of(run / "validations.jsonl") if type(row.get("step")) is int and row.get("response")
    ]
    until = [row for row in rows if step is None or row["step"] <= step]
    last = until[-1]["step"] if until else None
    return [row for row in until if row["step"] == last][:SAMPLES]


def changed_settings(config: Config) -> str:
    """YAML of the keys that are not at their defaults."""
    values = {key: (attrgetter(key)(config), leaf.default) for key, leaf in known_leaves().items()}
    return write_yaml({key: public(value) for key, (value, default) in values.items() if value != default})


def public(value: Any) -> Any:
    """A value for other people: of absolute paths the last part alone.

    >>> public("/home/me/a.jsonl@train,/home/me/b.jsonl"), public("org/rows"), public(("/srv/r.py:score", 1))
    ('a.jsonl@train,b.jsonl', 'org/rows', ['r.py:score', 1])
    """
    if isinstance(value, Mapping):
        return {name: public(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(each) for each in value]
    if not isinstance(value, str) or not value.startswith(("/", "~/")):
        return value
    return ",".join(Path(item.strip()).name for item in value.split(","))


# ---------------------------------------------------------------------------------------------------------- to a hub
def check_push(repository: str) -> None:
    """Before anything is loaded: a name that no repository has, and a hub that cannot be reached."""
    if repository.count("/") != 1 or not is_model_id(repository):
        raise ConfigError([f"--push: {repository} is no name of a repository; write ORG/NAME"])
    if (why := unreachable()) is not None:
        told = f"the Hugging Face hub cannot be reached ({why})"
        raise ConfigError([f"--push: {told}; export without it, and push from elsewhere: hf upload {repository} DIR"])


def push(folder: Path, repository: str) -> str:
    """Uploads the folder; a repository that is not there yet is made, private. Returns its address."""
    hub = HfApi()
    try:
        place = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by mtrl export")
    except (HfHubHTTPError, OSError, ValueError) as error:  # no token is a ValueError there, no network an OSError
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        told = f"{folder} is whole, but could not be pushed to {repository}: {why}"
        raise RunError(f"{told}. Log in (hf auth login), then: hf upload {repository} {folder}") from error
    return str(place)
