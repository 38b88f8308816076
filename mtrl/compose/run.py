"""Puts a run together: this room alone names concrete classes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mtrl.checkpoint.run_directory import CONFIG
from mtrl.compose import algorithm
from mtrl.compose.critic_worker import build_critic
from mtrl.compose.memory_limits import preflight_on_gpu
from mtrl.compose.policy import (
    LoadedModel,
    build_actor,
    build_encoder,
    build_generator,
    build_policy,
    build_reference,
    check_measurable,
    check_reference_to_sync,
    own_attention,
)
from mtrl.compose.reward_scorer import build_scorer, warn_of_wrong_truths
from mtrl.compose.task_source import (
    Rows,
    build_sampler,
    build_validation,
    check_given,
    open_data,
    rewards_of_truth,
    warn_of_few_rows,
)
from mtrl.compose.threads import settle_threads
from mtrl.compose.trackers import build_store, build_trackers
from mtrl.compose.unsupported import check_supported, several_processes
from mtrl.compose.worker_groups import RunWorkers, WorkerPlan, check_world_size, follow, follows, open_ranks, world_size
from mtrl.config import Config, ConfigError, given_keys, load_config, to_yaml
from mtrl.config.paths import GIVEN
from mtrl.data import DataError
from mtrl.embedded.embedded_rows import CONFIG_FILE, CONFIG_FILES, packaged_config
from mtrl.models.perturb import PERTURBATIONS
from mtrl.models.state_dicts import exported_weights
from mtrl.protocols import Tracker
from mtrl.tracking.record import TokenPieces
from mtrl.tracking.run_files import read_history
from mtrl.tracking.several import Trackers
from mtrl.tracking.table import by_name
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.interrupt import Interrupt, say_at_once
from mtrl.training.loop import Components, Loop
from mtrl.training.resume import Start, check_same_configuration, claim, find_start, fitting_state, restoring
from mtrl.training.validation import Result, Seen
from mtrl.types import Weights
from mtrl.utils.errors import Diverged, PassesCut, RankLost, RunError, opening
from mtrl.utils.machine import started_by_torchrun
from mtrl.workers.reference import SyncedReference

logger = logging.getLogger(__name__)

SCENES = CONFIG_FILES["scenes"]
Reward = Callable[..., Any] | str  # a function, or the name of one


@dataclass
class Run:
    """A run, ready to go."""

    config: Config
    directory: Path
    id: str  # identifies the run, the same for every attempt
    start: Start
    loop: Loop
    interrupt: Interrupt
    closing: ExitStack  # closes all that the run has opened
    preflight: Callable[[], object] = lambda: None  # runs the passes at the limits, before the first step
    loaded: LoadedModel | None = None  # the model that learns, which outlives the run

    def train(self) -> None:
        """Trains to the last step, or until a signal asks it to stop; then it saves and leaves as the signal would have
        it leave, with KeyboardInterrupt or SystemExit."""
        with self.closing, _data_errors_told():
            if self.config.training.val_only:
                self.loop.validate()
                return
            self.preflight()
            with self.interrupt, self._saved_on_error():
                self.loop.run()
                self.loop.components.store.close()
        if self.interrupt.asked():
            self._tell_of_saved()
            self.interrupt.leave()

    @contextmanager
    def _saved_on_error(self) -> Iterator[None]:
        """An error that ends the run costs the step it came in: the one before is saved, unless an update has begun to
        change it."""
        try:
            yield
        except Diverged:
            raise  # these weights are worth nothing; an earlier checkpoint is where to go on
        except Exception:
            if self.loop.whole is not None and self.loop.saved < self.loop.done:
                self._save_last_step()
            raise

    def _save_last_step(self) -> None:
        try:
            self.loop.save()
            self.loop.components.store.close()
        except Exception as error:  # the error that ends the run is the one to be told
            logger.warning("step %d could not be saved: %s", self.loop.done, error)
        else:
            self._tell_of_saved()

    def _tell_of_saved(self) -> None:
        name = self.config.training.experiment_name  # needed to resume: `mtrl demo` makes up a new one each time
        again = f"the same command goes on from there, with training.experiment_name={name}"
        say_at_once(f"saved after step {self.loop.done} in {self.directory}; {again}")


@contextmanager
def _data_errors_told() -> Iterator[None]:
    """Data that cannot be read any more are the user's to repair, not a mistake of ours."""
    try:
        yield
    except DataError as error:
        raise RunError(str(error)) from error


def configure(file: str | Path | None, overrides: Sequence[str] | Mapping[str, Any]) -> tuple[Config, Path | None]:
    """The configuration, and which of the package's lies under it, if one does. With no file, no model and no data file
    it is zoo.yaml: rows given in Python are few and short, like those of that task. With no file it is scenes.yaml for
    its model or its data, with neither from elsewhere."""
    given = given_keys(overrides)
    model, data = given.get("worker.actor.model.model_path"), str(given.get("dataset.train_files") or "")
    embedded: Path | None = None
    if file is None and not model and (not data or data.startswith(GIVEN)):
        embedded = CONFIG_FILE
    elif file is None and model in (None, "", "scenes") and (not data or packaged_config(data) == SCENES):
        embedded = SCENES
    return load_config(embedded or file, overrides), embedded


def build(
    config: Config,
    *,
    data: Rows | None = None,
    val_data: Rows | None = None,
    rewards: Sequence[Reward] | None = None,
    trackers: Sequence[Tracker] = (),
    loaded: LoadedModel | None = None,
) -> Run:
    """`data`, `val_data` and `rewards` stand in for the config's when they are Python objects; a model that is `loaded`
    already is the one that learns, where one process alone does. A process that was started to do what another one says
    does so, and ends."""
    check_usable(config)
    check_world_size(config)
    if follows():
        follow()
        raise SystemExit(0)
    ranked = several_processes(config)
    with opening(), ExitStack() as closing:
        training = config.training
        directory = closing.enter_context(claim(run_directory(config), config, training.fresh))
        settle_threads(directory.path, resumed=directory.used)
        encoder = build_encoder(config) if loaded is None else loaded.encoder
        files = config.dataset.train_files if data is None else data
        truth_for = rewards_of_truth(config, rewards)
        dataset = open_data(config, files, "train", encoder, directory.path, truth_for)
        warn_of_few_rows(len(dataset), config.dataset.rollout_batch_size)
        steps = algorithm.total_steps(config, len(dataset))
        start = find_start(
            directory.path,
            None if training.val_only else steps,
            find_last=training.find_last_checkpoint,
            given=training.load_checkpoint_path,
        )
        sampler = closing.enter_context(build_sampler(config, dataset, encoder, directory.path))
        if ranked:
            loaded = None
        else:
            loaded = loaded or LoadedModel(*build_policy(config, encoder))
            loaded.reset(config)
        sees_attention = own_attention(config) if loaded is None else loaded.policy.backbone.own_attention
        scorer = build_scorer(config, steps, rewards, ranked)
        closing.callback(scorer.close)
        warn_of_wrong_truths(dataset, scorer.functions)
        own = build_trackers(config, steps, encoder, directory.path, start.step)
        tracker = Trackers([*own, *trackers], before=directory.check_still_ours)
        closing.callback(tracker.close)
        rules = algorithm.make_algorithm(
            config,
            steps,
            first=not start.own,
            rewards=[function.needs for function in scorer.functions.values()],
            trackers=tracker.needs,
            sees_attention=sees_attention,
            pieces=TokenPieces(encoder.decode_tokens, encoder.decode),
        )
        check_measurable(config, rules, sees_attention)
        check_reference_to_sync(rules)
        if loaded is None:
            workers = open_ranks(WorkerPlan.of(config, steps, rules, directory.path), directory.path)
            closing.callback(workers.close)
            scorer.model = workers.reward_model
        else:
            workers = local_workers(config, loaded, steps, rules)
        interrupt = Interrupt()
        closing.callback(workers.generator.close)
        components = Components(
            source=sampler,
            generator=workers.generator,
            scorer=scorer,
            probers=[workers.actor] if workers.critic is None else [workers.actor, workers.critic],
            actor=workers.actor,
            reference=workers.reference,
            tracker=tracker,
            store=closing.enter_context(build_store(config, directory)),
            validation=build_validation(config, encoder, directory.path, data is not None, truth_for, val_data),
            stop=interrupt.asked,
            critic=workers.critic,
            devices=world_size(config) + (config.worker.rollout.n_gpus or 0),
        )
        loop = Loop(components, rules)
        if loaded is not None:
            loaded.is_pristine = False  # from here on it goes on, or learns
        if start.checkpoint is not None:
            with restoring(start.checkpoint):
                loop.restore(start.checkpoint, start.state if start.own else fitting_state(start, sampler))
        directory.record(to_yaml(config))
        preflight = partial(workers.preflight, start.checkpoint is not None)
        opened = closing.pop_all()
        return Run(config, directory.path, directory.id, start, loop, interrupt, opened, preflight, loaded)


def train_through(config: Config, begin: Callable[[Config], Run]) -> Run:
    """Trains to the end. A run that loses a process goes on from its last checkpoint, `training.max_restarts` times;
    one whose passes were cut as often as they can be."""
    left = config.training.max_restarts
    while True:
        try:
            run = begin(config)
            run.train()
            return run
        except PassesCut as error:
            if started_by_torchrun():  # it ends the processes together, and starts them again
                raise RunError(f"{error}the same command goes on from the last checkpoint") from error
            say_at_once(f"{error}the run goes on from its last checkpoint")
        except RankLost as error:
            if not left:
                raise
            say_at_once(f"{error}the run goes on from its last checkpoint ({left} more restarts)")
            left -= 1
        config = replace(config, training=replace(config.training, fresh=False))  # its directory is there now


def local_workers(config: Config, loaded: LoadedModel, steps: int, rules: AlgorithmSpec) -> RunWorkers:
    """All in this process, around one model."""
    policy, encoder = loaded.policy, loaded.encoder
    reference = build_reference(policy, rules)
    actor = build_actor(config, policy, encoder, steps, reference)
    critic = build_critic(config, policy, encoder, steps) if "values" in rules.needs else None
    generator = build_generator(config, policy, encoder, learns=not config.training.val_only)
    values = None if critic is None else critic.forward
    learners = [actor.learner] if critic is None else [actor.learner, critic.learner]
    return RunWorkers(
        actor,
        critic,
        SyncedReference(reference, policy) if reference and rules.sync_ref_every else None,
        generator,
        preflight=lambda resumed: preflight_on_gpu(config, policy, generator, rules.needs, resumed, learners, values),
    )


def open_model(config: Config) -> LoadedModel:
    """The model as the run of this configuration left it, where that has begun, else as it is given. Nothing is
    written, and a folder of another run is refused as `build` would."""
    training, place = config.training, run_directory(config)
    with opening(), claim(place, config, training.fresh) if place.exists() else nullcontext():
        start = find_start(place, None, find_last=training.find_last_checkpoint, given=training.load_checkpoint_path)
        loaded = LoadedModel(*build_policy(config))
        if start.checkpoint is not None:
            loaded.load(start.checkpoint)
    return loaded


Watch = Callable[[int], AbstractContextManager[Seen]]  # from the number of prompts to one who is shown their responses


def evaluate(
    config: Config,
    watch: Watch = lambda prompts: nullcontext(lambda rollouts, rewards: None),
    *,
    val_data: Rows | None = None,
    rewards: Sequence[Reward] | None = None,
    loaded: LoadedModel | None = None,
) -> Result:
    """Validates a model without training it. Attention is looked at on request, or for a reward: it costs a second pass
    over every response."""
    check_supported(config)
    if loaded is None:
        settle_threads()
    encoder, policy = build_policy(config) if loaded is None else (loaded.encoder, loaded.policy)
    validation = build_validation(config, encoder, None, truth_for=rewards_of_truth(config, rewards), data=val_data)
    if validation is None:
        raise ConfigError(["dataset.val_files: nothing to evaluate on; name a file (--data F, in Python val_data=)"])
    generator, scorer = build_generator(config, policy, encoder), build_scorer(config, 1, rewards)
    with closing(scorer), closing(generator):
        if loaded is not None and not loaded.is_pristine:
            with generator.resident():
                generator.load(Weights(0, exported_weights(loaded.model)))
        wanted = [function.needs for function in scorer.functions.values()]
        rules = algorithm.make_algorithm(config, 1, rewards=wanted, sees_attention=policy.backbone.own_attention)
        check_measurable(config, rules, policy.backbone.own_attention)
        looks = "attention_mass" in rules.needs or config.optimization.compute_attention_metrics is True
        prober = build_actor(config, policy, encoder, steps=1) if looks else None
        # Without a prober nobody else wants the device, and the engine need not sleep between batches.
        with generator.resident() if prober is None else nullcontext(), watch(validation.prompts) as seen:
            return validation.run(generator, scorer, version=0, prober=prober, seen=seen)


def metrics_row(result: Result) -> dict[str, float]:
    """A validation under the names that it has in metrics.jsonl."""
    return {**result.metrics, **by_name(result.by)}


def history(config: Config) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of the run of this configuration; none before it has begun."""
    place = run_directory(config)
    if (place / CONFIG).exists():
        check_same_configuration(place, config)
    return read_history(place)


def run_directory(config: Config) -> Path:
    """The directory of the run."""
    training = config.training
    return Path(training.output_dir, training.project_name, training.experiment_name).expanduser()


def check_usable(config: Config) -> None:
    check_supported(config)
    if unknown := unknown_names(config):
        raise ConfigError(unknown)


def check_all_given(config: Config, data: Any, val_data: Any, rewards: Any) -> None:
    """A configuration that names what a script gave can only be used by one that gives it again."""
    if data is None:
        check_given("data", config.dataset.train_files)
    if val_data is None:
        check_given("data", config.dataset.val_files)
    for name in config.reward_functions if rewards is None else ():
        check_given("a reward function", name)


def unknown_names(config: Config) -> list[str]:
    """What the configuration calls by a name that nothing here has."""
    name = config.optimization.perturbation
    return [] if name in PERTURBATIONS else [f"optimization.perturbation: {name}; there are {', '.join(PERTURBATIONS)}"]
