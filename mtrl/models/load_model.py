"""Load a model from a directory or a hub id."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from mtrl.models.adapters import merge_saved_adapters
from mtrl.models.checkpoint_files import base_path, check_weight_files, is_adapter
from mtrl.models.families import describe_error, is_vision_model, load_model_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES_IN_MESSAGE = 3
# transformers changes torch's default dtype and initialisers while it builds a model, for all threads. Two at once
# would leave them changed.
LOADING = threading.RLock()


def load_model(
    path: str | Path,
    *,
    dtype: str = "fp32",
    attn_implementation: str = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    optional: Collection[str] = (),
) -> PreTrainedModel:
    """Load the causal model of a supported family, in evaluation mode. `attn_implementation: auto` is sdpa. Weights
    must match the model; only `optional` ones may be missing or unknown. A directory of adapters gives their base with
    the adapters merged into it."""
    given, path = Path(path), base_path(path)
    model_class, options = _make_options(path, dtype, attn_implementation, trust_remote_code)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    model, report = from_pretrained(model_class, path, **options)
    required = {problem: [each for each in names if each not in optional] for problem, names in report.items()}
    check_loaded_weights(path, required)
    model = model.to(device).eval()
    check_finite(path, model)
    if is_adapter(given):
        try:
            merge_saved_adapters(model, given)
        except ValueError as error:
            raise ValueError(f"{given} does not fit {path}: {error}") from error
    return model


def empty_model(
    path: str | Path, *, dtype: str = "fp32", attn_implementation: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of `load_model` on the meta device: shapes, and no numbers. (For adapters: their base.)"""
    model_class, options = _make_options(base_path(path), dtype, attn_implementation, trust_remote_code)
    return build_empty(model_class, options.pop("config"), **options)


def build_empty(kind: Any, config: PreTrainedConfig, **options: Any) -> Any:
    """The model of a configuration on the meta device."""
    with LOADING, torch.device("meta"):
        return kind.from_config(config, **options).eval()


def build_uninitialized(config: PreTrainedConfig, **options: Any) -> Any:
    """The model of a configuration with any values in its weights: fake tensors, of which initial values of others
    would be computed, have none."""
    with LOADING, no_init_weights():
        model = find_model_class(config).from_config(config, **options).eval()
    model.tie_weights()
    return model


def _make_options(
    path: str, dtype: str, attn_implementation: str, trust_remote_code: bool
) -> tuple[Any, dict[str, Any]]:
    """The transformers class of the model, and the options for its constructor."""
    config = load_model_config(path, trust_remote_code)
    return find_model_class(config), {
        "config": config,
        "dtype": DTYPES[dtype],
        "attn_implementation": "sdpa" if attn_implementation == "auto" else attn_implementation,
        "trust_remote_code": trust_remote_code,
    }


def find_model_class(config: PreTrainedConfig) -> Any:
    return AutoModelForImageTextToText if is_vision_model(config) else AutoModelForCausalLM


def from_pretrained(kind: Any, path: str, **options: Any) -> tuple[Any, Mapping[str, Collection[Any]]]:
    """The model, and a report of weights that are missing, unexpected or of another size. transformers fills them with
    random numbers and logs a long report, which is silenced: the caller must check it. Pickled weights are refused,
    and any error becomes a ValueError that names the path."""
    check_weight_files(path)
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    with LOADING:
        level = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            return kind.from_pretrained(path, **options)
        except Exception as error:  # a config.json can be wrong in any other way
            raise ValueError(f"{path} cannot be loaded: {describe_error(error)}") from error
        finally:
            logging.set_verbosity(level)


def check_loaded_weights(path: str, report: Mapping[str, Collection[Any]]) -> None:
    """Raise a ValueError for a checkpoint that does not fit its config. transformers does not report tied weights."""
    wrong = {
        "missing": report["missing_keys"],
        "unknown": report["unexpected_keys"],
        "of another size": [name for name, *_ in report["mismatched_keys"]],
    }
    if problems := [f"{len(names)} {what} ({_join_some(names)})" for what, names in wrong.items() if names]:
        raise ValueError(
            f"{path}: the weights do not fit the model of its config.json: {', '.join(problems)}; training would start "
            "with random numbers, so save the checkpoint again with the class that loads it"
        )


def check_finite(path: str, model: PreTrainedModel) -> None:
    """Raise a ValueError for NaN or infinity, by the sum of each weight, which takes no memory."""
    if wrong := [name for name, weight in model.named_parameters() if not weight.sum(dtype=torch.float32).isfinite()]:
        raise ValueError(
            f"{path}: {len(wrong)} weights hold NaN or infinity ({_join_some(wrong)}): the training that wrote them "
            "diverged, or the file is damaged; use another checkpoint"
        )


def _join_some(names: Collection[str]) -> str:
    return ", ".join([*sorted(names)[:NAMES_IN_MESSAGE], *([".."] if len(names) > NAMES_IN_MESSAGE else [])])
