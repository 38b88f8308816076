"""The passes of a step at the limits of a configuration: the largest images, the longest prompts and responses.

Before the first step on a GPU they run once, so that what does not fit is told then and not when the longest prompt
comes. `mtrl doctor` runs the same passes on a model without numbers (`memory/estimate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mtrl.algorithms.signals import ATTENTION
from mtrl.algorithms.vocab import full_kl
from mtrl.memory.decode_footprint import Batch
from mtrl.models.forward import Forward, unpack
from mtrl.models.parallel.fsdp import in_one_pass, own_part
from mtrl.models.parallel.ranks import SINGLE_PROCESS
from mtrl.protocols import Generator, PromptEncoder
from mtrl.rollout.local import ROWS_AT_ONCE
from mtrl.types import Finish, Medium, Needs, Prompt, Rollouts, Sampling, Task
from mtrl.utils.errors import DeviceFull, StartError
from mtrl.utils.live_tensors import LiveTensors
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import parameter_pieces

GIB = 2**30
ADAM_STATES = 2  # of each weight that learns
DOES_NOT_FIT = {
    "optimizer": "the states of the optimizer do not fit",
    "sample": "sampling does not fit",
    "probe": "the probe of a step does not fit",
    "update": "the update does not fit",
    "critic": "the update of the critic does not fit",
}


@dataclass(frozen=True)
class Limits:
    """What of a configuration decides how large its passes are. Lengths are in tokens."""

    prompts: int  # of a step
    prompts_per_update: int  # of an optimizer step
    sampling: Sampling  # how many responses of a prompt, how long at most
    prompt_tokens: int
    max_pixels: int  # of an image; a prompt has one
    update: MicroBatching
    probe: MicroBatching
    needs: Needs
    full_divergence: bool = False  # whether the update reads the reference's whole vocabulary

    @property
    def batch(self) -> Batch:
        """What is sampled at once, as long as it fits."""
        n = min(self.sampling.n, ROWS_AT_ONCE)
        return Batch(min(self.prompts, ROWS_AT_ONCE // n), self.prompt_tokens, replace(self.sampling, n=n))

    @property
    def probed(self) -> Needs:
        """What of the needs the policy's own probe measures."""
        return self.needs.without("ref_logprobs", "divergence", "values")

    def on_each(self, ranks: int, sharers: int) -> Limits:
        """What one of several ranks has of it, of which so many neighbours share every pass."""
        return replace(
            self,
            prompts=-(-self.prompts * sharers // ranks),
            prompts_per_update=-(-self.prompts_per_update * sharers // ranks),
            update=self.update.over(SINGLE_PROCESS, sharers),
            probe=self.probe.over(SINGLE_PROCESS, sharers),
        )

    def within(self, tokens: int) -> Limits:
        """The same in passes of no more tokens."""
        return replace(self, update=self.update.within(tokens), probe=self.probe.within(tokens))


# ---------------------------------------------------------------------------------------------------- the longest step
def longest_prompt(encoder: PromptEncoder, limits: Limits) -> Prompt:
    """An image as large as the limits allow, where the model takes any, and text up to the longest prompt."""
    side = encoder.image_settings.factor if encoder.image_settings else 1
    prompt = _encode(encoder, [np.zeros((side, side, 3), np.uint8)] if side > 1 else [])
    places = min(limits.max_pixels // side**2, limits.prompt_tokens - len(prompt.ids) + 1)
    if side > 1 and places > 1:
        rows = math.isqrt(places)
        prompt = _encode(encoder, [np.zeros((rows * side, places // rows * side, 3), np.uint8)])
    missing = max(0, limits.prompt_tokens - len(prompt.ids))
    ids, pool = (torch.cat([each, each[-1:].expand(missing)]) for each in (prompt.ids, prompt.token_pool))
    return replace(prompt, ids=ids, token_pool=pool)


def _encode(encoder: PromptEncoder, media: Sequence[np.ndarray]) -> Prompt:
    content = [*({"type": "image"} for _ in media), {"type": "text", "text": "."}]
    marks = tuple(Medium("image", None) for _ in media)
    return encoder.encode(Task("rehearsal", "the rehearsal", ({"role": "user", "content": content},), marks), media)


def longest_rollouts(prompt: Prompt, prompts: int, sampling: Sampling) -> Rollouts:
    """The tokens are all one: what they say is of no consequence."""
    rows, length = prompts * sampling.n, sampling.max_new_tokens
    cut: Finish = "length"
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


def half_pass(limits: Limits, encoder: PromptEncoder, phase: str) -> int | None:
    """Half of what the largest pass of a phase takes, in tokens; None where it has none that could be cut finer."""
    if phase not in ("probe", "update", "critic"):
        return None
    probing, prompt = phase == "probe", longest_prompt(encoder, limits)
    rollouts = longest_rollouts(prompt, limits.prompts if probing else limits.prompts_per_update, limits.sampling)
    return limits.probe.first_half(rollouts, limits.probed.views) if probing else limits.update.first_half(rollouts)


@dataclass(frozen=True)
class MemoryPreflight:
    """The passes of a step, each a function that leaves nothing behind but gradients."""

    forward: Forward
    encoder: PromptEncoder
    limits: Limits
    critic: Forward | None = None

    def sample(self, generator: Generator) -> None:
        """The largest batch. One that does not fit is cut by the engine, for the rest of the run."""
        generator.preflight(self.prompts, self.limits.batch.sampling)

    def probe(self) -> None:
        """The largest pass, under as many views as are needed."""
        needs = self.limits.probed
        rollouts = self.rollouts(self.limits.prompts)
        part = rollouts.rows(self.limits.probe.split(rollouts, needs.views)[0])
        if not (self.forward.backbone.own_attention and part.visual.any()):
            needs = needs.without(*ATTENTION)
        if needs:
            views = [prompt.media for prompt in part.prompts]
            with torch.no_grad():
                in_one_pass(self.forward.backbone.model, lambda: self.forward.signals(part, needs, views))

    def updates(self) -> list[Rollouts]:
        """Of an optimizer step the first pass, which is the largest, and the next one, which finds its gradients; those
        after it are no larger."""
        rollouts = self.rollouts(self.limits.prompts_per_update)
        return [rollouts.rows(index) for index in self.limits.update.split(rollouts)[:2]]

    def learn(self, part: Rollouts) -> None:
        total, *_held = in_one_pass(self.forward.backbone.model, lambda: self._loss(part))
        total.backward()

    def _loss(self, part: Rollouts) -> tuple[Tensor, ...]:
        """A sum to go back from, and all that is held until it has."""
        theirs = self._of_reference(part) if self.limits.full_divergence else None
        hidden = self.forward.response_hidden(part)
        values = [self.forward.score_tokens(hidden, part, entropy="old_logprobs" not in self.limits.needs).logp]
        if theirs is not None:
            matrix = self.forward.backbone.output_matrix
            values.append(full_kl(hidden, theirs, matrix, **self.forward.distribution()))
        total = torch.stack([unpack(each, part.mask).sum() for each in values]).sum()
        return (total, hidden, *values, *(() if theirs is None else (theirs,)))

    @torch.no_grad()
    def _of_reference(self, part: Rollouts) -> Tensor:
        """The policy stands in for its reference, which is as large."""
        return self.forward.response_hidden(part)

    def update(self) -> None:
        for part in self.updates():
            self.learn(part)

    def update_critic(self) -> None:
        critic = self.critic
        assert critic is not None
        for part in self.updates():
            in_one_pass(critic.backbone.model, partial(self._values, critic, part)).backward()

    @staticmethod
    def _values(critic: Forward, part: Rollouts) -> Tensor:
        return critic.values(part).sum()

    @property
    def prompts(self) -> list[Prompt]:
        """Those that are sampled at once."""
        return self.limits.batch.prompts * [self.prompt]

    @property
    def prompt(self) -> Prompt:
        return longest_prompt(self.encoder, self.limits)

    def rollouts(self, prompts: int) -> Rollouts:
        return longest_rollouts(self.prompt, prompts, self.limits.sampling)


# -------------------------------------------------------------------------------------------------------- before a run
def preflight(
    forward: Forward,
    encoder: PromptEncoder,
    limits: Limits,
    generator: Generator | None,
    *,
    has_states: bool,
    ways: Sequence[str] = (),
    critic: Forward | None = None,
    states: int = ADAM_STATES,
    state_dtype: torch.dtype | None = None,
    offloaded: bool = False,
) -> dict[str, int]:
    """Runs the passes once; the bytes that each phase held at most, beyond what was held before. `generator` is the one
    that will sample, and asleep; None where others do.

    Where the optimizers have no states yet (they come with their first step), their room is taken meanwhile, of so many
    `states` of each weight, in its dtype unless told; where they are `offloaded`, that of the largest piece, for the
    update alone. Weights, gradients, random numbers and the mode of the model stay as they are. A phase that does not
    fit is a DoesNotFit with the `ways` to make it smaller.
    """
    model, device = forward.backbone.model, forward.backbone.device
    rehearsal = MemoryPreflight(forward, encoder, limits, critic)
    models = [model] if critic is None else [model, critic.backbone.model]
    learning = [p for each in models for p in each.parameters() if p.requires_grad]
    before = [p.grad for p in learning]
    held: list[Tensor] = []

    def hold_states() -> None:
        here: Sequence[Tensor] = [] if has_states else learning
        if offloaded:  # those of a run that goes on lie in main memory too
            here = max(parameter_pieces(learning), key=lambda piece: sum(own_part(p).nbytes for p in piece))
        held.extend(torch.empty_like(p, dtype=state_dtype or p.dtype) for p in here for _ in range(states))

    phases: dict[str, Callable[[], None]] = {
        **({} if offloaded else {"optimizer": hold_states}),
        **({} if generator is None else {"sample": partial(rehearsal.sample, generator)}),
        "probe": rehearsal.probe,
        **({"optimizer": hold_states} if offloaded else {}),
        "update": rehearsal.update,
    }
    if critic is not None:
        phases["critic"] = rehearsal.update_critic
    were_training, peaks = [each.training for each in models], {}
    try:
        for name, phase in phases.items():
            for each in models:
                each.train(name in ("update", "critic"))
            for parameter in learning:
                parameter.grad = None
            sampling = generator.resident() if generator is not None and name == "sample" else nullcontext()
            with refusing(name, device, ways), sampling, peak_memory(device) as peak:
                phase()
            peaks[name] = peak[0]
    finally:
        held.clear()
        for each, was_training in zip(models, were_training, strict=True):
            each.train(was_training)
        for parameter, gradient in zip(learning, before, strict=True):
            parameter.grad = gradient
        if device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of these sizes need not suit the step
    return peaks


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """[bytes], once it is over: by the allocator of a GPU and what was taken past it, elsewhere counted tensor by
    tensor."""
    peak: list[int] = []
    if device.type == "cuda":
        before, others = torch.cuda.memory_allocated(device), past_the_allocator(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        taken_past = max(0, past_the_allocator(device) - others)
        peak.append(torch.cuda.max_memory_allocated(device) - before + taken_past)
    else:
        with LiveTensors() as live:
            yield peak
        peak.append(live.peak)


def past_the_allocator(device: torch.device) -> int:
    """Bytes of a GPU that are taken and that torch's allocator does not know of: generation takes its buffers from the
    driver itself (`rollout/decode/arena.py`)."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class DoesNotFit(StartError):
    """A phase of a step, at the limits of a configuration."""

    def __init__(self, phase: str, told: str) -> None:
        super().__init__(told)
        self.phase = phase

    def __reduce__(self) -> tuple[type[DoesNotFit], tuple[str, str]]:
        """It may come from another process."""
        return type(self), (self.phase, str(self))


@contextmanager
def refusing(phase: str, device: torch.device, ways: Sequence[str]) -> Iterator[None]:
    """What does not fit becomes a sentence, once what it held has been let go."""
    held = torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0
    try:
        yield
        return
    except (torch.OutOfMemoryError, DeviceFull) as error:
        torch_says = str(error).partition(" Of the allocated memory")[0]  # the rest is about fragments
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(device)[1] / GIB
    advice = "".join(f"\n    {way}" for way in [*ways, "a smaller model, or a larger device"])
    raise DoesNotFit(
        phase,
        f"memory: {DOES_NOT_FIT[phase]} at the limits of the configuration, with {held:,.2f} of {total:,.2f} GiB held "
        f"before. {torch_says[:1].upper()}{torch_says[1:]}\n  What would help; mtrl doctor says how much each:{advice}",
    )
