"""Which rows become questions, and in which split: a first pass over everything but the images.

It keeps 17 bytes a row. What is chosen depends on the seed and on the ids alone, not on the order of the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtrl.data.row_settings import DataError
from mtrl.prepare.questions import RowReader
from mtrl.utils.files import regular_file


@dataclass(frozen=True)
class Selection:
    wanted: np.ndarray  # [rows] bool
    validation: np.ndarray  # [rows] bool: of the wanted ones
    left_out: dict[str, int]  # reason: rows
    questions: int
    unknown_ids: int  # ids of the file that no row has

    @property
    def rows(self) -> int:
        return int(self.wanted.sum())


def select(
    reader: RowReader,
    *,
    seed: int,
    subset: int | None = None,
    ids: Set[str] | None = None,
    validation: float = 0.0,
    progress: Callable[[int], None] = lambda rows: None,
) -> Selection:
    """`subset`: so many questions; `ids`: these alone; `validation`: the share of the questions that is held back."""
    total = len(reader)
    wanted, row_hash, question_hash = np.zeros(total, bool), np.zeros(total, np.uint64), np.zeros(total, np.uint64)
    left_out: Counter[str] = Counter()
    met: set[str] = set()
    for index, head in enumerate(reader.heads()):
        progress(1)
        if ids is not None and head.key in ids:
            met.add(head.key)
        if head.left_out is not None:
            left_out[head.left_out] += 1
        elif ids is not None and head.key not in ids:
            left_out["it is not in the file of ids"] += 1
        else:
            wanted[index] = True
            row_hash[index], question_hash[index] = stable_hash(head.id), stable_hash(f"{seed}:{head.question}")
    places = np.flatnonzero(wanted)
    first = places[np.unique(row_hash[places], return_index=True)[1]]
    wanted[:] = False
    wanted[first] = True
    left_out["a row with its id came before"] += len(places) - len(first)
    questions = np.unique(question_hash[wanted])  # sorted, in an order that the seed alone decides
    if subset is not None:
        chosen = np.isin(question_hash, questions[:subset])
        left_out["it is not in the subset"] += int((wanted & ~chosen).sum())
        wanted &= chosen
        questions = questions[:subset]
    held_back = questions[: round(validation * len(questions))]
    told = {reason: count for reason, count in sorted(left_out.items()) if count}
    unknown = 0 if ids is None else len(ids - met)
    return Selection(wanted, wanted & np.isin(question_hash, held_back), told, len(questions), unknown)


def stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def read_ids(path: str) -> frozenset[str]:
    """Question ids: one a line, or a JSON array of ids or of objects with a `question_id` or an `id`."""
    text = regular_file(Path(path).expanduser()).read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        ids = [line.strip() for line in text.splitlines()]
    else:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise DataError(f"{path} is no valid JSON: {error}") from error
        objects = (value if isinstance(value, dict) else {"id": value} for value in values)
        ids = [str(value.get("question_id", value.get("id", ""))) for value in objects]
    found = frozenset(filter(None, ids))
    if not found:
        raise DataError(f"{path} names no question; give ids, one a line, or a JSON array of them")
    return found
