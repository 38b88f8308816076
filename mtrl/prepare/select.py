"""Select the rows and their splits, in a first pass over everything but the images.

It needs 17 bytes per row. The selection depends only on the seed and the ids, not on the order of the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrl.data.parallel import Progress
from mtrl.data.row_settings import DataError
from mtrl.prepare.images import Storage
from mtrl.prepare.questions import RowReader
from mtrl.utils.files import regular_file


@dataclass(frozen=True)
class PrepareOptions:
    title: str
    split: str  # the output's split; with validation: train and val
    settings: dict[str, Any]  # shown in the card; a later start with others is an error
    seed: int = 0
    subset: int | None = None  # number of questions
    ids: Set[str] | None = None  # the only questions to use
    validation: float = 0.0  # share of the questions that is held out
    storage: Storage = "embed"
    skip_bad: bool = False
    shard_mib: int = 256


@dataclass(frozen=True)
class Selection:
    wanted: np.ndarray  # [rows] bool
    validation: np.ndarray  # [rows] bool; a subset of the wanted ones
    left_out: dict[str, int]  # number of rows by reason
    questions: int
    unknown_ids: int  # ids of the file that no row has


def select_rows(reader: RowReader, options: PrepareOptions) -> Selection:
    total, ids = len(reader), options.ids
    wanted, row_hash, question_hash = np.zeros(total, bool), np.zeros(total, np.uint64), np.zeros(total, np.uint64)
    left_out: Counter[str] = Counter()
    used_ids: set[str] = set()
    with Progress(total, f"selecting from {reader.name}") as progress:
        for index, header in enumerate(reader.headers()):
            progress.add(1)
            if ids is not None and header.key in ids:
                used_ids.add(header.key)
            if header.left_out is not None:
                left_out[header.left_out] += 1
            elif ids is not None and header.key not in ids:
                left_out["it is not in the file of ids"] += 1
            else:
                wanted[index] = True
                row_hash[index] = stable_hash(header.id)
                question_hash[index] = stable_hash(f"{options.seed}:{header.question}")
    rows = np.flatnonzero(wanted)
    first = rows[np.unique(row_hash[rows], return_index=True)[1]]
    wanted[:] = False
    wanted[first] = True
    left_out["an earlier row has the same id"] += len(rows) - len(first)
    questions = np.unique(question_hash[wanted])  # sorted by hash, so in an order that depends only on the seed
    if options.subset is not None:
        chosen = np.isin(question_hash, questions[: options.subset])
        left_out["it is not in the subset"] += int((wanted & ~chosen).sum())
        wanted &= chosen
        questions = questions[: options.subset]
    held_out = questions[: round(options.validation * len(questions))]
    reasons = {reason: count for reason, count in sorted(left_out.items()) if count}
    if not wanted.any():
        listed = "; ".join(f"{count:,} rows: {reason}" for reason, count in reasons.items())
        raise DataError(f"no row of {reader.name} is left ({listed or 'it is empty'})")
    unknown = 0 if ids is None else len(ids - used_ids)
    return Selection(wanted, wanted & np.isin(question_hash, held_out), reasons, len(questions), unknown)


def stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def read_ids(path: str) -> frozenset[str]:
    """Read question ids: one per line, or a JSON array of ids or of objects with a `question_id` or an `id`."""
    text = regular_file(Path(path).expanduser()).read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        ids = [line.strip() for line in text.splitlines()]
    else:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise DataError(f"{path} is not valid JSON: {error}") from error
        objects = (value if isinstance(value, dict) else {"id": value} for value in values)
        ids = [str(value.get("question_id", value.get("id", ""))) for value in objects]
    questions = frozenset(filter(None, ids))
    if not questions:
        raise DataError(f"{path} names no question; give ids, one per line, or a JSON array of them")
    return questions
