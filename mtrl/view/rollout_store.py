"""Recorded responses, whoever recorded them: a book has steps, a step has responses, and a response is read when it is
looked at. `Pages` are the numbers that responses are sorted and filtered by, kept for every step that was asked for."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mtrl.tracking.blocks import Block, DamagedRecord, Table, Walk, block_parts
from mtrl.tracking.streams import MAP_SCALE, MAPS, unpack_response

SORTED_BY = ("reward", "tokens", "dependency", "entropy", "vision", "advantage")
LISTED = (*SORTED_BY, "finish", "version", "head", "kept", "scale", "failed")  # what a row of a list says
LARGEST_SIDE = 4096  # image tokens of a side
TABLES_KEPT = 48  # tables of steps held in memory, of those that were looked at last

Json = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Page:
    """The numbers of a step's responses: [count] arrays by name, NaN where a response has none."""

    count: int
    numbers: Mapping[str, np.ndarray]


class RolloutStore(Protocol):
    def refresh(self) -> None:
        """Looks for what was written meanwhile."""

    def steps(self) -> Mapping[int, int]:
        """How many responses each step has, in the order of the steps."""

    def page(self, step: int) -> Page: ...

    def rows(self, step: int, places: Sequence[int]) -> list[Json]:
        """What lists show of these responses."""

    def response(self, step: int, place: int) -> Json:
        """All that is known of a response."""

    def maps(self, step: int, place: int) -> Json:
        """Where each token of a response looks: {"levels": base64 of a byte for each token and image token, "scale": a
        number a token}, of which `scale * (level / 255) ** 2` is the share of its attention. KeyError where nobody
        recorded it."""

    def image(self, step: int, key: str) -> bytes:
        """An image that a response of the step names, or KeyError."""

    def skipped(self) -> list[str]:
        """What could not be read, in sentences."""


class RecordedRollouts:
    """The record of a run of ours (`tracking/blocks.py`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._walks: dict[Path, Walk] = {}
        self._found: dict[Path, list[Block]] = {}
        self._blocks: dict[int, Block] = {}
        self._pages: dict[int, Page] = {}
        self._tables: OrderedDict[Block, Table] = OrderedDict()
        self._broken: set[int] = set()

    def refresh(self) -> None:
        parts = block_parts(self.directory)
        changed = [part for part in self._walks if part not in parts]
        for gone in changed:
            del self._walks[gone], self._found[gone]
        for part in parts:
            walk = self._walks.setdefault(part, Walk(part))
            try:
                new = list(walk.advance())
            except OSError:
                continue  # removed a moment ago, or no file
            self._found.setdefault(part, []).extend(new)
            changed += [part] if new else []
        if changed:
            self._arrange([block for part in parts for block in self._found.get(part, [])])

    def _arrange(self, blocks: Sequence[Block]) -> None:
        """The last attempt of each step; what an attempt did after the step where the next one began was undone."""
        kept: dict[int, Block] = {}
        attempt = None
        for block in blocks:
            if block.attempt != attempt:
                attempt = block.attempt
                kept = {step: other for step, other in kept.items() if step < block.step}
            kept[block.step] = block
        stale = [step for step in self._pages if kept.get(step) != self._blocks.get(step)]
        for step in stale:
            del self._pages[step]
        self._blocks = dict(sorted(kept.items()))

    def steps(self) -> Mapping[int, int]:
        return {step: block.count for step, block in self._blocks.items() if step not in self._broken}

    def table(self, step: int) -> Table:
        block = self._blocks[step]
        if block not in self._tables:
            try:
                self._tables[block] = checked(block.table(), block.count)
            except (DamagedRecord, OSError) as error:
                self._broken.add(step)
                raise DamagedRecord(f"step {step} is damaged") from error
            if len(self._tables) > TABLES_KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(block)
        return self._tables[block]

    def page(self, step: int) -> Page:
        if step not in self._pages:
            columns = self.table(step)["rollouts"]
            count = self._blocks[step].count
            found = {name: as_numbers(columns.get(name), count) for name in SORTED_BY}
            self._pages[step] = Page(count, {name: array for name, array in found.items() if array is not None})
        return self._pages[step]

    def rows(self, step: int, places: Sequence[int]) -> list[Json]:
        table = self.table(step)
        return [self._row(table, step, place) for place in places]

    def _row(self, table: Table, step: int, place: int) -> Json:
        columns = table["rollouts"]
        row: Json = {name: columns[name][place] for name in LISTED if name in columns}
        prompt = table["prompts"][columns["prompt"][place]]
        parts = {name: values[place] for name, values in columns.get("parts", {}).items()}
        images = prompt.get("images", [])
        return row | {
            "step": step, "row": place, "group": columns["prompt"][place], "id": prompt.get("id"), "parts": parts,
            "image": images[0] if images else None,
        }  # fmt: skip

    def response(self, step: int, place: int) -> Json:
        table, block = self.table(step), self._blocks[step]
        if not 0 <= place < block.count:
            raise KeyError(place)
        row, columns = self._row(table, step, place), table["rollouts"]
        kept = unpack_response(block.piece(table["where"][place]))
        numbers = {name: array for name, array in kept["streams"].items() if name not in (MAPS, MAP_SCALE)}
        streams = {name: as_list(array) for name, array in numbers.items() if array.ndim == 1}
        segments = list(table.get("segments", []))
        if (mass := kept["streams"].get("mass")) is not None:
            for number, segment in enumerate(segments):
                streams |= {
                    f"{pool}_{segment}": as_list(mass[:, number, i]) for i, pool in enumerate(("text", "vision"))
                }
        by_segment = [[pool[place] for pool in segment] for segment in columns.get("mass", [])]
        asked = {
            name: table["prompts"][row["group"]].get(name)
            for name in ("text", "answer", "images", "perturbed", "pools")
        }
        members = [other for other, group in enumerate(columns["prompt"]) if group == row["group"]]
        said = {"text": kept["text"], "pieces": kept["pieces"], "streams": streams}
        if (grids := image_grids(kept["streams"], table["prompts"][row["group"]])) is not None:
            said["grids"] = grids
            streams.setdefault("vision_all", as_list(vision_mass(kept["streams"])))
        return row | said | {"prompt": asked, "segments": segments, "mass": by_segment, "members": members}

    def maps(self, step: int, place: int) -> Json:
        table, block = self.table(step), self._blocks[step]
        if not 0 <= place < block.count:
            raise KeyError(place)
        kept = unpack_response(block.piece(table["where"][place]))
        prompt = table["prompts"][table["rollouts"]["prompt"][place]]
        if image_grids(kept["streams"], prompt) is None:
            raise KeyError(place)
        levels, scale = kept["streams"][MAPS], kept["streams"][MAP_SCALE]
        return {"levels": base64.b64encode(levels.tobytes()).decode(), "scale": as_list(scale, 6)}

    def image(self, step: int, key: str) -> bytes:
        place = self.table(step).get("images", {})[key]
        return self._blocks[step].piece(place)

    def skipped(self) -> list[str]:
        walks = list(self._walks.values())
        lost = sum(walk.skipped for walk in walks) + sum(walk.unfinished() for walk in walks[:-1])
        told = [f"record: {lost:,} bytes are damaged or were cut off, and are left out"] if lost else []
        return told + [f"record: step {step} is damaged and left out" for step in sorted(self._broken)]


def checked(table: Table, count: int) -> Table:
    """The table, where it is as it must be; whoever made the file may have meant harm."""
    columns, prompts = table.get("rollouts"), table.get("prompts")
    if not isinstance(columns, dict) or not isinstance(prompts, list) or not isinstance(table.get("where"), list):
        raise DamagedRecord("a table lacks what it must have")
    if not all(isinstance(prompt, dict) for prompt in prompts):
        raise DamagedRecord("a table's prompts are none")
    lists = [values for name, values in columns.items() if name not in ("parts", "mass")]
    lists += [table["where"], *dict(columns.get("parts", {})).values()]
    if "prompt" not in columns or any(not isinstance(values, list) or len(values) != count for values in lists):
        raise DamagedRecord("a table's columns are not as long as they must be")
    if not all(type(group) is int and 0 <= group < len(prompts) for group in columns["prompt"]):
        raise DamagedRecord("a table names prompts that it does not have")
    return table


def image_grids(streams: Mapping[str, np.ndarray], prompt: Mapping[str, Any]) -> list[Any] | None:
    """How the maps of a response lie on its images; None where there are no maps, or they do not fit."""
    levels, scale, grids = streams.get(MAPS), streams.get(MAP_SCALE), prompt.get("grids")
    if levels is None or scale is None or levels.ndim != 2 or scale.shape != levels.shape[:1]:
        return None
    if not isinstance(grids, list) or not all(map(is_grid, grids)):
        return None
    if sum(time * height * width for time, height, width, _ in grids) != levels.shape[1]:
        return None
    return grids


def vision_mass(streams: Mapping[str, np.ndarray]) -> np.ndarray:
    """What the maps sum up to, for steps in which nobody else read the attention."""
    return streams[MAP_SCALE] * np.square(streams[MAPS] / 255).sum(1)


def is_grid(grid: Any) -> bool:
    """(time, height, width, the times of the frames shown), from a file that anybody may have made."""
    try:
        *sides, shown = grid
        whole = all(type(number) is int and 0 <= number <= LARGEST_SIDE for number in (*sides, *shown))
        return whole and len(sides) == 3 and len(shown) <= LARGEST_SIDE and all(time < sides[0] for time in shown)
    except TypeError:
        return False


def as_numbers(values: Any, count: int) -> np.ndarray | None:
    """[count] floats, None as NaN; None where there are none at all."""
    if not isinstance(values, list) or len(values) != count:
        return None
    plain = (isinstance(x, (int, float)) for x in values)
    return np.array([x if ok else np.nan for x, ok in zip(values, plain, strict=True)], dtype=np.float64)


def as_list(array: np.ndarray, digits: int = 3) -> list[Any]:
    """Numbers as JSON has them: floats with the digits that are kept, None for those without an end."""
    if array.dtype.kind in "iu":
        return array.tolist()
    return [float(f"{x:.{digits}g}") if ok else None for x, ok in zip(array.tolist(), np.isfinite(array), strict=True)]
