"""The passes of a step at the limits of a configuration: the largest images, the longest prompts and responses.

They run once before the first step on a GPU, so running out of memory is reported then and not at the longest prompt.
`mtrl doctor` runs the same passes on a fake model (`memory/estimate.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mtrl.algorithms.signals import ATTENTION
from mtrl.algorithms.vocab import full_kl
from mtrl.memory.decode_footprint import Batch
from mtrl.memory.live_tensors import LiveTensors
from mtrl.models.device_copy import unpack
from mtrl.models.forward import Forward, PreparedPass, Views
from mtrl.models.parallel.fsdp import local_tensor, run_forward
from mtrl.models.turns import encoded_prompts
from mtrl.protocols import Generator, PromptEncoder
from mtrl.rollout.decode.engine import ROWS_PER_SLOT
from mtrl.rollout.local import ROWS_AT_ONCE
from mtrl.types import FinishReason, Medium, Needs, Prompt, Rollouts, Sampling, Task
from mtrl.utils.errors import DeviceFull, StartError
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import STAYING, StayingWeights, parameter_pieces

GIB = 2**30
ROWS_PER_BATCH = ROWS_PER_SLOT * ROWS_AT_ONCE
ADAM_STATES = 2  # per trainable weight
DOES_NOT_FIT = {
    "optimizer": "the states of the optimizer do not fit",
    "sample": "sampling does not fit",
    "probe": "the probe of a step does not fit",
    "update": "the update does not fit",
    "critic": "the update of the critic does not fit",
}


@dataclass(frozen=True)
class Limits:
    """Settings that decide how large the passes of a run are."""

    prompts: int  # per step
    prompts_per_update: int  # per optimizer step
    sampling: Sampling  # responses per prompt, and their length
    prompt_tokens: int
    max_pixels: int  # per image; a prompt has one
    update: MicroBatching
    probe: MicroBatching
    needs: Needs
    full_divergence: bool = False  # whether the update reads the reference's whole vocabulary
    live_needs: Needs = field(default_factory=Needs)  # of the update: the other views that it reads, with gradients
    views_sampled: int = 1  # of a prompt by the engine, which share its responses: 2 with noised images
    encodes_ahead: bool = False  # whether an update encodes the images of the next pass before a backward pass

    @property
    def batch(self) -> Batch:
        """The largest batch of an engine, if it fits. Engines that take smaller ones cut it."""
        n = min(self.sampling.n // self.views_sampled, ROWS_PER_BATCH)
        prompts = min(self.prompts * self.views_sampled, ROWS_PER_BATCH // n)
        return Batch(prompts, self.prompt_tokens, replace(self.sampling, n=n))

    @property
    def probe_needs(self) -> Needs:
        """The needs that the probe of the policy itself measures."""
        return self.needs.of_policy

    def on_each(self, ranks: int, sp_size: int) -> Limits:
        """The limits of one of several ranks; `sp_size` ranks share every pass."""
        return replace(
            self,
            prompts=-(-self.prompts * sp_size // ranks),
            prompts_per_update=-(-self.prompts_per_update * sp_size // ranks),
            update=self.update.scaled(sp_size),
            probe=self.probe.scaled(sp_size),
        )

    def within(self, tokens: int) -> Limits:
        """The same limits in passes of at most `tokens`."""
        return replace(self, update=self.update.within(tokens), probe=self.probe.within(tokens))


# -------------------------------------------------------------------------------------------------------- longest step
def longest_prompt(encoder: PromptEncoder, limits: Limits) -> Prompt:
    """A prompt with the largest image (if the model takes images), filled with text to the longest length."""
    images = encoder.image_settings
    prompt = _encode(encoder, [np.zeros((*encoder.largest_image(1), 3), np.uint8)] if images else [])
    if images:
        image_tokens = min(limits.max_pixels // images.factor**2, limits.prompt_tokens - len(prompt.ids) + 1)
        prompt = _encode(encoder, [np.zeros((*encoder.largest_image(max(1, image_tokens)), 3), np.uint8)])
    missing = max(0, limits.prompt_tokens - len(prompt.ids))
    ids, pool = (torch.cat([each, each[-1:].expand(missing)]) for each in (prompt.ids, prompt.token_pool))
    return replace(prompt, ids=ids, token_pool=pool)


def _encode(encoder: PromptEncoder, media: Sequence[np.ndarray]) -> Prompt:
    content = [*({"type": "image"} for _ in media), {"type": "text", "text": "."}]
    marks = tuple(Medium("image", None) for _ in media)
    return encoder.encode(Task("preflight", "the preflight", ({"role": "user", "content": content},), marks), media)


def longest_rollouts(encoder: PromptEncoder, limits: Limits, prompts: int) -> Rollouts:
    """The longest responses to so many of the longest prompts; all tokens are the same."""
    prompt, sampling = longest_prompt(encoder, limits), limits.sampling
    rows, length = prompts * sampling.n, sampling.max_new_tokens
    cut: FinishReason = "length"
    return Rollouts(
        prompts=prompts * (prompt,),
        group=torch.arange(prompts).repeat_interleave(sampling.n),
        tokens=prompt.ids[-1:].expand(rows, length),
        mask=torch.ones(rows, length, dtype=torch.bool),
        rollout_logprobs=torch.zeros(rows, length),
        text=rows * ("",),
        finish_reason=rows * (cut,),
        version=torch.zeros(rows, dtype=torch.long),
    )


def show_originals(rollouts: Rollouts, needs: Needs) -> Views:
    """The original images as stand-ins for every other view, which has as many tokens."""
    return {name: [prompt.media for prompt in encoded_prompts(rollouts)] for name in needs.other_views}


def half_pass_tokens(limits: Limits, encoder: PromptEncoder, phase: str) -> int | None:
    """Half the tokens of the largest pass of a phase; None if the phase has no pass that can be cut."""
    if phase not in ("probe", "update", "critic"):
        return None
    if phase == "probe":
        return limits.probe.first_half(longest_rollouts(encoder, limits, limits.prompts), limits.probe_needs.views)
    return limits.update.first_half(longest_rollouts(encoder, limits, limits.prompts_per_update))


@dataclass(frozen=True)
class MemoryPreflight:
    """The passes of a step; each leaves nothing behind but gradients."""

    forward: Forward
    encoder: PromptEncoder
    limits: Limits
    critic: Forward | None = None

    def sample(self, generator: Generator) -> None:
        """Sample the largest batch. If it does not fit, the engine cuts it for the rest of the run."""
        generator.preflight(self.prompts, self.limits.batch.sampling)

    def probe(self) -> None:
        """Run the largest pass, under as many views as needed."""
        needs = self.limits.probe_needs
        rollouts = self.rollouts(self.limits.prompts)
        part = rollouts.rows(self.limits.probe.split(rollouts, needs.views)[0])
        if not (self.forward.backbone.uses_own_attention and part.visual.any()):
            needs = needs.without(*ATTENTION)
        if needs:
            views = show_originals(part, needs)
            with torch.no_grad():
                run_forward(self.forward.backbone.model, lambda: self.forward.signals(part, needs, views))

    def updates(self) -> list[Rollouts]:
        """The first pass of an optimizer step, which is the largest, and the next one, which starts with gradients;
        later passes are no larger."""
        rollouts = self.rollouts(self.limits.prompts_per_update)
        return [rollouts.rows(index) for index in self.limits.update.split(rollouts)[:2]]

    def learn(self, part: Rollouts, following: Rollouts | None = None) -> None:
        """A pass of an update. The images of the `following` one are encoded before the backward pass."""
        total, *_held = run_forward(self.forward.backbone.model, lambda: self._loss(part))
        _ahead = None if following is None else self._prepare(following)
        total.backward()

    def passes(self) -> list[tuple[Rollouts, Rollouts | None]]:
        """The updates, and the rows whose images are encoded ahead: those of the first, largest one stand in."""
        parts = self.updates()
        following = parts[0] if self.limits.encodes_ahead and len(parts) > 1 else None
        return [(part, following) for part in parts]

    def _loss(self, part: Rollouts) -> tuple[Tensor, ...]:
        """A scalar to differentiate, and the tensors that a loss holds until then. The policy stands in for its
        reference, which is as large."""
        reference = None
        if self.limits.full_divergence:
            with torch.no_grad():
                reference = self.forward.response_hidden(part)
        hidden, *others = self.forward.view_states(part, prepared=self._prepare(part))
        values = [self.forward.score_tokens(hidden, part, entropy="old_logprobs" not in self.limits.needs).logp]
        if reference is not None:
            matrix = self.forward.backbone.output_matrix
            values.append(full_kl(hidden, reference, matrix, **self.forward.distribution()))
        values += self.forward.compare_views(hidden, others, part, self.limits.live_needs).values()
        total = torch.stack([unpack(each, part.mask).sum() for each in values]).sum()
        return (total, hidden, *others, *values, *(() if reference is None else (reference,)))

    def _prepare(self, part: Rollouts) -> PreparedPass:
        return self.forward.prepare(part, show_originals(part, self.limits.live_needs))

    def update(self) -> None:
        for part, following in self.passes():
            self.learn(part, following)

    def update_critic(self) -> None:
        critic = self.critic
        assert critic is not None
        for part, following in self.passes():
            values: Tensor = run_forward(critic.backbone.model, partial(critic.values, part))
            _ahead = None if following is None else critic.prepare(following)
            values.sum().backward()

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that are sampled at once."""
        return self.limits.batch.prompts * [longest_prompt(self.encoder, self.limits)]

    def rollouts(self, prompts: int) -> Rollouts:
        return longest_rollouts(self.encoder, self.limits, prompts)


# -------------------------------------------------------------------------------------------------------- before a run
def preflight(
    forward: Forward,
    encoder: PromptEncoder,
    limits: Limits,
    generator: Generator | None,
    *,
    has_states: bool,
    savings: Sequence[str] = (),
    critic: Forward | None = None,
    states: int = ADAM_STATES,
    state_dtype: torch.dtype | None = None,
    offloaded: bool = False,
    weights: StayingWeights = STAYING,
    only: Collection[str] = tuple(DOES_NOT_FIT),
    watch_update: Callable[[], AbstractContextManager[object]] = nullcontext,
    seconds: dict[str, float] | None = None,
) -> dict[str, int]:
    """Run the passes once and return the peak bytes of each phase beyond those held before; `only` some phases.
    `generator` is the engine of the run, asleep; None if dedicated engines sample. The policy's `weights` are where the
    step has them in each phase. The update runs within `watch_update`. `seconds` are added to those of each phase.

    If the optimizers have no states yet (the first step creates them), the memory of `states` numbers per weight is
    reserved meanwhile, in `state_dtype` or the weight's own; if they are `offloaded`, that of the largest piece during
    the update. Weights, gradients, random numbers and the mode of the model are restored. Raises DoesNotFit with the
    `savings` (settings that take less memory) if a phase does not fit.
    """
    model, device = forward.backbone.model, forward.backbone.device
    passes = MemoryPreflight(forward, encoder, limits, critic)
    models = [model] if critic is None else [model, critic.backbone.model]
    learning = [p for each in models for p in each.parameters() if p.requires_grad]
    before = [p.grad for p in learning]
    held: list[Tensor] = []

    def hold_states() -> None:
        here: Sequence[Tensor] = [] if has_states else learning
        if offloaded:  # a resumed run has its states in CPU memory, too
            here = max(parameter_pieces(learning), key=lambda piece: sum(local_tensor(p).nbytes for p in piece))
        held.extend(torch.empty_like(p, dtype=state_dtype or p.dtype) for p in here for _ in range(states))

    phases: dict[str, Callable[[], None]] = {
        **({} if offloaded else {"optimizer": hold_states}),
        **({} if generator is None else {"sample": partial(passes.sample, generator)}),
        "probe": passes.probe,
        **({"optimizer": hold_states} if offloaded else {}),
        "update": passes.update,
    }
    if critic is not None:
        phases["critic"] = passes.update_critic
    were_training, peaks = [each.training for each in models], {}
    try:
        for name, phase in ((name, phase) for name, phase in phases.items() if name in only):
            for each in models:
                each.train(name in ("update", "critic"))
            for parameter in learning:
                parameter.grad = None
            if name != "sample":  # `before_wake` places them for the engine
                weights.offload() if name == "critic" else weights.onload()
            sampling = generator.resident() if generator is not None and name == "sample" else nullcontext()
            watch = watch_update() if name == "update" else nullcontext()
            timed = nullcontext() if seconds is None else add_seconds(seconds, name)
            with timed, _explain_out_of_memory(name, device, savings), sampling, peak_memory(device) as peak, watch:
                phase()
            peaks[name] = peak[0]
    finally:
        held.clear()
        for each, was_training in zip(models, were_training, strict=True):
            each.train(was_training)
        for parameter, gradient in zip(learning, before, strict=True):
            parameter.grad = gradient
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the step may need blocks of other sizes
    return peaks


@contextmanager
def add_seconds(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the time within the context to that of a phase."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begin


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Yield a list that holds the peak bytes at the end: on a GPU those of the allocator and those outside of it,
    elsewhere counted tensor by tensor."""
    peak: list[int] = []
    if device.type == "cuda":
        before, outside = torch.cuda.memory_allocated(device), bytes_outside_allocator(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        new_outside = max(0, bytes_outside_allocator(device) - outside)
        peak.append(torch.cuda.max_memory_allocated(device) - before + new_outside)
    else:
        with LiveTensors() as live:
            yield peak
        peak.append(live.peak)


def bytes_outside_allocator(device: torch.device) -> int:
    """Bytes of a GPU in use that torch's allocator does not know: generation takes its buffers from the driver
    (`rollout/decode/arena.py`)."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class DoesNotFit(StartError):
    """A phase of a step does not fit at the limits of a configuration."""

    def __init__(self, phase: str, message: str) -> None:
        super().__init__(message)
        self.phase = phase

    def __reduce__(self) -> tuple[type[DoesNotFit], tuple[str, str]]:
        """For pickling: the error may come from another process."""
        return type(self), (self.phase, str(self))


@contextmanager
def _explain_out_of_memory(phase: str, device: torch.device, savings: Sequence[str]) -> Iterator[None]:
    """Turn an out-of-memory error into DoesNotFit, after the tensors of its traceback are freed."""
    held = torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0
    try:
        yield
        return
    except (torch.OutOfMemoryError, DeviceFull) as error:
        cause = str(error).partition(" Of the allocated memory")[0]  # the rest is about fragments
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(device)[1] / GIB
    advice = "".join(f"\n    {each}" for each in [*savings, "a smaller model, or a larger device"])
    raise DoesNotFit(
        phase,
        f"memory: {DOES_NOT_FIT[phase]} at the limits of the configuration, with {held:,.2f} of {total:,.2f} GiB held "
        f"before. {cause[:1].upper()}{cause[1:]}\n  What would help (mtrl doctor estimates how much):{advice}",
    )
