"""The local engine: plain PyTorch, the trainer's own model, any device.

Each prompt is encoded and prefilled once for its whole group; then all responses decode together, and rows leave as
they finish.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.models.backbone import Backbone, Cache, prompt_positions, vision_tokens
from mtrl.models.model_size import ModelSize, model_size
from mtrl.protocols import PromptEncoder
from mtrl.rollout.lifecycle import EngineLifecycle
from mtrl.rollout.responses import finish_reasons, make_rollouts
from mtrl.rollout.sampling import choose, first_sample_numbers, row_uniforms
from mtrl.rollout.weight_checks import check_weight_names
from mtrl.types import Prompt, Rollouts, Sampling, Weights
from mtrl.utils.errors import DeviceFull, Diverged

logger = logging.getLogger(__name__)
ROWS_AT_ONCE = 512
COMPACT_BELOW = 0.8  # share of the cached rows still decoding below which the finished ones leave the cache
TAKES_LESS = "a smaller worker.rollout.max_new_tokens or dataset.max_prompt_length; mtrl doctor says how much each"
Decoded = tuple[list[Tensor], list[Tensor]]  # tokens and their log-probs of responses, on the CPU
Decode = Callable[[Sequence[Prompt], Sequence[int], Sampling], Decoded]


class LocalGenerator(EngineLifecycle):
    """Samples with the weights of `backbone`, which the actor of the same process may share. It holds nothing between
    calls, so awake and asleep are the same."""

    def __init__(
        self, backbone: Backbone, encoder: PromptEncoder, *, version: int = 0, rows_at_once: int = ROWS_AT_ONCE
    ) -> None:
        self.backbone, self.encoder = backbone, encoder
        self.version = version
        self.rows_at_once = rows_at_once

    def load(self, weights: Weights) -> None:
        """Takes over a version; tensors that are the model's own already are left alone."""
        if getattr(weights.tensors, "model", None) is self.backbone.model:  # merged of the adapters that it has itself
            self.version = weights.version
            return
        own = self.backbone.model.state_dict()  # tied ones under each name
        check_weight_names(own, weights.tensors)
        with torch.no_grad():
            for name, tensor in weights.tensors.items():
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self.version = weights.version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        if sampling.version != self.version:
            raise RuntimeError(f"asked to sample at version {sampling.version}, but the engine holds {self.version}")
        tokens, behaviour = self._in_batches(prompts, sampling, self.decode)
        return make_rollouts(
            prompts,
            [place for place in range(len(prompts)) for _ in range(sampling.n)],
            tokens,
            behaviour,
            text=[self.encoder.decode(row) for row in tokens],
            finish=finish_reasons(tokens, self.encoder.stop_ids),
            version=self.version,
            pad_id=self.encoder.pad_id,
        )

    @torch.no_grad()
    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Where it does not fit there are fewer rows at once from here on, as while sampling."""
        self._in_batches(prompts, sampling, self.hold)

    def _in_batches(self, prompts: Sequence[Prompt], sampling: Sampling, decode: Decode) -> Decoded:
        """All responses, at most `rows_at_once` together: whole groups, or parts of one that is larger than that."""
        first, n = first_sample_numbers([prompt.task.id for prompt in prompts], sampling), sampling.n
        tokens: list[Tensor] = []
        behaviour: list[Tensor] = []
        while len(tokens) < n * len(prompts):
            place, sample = divmod(len(tokens), n)
            groups = 1 if sample else max(1, self.rows_at_once // n)
            here, count = slice(place, place + groups), min(n - sample, self.rows_at_once)
            numbers = [sample + each for each in first[here]]
            batch = self._fitting(decode, prompts[here], numbers, replace(sampling, n=count))
            if batch is not None:
                tokens += batch[0]
                behaviour += batch[1]
        return tokens, behaviour

    def _fitting(
        self, decode: Decode, prompts: Sequence[Prompt], first: Sequence[int], sampling: Sampling
    ) -> Decoded | None:  # fmt: skip
        """A batch, or None where it does not fit into the device: then there are fewer rows at once from here on."""
        try:
            return decode(prompts, first, sampling)
        except torch.OutOfMemoryError as error:
            torch_says = str(error).partition(" Of the allocated memory")[0]  # the rest is about fragments
        # The error is gone here, and with it the frames that held what there was of the batch.
        self.shrink()
        gc.collect()
        torch.cuda.empty_cache()
        rows = len(prompts) * sampling.n
        if rows == 1:
            raise DeviceFull(f"the device has no room to sample a single response. {torch_says} Set {TAKES_LESS}")
        self.rows_at_once = rows // 2
        logger.warning("the device has no room to sample %d responses at once: %d from here on, which is "
                       "slower. What takes less: %s", rows, self.rows_at_once, TAKES_LESS)  # fmt: skip
        return None

    def shrink(self) -> None:
        """Lets go of whatever was made for larger batches."""

    def decode(self, prompts: Sequence[Prompt], first: Sequence[int], sampling: Sampling) -> Decoded:
        """The rows of one batch; `first`: the number of each prompt's first sample."""
        return Decoding(self, prompts, first, sampling).run()

    def hold(self, prompts: Sequence[Prompt], first: Sequence[int], sampling: Sampling) -> Decoded:
        """A first token of `decode`, and then what it holds at most."""
        decoded = self.decode(prompts, first, replace(sampling, max_new_tokens=1))
        backbone, longest = self.backbone, max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens
        dtypes = backbone.output_matrix.dtype, backbone.compute_dtype
        known = held_at_last(model_size(backbone.model), *dtypes, len(decoded[0]), longest, sampling.cut)
        torch.empty(sum(known.values()), dtype=torch.uint8, device=backbone.device)
        return decoded


def held_at_last(
    size: ModelSize, weights: torch.dtype, compute: torch.dtype, rows: int, tokens: int, cut: bool
) -> dict[str, int]:
    """Bytes of the last token's step, with what autocast makes of wider weights and the output matrix. Choosing a token
    takes two tables of float32 and two of float64, or three and the places of sorted tokens where the tail is cut."""
    keys_and_values = 2 * size.keys * compute.itemsize * rows * tokens
    narrow = (size.read + size.output) * compute.itemsize if compute.itemsize < weights.itemsize else 0
    return {
        "narrow copies of the weights": narrow,
        "keys and values": size.layers * keys_and_values,
        "a layer of them as it grows": keys_and_values,
        "logits": (32 if cut else 24) * rows * size.vocabulary,
    }


@dataclass
class Decoding:
    """The sampling of one batch: the rows that still decode, and what all rows have said so far."""

    engine: LocalGenerator
    prompts: Sequence[Prompt]
    first: Sequence[int]  # the number of each prompt's first sample
    sampling: Sampling

    def run(self) -> Decoded:
        device = self.engine.backbone.device
        task_ids = [prompt.task.id for prompt in self.prompts]
        uniforms = row_uniforms(task_ids, self.first, self.sampling).to(device)
        rows = len(uniforms)
        tokens = torch.zeros(rows, self.sampling.max_new_tokens, dtype=torch.long, device=device)
        logps = torch.zeros(rows, self.sampling.max_new_tokens, device=device)
        lengths = torch.zeros(rows, dtype=torch.long, device=device)
        stop_ids = torch.tensor(self.engine.encoder.stop_ids, dtype=torch.long, device=device)
        forbidden = torch.tensor(self.engine.encoder.forbidden_ids, dtype=torch.long, device=device)

        hidden, position, keys, cache = self._prefill()
        padded = not bool(keys.all())
        output_matrix = self.engine.backbone.output_matrix.to(hidden.dtype)
        row = torch.arange(rows, device=device)  # rows in the cache, and which of them still decode
        decoding = torch.ones(rows, dtype=torch.bool, device=device)
        for t in range(self.sampling.max_new_tokens):
            logits = (hidden @ output_matrix.T).float().index_fill_(1, forbidden, -torch.inf)
            chosen, logp = choose(logits, uniforms[row, t], self.sampling)
            # Rows that have finished write on while they are in the cache, beyond their length.
            tokens[row, t], logps[row, t] = chosen, logp
            lengths[row] += decoding
            decoding &= ~torch.isin(chosen, stop_ids) & logp.isfinite()  # without probabilities nothing follows
            alive = int(decoding.sum())  # the only thing of a step that waits for the device
            if alive == 0 or t + 1 == self.sampling.max_new_tokens:
                break
            if alive < COMPACT_BELOW * len(row):
                stay = decoding.nonzero().flatten()
                cache.batch_select_indices(stay)
                row, chosen, position, keys = row[stay], chosen[stay], position[stay], keys[stay]
                decoding = decoding[stay]
            keys = torch.cat([keys, keys.new_ones(len(row), 1)], dim=1)
            hidden = self._step(chosen, position, keys if padded else None, cache)
            position = position + 1
        ends = lengths.tolist()
        split = [[x[:n] for x, n in zip(all_rows.cpu(), ends, strict=True)] for all_rows in (tokens, logps)]
        if not all(bool(row.isfinite().all()) for row in split[1]):
            raise Diverged(non_finite(self.engine.version, hidden.dtype))
        return split[0], split[1]

    def _prefill(self) -> tuple[Tensor, Tensor, Tensor, Cache]:
        """Every prompt once, then its cache for each of its responses: the last hidden state [rows, H], the next
        position [rows], which keys are real [rows, S], and the cache."""
        backbone = self.engine.backbone
        inputs = [self.engine.encoder.inputs(prompt, device=self.engine.backbone.device) for prompt in self.prompts]
        positions = [prompt_positions(each) for each in inputs]
        keys = left_pad([torch.ones(len(prompt.ids), dtype=torch.bool) for prompt in self.prompts])
        size = keys.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        # A padding position sees itself, since a softmax over nothing is NaN.
        mask = (causal & keys[:, None, :]) | torch.eye(size, dtype=torch.bool)
        cache = backbone.new_cache()
        hidden = backbone.forward_text(
            left_pad([prompt.ids for prompt in self.prompts]).to(backbone.device),
            left_pad([p.T for p in positions]).permute(2, 0, 1).to(backbone.device),
            left_pad([vision_tokens(prompt) for prompt in self.prompts]).to(backbone.device),
            backbone.encode_images(inputs),
            attention_mask=None if keys.all() else mask[:, None].to(backbone.device),
            cache=cache,
        )
        group = torch.arange(len(self.prompts), device=backbone.device).repeat_interleave(self.sampling.n)
        cache.batch_select_indices(group)
        following = torch.stack([p.max() + 1 for p in positions]).to(backbone.device)
        return hidden[group, -1], following[group], keys.to(backbone.device)[group], cache

    def _step(self, tokens: Tensor, position: Tensor, keys: Tensor | None, cache: Cache) -> Tensor:
        """One token further for every row in the cache: its hidden state [rows, H]. No keys: all are real."""
        mask = None if keys is None else keys[:, None, None, :]
        where = position[None, :, None].expand(3, -1, -1)
        return self.engine.backbone.forward_text(tokens[:, None], where, attention_mask=mask, cache=cache)[:, 0]


def non_finite(version: int, dtype: torch.dtype) -> str:
    """What to do about logits from which nothing can be sampled; version 0 is the model as it was given."""
    what = "the model's logits are NaN or infinite, so nothing can be sampled from them"
    if version == 0 and dtype == torch.float32:
        return f"{what}: its weights are broken. Use another checkpoint."
    if version == 0:
        return (
            f"{what}: its weights are broken, or too large for {str(dtype).removeprefix('torch.')}. Compute in fp32 "
            "(worker.actor.fsdp.mixed_precision_dtype), or use another checkpoint."
        )
    return (
        f"{what}: training has diverged by update {version}. Start a new run, from an earlier checkpoint "
        "(training.load_checkpoint_path) or from the beginning, with a lower worker.actor.optim.lr, a longer "
        "worker.actor.optim.warmup_steps or a lower worker.actor.max_grad_norm."
    )


def left_pad(rows: Sequence[Tensor]) -> Tensor:
    """Rows [L_i, ...] as one tensor [B, L, ...], aligned at their ends; zeros before."""
    return pad_sequence([row.flip(0) for row in rows], batch_first=True).flip(1)
