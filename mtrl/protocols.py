"""The seams. `training/loop.py` knows these; `build/` chooses what stands behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mtrl.algorithms.losses import Loss
from mtrl.algorithms.value_loss import ValueLoss
from mtrl.types import (
    Experience,
    Needs,
    Prompt,
    Rewards,
    Rollouts,
    Sampling,
    Signals,
    Task,
    TrainBatch,
    ValidationSample,
    Weights,
)


@dataclass(frozen=True)
class ImageSettings:
    """How an image becomes what a vision tower reads, under the names that checkpoints use.

    We resize, once, to a multiple of `factor` within the limits; the trainer and every engine then make the same pixels
    of it: (value * rescale_factor - mean) / std. The order of the fields is part of `PromptEncoder.fingerprint`.
    """

    patch_size: int  # side of a patch in pixels
    merge_size: int  # patches a side that become one token
    temporal_patch_size: int  # frames of a patch; a still image is repeated
    min_pixels: int
    max_pixels: int
    rescale_factor: float
    image_mean: tuple[float, ...]  # one for each channel
    image_std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"min_pixels ({self.min_pixels}) must be at least 1 and not above max_pixels ({self.max_pixels})"
            )

    @property
    def factor(self) -> int:
        """Pixels a side of one token."""
        return self.patch_size * self.merge_size

    def processor_arguments(self) -> dict[str, Any]:
        """Arguments for an engine that makes pixels with an image processor of transformers: the trainer's numbers
        whatever the checkpoint says, and no second resize."""
        # A checkpoint may write 1 for 1.0, which transformers takes from a file but not as an argument.
        floats = {name: [float(v) for v in getattr(self, name)] for name in ("image_mean", "image_std")}
        return asdict(self) | floats | {"do_resize": False, "do_rescale": True, "do_normalize": True}


@dataclass(frozen=True)
class Clip:
    """Which frames of a video are shown. Two of a second of film, at 24 frames a second: Clip(24, 24.0, (0, 12))."""

    total: int  # frames of the video
    fps: float  # its frames a second
    frames: tuple[int, ...]  # numbers of those that are shown, in their order

    @property
    def shown_fps(self) -> float:
        """Frames that are shown of a second."""
        return len(self.frames) / self.total * self.fps


@dataclass(frozen=True)
class VideoSettings:
    """How many frames of a video are shown, and how large: the keys of the `dataset:` block."""

    fps: float = 2.0  # frames taken from a second
    max_frames: int = 64
    max_pixels: int | None = None  # of a frame; None: as many as the family gives it


class PromptEncoder(Protocol):
    """Template, tokens, resize target, pads, pools: what one model family makes of a task."""

    forbidden_ids: tuple[int, ...]  # never sampled, at -inf in every pass
    stop_ids: tuple[int, ...]  # each ends a response
    pad_id: int
    image_settings: ImageSettings | None  # what the vision tower wants of an image; a text model has none

    def fingerprint(self) -> str:
        """Changes when any setting changes that `length` or `encode` depends on. Caches are keyed by it."""

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """The size the model will see: (height, width), multiples of patch * merge within the pixel limits."""

    def frame_size(self, height: int, width: int) -> tuple[int, int]:
        """The same for the frames of a video, whose limits are lower."""

    def clip(self, total: int, fps: float) -> Clip:
        """Which frames the model is shown of a video of so many frames."""

    def length(self, task: Task, sizes: Sequence[tuple[int, int]]) -> int:
        """Prompt tokens with the pads expanded, from each medium's (height, width) before `target_size`. Videos of the
        task say which frames are shown."""

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        """`media` are decoded RGB arrays, one for each medium of the task, already at their target size: [H, W, 3] an
        image, [F, H, W, 3] the frames of a video."""

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """The opaque multimodal dict for a forward pass, made from the prompt's media or another view of them; pixels
        are made on the device."""

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The text of a response, without special tokens."""


class TaskSource(Protocol):
    """Tasks in a seeded order, ready to use."""

    def take(self, count: int) -> list[Prompt]:
        """The next prompts; crosses epochs without a gap."""

    def get(self, ids: Sequence[str]) -> list[Prompt]:
        """The prompts of these tasks, for replay."""

    def metrics(self) -> dict[str, float]:
        """What a step reports of the data: rows that could not be read."""

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Generator(Protocol):
    """Samples responses. It resets its own caches in `load` and refuses to sample at a version it does not hold.
    `generate` and `load` are for an engine that is awake; its weights outlast a sleep (`rollout/lifecycle.py`)."""

    def resident(self) -> AbstractContextManager[None]:
        """Wakes the engine; at its end the engine sleeps and the trainer has the device memory. Such blocks may stand
        inside one another: the outermost counts."""

    apart: bool  # whether it samples beside those who learn, on devices of its own

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts: ...

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Callable[[], Rollouts]:
        """`generate` in two: one that is `apart` samples on until what it gives is called."""

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Takes the device memory that `generate` would take if no response stopped early, until the engine sleeps."""

    def load(self, weights: Weights) -> None:
        """Takes over a version of the weights as a whole: one that the engine does not know, or misses, is an error."""

    def close(self) -> None:
        """The run is over: whatever the engine started ends."""


class Prober(Protocol):
    """Scores sampled tokens: the actor, by its reference too, and the critic are probers."""

    def probe(self, rollouts: Rollouts, needs: Needs, step: int) -> Signals:
        """The fields of `needs` that this prober can bring; `step` keys the perturbation."""


class Snapshot(Protocol):
    """All that a learner has learnt, at one moment. It reads the live weights, so that it must be written before the
    next update, or `detached` first."""

    @property
    def nbytes(self) -> int: ...

    @property
    def copied(self) -> bool:
        """Whether it is one that later updates leave alone, and `detached` is the same."""

    def detached(self) -> Snapshot:
        """A copy in main memory."""

    def write(self, directory: Path) -> None:
        """Writes a Hugging Face checkpoint, and beside it what `restore` needs."""


class Stateful(Protocol):
    """Whatever learns or remembers: the actor, a critic, the replay buffer. A checkpoint holds a snapshot of each, by
    name."""

    def snapshot(self) -> Snapshot: ...

    def restore(self, directory: Path) -> None:
        """Goes on as the one whose snapshot was written there would have."""


class Synced(Stateful, Protocol):
    """A reference that follows the policy from afar. What it has become is in no file but a checkpoint."""

    def refresh(self) -> None:
        """Becomes the policy as it is now."""


class Actor(Prober, Stateful, Protocol):
    """The policy that learns. Blind to algorithms: it sees token streams and adds."""

    def update(self, batches: Iterable[TrainBatch], loss: Loss) -> dict[str, float]:
        """One optimizer step a batch; metrics are means over all tokens of the batches."""

    def publish(self) -> Weights: ...


class Critic(Prober, Stateful, Protocol):
    """Learns what a state is worth; it brings the signal `values`."""

    def update(self, batches: Iterable[TrainBatch], loss: ValueLoss) -> dict[str, float]:
        """One optimizer step a batch, as the actor's."""


class RemoteWorkers(Protocol):
    """Processes that hold the same workers: each is a part of every process, by a name, and its methods are called on
    all of them at once."""

    @property
    def size(self) -> int: ...

    def call(self, part: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What the method gives on each process, which has arguments of its own."""


class RemoteEngines(RemoteWorkers, Protocol):
    """Processes that sample, beside a crew whose ranks learn."""

    def begin(self, part: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """`call` in two: what it gives waits for them."""

    def hand_over(self, sender: str, taker: str) -> list[Any]:
        """Weights from the part `sender` of all ranks, one by one, to the part `taker` of all engines; what these say
        then."""


class WorkerGroup(RemoteWorkers, Protocol):
    """Processes that hold one model together, ranks, and whoever drives them."""

    def call_rank0(self, part: str, method: str, *arguments: Any) -> Any:
        """The same of the first rank alone, beside what is called on all of them: it must not wait for the others."""

    def call_side_channel(self, part: str, method: str, *arguments: Any) -> list[Any]:
        """What the method gives on each rank while they compute on, for whom it is called; ranks must not wait for one
        another in it. Where it fails on one, its error is raised and all of them go on."""

    def close(self) -> None:
        """Ends all processes."""


class PendingRewards(Protocol):
    def result(self, signals: Signals | None = None) -> Rewards:
        """Waits for the rewards. Functions that asked for signals run now; None: nothing was measured."""


class Scorer(Protocol):
    """Rewards. User code runs only behind this seam, while the probes run."""

    def submit(self, rollouts: Rollouts, step: int | None) -> PendingRewards:
        """`step` decides the weights. None is for validation: the weights of the end and a plain sum, so that totals of
        different times compare."""


class Tracker:
    """Where numbers and rollouts go. A tracker inherits from this and leaves out what it does not want to know."""

    needs: Needs = Needs()  # the signals it cannot do without; others it shows where they are there

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step."""
        return None

    def rollouts(self, step: int, experience: Experience) -> None:
        """A step's responses with their rewards, signals and credit."""
        return None

    def validation(
        self,
        step: int,
        values: Mapping[str, float],
        by: Mapping[str, Mapping[str, float]],
        samples: Sequence[ValidationSample],
    ) -> None:
        """`by`: success for each value of the data's columns; `samples`: a few responses for people to read."""
        return None

    def close(self) -> None:
        """The run is over."""
        return None


class Store(Protocol):
    """Checkpoints of a run."""

    def is_best(self, score: float | None) -> bool:
        """Whether no checkpoint that is there has such a score."""

    def save(self, step: int, snapshots: Mapping[str, Snapshot], state: Mapping[str, Any], score: float | None) -> None:
        """Saves each snapshot under the name of its learner. It may return before all is written; a failure is told,
        and no reason to stop."""

    def restore(self, checkpoint: Path, learners: Mapping[str, Stateful]) -> None:
        """Restores each learner from the snapshot of its name."""

    def close(self) -> None:
        """Waits for the last save; raises RunError where that failed."""
