"""Builds and trains a run, and evaluates a model without training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from mtrl.checkpoint.run_directory import CONFIG
from mtrl.compose import algorithm, task_source, worker_groups
from mtrl.compose.critic_worker import build_critic
from mtrl.compose.environments import RunEnvironments, blank_messages
from mtrl.compose.memory_limits import preflight_on_gpu
from mtrl.compose.policy import (
    GivenModel,
    LoadedModel,
    adopt_model,
    build_actor,
    build_encoder,
    build_generator,
    build_policy,
    build_reference,
    build_weights,
    check_reference_to_sync,
    check_signals_available,
    uses_own_attention,
)
from mtrl.compose.reward_scorer import build_scorer, warn_about_unmatched_answers
from mtrl.compose.trackers import build_store, build_trackers
from mtrl.config import Config, ConfigError, load_config, read_overrides, to_yaml
from mtrl.config.paths import PYTHON_PREFIX
from mtrl.config.unsupported import check_supported, shards_models
from mtrl.embedded.embedded_rows import CONFIG_FILE, CONFIG_FILES, packaged_config
from mtrl.models.model_object import check_model_object
from mtrl.models.perturb import PERTURBATIONS
from mtrl.models.state_dicts import exported_weights
from mtrl.protocols import Generator, Tracker
from mtrl.rewards.scorer import RewardScorer
from mtrl.tracking.record import TokenPieces
from mtrl.tracking.run_files import read_history
from mtrl.tracking.several import Trackers
from mtrl.tracking.table import flatten_rates
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.interrupt import Interrupt
from mtrl.training.loop import Components, Loop
from mtrl.training.resumable_run import Run
from mtrl.training.resume import check_same_configuration, claim, find_start, fitting_state, restoring
from mtrl.training.threads import set_threads
from mtrl.training.validation import OnBatch, Result
from mtrl.types import Weights
from mtrl.utils.errors import explain_os_errors
from mtrl.workers.reference import SyncedReference
from mtrl.workers.reward_model_worker import RewardModelWorker

logger = logging.getLogger(__name__)

Reward = Callable[..., Any] | str  # a function, or its name


def configure(file: str | Path | None, overrides: Sequence[str] | Mapping[str, Any]) -> tuple[Config, Path | None]:
    """Load the configuration, and return it with the embedded one that it is based on, if any. Without a file, model
    and data file that is zoo.yaml: Python rows are few and short, like those of that task. Without a file it is that of
    another embedded task if the model or the data is its own, and the other is not set."""
    values = read_overrides(overrides)
    model, data = values.get("worker.actor.model.model_path"), str(values.get("dataset.train_files") or "")
    embedded: Path | None = None
    task = packaged_config(data) if data else CONFIG_FILES.get(str(model))
    if file is None and not model and (not data or data.startswith(PYTHON_PREFIX)):
        embedded = CONFIG_FILE
    elif file is None and task and task != CONFIG_FILE and model in (None, "", task.stem):
        embedded = task
    return load_config(embedded or file, overrides), embedded


def build(
    config: Config,
    *,
    data: task_source.Rows | None = None,
    val_data: task_source.Rows | None = None,
    rewards: Sequence[Reward] | None = None,
    trackers: Sequence[Tracker] = (),
    given: GivenModel | None = None,
    loaded: LoadedModel | None = None,
) -> Run:
    """Build a run. Python objects in `data`, `val_data` and `rewards` replace those of the configuration. A single
    process trains the `given` model, or one that is `loaded` already. A follower process of torchrun serves the first
    rank and exits."""
    check_config(config)
    worker_groups.check_world_size(config)
    if worker_groups.is_follower():
        worker_groups.serve_first_rank()
        raise SystemExit(0)
    ranked = shards_models(config)
    with explain_os_errors(), ExitStack() as closing:
        training = config.training
        directory = closing.enter_context(claim(run_directory(config), config, training.fresh))
        set_threads(directory.path, resumed=directory.used)
        if given is not None and loaded is None:
            loaded = adopt_model(config, given, directory.used)
        encoder = build_encoder(config) if loaded is None else loaded.encoder
        if environments := RunEnvironments.open(config):
            closing.callback(environments.pool.close)
            encoder = environments.show_tools(encoder)
        files = config.dataset.train_files if data is None else data
        answer_rewards = task_source.rewards_needing_answers(config, rewards)
        dataset = task_source.open_data(config, files, "train", encoder, directory.path, answer_rewards)
        task_source.warn_about_few_rows(len(dataset), config.dataset.rollout_batch_size)
        steps = algorithm.count_steps(config, len(dataset))
        start = find_start(
            directory.path,
            None if training.val_only else steps,
            find_last=training.find_last_checkpoint,
            given=training.load_checkpoint_path,
        )
        sampler = closing.enter_context(task_source.build_sampler(config, dataset, encoder, directory.path))
        if ranked:
            loaded = None
        else:
            loaded = loaded or LoadedModel(*build_policy(config, encoder))
            loaded.reset(config)
        can_read_attention = uses_own_attention(config) if loaded is None else loaded.policy.backbone.uses_own_attention
        scorer = build_scorer(config, steps, rewards, ranked)
        closing.callback(scorer.close)
        if environments:
            environments.add_rewards(scorer)
        warn_about_unmatched_answers(dataset, scorer.functions)
        own = build_trackers(config, steps, encoder, directory.path, start.step)
        tracker = Trackers([*own, *trackers], before=directory.check_still_ours)
        closing.callback(tracker.close)
        spec = algorithm.make_algorithm(
            config,
            steps,
            is_new_run=not start.own,
            rewards=[function.needs for function in scorer.functions.values()],
            trackers=tracker.needs,
            can_read_attention=can_read_attention,
            decode=TokenPieces(encoder.decode_tokens, encoder.decode),
        )
        check_signals_available(config, spec, can_read_attention)
        check_reference_to_sync(spec)
        if loaded is None:
            workers = worker_groups.open_workers(worker_groups.WorkerPlan.make(config, steps, spec, directory.path))
            scorer.model = workers.reward_model
        else:
            workers = build_local_workers(config, loaded, steps, spec, scorer)
        closing.callback(workers.close)
        interrupt = Interrupt()
        closing.callback(workers.generator.close)
        components = Components(
            source=sampler,
            generator=environments.converse(workers.generator, encoder) if environments else workers.generator,
            scorer=scorer,
            probers=[workers.actor] if workers.critic is None else [workers.actor, workers.critic],
            actor=workers.actor,
            reference=workers.reference,
            tracker=tracker,
            store=closing.enter_context(build_store(config, directory)),
            validation=task_source.build_validation(
                config, encoder, directory.path, data is not None, answer_rewards, val_data
            ),
            stop=interrupt.asked,
            critic=workers.critic,
            devices=worker_groups.world_size(config) + (config.worker.rollout.n_gpus or 0),
        )
        loop = Loop(components, spec)
        if loaded is not None:
            loaded.is_pristine = False  # from here on a checkpoint or training changes it
        if start.checkpoint is not None:
            with restoring(start.checkpoint):
                loop.restore(start.checkpoint, start.state if start.own else fitting_state(start, sampler))
        directory.record(to_yaml(config))
        preflight = partial(workers.preflight, start.checkpoint is not None)
        opened = closing.pop_all()
        return Run(config, directory.path, directory.id, start, loop, interrupt, opened, preflight, loaded)


def build_local_workers(
    config: Config, loaded: LoadedModel, steps: int, spec: AlgorithmSpec, scorer: RewardScorer
) -> worker_groups.RunWorkers:
    """All workers in this process, around one model."""
    policy, encoder = loaded.policy, loaded.encoder
    reference = build_reference(policy, spec)
    weights = build_weights(config, policy)
    actor = build_actor(config, policy, encoder, steps, reference, weights)
    critic = None
    if "values" in spec.needs:
        critic = build_critic(config, policy, encoder, steps, policy_weights=weights)
    generator = build_generator(config, policy, encoder, not config.training.val_only, weights)
    if isinstance(scorer.model, RewardModelWorker):
        scorer.model.policy_weights = weights
    values = None if critic is None else critic.forward
    learners = [actor.learner] if critic is None else [actor.learner, critic.learner]
    return worker_groups.RunWorkers(
        actor,
        critic,
        SyncedReference(reference, policy) if reference and spec.sync_ref_every else None,
        generator,
        preflight=lambda resumed: preflight_on_gpu(
            config, policy, generator, spec.needs, resumed, learners, values, weights=weights
        ),
        close=weights.close,
    )


def open_model(config: Config, given: GivenModel | None = None) -> LoadedModel:
    """Load the model with the weights of this configuration's run if it has started, else with the initial ones.
    Nothing is written but the weights of a `given` model; the directory of another run is an error, as in `build`."""
    training, path = config.training, run_directory(config)
    claimed = claim(path, config, training.fresh) if path.exists() else nullcontext()
    with explain_os_errors(), claimed as directory:
        start = find_start(path, None, find_last=training.find_last_checkpoint, given=training.load_checkpoint_path)
        started = directory is not None and directory.used
        loaded = LoadedModel(*build_policy(config)) if given is None else adopt_model(config, given, started)
        if start.checkpoint is not None:
            loaded.load(start.checkpoint)
        else:
            loaded.reset(config)
    return loaded


def check_given(config: Config, model: Any) -> None:
    """Raise for a model object that this configuration cannot train in place."""
    check_model_object(model)
    if shards_models(config):
        reason = "an object is trained in place; for several processes or cpu_offload, save it and pass the folder"
        raise ConfigError([f"model: {reason}"])
    if config.worker.actor.model.peft_type is not None:
        raise ConfigError(["model: adapters (peft_type) need the name of their base; save it and pass the folder"])


MakeObserver = Callable[[int], AbstractContextManager[OnBatch]]  # from the number of prompts to a callback per batch


def evaluate(
    config: Config,
    observe: MakeObserver = lambda prompts: nullcontext(lambda rollouts, rewards: None),
    *,
    val_data: task_source.Rows | None = None,
    rewards: Sequence[Reward] | None = None,
    loaded: LoadedModel | None = None,
    blank_tools: bool = False,
) -> Result:
    """Validate a model without training it. Attention is measured only on request or for a reward: it costs a second
    pass over every response. `blank_tools`: all images of the environment are grey."""
    check_supported(config)
    if loaded is None:
        set_threads()
    encoder, policy = build_policy(config) if loaded is None else (loaded.encoder, loaded.policy)
    answer_rewards = task_source.rewards_needing_answers(config, rewards)
    environments = RunEnvironments.open(config)
    shown = environments.show_tools(encoder) if environments else encoder
    validation = task_source.build_validation(config, shown, None, answer_rewards=answer_rewards, data=val_data)
    if validation is None:
        raise ConfigError(
            ["dataset.val_files: there is no data to evaluate on; name a file (--data F, in Python val_data=)"]
        )
    scorer, weights = build_scorer(config, 1, rewards), build_weights(config, policy)
    generator: Generator = build_generator(config, policy, encoder, weights=weights)
    if environments:
        environments.add_rewards(scorer)
        generator = environments.converse(generator, blank_messages(encoder) if blank_tools else encoder)
    pool = closing(environments.pool) if environments else nullcontext()
    with pool, closing(scorer), closing(weights), closing(generator):
        if loaded is not None and not loaded.is_pristine:
            with generator.resident():
                generator.load(Weights(0, exported_weights(loaded.model)))
        needs, can_read = [function.needs for function in scorer.functions.values()], policy.backbone.uses_own_attention
        spec = algorithm.make_algorithm(config, 1, rewards=needs, can_read_attention=can_read)
        check_signals_available(config, spec, can_read)
        needs_attention = "attention_mass" in spec.needs or config.optimization.compute_attention_metrics is True
        prober = build_actor(config, policy, encoder, steps=1, weights=weights) if needs_attention else None
        # Without a prober the engine has the device to itself and need not sleep between batches.
        with generator.resident() if prober is None else nullcontext(), observe(validation.prompts) as on_batch:
            return validation.run(generator, scorer, version=0, prober=prober, on_batch=on_batch)


def to_metrics_row(result: Result) -> dict[str, float]:
    """The results of a validation under their names in metrics.jsonl."""
    return {**result.metrics, **flatten_rates(result.by)}


def read_run_history(config: Config) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of this configuration's run; empty before it has started."""
    directory = run_directory(config)
    if (directory / CONFIG).exists():
        check_same_configuration(directory, config)
    return read_history(directory)


def run_directory(config: Config) -> Path:
    training = config.training
    return Path(training.output_dir, training.project_name, training.experiment_name).expanduser()


def check_config(config: Config) -> None:
    check_supported(config)
    if unknown := find_unknown_names(config):
        raise ConfigError(unknown)


def check_python_objects_given(config: Config, data: Any, val_data: Any, rewards: Any) -> None:
    """A configuration that names Python objects can only be used by a script that gives them again."""
    if data is None:
        task_source.check_not_from_python("data", config.dataset.train_files)
    if val_data is None:
        task_source.check_not_from_python("data", config.dataset.val_files)
    for name in config.reward_functions if rewards is None else ():
        task_source.check_not_from_python("a reward function", name)


def find_unknown_names(config: Config) -> list[str]:
    """Errors for names in the configuration that are not registered."""
    name, known = config.optimization.perturbation, ", ".join(PERTURBATIONS)
    return [] if name in PERTURBATIONS else [f"optimization.perturbation: {name} is unknown; use one of {known}"]
