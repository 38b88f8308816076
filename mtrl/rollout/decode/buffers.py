"""The static buffers of decoding. A graph reads and writes fixed addresses, so everything that changes from batch to
batch (lengths, slots of rows, sampling settings) is a number in one of these, never a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from mtrl.models.device_copy import to_device
from mtrl.models.recurrent import TAPS
from mtrl.models.routing import expert_dtype
from mtrl.rollout.decode.arena import Arena, make_arena, round_up
from mtrl.rollout.decode.fused_weights import DecodeWeights
from mtrl.rollout.decode.layers import Attention, Mixture, Recurrence

MEMBERS = 8  # the most rows that read their prompt together
PIECE = 256  # the fewest prompt tokens in a piece of attention
PIECES = 16  # the most pieces of a prompt
CHUNK = 256  # response tokens in a piece of attention


def power_of_two(n: int, least: int = 1) -> int:
    """n rounded up to a power of two.

    >>> [power_of_two(n) for n in (1, 5, 8)], power_of_two(3, least=16)
    ([1, 8, 8], 16)
    """
    return max(least, 1 << max(0, n - 1).bit_length())


def round_up_coarsely(n: int, least: int) -> int:
    """n rounded up to a power of two or to 3/4 of one, for buffers of many gigabytes.

    >>> [round_up_coarsely(n, 4096) for n in (5, 5136, 6145, 41088)]
    [4096, 6144, 8192, 49152]
    """
    whole = power_of_two(n, least)
    return whole * 3 // 4 if least < whole and n <= whole * 3 // 4 else whole


@dataclass(frozen=True)
class Room:
    """The size of the buffers."""

    slots: int  # responses at a time
    groups: int  # each has up to MEMBERS responses to the same prompt
    new: int  # tokens of a response
    prompt_tokens: int  # total of all prompts
    longest: int  # prompt
    positions: int

    @classmethod
    def for_batch(cls, lengths: Sequence[int], first: Sequence[int], n: int, new: int, slots: int) -> Room:
        """For prompts of these lengths, whose responses begin at these positions, `slots` of them at a time. Rounded
        up, so that the slightly different next batch can use the same graphs."""
        slots = min(slots, len(lengths) * n)
        return cls(
            slots=round_up(slots, 16),
            groups=power_of_two(min(slots, len(lengths) * -(-n // MEMBERS))),
            new=new,
            prompt_tokens=round_up_coarsely(sum(lengths), 4096),
            longest=power_of_two(max(lengths), 512),
            positions=power_of_two(max(first) + new, 2048),
        )

    def union(self, other: Room | None) -> Room:
        return self if other is None else Room(*map(max, zip(astuple(self), astuple(other), strict=True)))

    @property
    def pieces_of_prompt(self) -> int:
        """Those of the longest prompt. How a prompt is cut depends on its own length alone, so that a token does not
        depend on the other rows of the batch or of earlier ones."""
        return min(PIECES, -(-self.longest // PIECE))

    @property
    def pieces(self) -> int:
        return self.pieces_of_prompt + -(-self.new // CHUNK)


class Rows:
    """The state of each response, by slot. When rows end, only the slot table changes, and nothing is moved; their
    slots go to the next responses. The last slot is unused: rows without a response write there."""

    def __init__(self, room: Room, device: torch.device, mixtures: Sequence[Mixture] = ()) -> None:
        """`mixtures`: those of the layers that have one."""
        self.slots, self.new = room.slots, room.new
        (
            self.token,  # the last one
            self.count,  # tokens so far, also after the end
            self.first,  # the position of the first token
            self.limit,
            self.done,
            self.lengths,  # tokens up to the end
            self.kv_index,  # where the last token's keys and values go
            self.position,  # the last token's
        ) = torch.zeros(8, room.slots + 1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(room.slots + 1, room.new, dtype=torch.int32, device=device)
        self.logps = torch.zeros(room.slots + 1, room.new, device=device)
        self.uniforms = torch.zeros(room.slots + 1, room.new, dtype=torch.float64, device=device)
        dtype = expert_dtype(max((each.experts for each in mixtures), default=0))
        chosen = len(mixtures), max((each.chosen for each in mixtures), default=0)
        self.experts = torch.zeros(room.slots + 1, room.new, *chosen, dtype=dtype, device=device)

    def clear(self) -> None:
        """For a new batch; the unused slot, which rows without a response share, has counted tokens, too."""
        for numbers in (self.token, self.count, self.done, self.lengths, self.kv_index, self.position):
            numbers.zero_()

    def begin(self, slots: Tensor, first: Tensor, uniforms: Tensor) -> None:
        """New responses in these slots. `first` [slots]: the position of the first token; `uniforms` [slots, tokens]:
        the random numbers."""
        tokens = uniforms.shape[1]
        for numbers in (self.token, self.count, self.done, self.lengths, self.kv_index, self.position):
            numbers.index_fill_(0, slots, 0)
        self.limit.index_fill_(0, slots, tokens)
        self.first.index_copy_(0, slots, first)
        self.uniforms[:, :tokens].index_copy_(0, slots, uniforms)

    def take(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Copies of the tokens, log-probs, experts and lengths in these slots."""
        return self.tokens[slots], self.logps[slots], self.experts[slots], self.lengths[slots]


@dataclass(frozen=True)
class Mode:
    """The kind of sampling that a graph does; its parameters are in `Rules`."""

    greedy: bool
    top_k: bool
    top_p: bool

    @property
    def cuts(self) -> bool:
        return self.top_k or self.top_p


class Rules:
    """Sampling parameters and stop tokens, on the device."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.settings = torch.tensor([1.0, 1.0, 0.0], device=device)  # 1 / temperature, top p, top k
        self.forbidden = torch.zeros(vocabulary, device=device)  # 0 or -inf
        self.stops = torch.zeros(vocabulary, dtype=torch.int32, device=device)

    def set(
        self, temperature: float, top_p: float, top_k: int, forbidden: Sequence[int], stops: Sequence[int]
    ) -> Mode:  # fmt: skip
        """Greedy choices (temperature 0) have the model's log-prob at temperature 1, without cuts."""
        greedy = temperature == 0
        self.settings.copy_(torch.tensor([1.0 if greedy else 1 / temperature, top_p, float(top_k)]))
        device = self.settings.device
        self.forbidden.zero_()[torch.tensor(forbidden, dtype=torch.long, device=device)] = -torch.inf
        self.stops.zero_()[torch.tensor(stops, dtype=torch.long, device=device)] = 1
        return Mode(greedy, not greedy and 0 < top_k < len(self.stops), not greedy and top_p < 1)


class SlotTable:
    """The slot of each row of a step, and which rows read a prompt together."""

    def __init__(self, rows: int, room: Room, device: torch.device) -> None:
        self.unused_slot = room.slots
        groups = min(rows, room.groups)
        self.slot = torch.full((rows,), self.unused_slot, dtype=torch.int32, device=device)
        self.members = torch.full((groups, MEMBERS), -1, dtype=torch.int32, device=device)
        self.start, self.length = torch.zeros(2, groups, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """All rows have the unused slot."""
        self.assign((), (), (), ())

    def assign(
        self, slots: Sequence[int], prompt_of: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Gives rows 0, 1, ... these slots; rows of one prompt read it together. All of it is a few hundred
        integers."""
        by_prompt: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            by_prompt.setdefault(prompt_of[slot], []).append(row)
        most, each = self.members.shape
        groups = [(p, rows[i : i + each]) for p, rows in by_prompt.items() for i in range(0, len(rows), each)]
        assert len(slots) <= len(self.slot) and len(groups) <= most, "more rows than the step has"
        empty = most - len(groups)
        members = [rows + [-1] * (each - len(rows)) for _, rows in groups] + [[-1] * each] * empty
        for buffer, value in (
            (self.slot, [*slots, *[self.unused_slot] * (len(self.slot) - len(slots))]),
            (self.members, members),
            (self.start, [starts[p] for p, _ in groups] + [0] * empty),
            (self.length, [lengths[p] for p, _ in groups] + [0] * empty),
        ):
            buffer.copy_(to_device(torch.tensor(value, dtype=torch.int32), buffer.device))


@dataclass(frozen=True)
class KeysAndValues:
    """Those of a layer, [tokens, key heads, width] each: of the prompts, one after the other, and of the responses by
    slot."""

    prompts: tuple[Tensor, Tensor]
    own: tuple[Tensor, Tensor]

    @classmethod
    def allocate(cls, room: Room, kind: Attention, dtype: torch.dtype, arena: Arena) -> KeysAndValues:
        def pair(tokens: int) -> tuple[Tensor, Tensor]:
            size = tokens, kind.key_heads, kind.head_dim
            return arena.empty(dtype, *size), arena.empty(dtype, *size)

        return cls(pair(room.prompt_tokens), pair((room.slots + 1) * room.new))


@dataclass(frozen=True)
class RecurrentStates:
    """Those of a layer after some tokens of each row."""

    state: Tensor  # [rows, value heads, key width, value width] float32
    taps: Tensor  # [rows, TAPS, channels] the last inputs of the convolution

    @classmethod
    def allocate(cls, rows: int, kind: Recurrence, dtype: torch.dtype, arena: Arena) -> RecurrentStates:
        state = arena.empty(torch.float32, rows, kind.value_heads, kind.key_dim, kind.value_dim)
        return cls(state, arena.empty(dtype, rows, TAPS, kind.mixed))

    @classmethod
    def from_cache(cls, layer: Any) -> RecurrentStates:
        """Of the rows of a pass, from its cache."""
        return cls(layer.recurrent_states[0].float(), layer.conv_states[0][..., -TAPS:].transpose(1, 2))

    @classmethod
    def join(cls, parts: Sequence[RecurrentStates]) -> RecurrentStates:
        return cls(torch.cat([each.state for each in parts]), torch.cat([each.taps for each in parts]))

    def begin(self, slots: Tensor, prompts: RecurrentStates, prompt_of: Tensor) -> None:
        """Give these slots the states that their prompts left behind."""
        self.state.index_copy_(0, slots, prompts.state[prompt_of])
        self.taps.index_copy_(0, slots, prompts.taps[prompt_of].to(self.taps.dtype))


@dataclass(frozen=True)
class AttentionPieces:
    """How attention is cut into pieces, and their results before they are summed."""

    of_prompt: int
    least: int  # the fewest tokens in a piece of a prompt
    most: int  # the most pieces of a prompt, here or in a larger room
    chunk: int  # response tokens in a piece
    block: int  # keys at a time
    part: Tensor  # [pieces, rows, heads, width] float32
    lse: Tensor  # [pieces, rows, heads]


@dataclass(frozen=True)
class Pairs:
    """Each row with each expert that its router chose."""

    expert: Tensor  # [rows, chosen]; the number of experts for rows without a response
    weight: Tensor  # [rows, chosen]
    order: Tensor  # [rows * chosen] pairs, by expert
    start: Tensor  # [experts + 1] where each expert's begin in `order`

    @property
    def chosen(self) -> int:
        return self.expert.shape[1]


@dataclass(frozen=True)
class Tiles:
    """The highest logit of each tile of the vocabulary, and the tile's mass relative to it: [rows, tiles] float32."""

    width: int
    top: Tensor
    mass: Tensor

    @property
    def count(self) -> int:
        return self.top.shape[1]


class ScratchBuffers:
    """Buffers that steps of several sizes share, since only one runs at a time; the largest step must come first."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.flat: dict[str, Tensor] = {}

    def __call__(self, name: str, dtype: torch.dtype, *size: int) -> Tensor:
        n = torch.Size(size).numel()
        if name not in self.flat:
            self.flat[name] = self.arena.empty(dtype, n)
        assert self.flat[name].numel() >= n, f"the largest {name} must be made first"
        return self.flat[name][:n].view(size)


class Buffers:
    """All buffers that live from step to step."""

    def __init__(self, weights: DecodeWeights, room: Room, device: torch.device) -> None:
        self.room, self.device, self.arena = room, device, make_arena(device)
        self.rows = Rows(room, device, [*weights.shape.mixtures.values()])
        self.rules = Rules(weights.shape.vocabulary, device)
        self.cache = {  # by the number of the layer
            i: KeysAndValues.allocate(room, kind, weights.dtype, self.arena)
            for i, kind in weights.shape.attentions.items()
        }
        self.states = {  # by slot; the unused one is never read
            i: RecurrentStates.allocate(room.slots, kind, weights.dtype, self.arena)
            for i, kind in weights.shape.recurrences.items()
        }
        self.angles = weights.angles(room.positions)  # by kind of layers
        self.scratch = ScratchBuffers(self.arena)
