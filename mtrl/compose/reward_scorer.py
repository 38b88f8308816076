"""Builds the reward scorer: reward functions by name, file or object, and the reward model."""

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
from mtrl.compose.task_source import check_not_from_python
from mtrl.config import Config, ConfigError
from mtrl.data import Dataset
from mtrl.data.row_settings import RowError
from mtrl.models.parallel.fsdp import Sharding
from mtrl.models.reward_model import load_reward_model
from mtrl.rewards.builtin_names import REWARDS, BuiltinReward, is_builtin_name
from mtrl.rewards.sandbox import InProcess, Sandbox
from mtrl.rewards.scorer import MODEL, Builtin, RewardFunction, RewardScorer
from mtrl.rewards.truths import names_no_option, row_truth
from mtrl.workers.reward_model_worker import RewardModelWorker

COMPARE_CHOICES = ("accuracy", "vgr_hard_negative")
MAX_ROWS_CHECKED = 1000  # rows whose answers are compared with their options before a run

logger = logging.getLogger(__name__)


def build_scorer(
    config: Config, steps: int, rewards: Sequence[Callable[..., Any] | str] | None = None, ranked: bool = False
) -> RewardScorer:
    """`ranked`: a reward model is built on the ranks and assigned to the scorer later."""
    reward, optimization = config.worker.reward, config.optimization
    functions: dict[str, RewardFunction] = {}
    model_names = [MODEL] if reward.reward_type == "model" else []
    model = build_reward_model(config) if model_names and not ranked else None
    for each in rewards or config.reward_functions:
        name, function = make_reward_function(config, each)
        duplicates = sum(other.partition("#")[0] == name for other in (*functions, *model_names))
        functions[f"{name}#{duplicates + 1}" if duplicates else name] = function
    parts = [*functions, *model_names]
    schedule = algorithm.make_reward_schedule(config, len(parts))
    for _, weights in schedule:
        if len(weights) != len(parts):
            count = f"{len(weights)} weights for {len(parts)} rewards ({', '.join(parts)})"
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


def warn_about_unmatched_answers(dataset: Dataset, functions: Iterable[str]) -> None:
    """Warn if the answer of some rows is none of their options, so that `accuracy` can never be 1. Of a large dataset,
    rows spread evenly over it are checked."""
    if not any(name.partition("#")[0] in COMPARE_CHOICES for name in functions):
        return
    indices = np.unique(np.linspace(0, len(dataset) - 1, min(MAX_ROWS_CHECKED, len(dataset))).astype(int)).tolist()
    wrong = []
    for index in indices:
        with suppress(RowError):  # the sampler reports it
            task = dataset.task(index)
            if names_no_option(task.answer, task.columns or {}):
                wrong.append(task)
    if wrong:
        logger.warning(
            "%d of the %d rows checked have an answer that is none of their options, so no response can be correct; "
            "the first: %s, %.60s. Check dataset.answer_key and dataset.options_key",
            len(wrong), len(indices), wrong[0].origin, repr(row_truth(wrong[0].answer, wrong[0].columns or {})[0]),
        )  # fmt: skip


def build_reward_model(config: Config, sharding: Sharding | None = None) -> RewardModelWorker:
    """The reward model on the device of this process, or sharded over ranks."""
    reward, actor = config.worker.reward, config.worker.actor
    assert reward.model_path is not None, "config/checks.py requires it"
    on_gpu = torch.cuda.is_available()
    model = load_reward_model(
        reward.model_path,
        dtype=actor.fsdp.mixed_precision_dtype,
        device="cuda" if on_gpu else "cpu",
        trust_remote_code=actor.model.trust_remote_code,
        sharding=sharding,
    )
    batching = algorithm.make_probe_batching(config, on_gpu, share_prefix=False)
    return RewardModelWorker(model, batching if sharding is None else batching.over(sharding.ranks))


def make_reward_function(config: Config, function: Callable[..., Any] | str) -> tuple[str, RewardFunction]:
    """The name of a reward function in logs, and the object that runs it."""
    reward = config.worker.reward
    if not isinstance(function, str):
        in_process = InProcess(function, reward.reward_fn_kwargs)
        return in_process.name, in_process
    check_not_from_python("a reward function", function)
    if not is_builtin_name(function):
        sandbox = make_sandbox(config, function, reward.reward_fn_kwargs)
        return sandbox.name, sandbox
    return function, make_builtin_reward(config, function)


def make_sandbox(config: Config, function: str, kwargs: Mapping[str, Any]) -> Sandbox:
    reward = config.worker.reward
    return Sandbox(
        function, kwargs, workers=reward.num_cpus, timeout_s=reward.timeout_s, step_timeout_s=reward.step_timeout_s
    )


def get_builtin_reward(name: str) -> BuiltinReward:
    if name not in REWARDS:
        names = f"a built-in ({', '.join(REWARDS)}), file.py[:name] or package.module:name"
        raise ConfigError([f"there is no reward {name}; use {names}"])
    return REWARDS[name]


def make_builtin_reward(config: Config, name: str) -> RewardFunction:
    builtin = get_builtin_reward(name)
    if builtin.library is not None and find_spec(builtin.library.module) is None:
        library = builtin.library
        raise ConfigError([f"worker.reward.functions: {name} needs {library.module}; {library.install}"])
    if builtin.sandboxed:
        return make_sandbox(config, builtin.function, {})
    module, _, attribute = builtin.function.partition(":")
    reward = getattr(import_module(module), attribute)
    if builtin.settings:
        reward = reward(*(attrgetter(key)(config) for key in builtin.settings))
    return Builtin(reward) if callable(reward) else reward
