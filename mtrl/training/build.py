"""Puts a run together. The only file that names concrete classes."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mtrl.config import Config, ConfigError, load_config, to_yaml
from mtrl.config.tree import GROUP_ESTIMATORS
from mtrl.data import Dataset, DataSettings, RowList, Sampler, open_dataset, open_sources
from mtrl.data.cache import DiskCache
from mtrl.data.sources import Source
from mtrl.errors import opening
from mtrl.models.backbone import Backbone
from mtrl.models.families import TextEncoder, encoder_files, load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load import DTYPES, load_model
from mtrl.models.perturb import PERTURBATIONS
from mtrl.models.reward_model import load_judge
from mtrl.protocols import Prober, Tracker
from mtrl.rewards import builtin, grounding
from mtrl.rewards.sandbox import InProcess, Sandbox
from mtrl.rewards.scorer import MODEL, Builtin, RewardFunction, RewardScorer
from mtrl.rollout.local import LocalGenerator
from mtrl.store.checkpoint import FolderStore
from mtrl.store.run_directory import RunDirectory
from mtrl.tracking.console import Console, ConsoleSettings
from mtrl.tracking.markdown import LogPaths, MarkdownLogs
from mtrl.tracking.run_files import RunFiles, first_steps_of, validations_of
from mtrl.tracking.several import Trackers
from mtrl.tracking.watch import Watch
from mtrl.training import recipe
from mtrl.training.evaluate import Result, Validation
from mtrl.training.interrupt import Interrupt, say
from mtrl.training.loop import House, Loop
from mtrl.training.resume import Start, claim, find_start, fitting_state, refuse_damaged
from mtrl.training.unbuilt import is_bare, refuse_unbuilt
from mtrl.workers.actor import LocalActor
from mtrl.workers.reference import Reference
from mtrl.workers.reward_model import RewardModel
from mtrl.zoo.rows import CONFIG_FILE, MODEL_DIRECTORY, ZooRows

logger = logging.getLogger(__name__)

BAD_ROWS = "bad_rows.jsonl"
MATH = "mtrl.rewards.math_equality:math"  # in a sandbox: a hostile answer can make it think for hours
EMBEDDED = "zoo@"  # `zoo@test` names a split of the embedded task wherever a data file is named

COMPILING = (
    "the first pass compiles kernels for this GPU, about a minute each time a command starts; without: "
    "worker.actor.use_torch_compile=false, with slower passes"
)

Rows = str | Sequence[Mapping[str, Any]]  # a file specification, or rows made in Python


@dataclass
class Run:
    """A run, ready to go."""

    config: Config
    directory: Path
    id: str  # the same for every attempt
    start: Start
    loop: Loop
    interrupt: Interrupt
    closing: ExitStack  # of all that is open

    def train(self) -> None:
        """To the last step, or until a signal asks it to stop; then it leaves as the signal would have it leave, with
        KeyboardInterrupt or SystemExit, after saving."""
        with self.closing:
            if self.config.training.val_only:
                self.loop.validate()
                return
            with self.interrupt:
                self.loop.run()
                self.loop.house.store.close()
        if self.interrupt.asked():
            name = self.config.training.experiment_name  # which `mtrl demo` makes up anew each time
            again = f"the same command goes on from there, with training.experiment_name={name}"
            say(f"saved after step {self.loop.done} in {self.directory}; {again}")
            self.interrupt.leave()


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
    if unknown := unknown_names(config):
        raise ConfigError(unknown)
    with opening(), ExitStack() as closing:
        training = config.training
        place = Path(training.output_dir, training.project_name, training.experiment_name).expanduser()
        directory = closing.enter_context(claim(place, config, training.fresh))
        encoder = build_encoder(config)
        files = config.dataset.train_files if data is None else data
        dataset = open_data(config, files, "train", encoder, directory.path)
        warn_of_few_rows(len(dataset), config.dataset.rollout_batch_size)
        steps = recipe.total_steps(config, len(dataset))
        start = find_start(
            directory.path,
            None if training.val_only else steps,
            find_last=training.find_last_checkpoint,
            given=training.load_checkpoint_path,
        )
        sampler = closing.enter_context(build_sampler(config, dataset, encoder, directory.path))
        _, policy = build_policy(config, encoder)
        actor = build_actor(config, policy, encoder, steps)
        scorer = build_scorer(config, steps, rewards)
        closing.callback(scorer.close)
        own = build_trackers(config, steps, encoder, directory.path)
        tracker = Trackers([*own, *trackers], before=directory.refuse_another)
        closing.callback(tracker.close)
        interrupt = Interrupt()
        house = House(
            source=sampler,
            generator=LocalGenerator(policy.backbone, encoder),
            scorer=scorer,
            probers=[actor, *build_reference(config, policy)],
            actor=actor,
            tracker=tracker,
            store=closing.enter_context(build_store(config, directory)),
            validation=build_validation(config, encoder, directory.path, trained_on_rows=data is not None),
            stop=interrupt.asked,
        )
        wanted = any(f.needs_signals and not isinstance(f, grounding.Grounded) for f in scorer.functions.values())
        sees = sees_attention(config, policy.backbone)
        rules = recipe.recipe_of(config, steps, first=not start.own, rewards_read_signals=wanted, sees_attention=sees)
        loop = Loop(house, rules)
        if start.checkpoint is not None:
            loop.restore(start.checkpoint, start.state if start.own else fitting_state(start, sampler))
        directory.record(to_yaml(config))
        return Run(config, directory.path, directory.id, start, loop, interrupt, closing.pop_all())


def evaluate(config: Config) -> Result:
    """Validates a model without training it."""
    refuse_unbuilt(config)
    encoder, policy = build_policy(config)
    validation = build_validation(config, encoder, None)
    if validation is None:
        raise ConfigError(["dataset.val_files: nothing to evaluate on; name a file (--data F)"])
    looks = sees_attention(config, policy.backbone) and recipe.attention_every(config)
    prober = build_actor(config, policy, encoder, steps=1) if looks else None
    scorer = build_scorer(config, steps=1)
    try:
        return validation.run(LocalGenerator(policy.backbone, encoder), scorer, version=0, prober=prober)
    finally:
        scorer.close()


def unknown_names(config: Config) -> list[str]:
    """What the configuration calls by a name that nothing here has."""
    name = config.optimization.perturbation
    return [] if name in PERTURBATIONS else [f"optimization.perturbation: {name}; there are {', '.join(PERTURBATIONS)}"]


def build_store(config: Config, directory: RunDirectory) -> FolderStore:
    training = config.training
    return FolderStore(
        directory.path / "checkpoints", training.save_limit, training.best_metric, before_saving=directory.keep
    )


# ------------------------------------------------------------------------------------------------------ model and data
def model_path(config: Config) -> str:
    return config.worker.actor.model.model_path or str(MODEL_DIRECTORY)


def build_policy(config: Config, encoder: TextEncoder | None = None) -> tuple[TextEncoder, Forward]:
    settings, actor = config.worker.actor.model, config.worker.actor
    encoder = encoder or build_encoder(config)
    refuse_damaged(Path(model_path(config)))
    model = load_model(
        model_path(config),
        dtype=actor.fsdp.param_dtype,
        attn_implementation=settings.attn_implementation,
        device="cuda" if torch.cuda.is_available() else "cpu",
        trust_remote_code=settings.trust_remote_code,
    )
    if settings.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = actor.use_torch_compile and model.device.type == "cuda"
    if compiled:
        say(COMPILING)
    backbone = Backbone(model, DTYPES[actor.fsdp.mixed_precision_dtype], compiled=compiled)
    if settings.freeze_vision_tower and backbone.vision_tower is not None:
        backbone.vision_tower.requires_grad_(False)
    forward = Forward(
        backbone,
        encoder,
        config.worker.rollout.temperature,
        share_prefix=actor.share_prefix and shares_prefixes(backbone),
        packed=actor.padding_free and actor.use_torch_compile and backbone.packs,  # its kernel is a compiled one
        last_k=config.optimization.attention_last_k_layers,
        weight_last_k=config.optimization.token_weight_last_k_layers,
    )
    return encoder, forward


def sees_attention(config: Config, backbone: Backbone) -> bool:
    """Whether attention can be read here; an error where somebody needs it."""
    needed = recipe.needs_attention(config) or config.optimization.compute_attention_metrics is True
    if needed and not backbone.own_attention:
        chosen = config.worker.actor.model.attn_implementation
        raise ConfigError([f"worker.actor.model.attn_implementation: {chosen} hides attention; set auto"])
    return backbone.own_attention


def shares_prefixes(backbone: Backbone) -> bool:
    if not backbone.shares_prefixes:
        said = "share_prefix: not known to be exact for the family %r with %s attention; each response reads its prompt"
        logger.warning(said, backbone.model.config.model_type, backbone.attention_name)
    return backbone.shares_prefixes


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


def build_sampler(config: Config, dataset: Dataset, encoder: TextEncoder, directory: Path) -> Sampler:
    shuffle, seed = config.dataset.shuffle, config.dataset.seed
    return Sampler(dataset, encoder, shuffle=shuffle, seed=seed, bad_rows_path=directory / BAD_ROWS)


def warn_of_few_rows(rows: int, prompts_per_step: int) -> None:
    if rows < prompts_per_step:
        logger.warning(
            "%d row%s for dataset.rollout_batch_size=%d: a step asks a row up to %d times; set it and "
            "worker.actor.global_batch_size to %d or less, or add data",
            rows, "s" if rows > 1 else "", prompts_per_step, math.ceil(prompts_per_step / rows), rows,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- workers
def build_actor(config: Config, policy: Forward, encoder: TextEncoder, steps: int) -> LocalActor:
    on_gpu = policy.backbone.device.type == "cuda"
    return LocalActor(
        policy,
        recipe.optimization_of(config, steps),
        perturbation=recipe.perturbation_of(config, encoder.patch_size),
        update_batching=recipe.update_batching(config, on_gpu, policy.share_prefix),
        probe_batching=recipe.probe_batching(config, on_gpu, policy.share_prefix),
        encoder_files=encoder_files(encoder, model_path(config)),
    )


def build_reference(config: Config, policy: Forward) -> list[Prober]:
    rule = recipe.divergence_of(config)
    if rule is None:
        return []
    frozen = Backbone(copy.deepcopy(policy.backbone.model).eval(), policy.backbone.compute_dtype)
    forward = replace(policy, backbone=frozen)
    batching = recipe.probe_batching(config, frozen.device.type == "cuda", policy.share_prefix)
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
        best_metric=config.training.best_metric,
    )


# ------------------------------------------------------------------------------------------------- rewards and tracking
def build_scorer(config: Config, steps: int, given: Sequence[Callable[..., Any] | str] | None = None) -> RewardScorer:
    reward, model = config.worker.reward, build_reward_model(config)
    functions: dict[str, RewardFunction] = {}
    taken = [] if model is None else [MODEL]
    for each in given or config.reward_functions:
        name, function = reward_function(config, each)
        same = sum(other.partition("#")[0] == name for other in (*functions, *taken))
        functions[f"{name}#{same + 1}" if same else name] = function
    parts = [*functions, *taken]
    schedule = recipe.reward_schedule(config, len(parts))
    for _, weights in schedule:
        if len(weights) != len(parts):
            count = f"{len(weights)} weights for {len(parts)} parts ({', '.join(parts)})"
            raise ConfigError([f"worker.reward.weights: {count}; give one weight for each, or null"])
    return RewardScorer(
        functions,
        schedule,
        steps,
        model,
        normalize=reward.normalize,
        failure_reward=reward.failure_reward,
        options_key=config.dataset.options_key,
        answer_key=config.dataset.answer_key,
        wants_token_weights=config.optimization.enable_token_weights and not recipe.attention_every(config),
    )


def build_reward_model(config: Config) -> RewardModel | None:
    reward, actor = config.worker.reward, config.worker.actor
    if reward.reward_type != "model":
        return None
    assert reward.model_path is not None, "the configuration's checks want a path"
    on_gpu = torch.cuda.is_available()
    judge = load_judge(
        reward.model_path,
        dtype=actor.fsdp.mixed_precision_dtype,
        device="cuda" if on_gpu else "cpu",
        trust_remote_code=actor.model.trust_remote_code,
    )
    return RewardModel(judge, recipe.probe_batching(config, on_gpu, share_prefix=False))


def reward_function(config: Config, function: Callable[..., Any] | str) -> tuple[str, RewardFunction]:
    """Its name in logs, and the function behind it."""
    reward = config.worker.reward
    if not isinstance(function, str):
        in_process = InProcess(function, reward.reward_fn_kwargs)
        return in_process.name, in_process
    if function == "math":
        if find_spec("math_verify") is None:
            raise ConfigError(["worker.reward.functions: math needs math-verify; pip install 'mtrl[math]'"])
        return function, Sandbox(MATH, {}, workers=reward.num_cpus, timeout_s=reward.timeout_s)
    if not is_bare(function):
        sandbox = Sandbox(function, reward.reward_fn_kwargs, workers=reward.num_cpus, timeout_s=reward.timeout_s)
        return sandbox.name, sandbox
    known = {
        "accuracy": builtin.accuracy,
        "format": builtin.format,
        "think_format": builtin.think_format,
        "length": builtin.length(config.dataset.max_response_length, reward.soft_punish_cache),
    }
    looking = {
        "mdi": grounding.mdi(reward.mdi_balance_ratio),
        "vgr": grounding.vgr(reward.vgr_normalizer),
        "vgr_hard_negative": grounding.vgr_hard_negative(reward.vgr_normalizer, reward.vgr_hard_negative_pool),
    }
    return function, looking[function] if function in looking else Builtin(known[function])


def build_trackers(config: Config, steps: int, encoder: TextEncoder, directory: Path) -> list[Tracker]:
    training = config.training
    grouped = config.optimization.advantage_estimator in GROUP_ESTIMATORS
    logs = LogPaths.of(directory / "logs", training.rollout_log_path, training.attention_diag_log_path)
    trackers: list[Tracker] = [
        RunFiles(directory, training.realtime_rollout_logging),
        MarkdownLogs(logs, encoder.decode_tokens, training.realtime_rollout_logging),
        Watch(first_steps_of(directory), groups=grouped),
    ]
    if "console" in training.logger:
        settings = ConsoleSettings(training.val_freq, training.colorize_output, training.log_preview_chars, directory)
        trackers.append(Console(steps, settings, earlier=validations_of(directory), decode=encoder.decode_tokens))
    return trackers
