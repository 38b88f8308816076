"""How much device memory a run takes at most, by formula.

Exact for what a run always holds: weights, gradients, moments. For passes it is a bound from the limits of the
configuration (every prompt and every response at its longest), with what a transformer layer holds for a token counted
by hand, as Qwen's layers are written. A phase is told at its fullest moment.

H below is the hidden size, I that of the feed-forward part, V the vocabulary; "narrow" is the width of products where
the weights are wider (float32 master weights).
"""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.algorithms.vocab import CHUNK_POSITIONS
from mtrl.models.size import LayerSize, ModelSize
from mtrl.rollout.local import ROWS_AT_ONCE
from mtrl.workers.micro_batches import MicroBatching

FLOAT32, INT64 = 4, 8
MIB = 2**20
BLOCK_REST = MIB  # torch's allocator leaves as much of a block unused before it cuts it
WORKSPACES = 2 * 32 * MIB  # of cuBLAS on Hopper (less on others): for the thread that runs, and for backward's

Parts = dict[str, int]


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
    update: MicroBatching
    probe: MicroBatching
    views: int = 1  # of the images, in a probe
    on_gpu: bool = False
    packed: bool = False  # all in one sequence, who sees whom told by blocks; else by a matrix for each sequence
    compiled: bool = False  # norms, MLPs and rotary positions
    judge_parameters: int = 0  # of a reward model

    @property
    def group_tokens(self) -> int:
        """A prompt with all its responses: read once, or with each."""
        prompts = 1 if self.update.share_prefix else self.responses_per_prompt
        return prompts * self.prompt_tokens + self.responses_per_prompt * self.response_tokens

    def pass_tokens(self, batching: MicroBatching, views: int = 1) -> int:
        """Of the largest pass, which has no more than the step has."""
        one_response = views * (self.prompt_tokens + self.response_tokens)
        if batching.rows is not None:
            limit = batching.rows * one_response
        elif batching.tokens is None:
            limit = max(batching.at_least, views * self.group_tokens)
        else:
            limit = max(batching.tokens, one_response)  # a group over the budget is cut, a response is not
        return min(limit, views * self.prompts_per_step * self.group_tokens)

    @property
    def later_tokens(self) -> int:
        """Of the largest pass of an update that finds gradients of earlier ones. The first is the fullest: it leaves
        less room than the group that went into another."""
        first, total = self.pass_tokens(self.update), self.prompts_per_step * self.group_tokens
        return min(first, total - first + self.group_tokens) if total > first else 0

    def scored_at_once(self, tokens: int) -> int:
        """Positions of a pass whose logits exist together; those of prompts have none."""
        return min(CHUNK_POSITIONS, tokens * self.responses_per_prompt * self.response_tokens // self.group_tokens)

    @property
    def narrow(self) -> bool:
        return self.compute_bytes < self.weight_bytes


@dataclass(frozen=True)
class Estimate:
    """Bytes by what they are for: held all the time, and on top of it by each phase, of which one runs at a time."""

    held: Parts
    phases: dict[str, Parts]

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + max(sum(parts.values()) for parts in self.phases.values())


def estimate(model: ModelSize, plan: Plan) -> Estimate:
    trained = model.parameters - (0 if plan.train_vision else model.vision_parameters)
    rests = model.matrices * BLOCK_REST if plan.on_gpu else 0  # of one copy of the weights
    held = {
        "weights": model.parameters * plan.weight_bytes,
        "weights of the reference": model.parameters * plan.weight_bytes if plan.reference else 0,
        "weights of the reward model": plan.judge_parameters * plan.compute_bytes,
        "moments of Adam": 2 * trained * plan.weight_bytes,
        "rests of blocks, workspaces": (4 if plan.reference else 3) * rests + WORKSPACES if plan.on_gpu else 0,
    }
    phases = {
        **_sampling(model, plan),
        "probe": _probe(model, plan),
        "update": _update(model, plan, {"gradients": trained * plan.weight_bytes + rests}),
    }
    return Estimate(_some(held), {phase: _some(parts) for phase, parts in phases.items()})


def _some(parts: Parts) -> Parts:
    return {name: size for name, size in parts.items() if size}


def _fullest(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


# -------------------------------------------------------------------------------------------------- without gradients
def _sampling(model: ModelSize, plan: Plan) -> dict[str, Parts]:
    rows = min(ROWS_AT_ONCE, plan.prompts_per_step * plan.responses_per_prompt)
    prompts = -(-rows // plan.responses_per_prompt)
    read, context = prompts * plan.prompt_tokens, plan.prompt_tokens + plan.response_tokens
    patches = _patches(model, plan, prompts)
    of_layer = 2 * model.text.keys * plan.compute_bytes  # keys and values of a token
    cached = model.text.layers * of_layer
    return {
        "see": _seeing(model, plan, patches),
        "read": {
            "pixels": patches * model.patch_numbers * FLOAT32,  # of each prompt, until all are read
            "keys and values": read * cached,
            "who sees whom": read * plan.prompt_tokens * (1 + plan.compute_bytes),  # a matrix on any device
            **_reading(model, plan, read, patches),
        },
        "decode": {
            "narrow copies of the weights": _copies_of_text(model, plan) + _copy_of_output(model, plan),
            "keys and values": rows * context * cached,
            "a layer of them as it grows": rows * context * of_layer,
            "logits": 3 * rows * model.vocabulary * FLOAT32,
        },
    }


def _probe(model: ModelSize, plan: Plan) -> Parts:
    tokens = plan.pass_tokens(plan.probe, plan.views)
    patches = _patches_of(model, plan, tokens)
    reading = {"who sees whom": _sight(plan, tokens, layers=1), **_reading(model, plan, tokens, patches)}
    logits = 3 * plan.scored_at_once(tokens) * model.vocabulary * FLOAT32  # as full_kl has them; else two
    scoring = {
        "hidden states": tokens * model.text.hidden * (2 * plan.compute_bytes + plan.weight_bytes),
        "narrow copies of the weights": _copy_of_output(model, plan),
        "logits of a chunk": logits,
    }
    return _fullest(_seeing(model, plan, patches), reading, scoring)


def _seeing(model: ModelSize, plan: Plan, patches: int) -> Parts:
    """Pixels come in float32, of each prompt and of all together, and are made as wide as the weights."""
    if model.vision is None:
        return {}
    narrowed = plan.weight_bytes if plan.weight_bytes < FLOAT32 else 0
    return {
        "narrow copies of the weights": model.vision_parameters * plan.compute_bytes if plan.narrow else 0,
        "pixels": patches * model.patch_numbers * (2 * FLOAT32 + narrowed),
        "a layer of the vision tower": patches * _passing(model.vision, plan, rotary_bytes=FLOAT32),
    }


def _reading(model: ModelSize, plan: Plan, tokens: int, patches: int) -> Parts:
    features = patches // model.merge**2 * model.text.hidden * plan.compute_bytes
    return {
        "narrow copies of the weights": _copies_of_text(model, plan),
        "features of images": 2 * features,  # as the tower gave them, and together
        "a layer": tokens * _passing(model.text, plan, rotary_bytes=plan.weight_bytes),
    }


def _passing(layer: LayerSize, plan: Plan, rotary_bytes: int) -> int:
    """Bytes for a token while it goes through a layer: the stream, where it came from, the norm's result (as wide as
    the weights) and what the products take of it; then the feed-forward part's two halves and their product, which
    compiled code writes over one of them; or queries and keys as they are turned to their positions (both before and
    after, and both terms of a sum). And what says where it stands: sines and cosines, ids and places."""
    place = 2 * layer.head * rotary_bytes + 6 * INT64
    stream = layer.hidden * (3 * plan.compute_bytes + plan.weight_bytes)
    feed_forward = (2 if plan.compiled else 3) * layer.inner * plan.compute_bytes
    rotary = layer.hidden * (6 * rotary_bytes + 2 * plan.compute_bytes)
    return stream + max(feed_forward, rotary) + place


# ----------------------------------------------------------------------------------------------------- with gradients
def _update(model: ModelSize, plan: Plan, gradients: Parts) -> Parts:
    """The fullest moments of a pass are where its backward pass begins, with all activations, and where it ends, with
    all gradients; in between the ones go as the others come. Later passes begin with gradients, too."""
    first, later = plan.pass_tokens(plan.update), plan.later_tokens
    moments = [_backward_begins(model, plan, first), {**gradients, **_backward_ends(model, plan, first)}]
    if later:
        seeing = _seeing(model, plan, _patches_of(model, plan, later))
        moments += [{**gradients, **_backward_begins(model, plan, later)}, {**gradients, **seeing}]
    return _fullest(*moments)


def _backward_begins(model: ModelSize, plan: Plan, tokens: int) -> Parts:
    layers = 1 if plan.checkpointing else model.text.layers
    kept = {
        "activations of the language model": tokens * _kept(model.text, plan),
        "activations of the vision tower": _kept_by_tower(model, plan, _patches_of(model, plan, tokens)),
        "who sees whom": _sight(plan, tokens, layers),
    }
    if plan.narrow and not plan.checkpointing:
        kept["narrow copies of the weights"] = model.parameters * plan.compute_bytes  # for the backward pass
    inside = _inside(model.text, plan) if plan.checkpointing else 0
    a_layer = {
        "a layer": tokens * (inside + _in_flight(model.text, plan)),
        "its narrow weights": _narrow_layer(model, plan) if plan.checkpointing else 0,  # made again, as all of it
        **_waiting(model, plan),
    }
    read = {"narrow copies of the weights": _copies_of_text(model, plan)}  # when the last layer has been read
    return {**kept, **_fullest(_vocabulary(model, plan, tokens), a_layer, read if plan.checkpointing else {})}


def _vocabulary(model: ModelSize, plan: Plan, tokens: int) -> Parts:
    """Between hidden states and log-probs. The gradient of the output matrix is summed in float32; where the products
    are narrower, a chunk's share of it is made before it is added."""
    chunk, output = plan.scored_at_once(tokens) * model.vocabulary, model.vocabulary * model.text.hidden
    compute = plan.compute_bytes
    share = (output + chunk) * compute if compute < FLOAT32 else 0
    return {
        "the last norm, hidden states": tokens * model.text.hidden * (FLOAT32 + 4 * compute),
        "gradient of the output matrix": output * FLOAT32,
        "a chunk of positions": max(2 * chunk * FLOAT32, share),  # logits and probabilities, then its share
        "narrow output matrix": _copy_of_output(model, plan),
    }


def _backward_ends(model: ModelSize, plan: Plan, tokens: int) -> Parts:
    patches = _patches_of(model, plan, tokens)
    a_layer = {
        "a layer": tokens * (_inside(model.text, plan) + _in_flight(model.text, plan)),
        "its narrow weights": _narrow_layer(model, plan),
    }
    embeddings = {"gradient of the embeddings": model.vocabulary * model.text.hidden * plan.weight_bytes}
    tower: Parts = {}
    if model.vision is not None and plan.train_vision:
        inside = _inside(model.vision, plan) if plan.checkpointing else 0
        tower = {"a layer of the vision tower": patches * (inside + _in_flight(model.vision, plan))}
    return {
        **_waiting(model, plan),
        "activations of the vision tower": _kept_by_tower(model, plan, patches),
        "who sees whom": _sight(plan, tokens, layers=1),
        **_fullest(a_layer, embeddings, tower),
    }


def _waiting(model: ModelSize, plan: Plan) -> Parts:
    """Where the output matrix is the embeddings', its gradient waits for theirs: autograd adds them up first."""
    waits = model.vocabulary * model.text.hidden * plan.weight_bytes if model.tied else 0
    return {"gradient of the output matrix": waits}


def _inside(layer: LayerSize, plan: Plan) -> int:
    """Bytes that a layer keeps for a token until its backward pass. Of H: the norms' float32 copies; then their
    results, scaled and not, queries before and after rotation, the attention's output as it is and side by side, the
    stream and its gradient (10), and what products take of the norms' results where wider weights made them wide (2).
    Of the keys: they and the values, before and after (4). Of I: the gate, its activation, the other half, their
    product (4)."""
    numbers = (12 if plan.narrow else 10) * layer.hidden + 4 * layer.keys + 4 * layer.inner
    return 2 * layer.hidden * FLOAT32 + numbers * plan.compute_bytes


def _in_flight(layer: LayerSize, plan: Plan) -> int:
    """Gradients at the widest place: of the product and both halves, when the product itself is gone."""
    return 2 * layer.inner * plan.compute_bytes


def _kept(layer: LayerSize, plan: Plan) -> int:
    """Bytes for a token, of the whole stack; with checkpointing only what enters each layer."""
    return layer.layers * (layer.hidden * plan.compute_bytes if plan.checkpointing else _inside(layer, plan))


def _kept_by_tower(model: ModelSize, plan: Plan, patches: int) -> int:
    """Its layers; before them the pixels, after them the merger: a norm (in float32, its result twice), a product and
    its activation."""
    if model.vision is None or not plan.train_vision:
        return 0
    merger = model.vision.hidden * (FLOAT32 + 4 * plan.compute_bytes)
    return patches * (model.patch_numbers * plan.compute_bytes + _kept(model.vision, plan) + merger)


# ------------------------------------------------------------------------------------------------------------- counting
def _sight(plan: Plan, tokens: int, layers: int) -> int:
    """A bool for each pair of positions of a group, and a number that each layer of sdpa makes of it for itself. Blocks
    are few; and where a response has its prompt to itself, attention is merely causal."""
    if plan.packed or not plan.update.share_prefix:
        return 0
    return tokens * min(tokens, plan.group_tokens) * (1 + layers * plan.compute_bytes)


def _copies_of_text(model: ModelSize, plan: Plan) -> int:
    """Autocast keeps a narrow copy of each matrix until the language model has been read. Embeddings are looked up, not
    multiplied; compiled MLPs make their own and let them go, layer by layer."""
    multiplied = _multiplied(model)
    if plan.compiled:
        multiplied -= model.mlp_parameters * (model.text.layers - 1) // model.text.layers
    return multiplied * plan.compute_bytes if plan.narrow else 0


def _narrow_layer(model: ModelSize, plan: Plan) -> int:
    return _multiplied(model) // model.text.layers * plan.compute_bytes if plan.narrow else 0


def _multiplied(model: ModelSize) -> int:
    """Parameters of the language model's layers."""
    embeddings = (1 if model.tied else 2) * model.vocabulary * model.text.hidden
    return model.parameters - model.vision_parameters - embeddings


def _copy_of_output(model: ModelSize, plan: Plan) -> int:
    return model.vocabulary * model.text.hidden * plan.compute_bytes if plan.narrow else 0


def _patches_of(model: ModelSize, plan: Plan, tokens: int) -> int:
    return _patches(model, plan, max(1, tokens // plan.group_tokens))


def _patches(model: ModelSize, plan: Plan, prompts: int) -> int:
    """At most, of the images of so many prompts: each takes a token for merge * merge patches."""
    if model.vision is None:
        return 0
    per_prompt = min(plan.prompt_tokens * model.merge**2, plan.max_pixels // model.patch**2)
    return prompts * per_prompt
