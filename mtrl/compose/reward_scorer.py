"""Everything that scores: reward functions by name, file or object, and the reward model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from mtrl.compose import algorithm
from mtrl.compose.task_source import check_given
from mtrl.config import Config, ConfigError
from mtrl.data import Dataset
from mtrl.data.row_settings import RowError
from mtrl.models.parallel.fsdp import Sharding
from mtrl.models.reward_model import load_reward_model
from mtrl.rewards.builtin_names import REWARDS, BuiltinReward, is_bare
from mtrl.rewards.sandbox import InProcess, Sandbox
from mtrl.rewards.scorer import MODEL, Builtin, RewardFunction, RewardScorer
from mtrl.rewards.truths import names_no_option, row_truth
from mtrl.workers.reward_model_worker import RewardModelWorker

COMPARE_CHOICES = ("accuracy", "vgr_hard_negative")
LOOKED_AT = 1000  # rows whose truths are looked at before a run

logger = logging.getLogger(__name__)


def build_scorer(
    config: Config, steps: int, given: Sequence[Callable[..., Any] | str] | None = None, ranked: bool = False
) -> RewardScorer:
    """`ranked`: the reward model, where there is one, is that of ranks, and given to the scorer when they are there."""
    reward, optimization = config.worker.reward, config.optimization
    functions: dict[str, RewardFunction] = {}
    taken = [MODEL] if reward.reward_type == "model" else []
    model = build_reward_model(config) if taken and not ranked else None
    for each in given or config.reward_functions:
        name, function = reward_function(config, each)
        same = sum(other.partition("#")[0] == name for other in (*functions, *taken))
        functions[f"{name}#{same + 1}" if same else name] = function
    parts = [*functions, *taken]
    schedule = algorithm.reward_schedule(config, len(parts))
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
        wants_token_weights=optimization.enable_token_weights and optimization.compute_attention_metrics is False,
    )


def warn_of_wrong_truths(dataset: Dataset, functions: Iterable[str]) -> None:
    """One warning where `accuracy` can pay no response to some rows. All rows of a small dataset are looked at, and as
    many rows spread over a large one."""
    if not any(name.partition("#")[0] in COMPARE_CHOICES for name in functions):
        return
    wrong, places = [], np.unique(np.linspace(0, len(dataset) - 1, min(LOOKED_AT, len(dataset))).astype(int)).tolist()
    for place in places:
        with suppress(RowError):  # the sampler tells of those
            task = dataset.task(place)
            if names_no_option(task.answer, task.columns or {}):
                wrong.append(task)
    if wrong:
        logger.warning(
            "%d of the %d rows looked at have an answer that is none of their options, so that no response can be "
            "right; the first: %s, %.60s. Look at dataset.answer_key and dataset.options_key",
            len(wrong), len(places), wrong[0].origin, repr(row_truth(wrong[0].answer, wrong[0].columns or {})[0]),
        )  # fmt: skip


def build_reward_model(config: Config, sharding: Sharding | None = None) -> RewardModelWorker:
    """Whole on the device of this process, or split over ranks, of which this is one."""
    reward, actor = config.worker.reward, config.worker.actor
    assert reward.model_path is not None, "the configuration's checks want a path"
    on_gpu = torch.cuda.is_available()
    model = load_reward_model(
        reward.model_path,
        dtype=actor.fsdp.mixed_precision_dtype,
        device="cuda" if on_gpu else "cpu",
        trust_remote_code=actor.model.trust_remote_code,
        sharding=sharding,
    )
    batching = algorithm.probe_batching(config, on_gpu, share_prefix=False)
    return RewardModelWorker(model, batching if sharding is None else batching.over(sharding.ranks))


def reward_function(config: Config, function: Callable[..., Any] | str) -> tuple[str, RewardFunction]:
    """A reward function's name in logs, and the object that runs it."""
    reward = config.worker.reward
    if not isinstance(function, str):
        in_process = InProcess(function, reward.reward_fn_kwargs)
        return in_process.name, in_process
    check_given("a reward function", function)
    if not is_bare(function):
        sandbox = sandboxed(config, function, reward.reward_fn_kwargs)
        return sandbox.name, sandbox
    return function, builtin_reward(config, function)


def sandboxed(config: Config, function: str, kwargs: Mapping[str, Any]) -> Sandbox:
    reward = config.worker.reward
    return Sandbox(
        function, kwargs, workers=reward.num_cpus, timeout_s=reward.timeout_s, step_timeout_s=reward.step_timeout_s
    )


def known_reward(name: str) -> BuiltinReward:
    if name not in REWARDS:
        known = f"a built-in ({', '.join(REWARDS)}), file.py[:name] or package.module:name"
        raise ConfigError([f"there is no reward {name}; name {known}"])
    return REWARDS[name]


def builtin_reward(config: Config, name: str) -> RewardFunction:
    known = known_reward(name)
    if known.library is not None and find_spec(known.library.module) is None:
        raise ConfigError([f"worker.reward.functions: {name} needs {known.library.module}; {known.library.install}"])
    if known.sandboxed:
        return sandboxed(config, known.place, {})
    module, _, attribute = known.place.partition(":")
    made = getattr(import_module(module), attribute)
    if known.settings:
        made = made(*(attrgetter(key)(config) for key in known.settings))
    return Builtin(made) if callable(made) else made
