"""Checks that every model family must pass: our passes over a model against transformers' own.

`mtrl doctor MODEL --parity` runs them on a user's weights, tests/conformance/test_family_checks.py on tiny models of
every family. `compose/family_checks.py` makes the `Candidate` that they take. Each returns the worst difference that it
measured and the limit for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtrl.models.adapters import ADAPTER, AdapterSettings, adapter_layers, add_adapters, merge_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.check_candidate import (
    WATCHED,
    Candidate,
    Finding,
    NotApplicable,
    change_other_responses,
    gap,
    gradient_gap,
    gradients,
    log_probs,
    plain_gradients,
    share_weights,
    token_weights,
)
from mtrl.models.forward import Forward
from mtrl.models.load_model import find_model_class
from mtrl.models.parity import plain_inputs, plain_log_probs
from mtrl.models.processors import load_processor, process_prompt
from mtrl.models.routing import has_experts
from mtrl.models.state_dicts import exported_weights, save_model
from mtrl.types import PERTURBED, SEGMENTS, TEXT_POOL, VISION_POOL, Needs, Prompt, Sampling

# What passes as rounding, at the worst token. Logits of 16 to 32 in bfloat16 are multiples of 1/8: a log-prob of such a
# model is known to half a nat at best. A wrong position, mask or image moves some token of a trained model by more.
# Log-probs are float32 for weights of any dtype.
LOG_PROBS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}  # nats
# Relative to the largest gradient of a weight, in float32. Those of a delta rule's decay are known to a few thousandths
# of their own size: the gradients of transformers' forward are as far from those in float64 as ours.
GRADIENTS = 1e-3
MASSES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}  # shares, 0 to 1
PIXELS = 1e-6  # numbers around 1: order of rescaling and normalising
GREEDY_TOKENS = 12


def check_prompt(candidate: Candidate) -> Finding:
    """Tokens and pixels equal those of transformers' processor of the family."""
    try:
        processor = load_processor(candidate.path, candidate.plain.config, candidate.trust_remote_code)
    except (ImportError, OSError, ValueError) as error:
        raise NotApplicable(
            f"transformers' processor cannot be loaded: {str(error).strip().splitlines()[0]}"
        ) from error
    if not getattr(processor, "chat_template", None):
        raise NotApplicable("the checkpoint has no chat template")
    worst = 0.0
    for prompt in candidate.rollouts.prompts:
        ours = {**candidate.encoder.inputs(prompt), "input_ids": prompt.ids}
        sizes = [medium.shape[:2] for medium in prompt.media]
        resize = all(candidate.encoder.target_size(*size) == size for size in sizes)
        for name, value in process_prompt(processor, prompt, resize).items():
            theirs = torch.as_tensor(value)
            theirs = theirs if name.startswith(("pixel", "image")) else theirs[0]
            if name in ours and ours[name].shape != theirs.shape:
                shapes = f"{tuple(ours[name].shape)}, transformers' {tuple(theirs.shape)}"
                return Finding("prompt", np.inf, PIXELS, f"{name} has the shape {shapes}")
            worst = np.maximum(worst, gap(ours[name], theirs) if name in ours else 0.0)
    kinds = "tokens and pixels" if hasattr(processor, "image_processor") else "tokens"
    return Finding("prompt", float(worst), PIXELS, f"{kinds} by {type(processor).__name__}")


def check_forward(candidate: Candidate) -> Finding:
    """Log-probs equal those of a plain forward of each row."""
    worst = gap(candidate.log_probs, candidate.plain_log_probs)
    return Finding("forward", worst, LOG_PROBS[candidate.dtype])


def check_gradients(candidate: Candidate) -> Finding:
    """Gradients equal those of a plain forward of each row."""
    candidate = candidate.wide
    weights = token_weights(candidate.rollouts)
    ours = gradients(candidate, candidate.forward, candidate.rollouts, weights)
    worst, where = gradient_gap(ours, plain_gradients(candidate, weights))
    return Finding("gradients", worst, GRADIENTS, f"most in {where}")


def check_sharing(candidate: Candidate) -> Finding:
    """Log-probs with one copy of the prompt for a group equal those with a copy for each response."""
    worst = gap(candidate.log_probs, log_probs(_unshared(candidate), candidate.rollouts))
    return Finding("sharing", worst, LOG_PROBS[candidate.dtype])


def check_sharing_gradients(candidate: Candidate) -> Finding:
    """The same for gradients."""
    candidate = candidate.wide
    weights, alone = token_weights(candidate.rollouts), _unshared(candidate)
    ours = gradients(candidate, candidate.forward, candidate.rollouts, weights)
    worst, where = gradient_gap(ours, gradients(candidate, alone, candidate.rollouts, weights))
    return Finding("sharing gradients", worst, GRADIENTS, f"most in {where}")


def _unshared(candidate: Candidate) -> Forward:
    if not candidate.forward.share_prefix:
        raise NotApplicable("the family does not share prompts: each response reads its own")
    return replace(candidate.forward, share_prefix=False)


def check_isolation(candidate: Candidate) -> Finding:
    """Other tokens in all other responses leave the log-probs of a response as they are, in every bit."""
    changed, limit = change_other_responses(candidate.rollouts), LOG_PROBS[candidate.dtype]
    again, other = (log_probs(candidate.forward, each)[WATCHED] for each in (candidate.rollouts, changed))
    first = candidate.log_probs[WATCHED]
    worst, noise = gap(other, first), gap(again, first)
    return Finding("isolation", worst, *_bitwise(candidate, noise, limit))


def check_isolation_gradients(candidate: Candidate) -> Finding:
    """The same for the gradients of a loss on that response alone."""
    candidate = candidate.wide
    rollouts = candidate.rollouts
    weights = torch.zeros(rollouts.mask.shape)
    weights[WATCHED] = token_weights(rollouts)[WATCHED]
    first = gradients(candidate, candidate.forward, rollouts, weights)
    noise, _ = gradient_gap(gradients(candidate, candidate.forward, rollouts, weights), first)
    changed = change_other_responses(rollouts)
    worst, _ = gradient_gap(gradients(candidate, candidate.forward, changed, weights), first)
    return Finding("isolation gradients", worst, *_bitwise(candidate, noise, GRADIENTS))


def _bitwise(candidate: Candidate, noise: float, rounding: float) -> tuple[float, str]:
    """The limit for numbers that should not change by a bit, and why it is not 0."""
    if has_experts(candidate.plain.config.get_text_config()):
        return rounding, "bits may move: the products of an expert are over all tokens that it gets, in one group"
    if noise:
        return rounding, f"bits may move: the same pass twice differs by {noise:.1e} on this device"
    return 0.0, "in every bit"


def check_perturbation(candidate: Candidate) -> Finding:
    """Log-probs under perturbed images equal those of a plain forward of these images."""
    if not any(prompt.media for prompt in candidate.rollouts.prompts):
        raise NotApplicable("a text model has no images")
    needs = Needs("old_logprobs", "perturbed_logprobs")
    ours = candidate.forward.signals(candidate.rollouts, needs, {PERTURBED: candidate.views}).perturbed_logprobs
    assert ours is not None
    theirs = candidate.compute_plain(candidate.plain, perturbed=True)
    effect = gap(theirs, candidate.plain_log_probs)
    return Finding("perturbation", gap(ours, theirs), *_below_effect(candidate.dtype, effect, "the images move"))


def _below_effect(dtype: torch.dtype, effect: float, what: str) -> tuple[float, str]:
    """The limit for log-probs that must follow a change: far enough below its effect to see that they do."""
    note = f"{what} log-probs by {effect:.1e} at most"
    return (min(LOG_PROBS[dtype], effect / 4) if effect else -1.0), note


def check_masses(candidate: Candidate) -> Finding:
    """Attention masses equal those from the matrices of transformers' eager attention, in the layers that have any."""
    if not candidate.forward.backbone.uses_own_attention:
        raise NotApplicable("attention masses need attn_implementation auto or sdpa")
    layers = len(candidate.forward.backbone.attention_layers)  # `all` reads the last one, `weight` all of them
    forward = replace(candidate.forward, attention_last_k_layers=1, token_weight_last_k_layers=layers)
    mass = forward.signals(candidate.rollouts, Needs("attention_mass")).attention_mass
    assert mass is not None
    model = share_weights(candidate.plain)
    model.set_attn_implementation("eager")
    worst = 0.0
    for ours, (prompt, response) in zip(mass, candidate.rows(), strict=True):
        theirs = eager_masses(candidate, model, prompt, response)
        known = ~theirs.isnan()  # models of one or two layers lack a third
        worst = np.maximum(worst, gap(ours[: len(response)][known], theirs[known]))  # NaN wins
    return Finding("masses", float(worst), MASSES[candidate.dtype])


@torch.no_grad()
def eager_masses(candidate: Candidate, model: PreTrainedModel, prompt: Prompt, response: Tensor) -> Tensor:
    """[length, len(SEGMENTS), 2] in float64, by the definition: mean over heads, share of the prompt without its first
    token, mean over the layers of a segment."""
    size, pool = len(prompt.ids), prompt.token_pool
    row = plain_inputs(candidate.encoder.inputs(prompt), prompt, response)
    row = {name: each.to(model.device) for name, each in row.items()}
    matrices = model(**row, output_attentions=True, use_cache=False).attentions
    layers = []
    for matrix in (each for each in matrices if each is not None):
        keys = matrix[0].double().mean(0)[size - 1 : -1, :size].cpu()
        keys[:, 0] = 0
        layers.append(torch.stack([keys[:, pool == each].sum(1) for each in (TEXT_POOL, VISION_POOL)], -1))
        layers[-1] /= keys.sum(1)[:, None]
    thirds = dict(zip(SEGMENTS, np.array_split(np.arange(len(layers)), 3), strict=False))
    chosen = thirds | {"all": [len(layers) - 1], "weight": range(len(layers))}
    nothing = torch.full_like(layers[0], torch.nan)
    means = [torch.stack([layers[i] for i in chosen[name]]).mean(0) if len(chosen[name]) else nothing
             for name in SEGMENTS]  # fmt: skip
    return torch.stack(means, 1)


@torch.no_grad()
def check_greedy(candidate: Candidate) -> Finding:
    """Greedy responses of our engine are those of `generate`. Where a token differs, the other must be as likely."""
    prompts, encoder = candidate.rollouts.prompts, candidate.encoder
    model: Any = candidate.plain
    with candidate.generator.resident():
        ours = candidate.generator.generate(prompts, Sampling(temperature=0, max_new_tokens=GREEDY_TOKENS))
    worst, different = 0.0, 0
    for prompt, tokens, mask in zip(prompts, ours.tokens, ours.mask, strict=True):
        row = plain_inputs(encoder.inputs(prompt), prompt, torch.zeros(0, dtype=torch.long))
        options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": GREEDY_TOKENS}
        options |= {"suppress_tokens": list(encoder.forbidden_ids) or None, "eos_token_id": list(encoder.stop_ids)}
        generated = model.generate(**{name: each.to(model.device) for name, each in row.items()}, **options)
        theirs, chosen = generated[0, len(prompt.ids) :].cpu(), tokens[mask]
        at = next((i for i, (a, b) in enumerate(zip(chosen, theirs, strict=False)) if a != b), None)
        if at is None:
            worst = max(worst, 0.0 if len(chosen) == len(theirs) else np.inf)
            continue
        both = [torch.cat([theirs[:at], each[at : at + 1]]) for each in (theirs, chosen)]
        likely, less = (float(plain_log_probs(model, encoder, prompt, each)[-1]) for each in both)
        worst, different = max(worst, likely - less), different + 1
    note = f"{different} of {len(prompts)} responses take another token, less likely by this much" if different else ""
    return Finding("greedy", worst, LOG_PROBS[candidate.dtype], note or "every token")


@torch.no_grad()
def check_adapters(candidate: Candidate) -> Finding:
    """Fresh adapters change nothing; changed ones give the same log-probs before and after they are merged. In float32:
    weights of 16 bits round away much of what is merged into them."""
    if find_spec("peft") is None:
        raise NotApplicable("peft is not installed: pip install 'mtrl[lora]'")
    base, rollouts = candidate.wide.log_probs, candidate.rollouts
    model: Any = copy.deepcopy(candidate.wide.plain)
    add_adapters(model, AdapterSettings())
    forward = replace(candidate.forward, backbone=Backbone(model))
    fresh = gap(log_probs(forward, rollouts), base)
    random = torch.Generator().manual_seed(0)
    for layer in adapter_layers(model):
        up, weight = layer.lora_B[ADAPTER].weight, layer.get_base_layer().weight
        up.copy_(torch.randn(up.shape, generator=random) * float(weight.std()) / 8)
    changed = log_probs(forward, rollouts)
    merge_adapters(model)
    merged = gap(log_probs(forward, rollouts), changed)
    limit = _below_effect(candidate.wide.dtype, gap(changed, base), "changed adapters move")
    return Finding("adapters", float(np.maximum(fresh, merged)), *limit)


@torch.no_grad()
def check_checkpoint(candidate: Candidate) -> Finding:
    """Saved weights load in plain transformers, with the same log-probs."""
    model = candidate.forward.backbone.model
    with TemporaryDirectory(prefix="mtrl-check-", ignore_cleanup_errors=True) as folder:
        save_model(model, exported_weights(model), Path(folder))
        kind = find_model_class(model.config)
        loaded = kind.from_pretrained(folder, dtype=candidate.dtype, trust_remote_code=candidate.trust_remote_code)
        theirs = candidate.compute_plain(loaded.to(candidate.plain.device).eval())
    return Finding("checkpoint", gap(theirs, candidate.plain_log_probs), LOG_PROBS[candidate.dtype])


Check = Callable[[Candidate], Finding]
CHECKS: dict[str, Check] = {
    check.__name__.removeprefix("check_").replace("_", " "): check
    for check in (
        check_prompt, check_forward, check_gradients, check_sharing, check_sharing_gradients, check_isolation,
        check_isolation_gradients, check_perturbation, check_masses, check_greedy, check_adapters, check_checkpoint,
    )
}  # fmt: skip
# They hold the weights a second time, in float32, or two sets of gradients as well.
LARGE_CHECKS = ("gradients", "sharing gradients", "isolation gradients", "adapters", "checkpoint")
