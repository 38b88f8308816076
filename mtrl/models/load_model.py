"""A model from a directory or a hub id."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from mtrl.models.adapters import base_path, is_adapter, merge_saved
from mtrl.models.checkpoint_files import check_weight_files
from mtrl.models.families import VISION_FAMILIES, in_a_line, load_model_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHOWN = 3  # names of weights in a message


def load_model(
    path: str | Path,
    *,
    dtype: str = "fp32",
    attn_implementation: str = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    but: Collection[str] = (),
) -> PreTrainedModel:
    """The causal model of a supported family, in evaluation mode. `attn_implementation: auto` is sdpa. Weights `but`
    those must be the model's: of these any may be missing or unknown, for a caller who puts them in place. A directory
    of adapters gives their base with them merged into it."""
    given, path = Path(path), base_path(path)
    family, options = _how_to_load(path, dtype, attn_implementation, trust_remote_code)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    model, found = from_pretrained(family, path, **options)
    check_shapes(path, {problem: [each for each in names if each not in but] for problem, names in found.items()})
    model = model.to(device).eval()
    check_finite(path, model)
    if is_adapter(given):
        try:
            merge_saved(model, given)
        except ValueError as error:
            raise ValueError(f"{given} does not fit {path}: {error}") from error
    return model


def empty_model(
    path: str | Path, *, dtype: str = "fp32", attn_implementation: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """What `load_model` would load, on the meta device: shapes, and no numbers. (Of adapters: their base.)"""
    family, options = _how_to_load(base_path(path), dtype, attn_implementation, trust_remote_code)
    with torch.device("meta"):
        return family.from_config(options.pop("config"), **options).eval()


def _how_to_load(
    path: str, dtype: str, attn_implementation: str, trust_remote_code: bool
) -> tuple[Any, dict[str, Any]]:
    """The class of transformers that has the model, and the options of its making."""
    config = load_model_config(path, trust_remote_code)
    family: Any = AutoModelForImageTextToText if config.model_type in VISION_FAMILIES else AutoModelForCausalLM
    return family, {
        "config": config,
        "dtype": DTYPES[dtype],
        "attn_implementation": "sdpa" if attn_implementation == "auto" else attn_implementation,
        "trust_remote_code": trust_remote_code,
    }


def from_pretrained(kind: Any, path: str, **options: Any) -> tuple[Any, Mapping[str, Collection[Any]]]:
    """The model, and which weights were missing, not expected, or of another size. transformers puts random numbers in
    their place and says so in a long report, which is kept quiet: the caller has to judge. Pickled weights are refused,
    and any error is a ValueError that names the path."""
    check_weight_files(path)
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    try:
        return kind.from_pretrained(path, **options)
    except Exception as error:  # whatever transformers meets in a config.json that is wrong in some other way
        raise ValueError(f"{path} cannot be loaded: {in_a_line(error)}") from error
    finally:
        logging.set_verbosity(level)


def check_shapes(path: str, found: Mapping[str, Collection[Any]]) -> None:
    """Weights that are tied to others may be missing: transformers does not count them."""
    wrong = {
        "missing": found["missing_keys"],
        "unknown": found["unexpected_keys"],
        "of another size": [name for name, *_ in found["mismatched_keys"]],
    }
    if told := [f"{len(names)} {what} ({_some(names)})" for what, names in wrong.items() if names]:
        raise ValueError(
            f"{path}: the weights do not fit the model of its config.json: {', '.join(told)}; training would go on "
            "with random numbers, so save the checkpoint anew by the class that is to load it"
        )


def check_finite(path: str, model: PreTrainedModel) -> None:
    """A sum is finite only where all its numbers are, and takes no memory."""
    if wrong := [name for name, weight in model.named_parameters() if not weight.sum(dtype=torch.float32).isfinite()]:
        raise ValueError(
            f"{path}: {len(wrong)} weights hold NaN or infinity ({_some(wrong)}): the training that wrote them had "
            "diverged, or the file is damaged; use another checkpoint"
        )


def _some(names: Collection[str]) -> str:
    return ", ".join([*sorted(names)[:SHOWN], *([".."] if len(names) > SHOWN else [])])
