"""The part that every worker that learns has in common: an optimizer over one model, and a state for checkpoints.

The worker brings the loss: an actor its policy loss, a critic its value loss.
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
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mtrl.checkpoint.learner_snapshot import make_snapshot, read_counters, restore_optimizer_state
from mtrl.models.activation_checkpointing import keep_activations
from mtrl.models.parallel.fsdp import compute_device, full_tensor, is_sharded, local_tensor, run_forward
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.state_dicts import load_weights
from mtrl.protocols import Snapshot
from mtrl.types import TrainBatch
from mtrl.utils.errors import DeviceFull, Diverged, PassesCut
from mtrl.utils.record_rows import map_tensors
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import OffloadedTensors, parameter_pieces
from mtrl.workers.optimizers import EightBitAdamW, RoundedAdamW, Rounding, fit_states

BAD_STEPS_IN_A_ROW = 3
COUNTERS = ("version", "optimizer_step", "bad_steps_in_a_row", "cut_to")  # attributes that a snapshot holds
LOWERS_MEMORY = (
    "worker.actor.tokens_per_micro_batch, worker.actor.model.enable_gradient_checkpointing=true, dataset.max_pixels "
    "or dataset.max_response_length"
)

PassLoss = Callable[[], tuple[Tensor, dict[str, Tensor]]]
"""The loss of some rows with gradients, and metrics, on any device; both add up over the passes of a step."""
StartPass = Callable[[TrainBatch], PassLoss]
"""Encodes the images of some rows, and returns the function for the rest of their pass."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 10
    total_steps: int = 1  # optimizer steps of the whole run
    lr_scheduler_type: Literal["constant_with_warmup", "cosine", "linear"] = "constant_with_warmup"
    min_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0
    param_rounding: Rounding = "none"  # how a bf16 weight takes changes that are too small for it
    name: Literal["adamw", "adamw_8bit"] = "adamw"  # adamw_8bit: the optimizer state has one byte per number

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step 0, 1, ..; the warm-up ends at step `warmup_steps` with the full rate."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        fall = {
            "constant_with_warmup": 1.0,
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.lr_scheduler_type]
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * fall)


def make_optimizer(parameters: Sequence[Tensor], settings: OptimizerSettings, fused: bool) -> torch.optim.Optimizer:
    """`fused`: one kernel, without temporary copies of the weights."""
    common: Any = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.name == "adamw_8bit":
        return EightBitAdamW(parameters, **common)
    if settings.param_rounding == "none":
        return torch.optim.AdamW(parameters, **common, fused=fused)
    return RoundedAdamW(parameters, **common, rounding=settings.param_rounding)


class Learner:
    """Takes optimizer steps on a Hugging Face model; parameters that do not require gradients stay as they are.

    Messages contain `name`, and `advice` if numbers are not finite. With `offload` the optimizer state is in CPU memory
    and comes to the device piece by piece. A model with dropout needs a `dropout_seed`; without one no random numbers
    are drawn. If `ranks` hold the model together, each learns from its share of every batch, and all have the same
    metrics and take the same steps."""

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
        self.model, self.optimization, self.configured_batching, self.ranks = model, optimization, batching, ranks
        self.name, self.advice, self.dropout_seed = name, advice, dropout_seed
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self.names)
        device = compute_device(model)
        self.optimizer = make_optimizer(self.parameters, optimization, fused=device.type == "cuda")
        pieces = parameter_pieces(self.parameters) if offload else []
        self.pieces = [(piece, OffloadedTensors(partial(self._large_states, piece), device)) for piece in pieces]
        self.version = 0  # version of the weights: the number of updates
        self.optimizer_step = 0
        self.bad_steps_in_a_row = 0
        self.cut_to = 0  # tokens or rows of a pass since the device was full; 0: it never was
        self.keep_cut: Callable[[int], object] = lambda size: None  # stores the size for the next attempt of all ranks
        self.kept_layers: Sequence[Any] = ()  # layers that keep their activations until the device is full
        # A vision tower is many short operations, which take longer to launch than to run. So the images of the next
        # pass are encoded before the backward pass of this one: the device still has long operations to do meanwhile.
        # Not with dropout, whose numbers belong to a pass, nor on ranks that gather weights pass by pass.
        self.encodes_ahead = device.type == "cuda" and dropout_seed is None and not self._is_one_of_several
        self.forbid_kept_layers: Callable[[], object] = lambda: None  # for the next attempt of all ranks

    @property
    def batching(self) -> MicroBatching:
        return self.limit_passes(self.configured_batching)

    def limit_passes(self, batching: MicroBatching) -> MicroBatching:
        """The batching with passes that fit into the device."""
        return batching.within(self.cut_to) if self.cut_to else batching

    # ------------------------------------------------------------------------------------------------------ updating
    def update(self, batches: Iterable[TrainBatch], start: StartPass) -> dict[str, float]:
        """One optimizer step per batch. Metrics are means over the steps, and sums over the passes of a step."""
        self.model.train()
        steps = [self._step(batch, start) for batch in batches]
        self.model.eval()
        self.version += 1
        finite = [step for step in steps if step["skipped_steps"] == 0] or steps
        metrics = {name: sum(step[name] for step in finite) / len(finite) for name in finite[0]}
        return metrics | {"skipped_steps": sum(step["skipped_steps"] for step in steps)}

    def gradient(self, batches: Iterable[TrainBatch], start: StartPass) -> list[Tensor]:
        """The gradient of all batches together, one tensor per parameter; the weights stay as they are."""
        self.model.train()
        for batch in batches:
            self._compute_gradients(batch, start)
        self.model.eval()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.optimizer.zero_grad()
        return gradients

    def _step(self, batch: TrainBatch, start: StartPass) -> dict[str, float]:
        lr = self.optimization.lr_at(self.optimizer_step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics = self._compute_gradients(batch, start)
        norm = float(full_tensor(torch.nn.utils.clip_grad_norm_(self.parameters, self.optimization.max_grad_norm)))
        finite = math.isfinite(norm) and all(map(math.isfinite, metrics.values()))
        if finite:
            self._step_optimizer()
        self.optimizer.zero_grad()
        self._count_bad_steps(finite)
        self.optimizer_step += 1
        return {**metrics, "grad_norm": norm, "lr": lr, "skipped_steps": float(not finite)}

    @contextmanager
    def _seed_dropout(self, micro_batch: int) -> Iterator[None]:
        """Dropout depends on the seed, the optimizer step and the micro-batch alone, so that a resumed run draws the
        same numbers."""
        if self.dropout_seed is None:
            yield
            return
        device, numbers = compute_device(self.model), [self.dropout_seed, self.optimizer_step, micro_batch]
        if self.ranks.rank:
            numbers.append(self.ranks.rank)  # each rank has other rows
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))
            yield

    def _compute_gradients(self, batch: TrainBatch, start: StartPass) -> dict[str, float]:
        """The gradients of an optimizer step; returns its metrics. If a pass does not fit into the device, all layers
        are checkpointed from then on. If they are, this step and all later ones use passes of half the size; if those
        do not fit either, it is an error."""
        metrics, problem = self._try_gradients(batch, start)
        if metrics is None and self.kept_layers:
            self._checkpoint_all_layers(problem)
            metrics, problem = self._try_gradients(batch, start)
        if metrics is not None:
            return metrics
        half = self.batching.first_half(batch.rollouts)
        if half is None:
            raise DeviceFull(f"the device has no room to learn from a single response. {problem} Set {LOWERS_MEMORY}")
        unit = "tokens" if self.configured_batching.rows is None else "responses"
        if self._is_one_of_several:
            self.keep_cut(half)
            raise PassesCut(
                f"the device of rank {self.ranks.rank} has no room for its part of an update of the {self.name}; all "
                f"ranks make passes of {half} {unit} from now on, which is slower. {problem} To use less memory, set "
                f"{LOWERS_MEMORY}; "
            )
        self.cut_to = half
        logger.warning("the device has no room for an update of the %s in passes of this size; the step is repeated "
                       "with half of it, %d %s per pass from now on, which is slower. To use less memory, set %s",
                       self.name, half, unit, LOWERS_MEMORY)  # fmt: skip
        metrics, problem = self._try_gradients(batch, start)
        if metrics is None:
            raise DeviceFull(f"the device has no room for half a pass of an update. {problem} Set {LOWERS_MEMORY}")
        return metrics

    @property
    def _is_one_of_several(self) -> bool:
        """Whether other ranks wait in the middle of a pass that fails here."""
        return self.ranks.size > 1 or is_sharded(self.model)

    def _checkpoint_all_layers(self, problem: str) -> None:
        kept = f"the activations that {len(self.kept_layers)} layers keep (enable_gradient_checkpointing=auto)"
        if self._is_one_of_several:
            self.forbid_kept_layers()
            raise PassesCut(
                f"the device of rank {self.ranks.rank} has no room for {kept}. {problem} All ranks recompute them from "
                f"now on, which is slower; "
            )
        keep_activations(self.kept_layers, False)
        self.kept_layers = ()
        logger.warning("the device has no room for %s; the step is repeated, and they are recomputed from now on, "
                       "which is slower", kept)  # fmt: skip

    def _try_gradients(self, batch: TrainBatch, start: StartPass) -> tuple[dict[str, float] | None, str]:
        """The metrics; None and torch's message if the device is full. All gradients are dropped then, since those of
        the failed pass cannot be subtracted."""
        try:
            return self._accumulate_gradients(batch, start), ""
        except torch.OutOfMemoryError as error:
            problem = str(error).partition(" Of the allocated memory")[0]  # the rest is about fragmentation
        # The error is gone here, and with it the frames that held tensors of the pass.
        self.optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()  # does nothing if no GPU is in use
        return None, problem

    def _accumulate_gradients(self, batch: TrainBatch, start: StartPass) -> dict[str, float]:
        """Adds up the gradients and the metrics of all passes. The metrics are read at the end: until then nothing
        waits for the device, which always has the next pass to do."""
        metrics: dict[str, list[Tensor]] = defaultdict(list)
        passes = [partial(take_pass, batch, *each) for each in self.batching.passes(batch.rollouts)]
        begun: PassLoss | None = None
        for number, (take, following) in enumerate(zip_longest(passes, passes[1:])):
            rest, begun = begun or partial(start_and_finish, start, take), None
            with self._seed_dropout(number):
                part, values = run_forward(self.model, rest)
                del rest  # the features of the images
                begun = start(following()) if self.encodes_ahead and following is not None else None
                part.backward()
            for name, value in values.items():
                metrics[name].append(value)
        return self.ranks.all_reduce_sum({name: sum(torch.stack(parts).tolist()) for name, parts in metrics.items()})

    def _step_optimizer(self) -> None:
        """Offloaded state comes to the device for one piece of the parameters after the other: the optimizer skips
        parameters without a gradient."""
        if not self.pieces:
            self.optimizer.step()
            return
        gradients = {parameter: parameter.grad for parameter in self.parameters}
        self.optimizer.zero_grad()
        for piece, states in self.pieces:
            for parameter in piece:
                parameter.grad = gradients.pop(parameter)
            states.onload()
            self.optimizer.step()
            states.offload()
            for parameter in piece:
                parameter.grad = None
        states.empty_cache()

    def _large_states(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """All but the step counts, which some kernels want on the CPU."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
        return [local_tensor(each) for state in states for name, each in state.items() if name != "step"]

    def _count_bad_steps(self, finite: bool) -> None:
        """A non-finite step is skipped; several in a row end the run."""
        self.bad_steps_in_a_row = 0 if finite else self.bad_steps_in_a_row + 1
        if not finite:
            message = "optimizer step %d of the %s has a non-finite loss or gradient and is skipped"
            logger.warning(message, self.optimizer_step, self.name)
        if self.bad_steps_in_a_row >= BAD_STEPS_IN_A_ROW:
            raise Diverged(
                f"{BAD_STEPS_IN_A_ROW} optimizer steps in a row of the {self.name} had a non-finite loss or gradient. "
                f"{self.advice}"
            )

    # ---------------------------------------------------------------------------------------------------- checkpoints
    def snapshot(self, files: Mapping[str, bytes]) -> Snapshot:
        """Everything that `restore` needs. Written, it is a Hugging Face or peft checkpoint, with `files` next to its
        weights."""
        counters = {name: getattr(self, name) for name in COUNTERS}
        return make_snapshot(self.model, self.optimizer, self.names, counters, files, self.ranks)

    def restore(self, directory: Path) -> None:
        """Continues as the learner whose snapshot was written there would have."""
        load_weights(self.model, directory, self.ranks)
        restore_optimizer_state(self.optimizer, self.names, directory, bool(self.pieces), self.ranks)
        fit_states(self.optimizer)
        for _, states in self.pieces:
            states.offload()
        cut_since = self.cut_to
        for name, count in read_counters(directory).items():
            setattr(self, name, count)
        self.cut_to = min(filter(None, (cut_since, self.cut_to)), default=0)


def start_and_finish(start: StartPass, take: Callable[[], TrainBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    return start(take())()


def take_pass(batch: TrainBatch, rows: Tensor, counts: bool) -> TrainBatch:
    """These rows, with weights of zero if they do not count."""
    return batch.rows(rows) if counts else zero_weighted(batch.rows(rows))


def zero_weighted(batch: TrainBatch) -> TrainBatch:
    """The rows with weights of zero: their pass adds zeros to gradients and metrics."""
    return replace(batch, weights=map_tensors(batch.weights, torch.zeros_like))
