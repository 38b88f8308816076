"""Everything that scores: reward functions by name, file or object, and the reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from mtrl.build import recipe
from mtrl.build.unbuilt import is_bare
from mtrl.config import Config, ConfigError
from mtrl.models.reward_model import load_judge
from mtrl.rewards import builtin, grounding
from mtrl.rewards.sandbox import InProcess, Sandbox
from mtrl.rewards.scorer import MODEL, Builtin, RewardFunction, RewardScorer
from mtrl.workers.reward_model import RewardModel

MATH = "mtrl.rewards.math_equality:math"  # in a sandbox: a hostile answer can make it think for hours


def build_scorer(config: Config, steps: int, given: Sequence[Callable[..., Any] | str] | None = None) -> RewardScorer:
    reward, algorithm, model = config.worker.reward, config.optimization, build_reward_model(config)
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
        wants_token_weights=algorithm.enable_token_weights and algorithm.compute_attention_metrics is False,
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
