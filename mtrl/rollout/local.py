"""The local engine: plain PyTorch, the trainer's own model, any device.

Each prompt is encoded and prefilled once for its whole group; then all responses decode together, and finished rows
leave the batch.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.algorithms.vocab import cap_logits
from mtrl.models.backbone import Backbone, Cache, prompt_positions, vision_tokens
from mtrl.models.document_mask import DocumentMask
from mtrl.models.model_size import ModelSize, model_size
from mtrl.models.routing import ExpertRecorder
from mtrl.protocols import PromptEncoder
from mtrl.rollout.lifecycle import EngineLifecycle
from mtrl.rollout.responses import finish_reasons, make_rollouts
from mtrl.rollout.sampling import choose, first_sample_numbers, row_uniforms
from mtrl.types import Prompt, Rollouts, Sampling, Weights
from mtrl.utils.errors import DeviceFull, Diverged

logger = logging.getLogger(__name__)
ROWS_AT_ONCE = 512
COMPACT_BELOW = 0.8  # finished rows leave the cache when a smaller share of its rows is still decoding
LOWERS_MEMORY = "a smaller worker.rollout.max_new_tokens or dataset.max_prompt_length; mtrl doctor says how much each"


class Decoded(NamedTuple):
    """Responses, on the CPU."""

    tokens: list[Tensor]
    logprobs: list[Tensor]
    experts: list[Tensor]  # [tokens, layers, k] each; empty for a dense model


Decode = Callable[[Sequence[Prompt], Sequence[int], Sampling], Decoded]


class LocalGenerator(EngineLifecycle):
    """Samples with the weights of `backbone`, which the actor may share. It holds nothing between calls, so it need not
    sleep."""

    def __init__(
        self, backbone: Backbone, encoder: PromptEncoder, *, version: int = 0, rows_at_once: int = ROWS_AT_ONCE
    ) -> None:
        self.backbone, self.encoder = backbone, encoder
        self.version = version
        self.rows_at_once = rows_at_once

    def load(self, weights: Weights) -> None:
        """Copies a version of the weights, except tensors that are the model's own."""
        if getattr(weights.tensors, "model", None) is self.backbone.model:  # this model's own adapters, merged
            self.version = weights.version
            return
        copy_weights(self.backbone, weights)
        self.version = weights.version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        if sampling.version != self.version:
            raise RuntimeError(f"asked to sample at version {sampling.version}, but the engine holds {self.version}")
        tokens, logprobs, experts = self._run_batches(prompts, sampling, self.decode)
        return make_rollouts(
            prompts,
            [index for index in range(len(prompts)) for _ in range(sampling.n)],
            tokens,
            logprobs,
            text=[self.encoder.decode(row) for row in tokens],
            finish=finish_reasons(tokens, self.encoder.stop_ids),
            version=self.version,
            pad_id=self.encoder.pad_id,
            routed_experts=experts or None,
        )

    @torch.no_grad()
    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Runs the first batch. If it does not fit, fewer rows are sampled at once from now on, as in `generate`."""
        first = prompts[: max(1, self.rows_per_batch // sampling.n)]
        self._run_batches(first, sampling, self.allocate_most)

    @property
    def rows_per_batch(self) -> int:
        """The most rows that `decode` gets."""
        return self.rows_at_once

    def _run_batches(self, prompts: Sequence[Prompt], sampling: Sampling, decode: Decode) -> Decoded:
        """All responses, batch by batch: whole groups, or parts of a larger one."""
        first, n = first_sample_numbers([prompt.task.id for prompt in prompts], sampling), sampling.n
        rows = Decoded([], [], [])
        while len(rows.tokens) < n * len(prompts):
            index, sample = divmod(len(rows.tokens), n)
            groups = 1 if sample else max(1, self.rows_per_batch // n)
            batch, count = slice(index, index + groups), min(n - sample, self.rows_per_batch)
            numbers = [sample + each for each in first[batch]]
            decoded = self._try_batch(decode, prompts[batch], numbers, replace(sampling, n=count))
            if decoded is not None:
                rows = Decoded(*(done + more for done, more in zip(rows, decoded, strict=True)))
        return rows

    def _try_batch(
        self, decode: Decode, prompts: Sequence[Prompt], first: Sequence[int], sampling: Sampling
    ) -> Decoded | None:  # fmt: skip
        """A batch; None if it does not fit into the device, and fewer rows are sampled at once from now on."""
        try:
            return decode(prompts, first, sampling)
        except torch.OutOfMemoryError as error:
            problem = str(error).partition(" Of the allocated memory")[0]  # the rest is about fragmentation
        # The error is gone here, and with it the frames that held tensors of the batch.
        self.free_buffers()
        gc.collect()
        torch.cuda.empty_cache()
        rows = min(len(prompts) * sampling.n, self.rows_at_once)
        if rows == 1:
            raise DeviceFull(f"the device has no room to sample a single response. {problem} Set {LOWERS_MEMORY}")
        self.rows_at_once = rows // 2
        logger.warning("the device has no room to sample %d responses at once: %d from now on, which is "
                       "slower. To use less memory, set %s", rows, self.rows_at_once, LOWERS_MEMORY)  # fmt: skip
        return None

    def free_buffers(self) -> None:
        """Frees buffers that were made for larger batches."""

    def decode(self, prompts: Sequence[Prompt], first: Sequence[int], sampling: Sampling) -> Decoded:
        """The rows of one batch; `first`: the number of each prompt's first sample."""
        with ExpertRecorder(self.backbone.routers) as experts:
            return Decoding(self, prompts, first, sampling, experts).run()

    def allocate_most(self, prompts: Sequence[Prompt], first: Sequence[int], sampling: Sampling) -> Decoded:
        """Decodes one token, then allocates the most that `decode` could need."""
        decoded = self.decode(prompts, first, replace(sampling, max_new_tokens=1))
        backbone, longest = self.backbone, max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens
        dtypes = backbone.output_matrix.dtype, backbone.compute_dtype
        most = peak_decode_bytes(model_size(backbone.model), *dtypes, len(decoded[0]), longest, sampling.cut)
        torch.empty(sum(most.values()), dtype=torch.uint8, device=backbone.device)
        return decoded


def peak_decode_bytes(
    size: ModelSize, weights: torch.dtype, compute: torch.dtype, rows: int, tokens: int, cut: bool
) -> dict[str, int]:
    """Bytes of the last token's step, with autocast's copies of wider weights and of the output matrix. Choosing a
    token takes two tables of float32 and two of float64, or three and the sorted indices if top-p or top-k cuts."""
    keys_and_values = 2 * size.keys * compute.itemsize * rows * tokens
    narrow = (size.read + size.output) * compute.itemsize if compute.itemsize < weights.itemsize else 0
    return {
        "narrow copies of the weights": narrow,
        "keys and values": size.layers * keys_and_values,
        "a layer of them as it grows": keys_and_values,
        "recurrent states": 4 * size.state * rows,
        "logits": (32 if cut else 24) * rows * size.vocabulary,
    }


@dataclass
class Decoding:
    """The sampling of one batch."""

    engine: LocalGenerator
    prompts: Sequence[Prompt]
    first: Sequence[int]  # the number of each prompt's first sample
    sampling: Sampling
    experts: ExpertRecorder

    def run(self) -> Decoded:
        device = self.engine.backbone.device
        task_ids = [prompt.task.id for prompt in self.prompts]
        uniforms = row_uniforms(task_ids, self.first, self.sampling).to(device)
        rows = len(uniforms)
        tokens = torch.zeros(rows, self.sampling.max_new_tokens, dtype=torch.long, device=device)
        logps = torch.zeros(rows, self.sampling.max_new_tokens, device=device)
        routed = torch.zeros(*tokens.shape, *self.experts.shape, dtype=self.experts.dtype, device=device)
        lengths = torch.zeros(rows, dtype=torch.long, device=device)
        stop_ids = torch.tensor(self.engine.encoder.stop_ids, dtype=torch.long, device=device)
        forbidden = torch.tensor(self.engine.encoder.forbidden_ids, dtype=torch.long, device=device)

        hidden, experts, position, keys, cache = self._prefill()
        padded = not bool(keys.all())
        output_matrix, softcap = self.engine.backbone.output_matrix.to(hidden.dtype), self.engine.backbone.softcap
        row = torch.arange(rows, device=device)  # the rows in the cache
        decoding = torch.ones(rows, dtype=torch.bool, device=device)
        for t in range(self.sampling.max_new_tokens):
            logits = cap_logits((hidden @ output_matrix.T).float(), softcap).index_fill_(1, forbidden, -torch.inf)
            chosen, logp = choose(logits, uniforms[row, t], self.sampling)
            # Finished rows keep writing beyond their length while they are in the cache.
            tokens[row, t], logps[row, t], routed[row, t] = chosen, logp, experts
            lengths[row] += decoding
            decoding &= ~torch.isin(chosen, stop_ids) & logp.isfinite()  # NaN ends a row
            alive = int(decoding.sum())  # the only wait for the device in a step
            if alive == 0 or t + 1 == self.sampling.max_new_tokens:
                break
            if alive < COMPACT_BELOW * len(row):
                stay = decoding.nonzero().flatten()
                self.engine.backbone.select_rows(cache, stay)
                row, chosen, position, keys = row[stay], chosen[stay], position[stay], keys[stay]
                decoding = decoding[stay]
            keys = torch.cat([keys, keys.new_ones(len(row), 1)], dim=1)
            hidden, experts = self._step(chosen, position, keys if padded else None, cache)
            position = position + 1
        ends = lengths.tolist()
        split = [[x[:n] for x, n in zip(all_rows.cpu(), ends, strict=True)] for all_rows in (tokens, logps, routed)]
        if not all(bool(row.isfinite().all()) for row in split[1]):
            raise Diverged(explain_non_finite(self.engine.version, hidden.dtype))
        return Decoded(split[0], split[1], split[2] if routed.numel() else [])

    def _prefill(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Cache]:
        """Reads every prompt once and repeats its cache for its responses. Returns the last hidden state [rows, H] and
        its experts, the next position [rows], which keys are real [rows, S], and the cache."""
        backbone = self.engine.backbone
        inputs = [self.engine.encoder.inputs(prompt, device=self.engine.backbone.device) for prompt in self.prompts]
        positions = [prompt_positions(each) for each in inputs]
        keys = left_pad([torch.ones(len(prompt.ids), dtype=torch.bool) for prompt in self.prompts])
        is_vision = left_pad([vision_tokens(prompt) for prompt in self.prompts])
        cache = backbone.new_cache()
        hidden = backbone.forward_text(
            left_pad([prompt.ids for prompt in self.prompts]).to(backbone.device),
            left_pad([p.T for p in positions]).permute(2, 0, 1).to(backbone.device),
            is_vision,
            backbone.encode_images(inputs),
            attention_mask=None if keys.all() else backbone.make_masks(DocumentMask.from_rows(is_vision, keys)),
            cache=cache,
            state_mask=None if keys.all() else keys.to(backbone.device),
        )
        group = torch.arange(len(self.prompts), device=backbone.device).repeat_interleave(self.sampling.n)
        backbone.select_rows(cache, group)
        following = torch.stack([p.max() + 1 for p in positions]).to(backbone.device)
        experts = self.experts.take(len(hidden), backbone.device)[group, -1]
        return hidden[group, -1], experts, following[group], keys.to(backbone.device)[group], cache

    def _step(self, tokens: Tensor, position: Tensor, keys: Tensor | None, cache: Cache) -> tuple[Tensor, Tensor]:
        """Reads one more token of every row in the cache: its hidden state [rows, H] and its experts. `keys` None: all
        are real."""
        mask = None if keys is None else self.engine.backbone.make_step_masks(keys)
        positions = position[None, :, None].expand(3, -1, -1)
        hidden = self.engine.backbone.forward_text(tokens[:, None], positions, attention_mask=mask, cache=cache)
        return hidden[:, 0], self.experts.take(len(hidden), hidden.device)[:, 0]


@torch.no_grad()
def copy_weights(backbone: Backbone, weights: Weights) -> None:
    """Into the backbone's model, in place."""
    own = backbone.model.state_dict()  # tied weights under each name
    check_weight_names(own, weights.tensors)
    for name, tensor in weights.tensors.items():
        if own[name].data_ptr() != tensor.data_ptr():
            own[name].copy_(tensor)


def check_weight_names(own: Collection[str], published: Collection[str]) -> None:
    """Checks that the actor publishes exactly the weights that the engine's model has."""
    for problem, names in (
        ("the model has no weight", set(published) - set(own)),
        ("the actor publishes no weight", set(own) - set(published)),
    ):
        if names:
            raise ValueError(f"{problem} {min(names)!r}; do actor and engine hold the same model?")


def explain_non_finite(version: int, dtype: torch.dtype) -> str:
    """The message for logits that are not finite; version 0 is the initial model."""
    problem = "the model's logits are NaN or infinite, so nothing can be sampled from them"
    if version == 0 and dtype == torch.float32:
        return f"{problem}: its weights are broken. Use another checkpoint."
    if version == 0:
        return (
            f"{problem}: its weights are broken, or too large for {str(dtype).removeprefix('torch.')}. Compute in fp32 "
            "(worker.actor.fsdp.mixed_precision_dtype), or use another checkpoint."
        )
    return (
        f"{problem}: training has diverged by update {version}. Start a new run, from an earlier checkpoint "
        "(training.load_checkpoint_path) or from the beginning, with a lower worker.actor.optim.lr, a longer "
        "worker.actor.optim.warmup_steps or a lower worker.actor.max_grad_norm."
    )


def left_pad(rows: Sequence[Tensor]) -> Tensor:
    """Rows [L_i, ...] as one tensor [B, L, ...], padded with zeros on the left."""
    return pad_sequence([row.flip(0) for row in rows], batch_first=True).flip(1)
