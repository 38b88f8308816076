"""Puts a run together. The only file that names concrete classes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtrl.config import Config, ConfigError, load_config, to_yaml
from mtrl.data import Dataset, DataSettings, RowList, Sampler, open_dataset, open_sources
from mtrl.data.cache import DiskCache
from mtrl.data.sources import Source
from mtrl.models.backbone import Backbone
from mtrl.models.families import TextEncoder, load_encoder, save_encoder_files
from mtrl.models.forward import Forward
from mtrl.models.load import DTYPES, load_model
from mtrl.models.perturb import PERTURBATIONS
from mtrl.protocols import Prober, Tracker
from mtrl.rewards import builtin
from mtrl.rewards.sandbox import InProcess, Sandbox
from mtrl.rewards.scorer import Builtin, RewardFunction, RewardScorer
from mtrl.rollout.local import LocalGenerator
from mtrl.tracking.console import Console
from mtrl.tracking.run_files import RunFiles
from mtrl.tracking.several import Trackers
from mtrl.training import recipe
from mtrl.training.checkpoint import FolderStore
from mtrl.training.evaluate import Result, Validation
from mtrl.training.loop import House, Loop
from mtrl.training.unbuilt import is_bare, refuse_unbuilt
from mtrl.workers.actor import LocalActor
from mtrl.workers.reference import Reference
from mtrl.zoo.rows import CONFIG_FILE, MODEL_DIRECTORY, ZooRows

BAD_ROWS = "bad_rows.jsonl"
EMBEDDED = "zoo@"  # `zoo@test` names a split of the embedded task wherever a data file is named

Rows = str | Sequence[Mapping[str, Any]]  # a file specification, or rows made in Python


@dataclass
class Run:
    """A run, ready to go."""

    config: Config
    directory: Path
    loop: Loop
    scorer: RewardScorer
    sampler: Sampler
    tracker: Trackers

    def train(self) -> None:
        try:
            if self.config.training.val_only:
                self.loop.validate(0)
            else:
                self.loop.run()
        finally:
            self.tracker.close()
            self.scorer.close()
            self.sampler.close()


def configure(file: str | Path | None, overrides: Sequence[str] | Mapping[str, Any]) -> tuple[Config, bool]:
    """The configuration, and whether the packaged zoo.yaml lies under it: with no file, no model and no data."""
    if file is None:
        config = load_config(CONFIG_FILE, overrides)
        if config.worker.actor.model.model_path is None and not config.dataset.train_files:
            return config, True
    return load_config(file, overrides), False


def build(
    config: Config,
    *,
    data: Rows | None = None,
    rewards: Sequence[Callable[..., Any] | str] | None = None,
    trackers: Sequence[Tracker] = (),
) -> Run:
    """`data` and `rewards` stand in for the config's when they are Python objects."""
    refuse_unbuilt(config)
    if config.optimization.perturbation not in PERTURBATIONS:
        known = ", ".join(PERTURBATIONS)
        raise ConfigError([f"optimization.perturbation: {config.optimization.perturbation}; there are {known}"])
    directory = run_directory(config)
    encoder, policy = build_policy(config)
    dataset = open_data(config, config.dataset.train_files if data is None else data, "train", encoder, directory)
    steps = recipe.total_steps(config, len(dataset))
    sampler = Sampler(
        dataset,
        encoder,
        shuffle=config.dataset.shuffle,
        seed=config.dataset.seed,
        bad_rows_path=directory / BAD_ROWS,
    )
    actor = build_actor(config, policy, encoder, steps)
    scorer = build_scorer(config, steps, rewards)
    tracker = Trackers([RunFiles(directory), *console(config, steps), *trackers])
    house = House(
        source=sampler,
        generator=LocalGenerator(policy.backbone, encoder),
        scorer=scorer,
        probers=[actor, *build_reference(config, policy)],
        actor=actor,
        tracker=tracker,
        store=FolderStore(directory / "checkpoints", config.training.save_limit),
        validation=build_validation(config, encoder, directory, trained_on_rows=data is not None),
    )
    (directory / "config.yaml").write_text(to_yaml(config))
    return Run(config, directory, Loop(house, recipe.recipe_of(config, steps)), scorer, sampler, tracker)


def evaluate(config: Config) -> Result:
    """Validates a model without training it."""
    refuse_unbuilt(config)
    encoder, policy = build_policy(config)
    validation = build_validation(config, encoder, None)
    if validation is None:
        raise ConfigError(["dataset.val_files: nothing to evaluate on; name a file (--data F)"])
    scorer = build_scorer(config, steps=1)
    try:
        return validation.run(LocalGenerator(policy.backbone, encoder), scorer, version=0)
    finally:
        scorer.close()


def run_directory(config: Config) -> Path:
    training = config.training
    directory = Path(training.output_dir) / training.project_name / training.experiment_name
    if (directory / "metrics.jsonl").exists():
        taken = f"{directory} holds a run already, and resuming is not built yet"
        raise ConfigError([f"training.experiment_name: {taken}; choose another name"])
    directory.mkdir(parents=True, exist_ok=True)
    return directory


# ------------------------------------------------------------------------------------------------------ model and data
def model_path(config: Config) -> str:
    return config.worker.actor.model.model_path or str(MODEL_DIRECTORY)


def build_policy(config: Config) -> tuple[TextEncoder, Forward]:
    settings, actor = config.worker.actor.model, config.worker.actor
    encoder = build_encoder(config)
    model = load_model(
        model_path(config),
        dtype=actor.fsdp.param_dtype,
        attn_implementation=settings.attn_implementation,
        device="cuda" if torch.cuda.is_available() else "cpu",
        trust_remote_code=settings.trust_remote_code,
    )
    if settings.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backbone = Backbone(model, DTYPES[actor.fsdp.mixed_precision_dtype])
    if settings.freeze_vision_tower and backbone.vision_tower is not None:
        backbone.vision_tower.requires_grad_(False)
    return encoder, Forward(backbone, encoder, config.worker.rollout.temperature, actor.share_prefix)


def build_encoder(config: Config) -> TextEncoder:
    settings, data = config.worker.actor.model, config.dataset
    return load_encoder(
        model_path(config),
        tokenizer_path=settings.tokenizer_path,
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        chat_template=data.override_chat_template,
        trust_remote_code=settings.trust_remote_code,
    )


def data_settings(config: Config) -> DataSettings:
    """The part of the `dataset:` block that reading rows depends on."""
    names = DataSettings.__dataclass_fields__
    return DataSettings(**{name: getattr(config.dataset, name) for name in names})


def sources_of(data: Rows, default_split: str) -> list[Source]:
    if not isinstance(data, str):
        return [RowList(list(data), "rows given in Python")]
    if not data:
        data = EMBEDDED + default_split
    sources: list[Source] = []
    for item in (item.strip() for item in data.split(",")):
        if item.startswith(EMBEDDED):
            sources.append(ZooRows(item.removeprefix(EMBEDDED)))  # type: ignore[arg-type]
        else:
            sources += open_sources(item, DiskCache())
    return sources


def open_data(config: Config, data: Rows, split: str, encoder: TextEncoder, directory: Path | None) -> Dataset:
    listed = None if directory is None else directory / BAD_ROWS
    return open_dataset(sources_of(data, split), data_settings(config), encoder, bad_rows_path=listed)


# ------------------------------------------------------------------------------------------------------------- workers
def build_actor(config: Config, policy: Forward, encoder: TextEncoder, steps: int) -> LocalActor:
    actor, on_gpu = config.worker.actor, policy.backbone.device.type == "cuda"
    return LocalActor(
        policy,
        recipe.optimization_of(config, steps),
        perturbation=recipe.perturbation_of(config, encoder.patch_size),
        update_batching=recipe.micro_batching(config, on_gpu, actor.micro_batch_size_per_device_for_update),
        probe_batching=recipe.micro_batching(config, on_gpu, actor.micro_batch_size_per_device_for_experience),
        save_encoder=lambda directory: save_encoder_files(encoder, model_path(config), directory),
    )


def build_reference(config: Config, policy: Forward) -> list[Prober]:
    rule = recipe.divergence_of(config)
    if rule is None:
        return []
    frozen = Backbone(copy.deepcopy(policy.backbone.model).eval(), policy.backbone.compute_dtype)
    forward = Forward(frozen, policy.encoder, policy.temperature, policy.share_prefix)
    rows = config.worker.actor.micro_batch_size_per_device_for_experience
    batching = recipe.micro_batching(config, frozen.device.type == "cuda", rows)
    return [Reference(forward, batching, policy if rule.penalty == "full" else None)]


def build_validation(
    config: Config, encoder: TextEncoder, directory: Path | None, trained_on_rows: bool = False
) -> Validation | None:
    """None where there is nothing to validate on: the embedded task validates itself, other data only if given."""
    embedded = not config.dataset.train_files and not trained_on_rows
    if not config.dataset.val_files and not embedded:
        return None
    dataset = open_data(config, config.dataset.val_files, "validation", encoder, directory)
    sampler = Sampler(dataset, encoder, shuffle=False)
    return Validation(
        batches=lambda: sampler.one_pass(config.dataset.val_batch_size),
        sampling=recipe.validation_sampling(config),
        keep_samples=config.training.val_generations_to_log,
    )


# ------------------------------------------------------------------------------------------------- rewards and tracking
def build_scorer(config: Config, steps: int, given: Sequence[Callable[..., Any] | str] | None = None) -> RewardScorer:
    reward = config.worker.reward
    functions: dict[str, RewardFunction] = {}
    for each in given or config.reward_functions:
        name, function = reward_function(config, each)
        same = sum(other.partition("#")[0] == name for other in functions)
        functions[f"{name}#{same + 1}" if same else name] = function
    schedule = recipe.reward_schedule(config, len(functions))
    for _, weights in schedule:
        if len(weights) != len(functions):
            count = f"{len(weights)} weights for {len(functions)} functions ({', '.join(functions)})"
            raise ConfigError([f"worker.reward.weights: {count}; give one weight for each, or null"])
    return RewardScorer(
        functions,
        schedule,
        steps,
        normalize=reward.normalize,
        failure_reward=reward.failure_reward,
        options_key=config.dataset.options_key,
    )


def reward_function(config: Config, function: Callable[..., Any] | str) -> tuple[str, RewardFunction]:
    """Its name in logs, and the function behind it."""
    reward = config.worker.reward
    if not isinstance(function, str):
        in_process = InProcess(function, reward.reward_fn_kwargs)
        return in_process.name, in_process
    if not is_bare(function):
        sandbox = Sandbox(function, reward.reward_fn_kwargs, workers=reward.num_cpus, timeout_s=reward.timeout_s)
        return sandbox.name, sandbox
    known = {
        "accuracy": builtin.accuracy,
        "format": builtin.format,
        "think_format": builtin.think_format,
        "length": builtin.length(config.dataset.max_response_length, reward.soft_punish_cache),
    }
    return function, Builtin(known[function])


def console(config: Config, steps: int) -> list[Tracker]:
    return [Console(steps)] if "console" in config.training.logger else []
