"""The policy that learns, in a single process or on one of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mtrl.algorithms.losses import Loss, total_loss, weighted_sum
from mtrl.algorithms.signals import ATTENTION
from mtrl.models.device_copy import to_device, unpack
from mtrl.models.forward import Forward, Media, PreparedPass
from mtrl.models.parallel.fsdp import run_forward, run_frozen_forward
from mtrl.models.state_dicts import exported_weights
from mtrl.models.turns import encoded_prompts
from mtrl.models.views import ImageViews
from mtrl.protocols import Snapshot
from mtrl.types import Needs, Rollouts, Signals, TrainBatch, Weights
from mtrl.utils.record_rows import map_tensors
from mtrl.workers.learner import Learner, OptimizerSettings, PassLoss
from mtrl.workers.micro_batches import Measure, MicroBatching
from mtrl.workers.offload import STAYING, OffloadedTensors, StayingWeights
from mtrl.workers.reference import Reference

Result = TypeVar("Result")
NO_NEEDS = Needs()
ADVICE = (
    "Lower worker.actor.optim.lr, look at the rewards for extreme values, or compute in fp32 "
    "(worker.actor.fsdp.mixed_precision_dtype)."
)


class LocalActor:
    """Probes and updates the model of `forward`. If ranks hold the model together, this is one of them: all get the
    same calls, each with its own rows."""

    def __init__(
        self,
        forward: Forward,
        optimization: OptimizerSettings,
        *,
        views: ImageViews,
        update_batching: MicroBatching,
        probe_batching: MicroBatching,
        encoder_files: Mapping[str, bytes],
        reference: Reference | None = None,
        dropout_seed: int | None = None,
        offload_optimizer: bool = False,
        offload_reference: bool = False,
        weights: StayingWeights = STAYING,
    ) -> None:
        self.forward, self.reference, self.ranks = forward, reference, forward.backbone.ranks
        self.weights = weights  # those of `forward`
        self.offloaded_reference: OffloadedTensors | None = None
        if offload_reference and reference is not None:
            theirs = list(reference.forward.backbone.model.parameters())
            self.offloaded_reference = OffloadedTensors(lambda: theirs, forward.backbone.device)
            self.offloaded_reference.offload()
        self.views, self.probe_batching = views, probe_batching
        self.model = forward.backbone.model
        self.learner = Learner(
            self.model,
            optimization,
            update_batching,
            name="actor",
            advice=ADVICE,
            offload=offload_optimizer,
            dropout_seed=dropout_seed,
            ranks=self.ranks,
        )
        self.encoder_files = encoder_files  # go next to the weights of a checkpoint

    # ------------------------------------------------------------------------------------------------------- probing
    def probe(self, rollouts: Rollouts, needs: Needs, step: int | None) -> Signals:
        """The needed signals of every token, before any update of this step; makes no pass if none is needed."""
        if step is not None:
            self.forward.kept.begin(self.forward.backbone, step)
        signals = self._probe_policy(rollouts, needs.of_policy, step)
        if not (needs := needs.of_reference):
            return signals
        measure = lambda rows: self._needed_reference.start_signals(rows, needs, self.forward)  # noqa: E731
        return signals.merge(self._with_reference(lambda: self._probe_in_passes(rollouts, measure)))

    @property
    def _needed_reference(self) -> Reference:
        assert self.reference is not None, "a run that needs the reference builds one"
        return self.reference

    def _with_reference(self, work: Callable[[], Result]) -> Result:
        """Runs `work` while the reference's weights are on the device and its root module is gathered."""
        model = self._needed_reference.forward.backbone.model
        with nullcontext() if self.offloaded_reference is None else self.offloaded_reference.onloaded():
            return work() if model is self.model else run_frozen_forward(model, work)

    def _probe_policy(self, rollouts: Rollouts, needs: Needs, step: int | None) -> Signals:
        if not self.ranks.any_rank(bool(rollouts.visual.any())):
            needs = needs.without(*ATTENTION)
        if not needs:
            return Signals()
        return self._probe_in_passes(rollouts, lambda rows: self._signals(rows, needs, step), needs)

    @torch.no_grad()
    def _probe_in_passes(self, rollouts: Rollouts, measure: Measure, needs: Needs = NO_NEEDS) -> Signals:
        self.weights.onload()
        batching = self.learner.limit_passes(self.probe_batching).reading(needs)
        return batching.probe(rollouts, lambda rows: run_forward(self.model, partial(measure, rows)), batching.views)

    def _signals(self, rollouts: Rollouts, needs: Needs, step: int | None) -> Callable[[], Signals]:
        return self.forward.start_signals(rollouts, needs, self._show(needs.other_views, rollouts, step))

    def _show(self, names: Iterable[str], rollouts: Rollouts, step: int | None) -> dict[str, Media]:
        """All media under these views."""
        views: dict[str, Media] = {}
        for name in names:
            assert step is not None, "a step keys the views"
            views[name] = [self.views.media(name, prompt, step) for prompt in encoded_prompts(rollouts)]
        return views

    # ------------------------------------------------------------------------------------------------------ updating
    def update(self, batches: Iterable[TrainBatch], loss: Loss) -> dict[str, float]:
        self.weights.onload()

        def learn() -> dict[str, float]:
            return self.learner.update(batches, partial(self._start_pass, loss=loss))

        try:
            if not loss.full_divergence:
                return learn()
            self.forward.kept.begin(self.forward.backbone)  # policy and reference read the same rows in turn
            return self._with_reference(learn)
        finally:
            self.forward.kept.end()

    def gradient(self, batches: Iterable[TrainBatch], loss: Loss) -> list[Tensor]:
        """The gradient of an update, for comparisons; the weights stay as they are."""
        self.weights.onload()
        work = partial(self.learner.gradient, batches, partial(self._start_pass, loss=loss))
        return self._with_reference(work) if loss.full_divergence else work()

    def _start_pass(self, batch: TrainBatch, loss: Loss) -> PassLoss:
        views = self._show(loss.live_needs.other_views, batch.rollouts, batch.step)
        return partial(self._loss, batch, loss, self.forward.prepare(batch.rollouts, views))

    def _loss(self, batch: TrainBatch, loss: Loss, prepared: PreparedPass) -> tuple[Tensor, dict[str, Tensor]]:
        """On the device, so that its backward pass is queued without waiting for the forward pass."""
        rollouts, kl = batch.rollouts, None
        fresh = batch.old_logprobs is None  # nothing was probed
        routing = self.forward.make_routing_reader(rollouts) if fresh else None
        theirs = self._needed_reference.response_hidden(rollouts) if loss.full_divergence else None
        states, *others = self.forward.view_states(rollouts, routing, prepared)
        if theirs is not None:
            kl = self._divergence(states, theirs, rollouts)
        scores = self.forward.score_tokens(states, rollouts, fresh)
        compared = self.forward.compare_views(states, others, rollouts, loss.live_needs)
        streams = map_tensors(batch, lambda stream: to_device(stream, self.forward.backbone.device))
        mask, token_weights = rollouts.mask, streams.weights.token
        live = {name: unpack(values, mask) for name, values in compared.items()}
        total, metrics = total_loss(unpack(scores.logp, mask), streams, loss, kl, live)
        if routing is not None:
            mismatch = unpack(self.forward.gather_mismatch(routing, rollouts), mask)
            metrics["routing_mismatch"] = weighted_sum(streams.weights.gap, mismatch)
        if scores.entropy is not None:
            metrics["entropy"] = weighted_sum(token_weights, unpack(scores.entropy, mask))
        if scores.support is not None:
            cut = unpack(scores.logp.detach() - scores.support, mask)
            gap = (cut - streams.rollouts.rollout_logprobs).abs()
            metrics["support_gap_mean"] = weighted_sum(streams.weights.gap, gap)
        return total, metrics

    def _divergence(self, ours: Tensor, theirs: Tensor, rollouts: Rollouts) -> Tensor:
        """[N, T]: the KL to the reference. It reads the same rows in every pass: storing its hidden states of a whole
        step would take tokens * H and a pass as well."""
        kl = self._needed_reference.divergence(ours, theirs, self.forward, rollouts)
        return unpack(kl, rollouts.mask)

    # -------------------------------------------------------------------------------------------------------- weights
    def publish(self) -> Weights:
        """A handle on this version. Tied weights are listed under each name, since an engine may hold them
        separately."""
        self.forward.kept.end()  # also of a step without an update
        return Weights(self.learner.version, exported_weights(self.model))

    def snapshot(self) -> Snapshot:
        return self.learner.snapshot(self.encoder_files)

    def restore(self, directory: Path) -> None:
        self.weights.onload()  # the optimizer state goes where they are
        self.forward.kept.end()
        self.learner.restore(directory)
