"""Puts a run together: this room alone names concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtrl.build import recipe
from mtrl.build.data import Rows, build_sampler, build_validation, open_data, rewards_of_truth, warn_of_few_rows
from mtrl.build.memory import rehearse_on_gpu
from mtrl.build.model import (
    build_actor,
    build_encoder,
    build_generator,
    build_policy,
    build_reference,
    refuse_unmeasured,
)
from mtrl.build.rewards import build_scorer, warn_of_wrong_truths
from mtrl.build.threads import settle_threads
from mtrl.build.trackers import build_store, build_trackers
from mtrl.build.unbuilt import refuse_unbuilt
from mtrl.config import Config, ConfigError, given_keys, load_config, to_yaml
from mtrl.errors import opening
from mtrl.models.perturb import PERTURBATIONS
from mtrl.protocols import Tracker
from mtrl.tracking.several import Trackers
from mtrl.training.evaluate import Result, Seen
from mtrl.training.interrupt import Interrupt, say_at_once
from mtrl.training.loop import Components, Loop
from mtrl.training.resume import Start, claim, find_start, fitting_state, restoring
from mtrl.zoo.rows import CONFIG_FILE


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
    rehearse: Callable[[], object] = lambda: None  # runs the passes at the limits, before the first step

    def train(self) -> None:
        """Trains to the last step, or until a signal asks it to stop; then it saves and leaves as the signal would have
        it leave, with KeyboardInterrupt or SystemExit."""
        with self.closing:
            if self.config.training.val_only:
                self.loop.validate()
                return
            self.rehearse()
            with self.interrupt:
                self.loop.run()
                self.loop.components.store.close()
        if self.interrupt.asked():
            name = self.config.training.experiment_name  # needed to resume: `mtrl demo` makes up a new one each time
            again = f"the same command goes on from there, with training.experiment_name={name}"
            say_at_once(f"saved after step {self.loop.done} in {self.directory}; {again}")
            self.interrupt.leave()


def configure(file: str | Path | None, overrides: Sequence[str] | Mapping[str, Any]) -> tuple[Config, bool]:
    """The configuration, and whether the packaged zoo.yaml lies under it: with no file, no model and no data."""
    given = given_keys(overrides)
    embedded = file is None and not any(map(given.get, ("worker.actor.model.model_path", "dataset.train_files")))
    return load_config(CONFIG_FILE if embedded else file, overrides), embedded


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
        settle_threads(directory.path, resumed=directory.used)
        encoder = build_encoder(config)
        files = config.dataset.train_files if data is None else data
        truth_for = rewards_of_truth(config, rewards)
        dataset = open_data(config, files, "train", encoder, directory.path, truth_for)
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
        scorer = build_scorer(config, steps, rewards)
        closing.callback(scorer.close)
        warn_of_wrong_truths(dataset, scorer.functions)
        own = build_trackers(config, steps, encoder, directory.path)
        tracker = Trackers([*own, *trackers], before=directory.refuse_another)
        closing.callback(tracker.close)
        rules = recipe.recipe_of(
            config,
            steps,
            first=not start.own,
            rewards=[function.needs for function in scorer.functions.values()],
            trackers=tracker.needs,
            sees_attention=policy.backbone.own_attention,
        )
        refuse_unmeasured(config, rules, policy.backbone)
        actor = build_actor(config, policy, encoder, steps, build_reference(policy, rules.needs))
        interrupt = Interrupt()
        components = Components(
            source=sampler,
            generator=build_generator(config, policy, encoder),
            scorer=scorer,
            probers=[actor],
            actor=actor,
            tracker=tracker,
            store=closing.enter_context(build_store(config, directory)),
            validation=build_validation(config, encoder, directory.path, data is not None, truth_for),
            stop=interrupt.asked,
        )
        loop = Loop(components, rules)
        if start.checkpoint is not None:
            with restoring(start.checkpoint):
                loop.restore(start.checkpoint, start.state if start.own else fitting_state(start, sampler))
        directory.record(to_yaml(config))
        resumed = start.checkpoint is not None
        rehearse = partial(rehearse_on_gpu, config, policy, rules.needs, has_states=resumed)
        return Run(config, directory.path, directory.id, start, loop, interrupt, closing.pop_all(), rehearse)


Watch = Callable[[int], AbstractContextManager[Seen]]  # from the number of prompts to one who is shown their responses


def evaluate(config: Config, watch: Watch = lambda prompts: nullcontext(lambda rollouts, rewards: None)) -> Result:
    """Validates a model without training it. Attention is looked at on request, or for a reward: it costs a second pass
    over every response."""
    refuse_unbuilt(config)
    settle_threads()
    encoder, policy = build_policy(config)
    validation = build_validation(config, encoder, None, truth_for=rewards_of_truth(config))
    if validation is None:
        raise ConfigError(["dataset.val_files: nothing to evaluate on; name a file (--data F)"])
    generator, scorer = build_generator(config, policy, encoder), build_scorer(config, steps=1)
    with closing(scorer):
        rewards = [function.needs for function in scorer.functions.values()]
        rules = recipe.recipe_of(config, 1, rewards=rewards, sees_attention=policy.backbone.own_attention)
        refuse_unmeasured(config, rules, policy.backbone)
        looks = "mass" in rules.needs or config.optimization.compute_attention_metrics is True
        prober = build_actor(config, policy, encoder, steps=1) if looks else None
        # Without a prober nobody else wants the device, and the engine need not sleep between batches.
        with generator.awake() if prober is None else nullcontext(), watch(validation.prompts) as seen:
            return validation.run(generator, scorer, version=0, prober=prober, seen=seen)


def unknown_names(config: Config) -> list[str]:
    """What the configuration calls by a name that nothing here has."""
    name = config.optimization.perturbation
    return [] if name in PERTURBATIONS else [f"optimization.perturbation: {name}; there are {', '.join(PERTURBATIONS)}"]
