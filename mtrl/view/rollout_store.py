"""Stores of recorded responses. A store has steps, a step has responses, and a response is read on demand."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mtrl.tracking.blocks import Block, DamagedRecord, PartReader, Table, block_parts
from mtrl.tracking.streams import MAP_SCALE, MAPS, as_list, unpack_response
from mtrl.utils.files import is_inside, is_own_file
from mtrl.utils.metric_history import LARGEST
from mtrl.view.signal_names import name_signals

SORTED_BY = ("reward", "tokens", "dependency", "entropy", "vision", "advantage")
LISTED = (*SORTED_BY, "finish", "version", "head", "kept", "trained", "scale", "failed", "noised")  # in rows of a list
IMAGE_LISTS = ("images", "perturbed")  # of a prompt: keys of images
MAX_SIDE = 4096  # image tokens per side
TABLES_CACHED = 48  # tables of steps in memory, the most recently used
DIGITS = 3  # precision of the stored half floats

Json = dict[str, Any]
Columns = Mapping[str, np.ndarray]  # [responses] numbers for each name in SORTED_BY, NaN if there is none


class RolloutStore(Protocol):
    """`refresh`, `steps` and `skipped` are called by one thread at a time; the others by any, also during these: what
    they keep is checked against the present data, so that a sort of a large run delays no other request."""

    def refresh(self) -> None:
        """Read what was written since the last call."""

    def steps(self) -> Mapping[int, int]:
        """The number of responses of each step, in the order of the steps."""

    def columns(self, step: int) -> Columns:
        """The numbers that responses are sorted and filtered by."""

    def rows(self, step: int, indices: Sequence[int]) -> list[Json]:
        """The rows of these responses in a list."""

    def response(self, step: int, row: int) -> Json:
        """A response with all its values."""

    def maps(self, step: int, row: int) -> Json:
        """The attention of each token on the image: {"levels": base64 of one byte per token and image token, "scale":
        one number per token}; `scale * (level / 255) ** 2` is a share of the token's attention. KeyError if it was not
        recorded."""

    def image(self, step: int, key: str) -> bytes:
        """An image of a response of the step, or KeyError."""

    def skipped(self) -> list[str]:
        """Messages about data that could not be read."""


class RecordedRollouts:
    """The record of an MTRL run (`tracking/blocks.py`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._readers: dict[Path, PartReader] = {}
        self._blocks_by_part: dict[Path, list[Block]] = {}
        self._blocks: dict[int, Block] = {}
        self._columns: dict[int, tuple[Block, Columns]] = {}
        self._refused: list[Path] = []
        self._read_table = lru_cache(TABLES_CACHED)(lambda block: check_table(block.table(), block.count))
        self._damaged: set[int] = set()

    def refresh(self) -> None:
        found = block_parts(self.directory) if is_inside(self.directory, self.directory.parent) else []
        self._refused = find_refused(found, self.directory.parent)
        parts = [part for part in found if is_own_file(part, self.directory.parent)]
        changed = [part for part in self._readers if part not in parts]
        for part in changed:
            del self._readers[part], self._blocks_by_part[part]
        for part in parts:
            reader = self._readers.setdefault(part, PartReader(part))
            known = self._blocks_by_part.setdefault(part, [])
            try:
                new = list(reader.read_new())
            except OSError:
                continue  # just deleted
            known += new
            changed += [part] if new else []
        if changed:
            self._select([block for part in parts for block in self._blocks_by_part[part]])

    def _select(self, blocks: Sequence[Block]) -> None:
        """Select the last attempt of each step. The next attempt undid all steps from its first one on."""
        selected: dict[int, Block] = {}
        attempt = None
        for block in blocks:
            if block.attempt != attempt:
                attempt = block.attempt
                selected = {step: other for step, other in selected.items() if step < block.step}
            selected[block.step] = block
        self._blocks = dict(sorted(selected.items()))

    def steps(self) -> Mapping[int, int]:
        return {step: block.count for step, block in self._blocks.items() if step not in self._damaged}

    def table(self, step: int) -> Table:
        try:
            return self._read_table(self._blocks[step])
        except (DamagedRecord, OSError) as error:
            self._damaged.add(step)
            raise DamagedRecord(f"step {step} is damaged") from error

    def columns(self, step: int) -> Columns:
        block = self._blocks[step]
        known_block, columns = self._columns.get(step, (None, {}))
        if known_block != block:
            table = self.table(step)["rollouts"]
            columns = {name: as_numbers(table.get(name), block.count) for name in SORTED_BY}
            self._columns[step] = (block, columns)
        return columns

    def rows(self, step: int, indices: Sequence[int]) -> list[Json]:
        table = self.table(step)
        return [self._row(table, step, row) for row in indices]

    def _row(self, table: Table, step: int, row: int) -> Json:
        columns = table["rollouts"]
        group = columns["prompt"][row]
        prompt = table["prompts"][group]
        parts = {name: values[row] for name, values in columns.get("parts", {}).items()}
        images = prompt.get("images")
        return {name: columns[name][row] for name in LISTED if name in columns} | {
            "step": step, "row": row, "group": group, "id": prompt.get("id"), "parts": parts,
            "image": images[0] if images else None,
        }  # fmt: skip

    def _read(self, step: int, row: int) -> tuple[Table, Json, list[Any] | None]:
        """The step's table, the stored response, and the grids of its attention maps; KeyError without such a row."""
        table, block = self.table(step), self._blocks[step]
        if not 0 <= row < block.count:
            raise KeyError(row)
        stored = unpack_response(block.read(table["where"][row]))
        prompt = table["prompts"][table["rollouts"]["prompt"][row]]
        return table, stored, image_grids(stored["streams"], prompt)

    def response(self, step: int, row: int) -> Json:
        table, stored, grids = self._read(step, row)
        try:
            return self._join(step, row, table, stored, grids)
        except (TypeError, IndexError, AttributeError) as error:  # values of a kind that we do not write
            raise DamagedRecord(f"response {row} of step {step} is damaged") from error

    def _join(self, step: int, row: int, table: Table, stored: Json, grids: list[Any] | None) -> Json:
        """All values of a response, from its step's table and its own streams."""
        summary, columns, arrays = self._row(table, step, row), table["rollouts"], stored["streams"]
        streams = {
            name: as_list(array, DIGITS)
            for name, array in arrays.items()
            if array.ndim == 1 and name not in (MAPS, MAP_SCALE)
        }
        if "trained" not in streams and {"mask", "advantage"} <= streams.keys():  # a record of an earlier version
            pairs = zip(streams["mask"], streams["advantage"], strict=False)
            streams["trained"] = [int(bool(kept and advantage)) for kept, advantage in pairs]
            summary["trained"] = sum(streams["trained"])
        segments = list(table.get("segments", []))
        if (mass := arrays.get("mass")) is not None:
            for number, segment in enumerate(segments):
                for i, pool in enumerate(("text", "vision")):
                    streams[f"{pool}_{segment}"] = as_list(mass[:, number, i], DIGITS)
        if grids is not None:  # if no attention mass was measured, take the sum of the maps
            vision = arrays[MAP_SCALE] * np.square(arrays[MAPS] / 255).sum(1)
            streams.setdefault("vision_all", as_list(vision, DIGITS))
        stored_prompt = table["prompts"][summary["group"]]
        prompt = {name: stored_prompt.get(name) for name in ("text", "answer", "images", "perturbed", "pools")}
        return summary | ({} if grids is None else {"grids": grids}) | {
            "text": stored["text"], "pieces": stored["pieces"], "streams": streams, "prompt": prompt,
            "messages": stored["messages"],
            "signals": name_signals(streams),
            "segments": segments, "mass": [[pool[row] for pool in segment] for segment in columns.get("mass", [])],
            "members": [other for other, group in enumerate(columns["prompt"]) if group == summary["group"]],
        }  # fmt: skip

    def maps(self, step: int, row: int) -> Json:
        _, stored, grids = self._read(step, row)
        if grids is None:
            raise KeyError(row)
        levels, scale = stored["streams"][MAPS], stored["streams"][MAP_SCALE]
        return {"levels": base64.b64encode(levels.tobytes()).decode(), "scale": as_list(scale, digits=6)}

    def image(self, step: int, key: str) -> bytes:
        location = self.table(step).get("images", {})[key]
        return self._blocks[step].read(location)

    def skipped(self) -> list[str]:
        readers = list(self._readers.values())
        lost = sum(reader.skipped for reader in readers) + sum(reader.unfinished() for reader in readers[:-1])
        messages = [f"record: {lost:,} bytes are damaged or cut off and are left out"] if lost else []
        messages += refusals(self._refused)
        return messages + [f"record: step {step} is damaged and left out" for step in sorted(self._damaged)]


def image_keys(response: Json) -> list[str]:
    """The images of a response: those of its prompt, their perturbed views, and those that an environment showed."""
    of_prompt = [key for name in IMAGE_LISTS for key in response["prompt"][name] or []]
    return of_prompt + [key for message in response.get("messages", ()) for key in message["images"]]


def check_table(table: Table, count: int) -> Table:
    """The table, if it is valid: it may come from a malicious file."""
    columns, prompts = table.get("rollouts"), table.get("prompts")
    if not isinstance(columns, dict) or not isinstance(prompts, list) or not isinstance(table.get("where"), list):
        raise DamagedRecord("a table lacks its columns, prompts or locations")
    if not all(isinstance(prompt, dict) for prompt in prompts):
        raise DamagedRecord("a prompt in a table is not an object")
    texts = [table.get("segments", []), *(prompt.get(name) or [] for prompt in prompts for name in IMAGE_LISTS)]
    if not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in texts):
        raise DamagedRecord("images or segments of a table are not lists of names")
    if not isinstance(columns.get("parts", {}), dict) or not isinstance(table.get("images", {}), dict):
        raise DamagedRecord("rewards or images of a table are not named")
    lists = [values for name, values in columns.items() if name not in ("parts", "mass")]
    lists += [table["where"], *columns.get("parts", {}).values()]
    if "prompt" not in columns or any(not isinstance(values, list) or len(values) != count for values in lists):
        raise DamagedRecord("a column of a table is missing or has the wrong length")
    if not all(type(group) is int and 0 <= group < len(prompts) for group in columns["prompt"]):
        raise DamagedRecord("a table refers to a prompt that it does not have")
    return table


def image_grids(streams: Mapping[str, np.ndarray], prompt: Mapping[str, Any]) -> list[Any] | None:
    """The token grids of a response's images; None if there are no maps or they do not fit the grids."""
    levels, scale, grids = streams.get(MAPS), streams.get(MAP_SCALE), prompt.get("grids")
    if levels is None or scale is None or levels.ndim != 2 or scale.shape != levels.shape[:1]:
        return None
    if not isinstance(grids, list) or not all(map(is_grid, grids)):
        return None
    return grids if sum(time * height * width for time, height, width, _ in grids) == levels.shape[1] else None


def is_grid(grid: Any) -> bool:
    """Whether this is (time, height, width, times of the stored frames); the file may be malicious."""
    try:
        *sides, frames = grid
        is_valid = all(type(number) is int and 0 <= number <= MAX_SIDE for number in (*sides, *frames))
        return is_valid and len(sides) == 3 and len(frames) <= MAX_SIDE and all(time < sides[0] for time in frames)
    except TypeError:
        return False


def as_numbers(values: Any, count: int) -> np.ndarray:
    """[count] floats, NaN for values that are not numbers."""
    if not isinstance(values, list) or len(values) != count:
        return np.full(count, np.nan)
    is_known = (isinstance(x, (int, float)) and abs(x) < LARGEST for x in values)  # a larger one means infinity
    return np.array([x if known else np.nan for x, known in zip(values, is_known, strict=True)], dtype=np.float64)


def find_refused(files: Sequence[Path], root: Path) -> list[Path]:
    """The files that are not read: links that lead out of the directory `root`, pipes and folders."""
    return [file for file in files if os.path.lexists(file) and not is_own_file(file, root)]


def refusals(files: Sequence[Path]) -> list[str]:
    reason = "it is a link that leads out of the run's directory, or no file"
    return [f"{file.name} is left out: {reason}" for file in files]
