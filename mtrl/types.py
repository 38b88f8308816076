"""The records that travel through a step.

Read this after `training/loop.py`. One step turns `Task`s into `Prompt`s, samples `Rollouts`, scores them (`Rewards`),
probes them (`Signals`), decides what each token deserves (`Credit`) and hands the actor `TrainBatch`es.

Shapes: P prompts, N responses (rows, group-major), T tokens of the longest response, L tokens of a prompt. Responses
are right-padded `[N, T]` everywhere outside `models/` and `rollout/`. `group[i]` is the prompt of row i; groups may be
uneven (after filtering or replay), so nothing reshapes to `[P, G]`. All tensors live on the CPU: float32, int64, bool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mtrl.utils.attention_map import AttentionMap
from mtrl.utils.record_rows import as_index, join_rows, take_rows

NO_POOL, TEXT_POOL, VISION_POOL = 0, 1, 2  # of `Prompt.pool`: which prompt tokens attention counts, and as what

SEGMENTS = ("early", "middle", "late", "all", "weight")
"""Layer segments of `Signals.mass`: thirds of the layers, all (or the last k), and those that token weights read."""

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Medium:
    """An image or a video as the dataset names it, not decoded yet: Medium("image", "cats/1.png")."""

    kind: Literal["image", "video"]
    source: Any  # a path, bytes, base64 text or a PIL image
    clip: Any = field(default=None, repr=False)  # the `protocols.Clip` of a video, once it is known what it holds


@dataclass(frozen=True)
class Task:
    """One row of a dataset: what is asked, and all that a reward may want to know.

    >>> task = Task("3f9a:0", "train.jsonl, row 1",
    ...             ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]},),
    ...             media=(Medium("image", "cats/1.png"),), answer="B", columns={"level": 2})
    >>> task.visual
    True
    """

    id: str  # "source fingerprint:row", stable for ever
    origin: str  # where a person finds the row, for messages
    messages: tuple[dict[str, Any], ...]  # a chat; media stand as {"type": "image"} in the order of `media`
    media: tuple[Medium, ...] = ()
    answer: Any = None
    columns: Mapping[str, Any] | None = None  # every other column of the row
    chat: bool = False  # the row asked with messages, not with a text

    @property
    def visual(self) -> bool:
        return bool(self.media)

    @property
    def text(self) -> str:
        """The messages for people: media as <image> and <video>, without a template's marks."""
        contents = [message.get("content") or "" for message in self.messages]
        said = lambda parts: "".join(p["text"] if p["type"] == "text" else f"<{p['type']}>" for p in parts)  # noqa: E731
        return "\n".join(c if isinstance(c, str) else said(c) for c in contents)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A task as a model family sees it. A 56 x 56 image of 14-pixel patches merged 2 x 2 takes 4 tokens:

    ids         [.., <vision_start>, <pad>, <pad>, <pad>, <pad>, <vision_end>, Which, colour, ..]
    engine_ids  [.., <vision_start>, <pad>,                      <vision_end>, Which, colour, ..]
    pool        [..,              0,     2,     2,     2,     2,            0,     1,      1, ..]
    """

    task: Task
    media: tuple[np.ndarray, ...]  # uint8 RGB, [H, W, 3] an image, [F, H, W, 3] a clip, at a multiple of patch * merge
    ids: Tensor  # [L], pads expanded
    engine_ids: Tensor  # [L'], one pad a medium, as inference servers want it
    token_pool: Tensor  # [L], NO_POOL, TEXT_POOL or VISION_POOL


@dataclass(frozen=True)
class Sampling:
    """How to sample. Tokens are keyed by (seed, step, task id, sample), never by the batch around them: the same key
    gives the same tokens in the same engine. Greedy responses of a prompt are all equal."""

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    max_new_tokens: int = 512
    seed: int = 1
    step: int = 0
    version: int = 0  # version of the weights that the caller expects; a generator that holds others refuses
    times_sampled: Mapping[str, int] = field(
        default_factory=dict, hash=False
    )  # how often this step has asked a task before

    @property
    def greedy(self) -> Sampling:
        """One response a prompt, of the likeliest tokens."""
        return replace(self, n=1, temperature=0.0, top_p=1.0, top_k=-1)

    @property
    def cut(self) -> bool:
        """Whether the tail of the distribution is never sampled."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Sampled responses. Two prompts, two responses each, the longest of 3 tokens (the end token counts):

    group      [0, 0, 1, 1]
    tokens     [[7, 9, 2], [7, 2, 0], [8, 8, 2], [5, 2, 0]]
    mask       [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]]
    behaviour  log-prob of each token under the distribution really sampled from
    """

    prompts: tuple[Prompt, ...]  # [P]
    group: Tensor  # [N]
    tokens: Tensor  # [N, T]
    mask: Tensor  # [N, T]
    rollout_logprobs: Tensor  # [N, T]
    text: tuple[str, ...]  # [N]
    finish_reason: tuple[Finish, ...]  # [N]
    version: Tensor  # [N], version of the weights that sampled the row

    def __len__(self) -> int:
        return len(self.group)

    @property
    def visual(self) -> Tensor:
        """[N] bool: rows whose prompt has an image or a video."""
        by_prompt = torch.tensor([prompt.task.visual for prompt in self.prompts], dtype=torch.bool)
        return by_prompt[self.group]

    @property
    def truncated(self) -> Tensor:
        """[N] bool: rows cut at the length limit."""
        return torch.tensor([reason == "length" for reason in self.finish_reason], dtype=torch.bool)

    def rows(self, index: Tensor) -> Rollouts:
        """These rows, with only the prompts they use, renumbered."""
        index = as_index(index)
        used, group = torch.unique(self.group[index], return_inverse=True)
        picked = take_rows(replace(self, prompts=()), index)
        return replace(picked, prompts=tuple(self.prompts[p] for p in used.tolist()), group=group)

    @staticmethod
    def join(parts: Sequence[Rollouts]) -> Rollouts:
        """All rows, the prompts of each part after those of the part before; shorter rows are padded."""
        counts = torch.tensor([0, *(len(part.prompts) for part in parts[:-1])])
        firsts = counts.cumsum(0).tolist()
        return join_rows([replace(part, group=part.group + first) for part, first in zip(parts, firsts, strict=True)])


@dataclass(frozen=True, eq=False)
class Rewards:
    """Scores. NaN in `parts` means "not applicable here"; `total` is always finite.

    total [1.5, 0.5], parts {"accuracy": [1, 0], "format": [0.5, 0.5]}, failed [False, False]
    """

    total: Tensor  # [N]
    parts: Mapping[str, Tensor]  # name -> [N]
    failed: Tensor  # [N], the reward function raised or ran out of time
    baseline: Tensor | None = None  # [N], the reward of the greedy response to the same prompt (ReMax)
    token_weights: Tensor | None = None  # [N, T], supplied by a reward function


TWO_VIEWS = {"views": 2}  # metadata of a signal that compares the original image with the perturbed one


@dataclass(frozen=True, eq=False)
class Signals:
    """What the probes measured, per token of a response. Fields nobody asked for stay None.

    >>> a = Signals(old=torch.zeros(1, 2)); b = Signals(entropy=torch.ones(1, 2))
    >>> a.merge(b).entropy
    tensor([[1., 1.]])
    """

    old_logprobs: Tensor | None = None  # [N, T] log-prob on the original image, before this step's updates
    support: Tensor | None = None  # [N, T] log of the probability of what top-p and top-k leave, where they cut
    perturbed_logprobs: Tensor | None = field(
        default=None, metadata=TWO_VIEWS
    )  # [N, T] log-prob on the perturbed image
    dependency: Tensor | None = field(default=None, metadata=TWO_VIEWS)  # [N, T] S of section 1.2
    entropy: Tensor | None = None  # [N, T] entropy of the policy at that token, in nats
    entropy_change: Tensor | None = field(default=None, metadata=TWO_VIEWS)  # [N, T] perturbed minus `entropy`
    similarity: Tensor | None = None  # [N, T] cosine of the state that predicts a token to its image's; 0 without one
    ref_logprobs: Tensor | None = None  # [N, T] log-prob under the reference
    divergence: Tensor | None = None  # [N, T] KL to the reference over the whole vocabulary (`full`)
    values: Tensor | None = None  # [N, T] returns that a critic expects
    attention_mass: Tensor | None = None  # [N, T, len(SEGMENTS), 2] attention on the text and the vision pool
    prompt_attention_mass: Tensor | None = None  # [N, len(SEGMENTS), 2] from the prompt's tokens after its images
    attention_maps: tuple[AttentionMap | None, ...] | None = None  # [N] the vision mass of `all`, patch by patch

    def merge(self, other: Signals) -> Signals:
        """Both probes' fields in one record; a field that both bring is a mistake of the caller."""
        brought = {f.name: getattr(other, f.name) for f in fields(other) if getattr(other, f.name) is not None}
        twice = [name for name in brought if getattr(self, name) is not None]
        assert not twice, f"two probes brought {', '.join(twice)}"
        return replace(self, **brought)


VIEWS = {f.name: f.metadata.get("views", 1) for f in fields(Signals)}  # how many views of the image each signal takes


@dataclass(frozen=True, init=False)
class Needs:
    """The signals that somebody reads, by their names in `Signals`. What nobody needs is not computed.

    >>> needs = Needs("old_logprobs") | Needs("dependency")
    >>> "dependency" in needs, needs.views, bool(needs.without("old_logprobs", "dependency"))
    (True, 2, False)
    """

    names: frozenset[str]

    def __init__(self, *names: str) -> None:
        if unknown := sorted(set(names) - VIEWS.keys()):
            raise ValueError(f"there is no signal {', '.join(unknown)}; there are {', '.join(VIEWS)}")
        object.__setattr__(self, "names", frozenset(names))

    def __or__(self, other: Needs) -> Needs:
        return Needs(*self.names, *other.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __bool__(self) -> bool:
        return bool(self.names)

    def without(self, *names: str) -> Needs:
        return Needs(*self.names.difference(names))

    @property
    def views(self) -> int:
        """How many views of the images it takes to measure these signals: the original, or the perturbed one too."""
        return max((VIEWS[name] for name in self.names), default=1)


@dataclass(frozen=True, eq=False)
class Credit:
    """What each token deserves. One response of two tokens, the second one kept, a trajectory factor of 1.2:

    advantage [[1.2, 1.2]]   select [[False, True]]   measure [[1., 1.]]   scale [1.2]
    """

    advantage: Tensor  # [N, T] A * w * v
    keep_mask: Tensor  # [N, T] tokens whose policy gradient counts
    token_weight: Tensor  # [N, T] what a token counts for in sums and denominators: the mask, or mask * v
    response_weight: Tensor  # [N] the weight w of the response
    weights: Tensor | None = None  # [N, T] the weights v of its tokens, where there are any


@dataclass(frozen=True, eq=False)
class Experience:
    """Responses and all that is known of them. `gather` makes it, advantages and credit join it, trackers read it."""

    rollouts: Rollouts
    rewards: Rewards
    signals: Signals
    advantage: Tensor | None = None  # [N, T] A, before credit
    returns: Tensor | None = None  # [N, T], where a critic learns
    credit: Credit | None = None

    def __len__(self) -> int:
        return len(self.rollouts)

    def rows(self, index: Tensor) -> Experience:
        return take_rows(self, index)

    @staticmethod
    def join(parts: Sequence[Experience]) -> Experience:
        """All rows in one; what a part lacks (a signal of its own step, say), the whole lacks too."""
        return join_rows(parts)


@dataclass(frozen=True, eq=False)
class LossWeights:
    """A weight for every token and loss term, with mask, loss type and global denominator folded in.

    A term's loss is sum(weight * term): micro-batches and ranks only add. Two responses of 1 and 3 tokens under
    `grpo`: policy [[1/2, 0, 0], [1/6, 1/6, 1/6]], token mean [[1/4, 0, 0], [1/4, 1/4, 1/4]].
    """

    policy: Tensor  # [N, T] filtered by Credit.select
    divergence: Tensor  # [N, T] the same aggregation, unfiltered
    token: Tensor  # [N, T] the plain token mean: entropy penalty and metrics


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """One optimizer step, or a slice of its rows. The actor reads streams and never asks which algorithm made them.

    Without `old` and `correction` the policy itself is the old one: fresh rollouts, a single optimizer step on them."""

    rollouts: Rollouts
    old_logprobs: Tensor | None  # [N, T]
    advantage: Tensor  # [N, T]
    correction: Tensor | None  # [N, T] factor for the mismatch between sampler and trainer
    weights: LossWeights
    ref_logprobs: Tensor | None = None  # [N, T]
    returns: Tensor | None = None  # [N, T] what a critic is to expect
    values: Tensor | None = None  # [N, T] what it expected before this step's updates

    def __len__(self) -> int:
        return len(self.rollouts)

    def rows(self, index: Tensor) -> TrainBatch:
        return take_rows(self, index)


@dataclass(frozen=True)
class ValidationSample:
    """A validation response, written out for people."""

    id: str  # id of the task
    prompt: str  # its text, without media
    response: str
    answer: Any
    reward: float
    rewards: Mapping[str, float] | None = None  # the parts of the reward that apply


@dataclass(frozen=True, eq=False)
class Weights:
    """A handle on a version of the policy, for a generator: every weight by its Hugging Face name (tied ones under each
    of theirs), adapters merged. Names are free, tensors may be made when read. It holds until the next update."""

    version: int
    tensors: Mapping[str, Tensor]
