"""The static buffers of decoding. A graph reads and writes fixed addresses, so everything that changes from batch to
batch (lengths, who sits where, how to sample) is a number in one of these, never a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from mtrl.rollout.decode.arena import Arena, arena_on, round_up
from mtrl.rollout.decode.fused_weights import DecodeWeights
from mtrl.rollout.decode.layers import Shape

MEMBERS = 8  # rows of a group that read their prompt together, at most
PIECE = 128  # prompt tokens in a piece of attention, at least
PIECES = 16  # of a prompt, at most
CHUNK = 256  # own tokens in a piece of attention


def power_of_two(n: int, least: int = 1) -> int:
    """The power of two from n on.

    >>> [power_of_two(n) for n in (1, 5, 8)], power_of_two(3, least=16)
    ([1, 8, 8], 16)
    """
    return max(least, 1 << max(0, n - 1).bit_length())


def halfway(n: int, least: int) -> int:
    """The power of two from n on, or the number halfway to it where that is enough: buffers of many gigabytes.

    >>> [halfway(n, 4096) for n in (5, 5136, 6145, 41088)]
    [4096, 6144, 8192, 49152]
    """
    whole = power_of_two(n, least)
    return whole * 3 // 4 if least < whole and n <= whole * 3 // 4 else whole


@dataclass(frozen=True)
class Room:
    """How much the buffers hold."""

    slots: int  # responses
    tables: int  # prompts, one for each MEMBERS of their responses
    new: int  # tokens of a response
    prompt_tokens: int  # of all prompts together
    longest: int  # prompt
    positions: int

    @classmethod
    def for_batch(cls, lengths: Sequence[int], first: Sequence[int], n: int, new: int) -> Room:
        """Of prompts with these lengths, whose responses begin at these positions. Rounded up, so that the next batch,
        which is a little different, finds the same graphs."""
        return cls(
            slots=round_up(len(lengths) * n, 16),
            tables=power_of_two(len(lengths) * -(-n // MEMBERS)),
            new=new,
            prompt_tokens=halfway(sum(lengths), 4096),
            longest=power_of_two(max(lengths), 512),
            positions=power_of_two(max(first) + new, 2048),
        )

    def union(self, other: Room | None) -> Room:
        return self if other is None else Room(*map(max, zip(astuple(self), astuple(other), strict=True)))

    @property
    def pieces_of_prompt(self) -> int:
        """As many as the longest prompt has. How a prompt is cut follows from its own length and from nothing else, so
        that a token does not depend on who else is in the batch or was in one before."""
        return min(PIECES, -(-self.longest // PIECE))

    @property
    def pieces(self) -> int:
        return self.pieces_of_prompt + -(-self.new // CHUNK)


class Rows:
    """What belongs to a response, by its slot: rows that end leave by a new table of slots, and nothing is moved. The
    last slot is nobody's: rows without a response write there."""

    def __init__(self, room: Room, device: torch.device) -> None:
        self.slots, self.new = room.slots, room.new
        (
            self.token,  # the last one
            self.count,  # tokens so far, after the end too
            self.first,  # the position of the first token
            self.limit,
            self.done,
            self.lengths,  # tokens up to the end
            self.place,  # of the last token's keys and values
            self.position,  # of the last token
        ) = torch.zeros(8, room.slots + 1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(room.slots + 1, room.new, dtype=torch.int32, device=device)
        self.logps = torch.zeros(room.slots + 1, room.new, device=device)
        self.uniforms = torch.zeros(room.slots + 1, room.new, dtype=torch.float64, device=device)

    def restart(self, first: Tensor, uniforms: Tensor) -> None:
        """`first` [rows]: the position of each response's first token; `uniforms` [rows, tokens]: its draws."""
        for numbers in (self.token, self.count, self.first, self.done, self.lengths, self.place, self.position):
            numbers.zero_()
        rows, tokens = uniforms.shape
        self.limit.fill_(tokens)
        self.first[:rows] = first
        self.uniforms[:rows, :tokens] = uniforms


@dataclass(frozen=True)
class Mode:
    """What a graph does when it samples; how strongly is in `Rules`."""

    greedy: bool
    top_k: bool
    top_p: bool

    @property
    def cuts(self) -> bool:
        return self.top_k or self.top_p


class Rules:
    """How to sample, and what ends a response: numbers on the device."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.settings = torch.tensor([1.0, 1.0, 0.0], device=device)  # 1 / temperature, top p, top k
        self.forbidden = torch.zeros(vocabulary, device=device)  # 0 or -inf
        self.stops = torch.zeros(vocabulary, dtype=torch.int32, device=device)

    def set(
        self, temperature: float, top_p: float, top_k: int, forbidden: Sequence[int], stops: Sequence[int]
    ) -> Mode:  # fmt: skip
        """Greedy choices (temperature 0) report the model's own log-prob at temperature 1, and cut nothing."""
        greedy = temperature == 0
        self.settings.copy_(torch.tensor([1.0 if greedy else 1 / temperature, top_p, float(top_k)]))
        device = self.settings.device
        self.forbidden.zero_()[torch.tensor(forbidden, dtype=torch.long, device=device)] = -torch.inf
        self.stops.zero_()[torch.tensor(stops, dtype=torch.long, device=device)] = 1
        return Mode(greedy, not greedy and 0 < top_k < len(self.stops), not greedy and top_p < 1)


class Seats:
    """Which slot each row of a step serves, and which rows read a prompt together."""

    def __init__(self, rows: int, room: Room, device: torch.device) -> None:
        self.nobody = room.slots
        tables = min(rows, room.tables)
        self.slot = torch.full((rows,), self.nobody, dtype=torch.int32, device=device)
        self.members = torch.full((tables, MEMBERS), -1, dtype=torch.int32, device=device)
        self.start, self.length = torch.zeros(2, tables, dtype=torch.int32, device=device)

    def take(
        self, slots: Sequence[int], prompt_of: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Rows 0, 1, ... take these slots; rows of one prompt read it together. All of it is a few hundred integers."""
        by_prompt: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            by_prompt.setdefault(prompt_of[slot], []).append(row)
        tables, each = self.members.shape
        taken = [(p, rows[i : i + each]) for p, rows in by_prompt.items() for i in range(0, len(rows), each)]
        assert len(slots) <= len(self.slot) and len(taken) <= tables, "too few seats"
        empty = tables - len(taken)
        members = [rows + [-1] * (each - len(rows)) for _, rows in taken] + [[-1] * each] * empty
        for here, value in (
            (self.slot, [*slots, *[self.nobody] * (len(self.slot) - len(slots))]),
            (self.members, members),
            (self.start, [starts[p] for p, _ in taken] + [0] * empty),
            (self.length, [lengths[p] for p, _ in taken] + [0] * empty),
        ):
            here.copy_(torch.tensor(value, dtype=torch.int32))


class KeysAndValues:
    """[layers, tokens, key heads, width]: of the prompts, one after the other and each once; and of the responses."""

    def __init__(self, room: Room, shape: Shape, dtype: torch.dtype, arena: Arena) -> None:
        sizes = (room.prompt_tokens, room.prompt_tokens, (room.slots + 1) * room.new, (room.slots + 1) * room.new)
        self.prompt_keys, self.prompt_values, self.own_keys, self.own_values = (
            arena.empty(dtype, shape.layers, size, shape.key_heads, shape.width) for size in sizes
        )


@dataclass(frozen=True)
class CompiledPieces:
    """How attention is cut, and where its pieces wait to be summed."""

    of_prompt: int
    least: int  # tokens in a piece of a prompt
    most: int  # pieces that a prompt may have, here or in a larger room
    chunk: int  # own tokens in a piece
    block: int  # keys at a time
    part: Tensor  # [pieces, rows, heads, width] float32
    lse: Tensor  # [pieces, rows, heads]


@dataclass(frozen=True)
class Tiles:
    """Of logits [rows, vocabulary]: the highest of each tile and the tile's mass beside it, [rows, tiles] float32."""

    width: int
    top: Tensor
    mass: Tensor

    @property
    def count(self) -> int:
        return self.top.shape[1]


class ScratchBuffers:
    """Buffers that steps of several sizes share, as only one of them runs at a time: the largest must be the first."""

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
    """All that lives from step to step."""

    def __init__(self, weights: DecodeWeights, room: Room, device: torch.device) -> None:
        self.room, self.device, self.arena = room, device, arena_on(device)
        self.rows = Rows(room, device)
        self.rules = Rules(weights.shape.vocabulary, device)
        self.cache = KeysAndValues(room, weights.shape, weights.dtype, self.arena)
        self.cos, self.sin = weights.angles(room.positions)
        self.scratch = ScratchBuffers(self.arena)
