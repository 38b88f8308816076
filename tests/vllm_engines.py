"""Real engines of vLLM for tests; one of each family lives as long as the tests do: a start takes seconds."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from tiny_models import checkpoint, encoder_of, plain_model

from mtrl.models.families import TextEncoder
from mtrl.models.weights import exported_weights
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import InProcess
from mtrl.rollout.vllm.process import ChildProcess
from mtrl.rollout.vllm.requests import Host
from mtrl.rollout.vllm.settings import engine_arguments
from mtrl.types import Weights

INSTALLED = find_spec("vllm") is not None
MAX_LENGTH = 512
_changed: set[Host] = set()  # engines that may hold other weights than those of the checkpoint


def arguments(family: str, **extra: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    images = encoder_of(family).image_settings
    small = {"kv_cache_memory_bytes": 2**26, **extra}
    return (
        engine_arguments(str(checkpoint(family)), dtype="float32", max_length=MAX_LENGTH, extra=small),
        None if images is None else images.processor_arguments(),
    )


@lru_cache
def in_process(family: str) -> InProcess:
    return InProcess(*arguments(family))


@lru_cache
def child_process(family: str) -> ChildProcess:
    return ChildProcess(*arguments(family), torch.float32)


def engine_on(
    host: Host, family: str, encoder: TextEncoder | None = None, *, may_change: bool = False
) -> VllmGenerator:
    """An engine at version 0, with the weights of the checkpoint."""
    weights = exported_weights(plain_model(family))
    engine = VllmGenerator(host, encoder or encoder_of(family), weights.keys())
    if host in _changed:
        engine.load(Weights(0, weights))
        _changed.discard(host)
    if may_change:
        _changed.add(host)
    return engine
