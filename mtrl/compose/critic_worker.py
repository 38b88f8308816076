"""The critic of a run whose advantages need one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mtrl.compose import algorithm
from mtrl.compose.hub import seek_model
from mtrl.compose.policy import load_options, make_backbone, model_path, warn_of_large_steps
from mtrl.config import Config, ConfigError
from mtrl.models.families import TextEncoder, encoder_files, load_encoder, load_model_config
from mtrl.models.forward import Forward
from mtrl.models.value_head import load_value_model
from mtrl.training.resume import check_undamaged
from mtrl.workers.critic import LocalCritic

KEY = "worker.critic.model.model_path"


def critic_path(config: Config) -> str:
    """Where its weights come from: by default what the actor starts from too."""
    return config.worker.critic.model.model_path or model_path(config)


def build_critic(config: Config, policy: Forward, encoder: TextEncoder, steps: int, model: Any = None) -> LocalCritic:
    """A model of its own behind the policy's passes: the same tokens and images, shared and packed in the same way. It
    is kept and computed as the actor is; its optimizer and schedule are its own. One that is there is taken."""
    path, on_gpu, ranks = critic_path(config), policy.backbone.device.type == "cuda", policy.backbone.ranks
    if path != model_path(config):
        check_same_inputs(config, policy.backbone.model.config.model_type, encoder)
    model = model or load_critic(config)
    warn_of_large_steps("worker.critic.optim.lr", config.worker.critic.optim.lr, model)
    return LocalCritic(
        replace(policy, backbone=make_backbone(config, model, ranks)),
        algorithm.critic_optimizer_settings(config, steps),
        update_batching=algorithm.update_batching(config, on_gpu, policy.share_prefix).over(ranks, policy.sharers.size),
        probe_batching=algorithm.probe_batching(config, on_gpu, policy.share_prefix).over(ranks, policy.sharers.size),
        encoder_files=encoder_files(encoder, path),
        offload_optimizer=on_gpu and algorithm.offloads_optimizer(config),
    )


def load_critic(config: Config, device: str | None = None) -> Any:
    path = critic_path(config)
    seek_model(path)
    check_undamaged(Path(path))
    return load_value_model(path, **load_options(config, device))


def check_same_inputs(config: Config, family: str, encoder: TextEncoder) -> None:
    """A critic reads the very tokens and pixels that were made for the actor."""
    path, trusted = critic_path(config), config.worker.actor.model.trust_remote_code
    told = f"{KEY}: {path} cannot read what is made for the actor"
    theirs = load_model_config(path, trusted).model_type
    if theirs != family:
        raise ConfigError([f"{told}: it is of the family {theirs}, not {family}; name a model of the actor's family"])
    data = config.dataset
    own = load_encoder(path, min_pixels=data.min_pixels, max_pixels=data.max_pixels, trust_remote_code=trusted)
    if own.tokenizer.get_vocab() != encoder.tokenizer.get_vocab():
        raise ConfigError([f"{told}: its tokenizer is another one; name a model with the actor's tokenizer"])
    if own.image_settings != encoder.image_settings:
        raise ConfigError([f"{told}: its images have other patches or colours; name a model with the actor's settings"])
