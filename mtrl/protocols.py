"""The interfaces that `training/loop.py` works with; `compose/` chooses the implementations."""

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

Schema = Mapping[str, Any]  # of a tool: {"type": "function", "function": {"name": .., "parameters": {..}, ..}}


@dataclass(frozen=True)
class ImageSettings:
    """Image preprocessing, under the names that checkpoints use.

    An image is resized once, to a multiple of `factor` within the limits; the trainer and every engine then compute the
    same pixels: (value * rescale_factor - mean) / std. The order of the fields is part of `PromptEncoder.fingerprint`.
    """

    patch_size: int  # side of a patch in pixels
    merge_size: int  # patches per side of a token
    temporal_patch_size: int  # frames per patch; a still image is repeated
    min_pixels: int
    max_pixels: int
    rescale_factor: float
    image_mean: tuple[float, ...]  # per channel
    image_std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"min_pixels ({self.min_pixels}) must be at least 1 and not above max_pixels ({self.max_pixels})"
            )

    @property
    def factor(self) -> int:
        """Side of one token in pixels."""
        return self.patch_size * self.merge_size

    def processor_arguments(self) -> dict[str, Any]:
        """Arguments for transformers' image processor in an engine: the trainer's settings and no second resize."""
        # A checkpoint may write 1 for 1.0, which transformers accepts from a file but not as an argument.
        floats = {name: [float(v) for v in getattr(self, name)] for name in ("image_mean", "image_std")}
        return asdict(self) | floats | {"do_resize": False, "do_rescale": True, "do_normalize": True}


@dataclass(frozen=True)
class Clip:
    """The sampled frames of a video. Two frames of one second at 24 fps: Clip(24, 24.0, (0, 12))."""

    total: int  # frames of the video
    fps: float  # frames per second of the video
    frames: tuple[int, ...]  # indices of the sampled frames, ascending

    @property
    def shown_fps(self) -> float:
        """Sampled frames per second."""
        return len(self.frames) / self.total * self.fps


@dataclass(frozen=True)
class VideoSettings:
    """Number and size of the sampled frames: the video keys of the `dataset:` block."""

    video_fps: float = 2.0  # frames per second
    video_max_frames: int = 64
    video_max_pixels: int | None = None  # per frame; None: the family's default


class PromptEncoder(Protocol):
    """Encodes tasks for one model family: template, tokens, resize target, pads, token pools."""

    forbidden_ids: tuple[int, ...]  # never sampled, at -inf in every pass
    stop_ids: tuple[int, ...]  # each ends a response
    pad_id: int
    image_settings: ImageSettings | None  # None for text models

    def fingerprint(self) -> str:
        """Identifies all settings that `length` and `encode` depend on; the key of caches."""

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after resizing, for many families multiples of patch * merge within the pixel limits."""

    def frame_size(self, height: int, width: int) -> tuple[int, int]:
        """The same for the frames of a video, with lower limits."""

    def clip(self, total: int, fps: float) -> Clip:
        """The frames to sample from a video of `total` frames."""

    def length(self, task: Task, sizes: Sequence[tuple[int, int]]) -> int:
        """Prompt tokens with expanded pads, from each medium's (height, width) before `target_size`. The videos of the
        task have their clip."""

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        """`media` are decoded RGB arrays at their target size, one per medium of the task: [H, W, 3] for an image,
        [F, H, W, 3] for a video."""

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """The opaque multimodal dict for a forward pass, from the prompt's media or another view of them; pixels are
        computed on the device."""

    def largest_image(self, tokens: int) -> tuple[int, int]:
        """(height, width) of an image at its target size with so many tokens, or the most that an image can have."""

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The text of a response, without special tokens."""

    def with_tools(self, tools: Mapping[str, Sequence[Schema]]) -> PromptEncoder:
        """A copy whose prompts describe the tools of the environment that a row's column `environment` names. The name
        "" has those of every row."""

    def check_messages(self) -> None:
        """Raise a ValueError if the chat template cannot show what an environment says in the middle of a response."""

    def encode_message(self, content: Sequence[str | np.ndarray], after: int, id: str) -> Prompt:
        """What a response reads between its last token `after`, one of the stop tokens, and its next one. `content` are
        texts and images, uint8 RGB [H, W, 3]. Special tokens that a text spells out are text. Raises a ValueError for
        an image that the model cannot see, such as a very long one."""


class TaskSource(Protocol):
    """Prompts in a seeded order."""

    def take(self, count: int) -> list[Prompt]:
        """The next prompts, across epochs."""

    def get(self, ids: Sequence[str]) -> list[Prompt]:
        """The prompts of these tasks, for replay."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the data: rows that could not be read."""

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Generator(Protocol):
    """Samples responses. `load` resets its caches; sampling with another version than it holds raises. Call `generate`
    and `load` inside `resident()`; the weights survive a sleep (`rollout/lifecycle.py`)."""

    def resident(self) -> AbstractContextManager[None]:
        """Wake the engine; when the outermost block ends, it sleeps and releases its device memory to the trainer."""

    colocated: bool  # whether it shares its devices with the workers that learn

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts: ...

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Callable[[], Rollouts]:
        """Starts generation; the returned callable waits for the rollouts. Only dedicated engines sample meanwhile."""

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Allocate the memory that `generate` needs if no response stops early, until the engine sleeps."""

    def load(self, weights: Weights) -> None:
        """Load a version of the weights; unknown or missing weights are an error."""

    def close(self) -> None:
        """End everything that the engine started."""


class Prober(Protocol):
    """Measures signals of sampled tokens: the actor (with its reference) and the critic."""

    def probe(self, rollouts: Rollouts, needs: Needs, step: int | None) -> Signals:
        """The fields of `needs` that this prober measures; `step` keys the perturbation. Until the step's end (`update`
        or `publish` of the actor) probers keep what its passes have in common. None: outside of a step, as in
        validation; nothing is kept."""


class Snapshot(Protocol):
    """The state of a learner. It reads the live weights: write it before the next update, or `detached` it first."""

    @property
    def nbytes(self) -> int: ...

    @property
    def copied(self) -> bool:
        """Whether it is a copy already, which later updates do not change."""

    def detached(self) -> Snapshot:
        """A copy in CPU memory."""

    def write(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint and the files that `restore` needs."""


class Stateful(Protocol):
    """Anything with state: the actor, a critic, the replay buffer. A checkpoint holds a snapshot of each by name."""

    def snapshot(self) -> Snapshot: ...

    def restore(self, directory: Path) -> None:
        """Restore the state whose snapshot was written there."""


class Synced(Stateful, Protocol):
    """A reference that is synced with the policy now and then; its weights are part of the checkpoint."""

    def sync(self) -> None:
        """Copy the current weights of the policy."""


class Actor(Prober, Stateful, Protocol):
    """The policy. It does not know the algorithm: it sees token streams and adds gradients."""

    def update(self, batches: Iterable[TrainBatch], loss: Loss) -> dict[str, float]:
        """One optimizer step per batch; metrics are means over all tokens of the batches."""

    def publish(self) -> Weights:
        """The weights at the end of a step."""


class Critic(Prober, Stateful, Protocol):
    """Learns the value of states; measures the signal `values`."""

    def update(self, batches: Iterable[TrainBatch], loss: ValueLoss) -> dict[str, float]:
        """One optimizer step per batch, as the actor's."""


class RemoteWorkers(Protocol):
    """Processes that hold the same workers, each under the name of its role."""

    @property
    def size(self) -> int: ...

    def call(self, role: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of one role on all processes at once, with one argument tuple each; returns their results."""


class RemoteEngines(RemoteWorkers, Protocol):
    """Dedicated engines: processes that sample while the ranks of a worker group learn."""

    def start(self, role: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Starts a `call`; the returned callable waits for its results."""

    def transfer_weights(self, sender: str, receiver: str) -> list[Any]:
        """Sends the weights one by one from the role `sender` of the ranks to `load` of the role `receiver` of the
        engines; returns the engines' results."""


class WorkerGroup(RemoteWorkers, Protocol):
    """Ranks: processes that hold one model together."""

    def call_rank0(self, role: str, method: str, *arguments: Any) -> Any:
        """Calls the method on the first rank alone, possibly during another call; it must not wait for the others."""

    def call_side_channel(self, role: str, method: str, *arguments: Any) -> list[Any]:
        """Calls the method on each rank while they compute; ranks must not wait for one another in it. If it fails on
        one, its error is raised and all of them continue."""

    def close(self) -> None:
        """Ends all processes."""


class PendingRewards(Protocol):
    def result(self, signals: Signals | None = None) -> Rewards:
        """Wait for the rewards. Functions that read signals run now; None: no signals were measured."""


class Scorer(Protocol):
    """Computes rewards. User code runs only here, while the probes run."""

    def submit(self, rollouts: Rollouts, step: int | None) -> PendingRewards:
        """`step` decides the weights. None is for validation: final weights and a plain sum, so that totals of
        different steps are comparable."""


class Tracker:
    """Receives metrics and rollouts. Subclasses override the methods they need."""

    needs: Needs = Needs()  # signals it requires; others it may show if they were measured

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a step."""

    def rollouts(self, step: int, experience: Experience) -> None:
        """A step's responses with their rewards, signals and credit."""

    def validation(
        self,
        step: int,
        values: Mapping[str, float],
        by: Mapping[str, Mapping[str, float]],
        samples: Sequence[ValidationSample],
    ) -> None:
        """`by`: success for each value of the data's columns; `samples`: a few responses to read."""

    def close(self) -> None:
        """The run is over."""


class Store(Protocol):
    """Checkpoints of a run."""

    def is_best(self, score: float | None) -> bool:
        """Whether the score beats every checkpoint so far."""

    def save(self, step: int, snapshots: Mapping[str, Snapshot], state: Mapping[str, Any], score: float | None) -> None:
        """Save each snapshot under its name. It may return before everything is written; a failure is logged and does
        not stop the run."""

    def restore(self, checkpoint: Path, learners: Mapping[str, Stateful]) -> None:
        """Restore each learner from its snapshot."""

    def close(self) -> None:
        """Wait for the last save; raises RunError if it failed."""
