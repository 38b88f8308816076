"""What every worker that learns has: an optimizer over one model, and a state that goes to a disk and back.

Which loss it descends is the worker's affair: an actor hands in the policy loss, a critic its value loss.
"""

from __future__ import annotations

import gc
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mtrl.checkpoint.learner_snapshot import make_snapshot, read_counters, restore_optimizer_state
from mtrl.models.parallel.fsdp import compute_device, in_one_pass, is_split, own_part, whole
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.state_dicts import load_weights
from mtrl.protocols import Snapshot
from mtrl.types import LossWeights, TrainBatch
from mtrl.utils.errors import DeviceFull, Diverged, PassesCut
from mtrl.workers.eight_bit import EightBitAdamW
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import OffloadedTensors, parameter_pieces
from mtrl.workers.rounding import RoundedAdamW, Rounding

BAD_STEPS_IN_A_ROW = 3
COUNTED = ("version", "optimizer_step", "bad_steps_in_a_row", "cut_to")  # what a learner counts, for its snapshot
TAKES_LESS = (
    "worker.actor.tokens_per_micro_batch, worker.actor.model.enable_gradient_checkpointing=true, dataset.max_pixels "
    "or dataset.max_response_length"
)

BatchLoss = Callable[[TrainBatch], tuple[Tensor, dict[str, Tensor]]]
"""The loss of some rows with gradients, and metrics; both add up over the slices of an optimizer step."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 10
    total_steps: int = 1  # optimizer steps of the whole run
    schedule: Literal["constant_with_warmup", "cosine", "linear"] = "constant_with_warmup"
    min_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0
    rounding: Rounding = "none"  # how a weight in bf16 takes what is too little for it
    eight_bit: bool = False  # a byte for each number of the state

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step 0, 1, ..: the warm-up ends at step `warmup_steps` with the full rate."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        fall = {
            "constant_with_warmup": 1.0,
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.schedule]
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * fall)


def make_optimizer(parameters: Sequence[Tensor], settings: OptimizerSettings, fused: bool) -> torch.optim.Optimizer:
    """`fused`: one kernel, no copies of the weights on the way."""
    common: Any = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.eight_bit:
        return EightBitAdamW(parameters, **common)
    if settings.rounding == "none":
        return torch.optim.AdamW(parameters, **common, fused=fused)
    return RoundedAdamW(parameters, **common, rounding=settings.rounding)


class Learner:
    """Takes optimizer steps on a Hugging Face model; parameters that do not require gradients stay as they are.

    `name` says in messages who learns, `advice` what a user may change where its numbers are not finite. With `offload`
    the optimizer's state lies in main memory and comes piece by piece for its steps. A model with dropout needs a seed
    of it; without one no random numbers are drawn. Where `ranks` hold the model together each has its part of every
    batch, and all of them find the same metrics and take the same steps."""

    def __init__(
        self,
        model: Any,
        optimization: OptimizerSettings,
        batching: MicroBatching,
        *,
        name: str,
        advice: str,
        offload: bool = False,
        dropout_seed: int | None = None,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.model, self.optimization, self.given_batching, self.ranks = model, optimization, batching, ranks
        self.name, self.advice, self.dropout_seed = name, advice, dropout_seed
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self.names)
        device = compute_device(model)
        self.optimizer = make_optimizer(self.parameters, optimization, fused=device.type == "cuda")
        pieces = parameter_pieces(self.parameters) if offload else []
        self.pieces = [(piece, OffloadedTensors(partial(self._large_states, piece), device)) for piece in pieces]
        self.version = 0  # version of the weights: how many updates they have seen
        self.optimizer_step = 0
        self.bad_steps_in_a_row = 0
        self.cut_to = 0  # tokens, or rows, of a pass since the device was full; 0: it never was
        self.keep_cut: Callable[[int], object] = lambda size: None  # for the next attempt, where ranks have to end

    @property
    def batching(self) -> MicroBatching:
        return self.fitting(self.given_batching)

    def fitting(self, batching: MicroBatching) -> MicroBatching:
        """No larger passes than the device had room for."""
        return batching.within(self.cut_to) if self.cut_to else batching

    # ------------------------------------------------------------------------------------------------------ updating
    def update(self, batches: Iterable[TrainBatch], loss: BatchLoss) -> dict[str, float]:
        """One optimizer step a batch. Metrics are means over the steps; within a step, parts of it add up."""
        self.model.train()
        steps = [self._step(batch, loss) for batch in batches]
        self.model.eval()
        self.version += 1
        finite = [step for step in steps if step["skipped_steps"] == 0] or steps
        metrics = {name: sum(step[name] for step in finite) / len(finite) for name in finite[0]}
        return metrics | {"skipped_steps": sum(step["skipped_steps"] for step in steps)}

    def gradient(self, batches: Iterable[TrainBatch], loss: BatchLoss) -> list[Tensor]:
        """Of all batches together at the weights of now, one tensor a parameter; nothing is learnt of it."""
        self.model.train()
        for batch in batches:
            self._fitting_gradients(batch, loss)
        self.model.eval()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.optimizer.zero_grad()
        return found

    def _step(self, batch: TrainBatch, loss: BatchLoss) -> dict[str, float]:
        lr = self.optimization.lr_at(self.optimizer_step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics = self._fitting_gradients(batch, loss)
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.optimization.max_grad_norm)))
        finite = math.isfinite(norm) and all(map(math.isfinite, metrics.values()))
        if finite:
            self._move_weights()
        self.optimizer.zero_grad()
        self._count_bad_steps(finite)
        self.optimizer_step += 1
        return {**metrics, "grad_norm": norm, "lr": lr, "skipped_steps": float(not finite)}

    @contextmanager
    def _dropping(self, micro_batch: int) -> Iterator[None]:
        """What dropout leaves out is a matter of the seed, the optimizer step and the micro-batch, and of nothing that
        was drawn before: a run that goes on from a checkpoint draws the same."""
        if self.dropout_seed is None:
            yield
            return
        device, numbers = compute_device(self.model), [self.dropout_seed, self.optimizer_step, micro_batch]
        if self.ranks.rank:
            numbers.append(self.ranks.rank)  # other rows than those of the first rank
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))
            yield

    def _fitting_gradients(self, batch: TrainBatch, loss: BatchLoss) -> dict[str, float]:
        """The gradients of an optimizer step. Where a pass does not fit into the device they are made anew in smaller
        ones, and so in all later steps; where those do not fit either, it is an error."""
        try:
            return self._gradients(batch, loss)
        except torch.OutOfMemoryError as error:
            torch_says = str(error).partition(" Of the allocated memory")[0]  # the rest is about fragments
        # The error is gone here, and with it the frames that held what there was of the pass. What it had added to the
        # gradients cannot be told from what the passes before it had: all of it goes.
        self._let_go()
        half = self.batching.first_half(batch.rollouts)
        if half is None:
            raise DeviceFull(f"the device has no room to learn from a single response. {torch_says} Set {TAKES_LESS}")
        unit = "tokens" if self.given_batching.rows is None else "responses"
        if self.ranks.size > 1 or is_split(self.model):  # nobody comes out of the middle of a pass
            self.keep_cut(half)
            raise PassesCut(
                f"the device of rank {self.ranks.rank} has no room for its part of an update of the {self.name}; all "
                f"ranks make passes of {half} {unit} from here on, which is slower. {torch_says} What takes less: "
                f"{TAKES_LESS}; "
            )
        self.cut_to = half
        logger.warning("the device has no room for an update of the %s in passes of this size; the step begins again "
                       "with half of it, %d %s a pass from here on, which is slower. What takes less: %s",
                       self.name, half, unit, TAKES_LESS)  # fmt: skip
        try:
            return self._gradients(batch, loss)
        except torch.OutOfMemoryError as error:
            torch_says = str(error).partition(" Of the allocated memory")[0]
        self._let_go()
        raise DeviceFull(f"the device has no room for half of an update's pass either. {torch_says} Set {TAKES_LESS}")

    def _gradients(self, batch: TrainBatch, loss: BatchLoss) -> dict[str, float]:
        """Adds the gradients of every pass to those of the parameters, and the metrics to one another."""
        metrics: dict[str, float] = defaultdict(float)
        for number, (rows, counts) in enumerate(self.batching.passes(batch.rollouts)):
            taken = batch.rows(rows) if counts else zero_weighted(batch.rows(rows))
            with self._dropping(number):
                part, values = in_one_pass(self.model, partial(loss, taken))
                part.backward()
            for name, value in values.items():
                metrics[name] += float(value)
        return self.ranks.all_reduce_sum(metrics)

    def _let_go(self) -> None:
        self.optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no GPU in use

    def _move_weights(self) -> None:
        """The optimizer's own step. State that lies in main memory comes for one piece of the parameters after the
        other: those without a gradient are left alone, and a piece has no further use for its own afterwards."""
        if not self.pieces:
            self.optimizer.step()
            return
        gradients = {parameter: parameter.grad for parameter in self.parameters}
        self.optimizer.zero_grad()
        for piece, states in self.pieces:
            for parameter in piece:
                parameter.grad = gradients.pop(parameter)
            states.bring()
            self.optimizer.step()
            states.park()
            for parameter in piece:
                parameter.grad = None
        states.give_back()

    def _large_states(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """All but the counts of steps, which some kernels want elsewhere than the weights."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
        return [own_part(each) for state in states for name, each in state.items() if name != "step"]

    def _count_bad_steps(self, finite: bool) -> None:
        """A step that would poison the weights is left out; three in a row are no accident."""
        self.bad_steps_in_a_row = 0 if finite else self.bad_steps_in_a_row + 1
        if not finite:
            told = "optimizer step %d of the %s has a non-finite loss or gradient and is skipped"
            logger.warning(told, self.optimizer_step, self.name)
        if self.bad_steps_in_a_row >= BAD_STEPS_IN_A_ROW:
            raise Diverged(
                f"{BAD_STEPS_IN_A_ROW} optimizer steps in a row of the {self.name} had a non-finite loss or gradient. "
                f"{self.advice}"
            )

    # ---------------------------------------------------------------------------------------------- to disk and back
    def snapshot(self, files: Mapping[str, bytes]) -> Snapshot:
        """All that `restore` needs; a checkpoint of Hugging Face, or of peft, once it is written, with `files` beside
        its weights."""
        counters = {name: getattr(self, name) for name in COUNTED}
        return make_snapshot(self.model, self.optimizer, self.names, counters, files, self.ranks)

    def restore(self, directory: Path) -> None:
        """Goes on as the learner whose snapshot was written there would have."""
        load_weights(self.model, directory, self.ranks)
        restore_optimizer_state(self.optimizer, self.names, directory, bool(self.pieces), self.ranks)
        for _, states in self.pieces:
            states.park()
        found = self.cut_to
        for name, count in read_counters(directory).items():
            setattr(self, name, count)
        self.cut_to = min(filter(None, (found, self.cut_to)), default=0)  # it may have been full since


def zero_weighted(batch: TrainBatch) -> TrainBatch:
    """Rows that count for nothing: their pass adds zeros to gradients and metrics."""
    weights = LossWeights(**{name: torch.zeros_like(weight) for name, weight in vars(batch.weights).items()})
    return replace(batch, weights=weights)
