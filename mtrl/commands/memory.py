"""How much device memory a run takes at most, by formula.

Exact for what a run always holds: weights, gradients, moments. For passes it is a bound from the limits of the
configuration (longest prompts, longest responses), with what a transformer layer keeps for a token counted by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.algorithms.vocab import CHUNK_POSITIONS
from mtrl.models.size import LayerSize, ModelSize
from mtrl.rollout.local import ROWS_AT_ONCE


@dataclass(frozen=True)
class Plan:
    """What of a configuration decides about memory. Lengths are limits, in tokens; widths are bytes of a number."""

    weight_bytes: int  # of the master weights
    compute_bytes: int  # of products
    reference: bool
    train_vision: bool
    checkpointing: bool
    prompts_per_step: int
    responses_per_prompt: int
    prompt_tokens: int
    response_tokens: int
    max_pixels: int
    tokens_per_pass: int | None  # None: as many as the largest group has
    at_least_per_pass: int = 0  # what None stands for at least
    share_prefix: bool = True
    judge_parameters: int = 0  # of a reward model

    @property
    def sequence_tokens(self) -> int:
        """The longest sequence of a pass: a prompt with all its responses, or with one."""
        responses = self.responses_per_prompt if self.share_prefix else 1
        return self.prompt_tokens + responses * self.response_tokens

    @property
    def pass_tokens(self) -> int:
        if self.tokens_per_pass is None:
            return max(self.at_least_per_pass, self.sequence_tokens)
        one_response = self.prompt_tokens + self.response_tokens  # a group over the budget is cut, a response is not
        return max(self.tokens_per_pass, one_response)


@dataclass(frozen=True)
class Estimate:
    """Bytes by what they are for: held all the time, and on top of it by each phase, of which one runs at a time."""

    held: dict[str, int]
    phases: dict[str, dict[str, int]]

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + max(sum(parts.values()) for parts in self.phases.values())


def estimate(model: ModelSize, plan: Plan) -> Estimate:
    trained = model.parameters - (0 if plan.train_vision else model.vision_parameters)
    held = {"weights": model.parameters * plan.weight_bytes}
    if plan.reference:
        held["weights of the reference"] = model.parameters * plan.weight_bytes
    if plan.judge_parameters:
        held["weights of the reward model"] = plan.judge_parameters * plan.compute_bytes
    held["moments of Adam"] = 2 * trained * plan.weight_bytes
    phases = {**_sampling(model, plan), "update": _update(model, plan, trained)}
    return Estimate(held, {phase: {name: n for name, n in parts.items() if n} for phase, parts in phases.items()})


def _sampling(model: ModelSize, plan: Plan) -> dict[str, dict[str, int]]:
    rows = min(ROWS_AT_ONCE, plan.prompts_per_step * plan.responses_per_prompt)
    prompts = -(-rows // plan.responses_per_prompt)
    read, context = prompts * plan.prompt_tokens, plan.prompt_tokens + plan.response_tokens
    cached = 2 * model.text.layers * model.text.keys * plan.compute_bytes  # for a token
    copies = {"narrow copies of the weights": _copies(model, plan)}
    return {
        "see": {**copies, "a layer of the vision tower": _patches(model, plan, prompts) * _passing(model.vision, plan)},
        "read": {**copies, "keys and values": read * cached, "a layer": read * _passing(model.text, plan)},
        "decode": {
            **copies,
            "keys and values": rows * context * cached,
            "logits": 3 * rows * model.vocabulary * 4,
        },
    }


def _update(model: ModelSize, plan: Plan, trained: int) -> dict[str, int]:
    tokens = plan.pass_tokens
    prompts = max(1, tokens // plan.sequence_tokens)
    output = model.vocabulary * model.text.hidden
    patches = _patches(model, plan, prompts)
    tower = _kept(model.vision, plan) if plan.train_vision else _passing(model.vision, plan)
    return {
        "gradients": trained * plan.weight_bytes,
        "narrow copies of the weights": _copies(model, plan),
        "activations of the language model": tokens * _kept(model.text, plan),
        "activations of the vision tower": patches * tower,
        "who sees whom": tokens * min(tokens, plan.sequence_tokens) * (1 + plan.compute_bytes),
        "logits of a chunk": 2 * CHUNK_POSITIONS * model.vocabulary * 4,
        "gradient of the output matrix": output * 4,
    }


def _copies(model: ModelSize, plan: Plan) -> int:
    """Autocast keeps a narrow copy of each weight for the length of a pass."""
    return model.parameters * plan.compute_bytes if plan.compute_bytes < plan.weight_bytes else 0


def _patches(model: ModelSize, plan: Plan, prompts: int) -> int:
    """At most, of the images of so many prompts: each takes a token for merge * merge patches."""
    if model.vision is None:
        return 0
    per_prompt = min(plan.prompt_tokens * model.merge**2, plan.max_pixels // model.patch**2)
    return prompts * per_prompt


def _inside(layer: LayerSize, plan: Plan) -> int:
    """Bytes that a layer keeps for a token until its backward pass. The stream and both norms are as wide as the master
    weights (6 of the hidden size); queries, keys, values, the attention's output and the inputs of products as wide as
    products (6 of it, 4 of the keys); of the feed-forward part the gate, its activation, the other half, their
    product."""
    narrow = 6 * layer.hidden + 4 * layer.keys + 4 * layer.inner
    return 6 * layer.hidden * plan.weight_bytes + narrow * plan.compute_bytes


def _kept(layer: LayerSize | None, plan: Plan) -> int:
    """For the whole stack; with checkpointing only what enters each layer, and one layer inside, with its gradients."""
    if layer is None:
        return 0
    if not plan.checkpointing:
        return layer.layers * _inside(layer, plan)
    return layer.layers * layer.hidden * plan.weight_bytes + 2 * _inside(layer, plan)


def _passing(layer: LayerSize | None, plan: Plan) -> int:
    """Without gradients one layer's worth lives at a time."""
    return 0 if layer is None else _inside(layer, plan)
