"""Groups of responses decoded together: prompts are read once by the trainer's own modules, then every step is one CUDA
graph, and the slots of finished rows go to the next ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.models.backbone import Backbone, Cache, prompt_positions, vision_tokens
from mtrl.models.device_copy import to_device
from mtrl.models.document_mask import DocumentMask
from mtrl.models.routing import ExpertRecorder
from mtrl.protocols import PromptEncoder
from mtrl.rollout.decode.arena import round_up
from mtrl.rollout.decode.buffers import Buffers, Mode, RecurrentStates, Room
from mtrl.rollout.decode.explain import explain_unsupported
from mtrl.rollout.decode.fused_weights import DecodeWeights
from mtrl.rollout.decode.row_queue import EndedRows, Poll, RowQueue
from mtrl.rollout.decode.step import Ops, Step, triton_ops
from mtrl.rollout.local import ROWS_AT_ONCE, Decoded, LocalGenerator, explain_non_finite, left_pad
from mtrl.rollout.sampling import row_uniforms
from mtrl.types import Prompt, Sampling
from mtrl.utils.errors import Diverged

logger = logging.getLogger(__name__)
BUCKETS = (64, 128, 256, 512)  # rows of a step; fewer than 64 are no faster
POLL = 4  # steps between two checks for finished rows
ROWS_PER_SLOT = 4  # responses of a batch for each that is decoded at a time; their prompts are in memory together
PREFILL_TOKENS = 32_768  # prompt tokens in one pass, with padding


def explain_local_engine(backbone: Backbone) -> str | None:
    """Why generation must use the local engine; None if this one can decode."""
    if backbone.device.type != "cuda":
        return "no CUDA device"
    try:
        triton_ops()
    except ImportError:
        return "Triton is not installed (pip install triton)"
    return explain_unsupported(backbone.language_model, backbone.model.get_output_embeddings())


def make_fastest_generator(backbone: Backbone, encoder: PromptEncoder) -> LocalGenerator:
    """This engine if it supports the model, else the local one; logs the reason on a GPU."""
    why = explain_local_engine(backbone)
    if why is None:
        return GraphGenerator(backbone, encoder, ops=triton_ops())
    if backbone.device.type == "cuda":
        other = ". Try worker.rollout.name=vllm" if backbone.family.runs_in_vllm else ""
        logger.warning("generation uses the local engine, which is several times slower: %s%s", why, other)
    return LocalGenerator(backbone, encoder)


@dataclass
class Prefilled:
    """Prompts whose keys and values are in the cache."""

    hidden: Tensor  # [prompts, H] of their last tokens
    experts: Tensor  # [prompts, layers, k] of their last tokens
    states: dict[int, RecurrentStates]  # after them, by layer
    starts: list[int]  # the index of each in the cache
    lengths: list[int]
    first: list[int]  # the position of a response's first token


class GraphGenerator(LocalGenerator):
    """LocalGenerator with its decoding replaced. Asleep it holds hardly any device memory beyond the model: its buffers
    and its copy of the weights are unmapped, and graphs stay valid (`arena.py`)."""

    def __init__(
        self, backbone: Backbone, encoder: PromptEncoder, *, ops: Ops, version: int = 0,
        rows_at_once: int = ROWS_AT_ONCE, buckets: Sequence[int] = BUCKETS, poll: int = POLL,
    ) -> None:  # fmt: skip
        super().__init__(backbone, encoder, version=version, rows_at_once=rows_at_once)
        self.ops, self.buckets, self.poll = ops, sorted(buckets), poll
        self.room: Room | None = None  # the largest so far, for which new buffers are made
        self.captures = 0
        self._stream: Any = None
        self._drop_all()

    def _drop_all(self) -> None:
        self.weights: DecodeWeights | None = None
        self.buffers: Buffers | None = None
        self.steps: dict[tuple[int, Mode], Step] = {}
        self.graphs: dict[tuple[int, Mode], Any] = {}

    @property
    def rows_per_batch(self) -> int:
        return ROWS_PER_SLOT * self.rows_at_once

    def sleep(self) -> None:
        for holder in (self.weights, self.buffers):
            if holder is not None:
                holder.arena.unmap_memory()

    def free_buffers(self) -> None:
        self.room = None
        self._drop_all()

    def allocate_most(self, prompts: Sequence[Prompt], first: Sequence[int], sampling: Sampling) -> Decoded:
        decoded = self.decode(prompts, first, replace(sampling, max_new_tokens=2), new=sampling.max_new_tokens)
        self.room = None  # the next batch gets buffers of its own size
        return decoded

    def decode(
        self, prompts: Sequence[Prompt], first: Sequence[int], sampling: Sampling, new: int = 0
    ) -> Decoded:  # fmt: skip
        """Tokens and log-probs of every row; buffers have room for at least `new` tokens."""
        inputs = [self.encoder.inputs(prompt, device=self.backbone.device) for prompt in prompts]
        positions = [prompt_positions(each) for each in inputs]
        begins = [int(each.max()) + 1 for each in positions]
        lengths = [len(prompt.ids) for prompt in prompts]
        new = max(new, sampling.max_new_tokens)
        buffers = self._prepare(Room.for_batch(lengths, begins, sampling.n, new, self.rows_at_once))
        mode = buffers.rules.set(
            sampling.temperature, sampling.top_p, sampling.top_k, self.encoder.forbidden_ids, self.encoder.stop_ids
        )
        self._step(self._bucket(buffers.room.slots), mode)  # the largest first: all others share its scratch
        prefilled = self._prefill(buffers, prompts, inputs, positions, begins)
        del inputs  # the pixels
        uniforms = row_uniforms([prompt.task.id for prompt in prompts], first, sampling)
        return self._run(buffers, prefilled, mode, uniforms, sampling.n)

    def _prepare(self, needed: Room) -> Buffers:
        """Refreshes the weights and provides buffers with room; keeps the addresses that graphs read if possible."""
        if self.weights is not None:
            self.weights.arena.map_memory()
            if not self.weights.refresh():
                self._drop_all()
        if self.weights is None:
            self.weights = DecodeWeights(self.backbone.model, self.backbone.compute_dtype)
        self.room = needed.union(self.room)
        if self.buffers is None or self.buffers.room != self.room:
            self.buffers, self.steps, self.graphs = None, {}, {}  # freed before the new ones are made
            self.buffers = Buffers(self.weights, self.room, self.backbone.device)
        self.buffers.arena.map_memory()
        return self.buffers

    # -------------------------------------------------------------------------------------------------------- prompts
    def _prefill(
        self, buffers: Buffers, prompts: Sequence[Prompt], inputs: Sequence[dict[str, Tensor]],
        positions: Sequence[Tensor], first: list[int],
    ) -> Prefilled:  # fmt: skip
        """Reads every prompt once, through the same `encode_images` and `forward_text` as training."""
        lengths = [len(prompt.ids) for prompt in prompts]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        at_once = prompts_at_once(max(lengths))
        parts = []
        for low in range(0, len(prompts), at_once):
            batch = slice(low, low + at_once)
            parts.append(self._read(buffers, prompts[batch], inputs[batch], positions[batch], starts[low]))
        hidden, experts, states = zip(*parts, strict=True)
        joined = {i: RecurrentStates.join([each[i] for each in states]) for i in buffers.states}
        return Prefilled(torch.cat(hidden), torch.cat(experts), joined, starts, lengths, first)

    def _read(
        self, buffers: Buffers, prompts: Sequence[Prompt], inputs: Sequence[dict[str, Tensor]],
        positions: Sequence[Tensor], start: int,
    ) -> tuple[Tensor, Tensor, dict[int, RecurrentStates]]:  # fmt: skip
        """Writes the keys and values of these prompts into the cache from `start` on; returns hidden states and experts
        of their last tokens, and their recurrent states."""
        device = self.backbone.device
        with ExpertRecorder(self.backbone.routers) as recorder:
            hidden, cache, is_real = read_prompts(self.backbone, prompts, inputs, positions)
            experts = recorder.take(len(prompts), device)
        last = (is_real * torch.arange(hidden.shape[1])).amax(1)
        real = is_real.flatten().nonzero().flatten().to(device)
        span = slice(start, start + len(real))
        layers: Any = cache.layers
        for i, kept in buffers.cache.items():
            for target, source in zip(kept.prompts, (layers[i].keys, layers[i].values), strict=True):
                target[span] = source.transpose(1, 2).flatten(0, 1)[real].to(target.dtype)
        states = {i: RecurrentStates.from_cache(layers[i]) for i in buffers.states}
        at = torch.arange(len(prompts), device=device), last.to(device)
        return hidden[at], experts[at] if experts.numel() else experts[:, 0], states

    # -------------------------------------------------------------------------------------------------------- decoding
    def _run(self, buffers: Buffers, prompts: Prefilled, mode: Mode, uniforms: Tensor, n: int) -> Decoded:
        """Runs steps until all rows have ended. The flags of ended rows are read one poll later, so that the device
        never waits."""
        queue = RowQueue(len(uniforms), min(self.rows_at_once, len(uniforms)), n, uniforms.shape[1])
        uniforms, ended = to_device(uniforms, self.backbone.device), EndedRows(len(uniforms))
        buffers.rows.clear()
        size = self._begin(buffers, prompts, mode, queue, uniforms)
        polls: list[Poll] = []
        while queue.live:
            if slots := queue.find_ended(polls[0] if len(polls) > 1 else None):
                ended.add(queue.release(slots), buffers.rows.take(self._index(slots)))
                size = self._begin(buffers, prompts, mode, queue, uniforms, size)
                continue  # a response may have a single token
            self._replay(size, mode)
            queue.now += 1
            if queue.now % self.poll == 0:
                polls = [*polls[-1:], self._poll(buffers, queue.now)]
        decoded = Decoded(*ended.split())
        if not all(bool(row.isfinite().all()) for row in decoded.logprobs):
            raise Diverged(explain_non_finite(self.version, self.backbone.compute_dtype))
        return decoded

    def _begin(
        self, buffers: Buffers, prompts: Prefilled, mode: Mode, queue: RowQueue, uniforms: Tensor, size: int = 0
    ) -> int:  # fmt: skip
        """Samples the first tokens of the next rows in the free slots, and gives the live rows to the step of the
        smallest bucket; returns its size, which was `size`."""
        slots, rows = queue.fill()
        if rows:
            index, prompt_of = self._index(rows), [row // queue.n for row in rows]
            first = torch.tensor([prompts.first[each] for each in prompt_of], dtype=torch.int32)
            where, parents = self._index(slots), self._index(prompt_of)
            buffers.rows.begin(where, to_device(first, index.device), uniforms[index])
            buffers.rows.experts[where, 0] = prompts.experts[parents]
            for i, states in buffers.states.items():
                states.begin(where, prompts.states[i], parents)
            step = self._step(self._bucket(len(rows)), mode)
            step.slot_table.assign(slots, queue.prompt_of, prompts.starts, prompts.lengths)
            step.normed[: len(rows)] = prompts.hidden[parents].to(step.normed.dtype)
            step.normed[len(rows) :] = 0  # uninitialized memory may be NaN, which Triton's interpreter rejects
            step.sample()
        needed = self._bucket(len(queue.live))
        if queue.live and (rows or needed != size):
            self._assign_slots(needed, mode, queue.live, queue.prompt_of, prompts)
        return needed

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.long), self.backbone.device)

    def _bucket(self, rows: int) -> int:
        return bucket_size(rows, self.buckets)

    def _step(self, size: int, mode: Mode) -> Step:
        """The step of a bucket, made once; its graph is captured when it first runs."""
        assert self.weights is not None and self.buffers is not None
        if (size, mode) not in self.steps:
            self.steps[size, mode] = Step(self.weights, self.buffers, size, mode, self.ops)
        return self.steps[size, mode]

    def _assign_slots(
        self, size: int, mode: Mode, live: Sequence[int], prompt_of: Sequence[int], prompts: Prefilled
    ) -> None:  # fmt: skip
        step = self._step(size, mode)
        if self.captures_graphs and (size, mode) not in self.graphs:
            step.slot_table.clear()  # no row may take part in the step that compiles the kernels
            self.graphs[size, mode] = self._capture(step)
        step.slot_table.assign(live, prompt_of, prompts.starts, prompts.lengths)

    @property
    def captures_graphs(self) -> bool:
        return self.backbone.device.type == "cuda"

    def _capture(self, step: Step) -> Any:
        """The step that compiles the kernels runs in the stream of the capture, so that cuBLAS's workspace belongs to
        no graph."""
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            step.run()
            torch.cuda.synchronize()
            graph.capture_begin()
            step.run()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self.captures += 1
        return graph

    def _replay(self, size: int, mode: Mode) -> None:
        graph = self.graphs.get((size, mode))
        if graph is None:
            self.steps[size, mode].run()
        else:
            graph.replay()

    def _poll(self, buffers: Buffers, now: int) -> Poll:
        """Starts a copy of the flags of ended rows to the CPU."""
        if self.backbone.device.type != "cuda":
            return Poll(now, buffers.rows.done.clone())
        done = torch.empty(len(buffers.rows.done), dtype=torch.int32, pin_memory=True)
        done.copy_(buffers.rows.done, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Poll(now, done, event.synchronize)


def read_prompts(
    backbone: Backbone, prompts: Sequence[Prompt], inputs: Sequence[dict[str, Tensor]], positions: Sequence[Tensor]
) -> tuple[Tensor, Cache, Tensor]:
    """Hidden states [prompts, L, H] and the cache of prompts, from one pass, and which positions are no padding.

    Rows are padded on the right, where causal attention needs no mask; but on the left if states are read in order, so
    that the last token of each leaves its state."""
    cache, device, pad = backbone.new_cache(), backbone.device, left_pad if backbone.has_states else right_pad
    layers: Any = cache.layers
    for layer in layers:
        if getattr(layer, "is_sliding", False):  # would keep the last keys of the padded row, which may be padding
            layer.activate_past_recording()
    is_vision = pad([vision_tokens(prompt) for prompt in prompts])
    is_real = pad([torch.ones(len(prompt.ids), dtype=torch.bool) for prompt in prompts])
    padded_left = backbone.has_states and len({len(prompt.ids) for prompt in prompts}) > 1
    needs_mask = padded_left or not backbone.is_causal
    hidden = backbone.forward_text(
        pad([prompt.ids for prompt in prompts]).to(device),
        pad([each.T for each in positions]).permute(2, 0, 1).to(device),
        is_vision,
        backbone.encode_images(inputs),
        attention_mask=backbone.make_masks(DocumentMask.from_rows(is_vision, is_real)) if needs_mask else None,
        cache=cache,
        state_mask=is_real.to(device) if padded_left else None,
    )
    return hidden, cache, is_real


def prompts_at_once(longest: int) -> int:
    """The number of prompts that one pass reads."""
    return max(1, PREFILL_TOKENS // longest)


def bucket_size(rows: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The number of rows of a step for this many responses."""
    return next((size for size in buckets if size >= rows), round_up(rows, 64))


def right_pad(rows: Sequence[Tensor]) -> Tensor:
    """Rows [L_i, ...] as one tensor [B, L, ...], padded with zeros on the right."""
    return pad_sequence(list(rows), batch_first=True)
