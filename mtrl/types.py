"""The records that travel through a step.

Read this after `training/loop.py`. One step turns `Task`s into `Prompt`s, samples `Rollouts`, scores them (`Rewards`),
probes them (`Signals`), assigns `Credit` to each token and passes `TrainBatch`es to the actor.

Shapes: P prompts, N responses (rows, group-major), T tokens of the longest response, L tokens of a prompt. Responses
are right-padded `[N, T]` everywhere outside `models/` and `rollout/`. `group[i]` is the prompt of row i; groups may be
uneven (after filtering or replay), so nothing reshapes to `[P, G]`. All tensors live on the CPU: float32, int64, bool;
experts are small integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from mtrl.utils.record_rows import as_index, join_rows, take_rows

NO_POOL, TEXT_POOL, VISION_POOL = 0, 1, 2  # values of `Prompt.token_pool`, for attention metrics

SEGMENTS = ("early", "middle", "late", "all", "weight")
"""Layer segments of `Signals.attention_mass`: thirds of the layers, all (or the last k), those of token weights."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Medium:
    """An image or a video of the dataset, not decoded yet: Medium("image", "cats/1.png")."""

    kind: Literal["image", "video"]
    source: Any  # a path, bytes, base64 text or a PIL image
    clip: Any = field(default=None, repr=False)  # the `protocols.Clip` of a video, once it was opened


@dataclass(frozen=True)
class Task:
    """One row of a dataset: the question, and everything that a reward may read.

    >>> task = Task("3f9a:0", "train.jsonl, row 1",
    ...             ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]},),
    ...             media=(Medium("image", "cats/1.png"),), answer="B", columns={"level": 2})
    >>> task.visual
    True
    """

    id: str  # "source fingerprint:row", stable
    origin: str  # file and row, for messages
    messages: tuple[dict[str, Any], ...]  # a chat; media are {"type": "image"} in the order of `media`
    media: tuple[Medium, ...] = ()
    answer: Any = None
    columns: Mapping[str, Any] | None = None  # every other column of the row
    chat: bool = False  # the row has messages instead of a text

    @property
    def visual(self) -> bool:
        return bool(self.media)

    @property
    def text(self) -> str:
        """The messages as readable text: media as <image> and <video>, without a chat template."""
        return "\n".join(content_text(message.get("content") or "") for message in self.messages)


def content_text(content: Any) -> str:
    """The content of a message as readable text."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A task encoded for a model family. A 56 x 56 image of 14-pixel patches merged 2 x 2 takes 4 tokens:

    ids         [.., <vision_start>, <pad>, <pad>, <pad>, <pad>, <vision_end>, Which, colour, ..]
    engine_ids  [.., <vision_start>, <pad>,                      <vision_end>, Which, colour, ..]
    token_pool  [..,              0,     2,     2,     2,     2,            0,     1,      1, ..]
    """

    task: Task
    media: tuple[np.ndarray, ...]  # uint8 RGB, [H, W, 3] an image, [F, H, W, 3] a clip, at a multiple of patch * merge
    ids: Tensor  # [L], pads expanded
    engine_ids: Tensor  # [L'], one pad per medium, as inference engines expect it
    token_pool: Tensor  # [L], NO_POOL, TEXT_POOL or VISION_POOL


@dataclass(frozen=True, eq=False)
class EnvironmentTurn:
    """A message of the environment in the middle of a response, and what it answers: EnvironmentTurn(3, message,
    ("zoom",)) comes after the response's third own token."""

    after: int  # tokens of the response itself that come before it, at least 1
    message: Prompt  # with all that the chat template writes up to the response's next token
    tools: tuple[str, ...] = ()  # that were called
    errors: int = 0  # calls that gave an error
    waited: float = 0.0  # seconds until all results were there


@dataclass(frozen=True, eq=False)
class Observations:
    """What the environment said during one response. The model reads it and did not write it: it is context like the
    prompt, in no stream of tokens, so that nothing learns from it and no mean counts it (`models/turns.py`).

    A response of 5 own tokens with a message after the third is read as own[:3], message, own[3:].
    """

    id: str  # of the response: unlike that of any task
    turns: tuple[EnvironmentTurn, ...]  # none if the response called no tool


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Tokens are keyed by (seed, step, task id, sample), never by the batch: the same key gives
    the same tokens in the same engine. All greedy responses to a prompt are equal."""

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    max_new_tokens: int = 512
    seed: int = 1
    step: int = 0
    version: int = 0  # expected version of the weights; a generator with another version raises
    times_sampled: Mapping[str, int] = field(default_factory=dict, hash=False)  # per task id, earlier in this step
    room: Mapping[str, int] = field(default_factory=dict, hash=False)  # per task id, if fewer tokens are read

    @property
    def greedy(self) -> Sampling:
        """One greedy response per prompt."""
        return replace(self, n=1, temperature=0.0, top_p=1.0, top_k=-1)

    @property
    def cut(self) -> bool:
        """Whether top-p or top-k cuts the distribution."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Sampled responses. Two prompts, two responses each, the longest of 3 tokens (the end token counts):

    group      [0, 0, 1, 1]
    tokens     [[7, 9, 2], [7, 2, 0], [8, 8, 2], [5, 2, 0]]
    mask       [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]]
    rollout_logprobs  log-prob of each token under the distribution that was sampled from
    """

    prompts: tuple[Prompt, ...]  # [P]
    group: Tensor  # [N]
    tokens: Tensor  # [N, T]
    mask: Tensor  # [N, T]
    rollout_logprobs: Tensor  # [N, T]
    text: tuple[str, ...]  # [N]
    finish_reason: tuple[FinishReason, ...]  # [N]
    version: Tensor  # [N], version of the weights that sampled the row
    routed_experts: Tensor | None = None  # [N, T, layers, k] experts of the state that each token was sampled from
    noised: Tensor | None = None  # [N] bool: sampled on a noised image, not on that of `prompts`; None: no row is
    observations: tuple[Observations | None, ...] | None = None  # [N] of several turns; None: no environment

    def __len__(self) -> int:
        return len(self.group)

    @property
    def visual(self) -> Tensor:
        """[N] bool: rows whose prompt has an image or a video, or that were shown one since."""
        by_prompt = torch.tensor([prompt.task.visual for prompt in self.prompts], dtype=torch.bool)
        shown = (any(turn.message.media for turn in each.turns) if each else False for each in self.observed)
        return by_prompt[self.group] | torch.tensor([*shown], dtype=torch.bool)

    @property
    def observed(self) -> Sequence[Observations | None]:
        """[N] `observations`, also where there is no environment."""
        return self.observations or len(self) * (None,)

    @property
    def read_tokens(self) -> Tensor:
        """[N] tokens that a pass reads of each row, those of its observations included."""
        read = [sum(len(turn.message.ids) for turn in each.turns) if each else 0 for each in self.observed]
        return self.mask.sum(1) + torch.tensor(read, dtype=torch.long)

    @property
    def truncated(self) -> Tensor:
        """[N] bool: rows cut at the length limit."""
        return torch.tensor([reason == "length" for reason in self.finish_reason], dtype=torch.bool)

    @property
    def comparable(self) -> Tensor:
        """[N, T] bool: the valid tokens that sampler and trainer see on the same image. The gap between the log-probs
        of other tokens says nothing about the sampler and corrects nothing."""
        return self.mask if self.noised is None else self.mask & ~self.noised[:, None]

    def rows(self, index: Tensor) -> Rollouts:
        """These rows, with only the prompts they use, renumbered."""
        index = as_index(index)
        used, group = torch.unique(self.group[index], return_inverse=True)
        picked = take_rows(replace(self, prompts=()), index)
        return replace(picked, prompts=tuple(self.prompts[p] for p in used.tolist()), group=group)

    @staticmethod
    def join(parts: Sequence[Rollouts]) -> Rollouts:
        """Concatenate the rows and the prompts; shorter rows are padded."""
        counts = torch.tensor([0, *(len(part.prompts) for part in parts[:-1])])
        firsts = counts.cumsum(0).tolist()
        return join_rows([replace(part, group=part.group + first) for part, first in zip(parts, firsts, strict=True)])


@dataclass(frozen=True, eq=False)
class Rewards:
    """Scores. NaN in `parts` means not applicable; `total` is always finite.

    total [1.5, 0.5], parts {"accuracy": [1, 0], "format": [0.5, 0.5]}, failed [False, False]
    """

    total: Tensor  # [N]
    parts: Mapping[str, Tensor]  # name -> [N]
    failed: Tensor  # [N], the reward function raised or timed out
    baseline: Tensor | None = None  # [N], reward of the greedy response to the same prompt (ReMax)
    token_weights: Tensor | None = None  # [N, T], returned by a reward function


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The share of each response token's attention that every image token of the prompt gets, stored as
    `scale * (level / 255) ** 2`. The shares of a token sum to its vision mass."""

    levels: Tensor  # [tokens, image tokens] uint8
    scale: Tensor  # [tokens]

    @property
    def shares(self) -> Tensor:
        return self.scale[:, None] * (self.levels / 255).square()


TWO_VIEWS = {"views": 2}  # metadata of signals that compare the original with the perturbed image
PERTURBED = "perturbed"  # the name of that view
COUNTERFACTUAL = "counterfactual"  # a kind of views that depend on the response: none shares its prompt with another
# Signals of any view: "kl@none" is the one of `none`.
OF_A_VIEW = ("logprobs", "entropy", "kl", "reverse_kl", "jsd", "jsd_top100")


@dataclass(frozen=True, eq=False)
class Signals:
    """Measurements of the probes, per token of a response. Fields that are not needed stay None; `extra` has signals of
    users' classes, and those of other views (`OF_A_VIEW`).

    >>> a = Signals(old_logprobs=torch.zeros(1, 2)); b = Signals(entropy=torch.ones(1, 2))
    >>> a.merge(b).entropy
    tensor([[1., 1.]])
    """

    old_logprobs: Tensor | None = None  # [N, T] log-prob on the original image, before this step's updates
    support: Tensor | None = None  # [N, T] log-probability of the support that top-p and top-k leave
    routing_mismatch: Tensor | None = None  # [N, T] share of `Rollouts.routed_experts` that the policy did not choose
    perturbed_logprobs: Tensor | None = field(default=None, metadata=TWO_VIEWS)  # [N, T] on the perturbed image
    dependency: Tensor | None = field(default=None, metadata=TWO_VIEWS)  # [N, T] S of section 1.2
    entropy: Tensor | None = None  # [N, T] entropy of the policy, in nats
    entropy_change: Tensor | None = field(default=None, metadata=TWO_VIEWS)  # [N, T] perturbed minus `entropy`
    similarity: Tensor | None = None  # [N, T] cosine of the state before the token to its image's; 0 without an image
    token_similarity: Tensor | None = None  # [N, T] the same of the state at the token
    layer_similarity: Tensor | None = None  # [N, T] mean cosine to image tokens over all layers; 0 without an image
    image_share: Tensor | None = None  # [N, T] of the last layer's attention on the image; 0 without an image
    text_share: Tensor | None = None  # [N, T] on all tokens after it
    image_shift: Tensor | None = None  # [N, T] distance of its attention within the image to that of the token before
    text_shift: Tensor | None = None  # [N, T] within the text after it
    ref_logprobs: Tensor | None = None  # [N, T] log-prob under the reference
    divergence: Tensor | None = None  # [N, T] KL to the reference over the whole vocabulary (`full`)
    values: Tensor | None = None  # [N, T] values of the critic
    attention_mass: Tensor | None = None  # [N, T, len(SEGMENTS), 2] attention on the text and the vision pool
    prompt_attention_mass: Tensor | None = None  # [N, len(SEGMENTS), 2] of the prompt tokens after the images
    attention_maps: tuple[AttentionMap | None, ...] | None = None  # [N] vision mass of `all`, per patch
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # [N, T, *shape] by name

    def merge(self, other: Signals) -> Signals:
        """The signals of both records; none may be in both."""
        new = {name: value for name in VIEWS if (value := getattr(other, name)) is not None}
        twice = [name for name in new if getattr(self, name) is not None] + [*self.extra.keys() & other.extra.keys()]
        assert not twice, f"two probes measured {', '.join(twice)}"
        return replace(self, **new, extra={**self.extra, **other.extra})

    def by_name(self, name: str) -> Tensor | None:
        """A signal of any kind; None if it was not measured."""
        return getattr(self, name) if name in VIEWS else self.extra.get(name)

    @staticmethod
    def join(parts: Sequence[Signals]) -> Signals:
        """Concatenate the rows. A signal that one part lacks is missing in the result."""
        shared = set.intersection(*(set(part.extra) for part in parts))
        extras = [{name: part.extra[name] for name in part.extra if name in shared} for part in parts]
        return join_rows([replace(part, extra=extra) for part, extra in zip(parts, extras, strict=True)])


VIEWS = {f.name: f.metadata.get("views", 1) for f in fields(Signals) if f.name != "extra"}  # views of the image each


@dataclass(frozen=True, eq=False)
class TokenStates:
    """M response tokens as one view of a probe pass sees them, without gradients, on the device of the model."""

    tokens: Tensor  # [M] ids
    hidden: Tensor  # [M, H] the last hidden state before each token, from which it is predicted
    map_log_probs: Callable[[Callable[[Tensor, Tensor], Tensor]], Tensor]
    """Calls a function with the log-probs [C, V] and the ids [C] of a chunk of tokens at a time, since those of all
    tokens need much memory, and returns its results [C, ..] for all: [M, ..]."""


class Signal(ABC):
    """A signal of a user's class, which is a frozen dataclass; `optimization.signals` names it. It is measured in
    every step and is in `Signals.extra[name]`."""

    name: ClassVar[str]
    shape: ClassVar[tuple[int, ...]] = ()  # of the numbers of one token; (): a single number
    views: ClassVar[Literal[1, 2]] = 1  # 2: it compares the original image with another view of it
    view: ClassVar[str] = PERTURBED  # which one
    model: ClassVar[Literal["policy", "reference"]] = "policy"  # whose pass measures it

    @abstractmethod
    def measure(self, original: TokenStates, perturbed: TokenStates | None) -> Tensor:
        """[M, *shape] for the M tokens of `original`; `perturbed` are the same tokens under the other view."""


@dataclass(frozen=True, init=False)
class Needs:
    """The signals that are read, by their names in `Signals`. Only these are computed. `custom` are the users' classes
    that measure those in `Signals.extra`.

        >>> needs = Needs("old_logprobs") | Needs("dependency")
        >>> "dependency" in needs, needs.views, bool(needs.without("old_logprobs", "dependency"))
        (True, 2, False)
    """

    names: frozenset[str]
    custom: frozenset[Signal]

    def __init__(self, *names: str, custom: Iterable[Signal] = ()) -> None:
        object.__setattr__(self, "custom", frozenset(custom))
        object.__setattr__(self, "names", frozenset(names) | {signal.name for signal in self.custom})

    def __or__(self, other: Needs) -> Needs:
        return Needs(*self.names, *other.names, custom=self.custom | other.custom)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __bool__(self) -> bool:
        return bool(self.names)

    def without(self, *names: str) -> Needs:
        custom = (signal for signal in self.custom if signal.name not in names)
        return Needs(*self.names.difference(names), custom=custom)

    @property
    def views(self) -> int:
        """Views of the images that these signals need, the original one among them."""
        return 1 + len(self.other_views)

    @property
    def other_views(self) -> tuple[str, ...]:
        """The views that are compared with the original one, in the order in which a pass reads them.

        >>> Needs("dependency", "kl@none", "jsd@none", "old_logprobs").other_views
        ('none', 'perturbed')
        """
        named = {view for _, at, view in (name.partition("@") for name in self.names) if at}
        named |= {signal.view for signal in self.custom if signal.views == 2}
        return tuple(sorted(named | {PERTURBED for name in self.names if VIEWS.get(name, 1) == 2}))

    @property
    def unshared_views(self) -> tuple[str, ...]:
        """Those of `other_views` under which every response has its own copy of the prompt."""
        return tuple(view for view in self.other_views if view.partition("(")[0] == COUNTERFACTUAL)

    def of_view(self, view: str) -> tuple[str, ...]:
        """Those of `OF_A_VIEW` that are needed of this view."""
        return tuple(each for each in OF_A_VIEW if f"{each}@{view}" in self.names)

    @property
    def unknown(self) -> list[str]:
        """Names that are no field of `Signals` and that no class of a user measures."""
        of_views = {f"{each}@{view}" for view in self.other_views for each in OF_A_VIEW}
        return sorted(self.names - VIEWS.keys() - {signal.name for signal in self.custom} - of_views)

    @property
    def of_reference(self) -> Needs:
        """Those that a pass of the reference measures."""
        custom = [signal.name for signal in self.custom if signal.model == "reference"]
        return self.without(*self.names.difference(("ref_logprobs", "divergence"), custom))

    @property
    def of_policy(self) -> Needs:
        return self.without("values", *self.of_reference.names)


@dataclass(frozen=True, eq=False)
class Credit:
    """The credit of each token. One response of two tokens, the second one kept, a trajectory weight of 1.2:

    advantage [[1.2, 1.2]]   keep_mask [[False, True]]   token_weight [[1., 1.]]   response_weight [1.2]
    """

    advantage: Tensor  # [N, T] A * w * v
    keep_mask: Tensor  # [N, T] tokens that the filters keep
    token_weight: Tensor  # [N, T] weight in sums and denominators: the mask, or mask * v
    response_weight: Tensor  # [N] w
    weights: Tensor | None = None  # [N, T] v, if any rule weights tokens
    silenced: Tensor | None = None  # [N] responses without a policy gradient, if any: truncated ones, or in a warm-up

    @property
    def trained(self) -> Tensor:
        """[N, T] bool: the tokens with a policy gradient, which a kept token without an advantage or weight lacks."""
        trained = self.keep_mask & (self.advantage != 0) & (self.token_weight != 0)
        return trained if self.silenced is None else trained & ~self.silenced[:, None]


@dataclass(frozen=True, eq=False)
class Experience:
    """Responses with rewards and signals, later with advantages and credit."""

    rollouts: Rollouts
    rewards: Rewards
    signals: Signals
    advantage: Tensor | None = None  # [N, T] A, before credit
    returns: Tensor | None = None  # [N, T], with a critic
    credit: Credit | None = None

    def __len__(self) -> int:
        return len(self.rollouts)

    def rows(self, index: Tensor) -> Experience:
        return take_rows(self, index)


@dataclass(frozen=True, eq=False)
class LossWeights:
    """One weight per token and loss term, with mask, loss type and global denominator folded in.

    A term's loss is sum(weight * term): micro-batches and ranks only add. Two responses of 1 and 3 tokens under
    `grpo`: policy [[1/2, 0, 0], [1/6, 1/6, 1/6]], token mean [[1/4, 0, 0], [1/4, 1/4, 1/4]].
    """

    policy: Tensor  # [N, T] filtered by Credit.keep_mask
    divergence: Tensor  # [N, T] the same aggregation, unfiltered
    token: Tensor  # [N, T] the plain token mean: entropy penalty and metrics
    comparable: Tensor | None = None  # [N, T] the mean over `Rollouts.comparable` tokens; None: these are all

    @property
    def gap(self) -> Tensor:
        """[N, T] the token mean for metrics that compare the sampler with the trainer."""
        return self.token if self.comparable is None else self.comparable


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """One optimizer step, or a slice of its rows. The actor does not know which algorithm made these streams.

    Without `old_logprobs` and `correction` the current policy is the old one: one optimizer step on fresh rollouts."""

    rollouts: Rollouts
    old_logprobs: Tensor | None  # [N, T]
    advantage: Tensor  # [N, T]
    correction: Tensor | None  # [N, T] truncated importance weight: sampler against trainer
    weights: LossWeights
    ref_logprobs: Tensor | None = None  # [N, T]
    returns: Tensor | None = None  # [N, T] targets of the critic
    values: Tensor | None = None  # [N, T] its values before this step's updates
    signals: Mapping[str, Tensor] = field(default_factory=dict)  # [N, T] by name: those that loss terms read
    step: int | None = None  # keys the views that loss terms read

    def __len__(self) -> int:
        return len(self.rollouts)

    def rows(self, index: Tensor) -> TrainBatch:
        return take_rows(self, index)


@dataclass(frozen=True)
class ValidationSample:
    """A validation response, for logs."""

    id: str  # id of the task
    prompt: str  # its text, without media
    response: str
    answer: Any
    reward: float
    rewards: Mapping[str, float] | None = None  # reward parts that apply


@dataclass(frozen=True, eq=False)
class Weights:
    """A version of the policy, for a generator: every weight by its Hugging Face name (tied ones under each name),
    adapters merged. Tensors may be made when they are read. Valid until the next update."""

    version: int
    tensors: Mapping[str, Tensor]
