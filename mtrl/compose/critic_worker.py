"""Builds the critic, if the advantage estimator needs one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mtrl.compose import algorithm
from mtrl.compose.policy import load_options, make_backbone, model_path, warn_about_large_lr
from mtrl.config import Config, ConfigError
from mtrl.data.hub import check_model_available
from mtrl.models.families import TextEncoder, encoder_files, load_encoder, load_model_config
from mtrl.models.forward import Forward
from mtrl.models.value_head import load_value_model
from mtrl.training.resume import check_undamaged
from mtrl.workers.critic import LocalCritic
from mtrl.workers.offload import STAYING, StayingWeights

KEY = "worker.critic.model.model_path"


def critic_path(config: Config) -> str:
    """The path of the initial weights: by default those of the actor."""
    return config.worker.critic.model.model_path or model_path(config)


def build_critic(
    config: Config,
    policy: Forward,
    encoder: TextEncoder,
    steps: int,
    model: Any = None,
    policy_weights: StayingWeights = STAYING,
) -> LocalCritic:
    """Build a separate model that runs the same passes as the policy, with its own optimizer and schedule. `model` is
    used if it is loaded already."""
    path, on_gpu, ranks = critic_path(config), policy.backbone.device.type == "cuda", policy.backbone.ranks
    if path != model_path(config):
        check_same_inputs(config, policy.backbone.model.config.model_type, encoder)
    model = model or load_critic(config)
    warn_about_large_lr("worker.critic.optim.lr", config.worker.critic.optim.lr, model)
    return LocalCritic(
        replace(policy, backbone=make_backbone(config, model, ranks)),
        algorithm.make_schedule(config, config.worker.critic.optim, steps),
        update_batching=algorithm.make_update_batching(config, on_gpu, policy.share_prefix).over(ranks),
        probe_batching=algorithm.make_probe_batching(config, on_gpu, policy.share_prefix).over(ranks),
        encoder_files=encoder_files(encoder, path),
        offload_optimizer=on_gpu and algorithm.offloads_optimizer(config),
        policy_weights=policy_weights,
    )


def load_critic(config: Config, device: str | None = None) -> Any:
    path = critic_path(config)
    check_model_available(path)
    check_undamaged(Path(path))
    return load_value_model(path, **load_options(config, device))


def check_same_inputs(config: Config, family: str, encoder: TextEncoder) -> None:
    """The critic reads the tokens and pixels that were prepared for the actor."""
    path, trusted = critic_path(config), config.worker.actor.model.trust_remote_code
    prefix = f"{KEY}: {path} cannot read the inputs of the actor"
    critic_family = load_model_config(path, trusted).model_type
    if critic_family != family:
        raise ConfigError([f"{prefix}: its family is {critic_family}, not {family}; use a model of the actor's family"])
    data = config.dataset
    own = load_encoder(path, min_pixels=data.min_pixels, max_pixels=data.max_pixels, trust_remote_code=trusted)
    if own.tokenizer.get_vocab() != encoder.tokenizer.get_vocab():
        raise ConfigError([f"{prefix}: its tokenizer differs; use a model with the actor's tokenizer"])
    if own.image_settings != encoder.image_settings:
        raise ConfigError([f"{prefix}: its image settings differ; use a model with the same patches and colours"])
