"""From a reader of a dataset to a prepared folder: choose, write in stretches, then the card and the sheet."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mtrl.data.cache import replacing
from mtrl.data.parallel import Progress
from mtrl.data.row_settings import DataError, RowError
from mtrl.prepare.contact_sheet import draw_sheet, sample_rows
from mtrl.prepare.dataset_card import card
from mtrl.prepare.images import Storage, stored
from mtrl.prepare.questions import RowFault, RowReader, SourceQuestion
from mtrl.prepare.select import Selection, select
from mtrl.prepare.shards import STRETCH_ROWS, Journal, Output, Stretch, telling_of_a_full_disk

MARK = re.compile("<image>")
PARTICULAR = re.compile(r"the image .+?(?= (?:does not|cannot|is|has))|'[^']*'|\d+")


@dataclass(frozen=True)
class Wishes:
    """What the user chooses; `named` are those that the card shows and a later start must not change."""

    title: str
    split: str  # of the output; with validation: train and val
    named: dict[str, Any]
    seed: int = 0
    subset: int | None = None
    ids: Set[str] | None = None
    validation: float = 0.0
    storage: Storage = "embed"
    skip_bad: bool = False
    shard_mib: int = 256


@dataclass(frozen=True)
class Prepared:
    folder: Path
    rows: dict[str, int]
    questions: int
    left_out: dict[str, int]
    skipped: dict[str, int]
    was_there: bool


def prepare(reader: RowReader, folder: Path, wishes: Wishes, stream: TextIO | None = None) -> Prepared:
    output = Output(folder, {**wishes.named, "stamp": reader.stamp})
    try:
        with telling_of_a_full_disk(output):
            was_there = output.journal.complete
            selection = choose(reader, wishes, stream)
            if not was_there:
                write(reader, output, selection, wishes, stream)
                finish(output, selection, wishes)
            counts = output.journal.counts
            return Prepared(
                folder,
                dict(counts["rows"]),
                selection.questions,
                selection.left_out,
                dict(counts["skipped"]),
                was_there,
            )
    finally:
        output.close()


def choose(reader: RowReader, wishes: Wishes, stream: TextIO | None) -> Selection:
    with Progress(len(reader), f"choosing of {reader.name}", stream) as progress:
        selection = select(
            reader, seed=wishes.seed, subset=wishes.subset, ids=wishes.ids, validation=wishes.validation,
            progress=progress.add,
        )  # fmt: skip
    if not selection.rows:
        told = "; ".join(f"{count:,} rows: {reason}" for reason, count in selection.left_out.items())
        raise DataError(f"no row of {reader.name} is left ({told or 'it is empty'})")
    return selection


def write(reader: RowReader, output: Output, selection: Selection, wishes: Wishes, stream: TextIO | None) -> None:
    journal = output.journal
    stretch = Stretch(output.folder, journal.stretches)
    skipped: list[str] = []
    try:
        with Progress(int(selection.wanted[journal.done :].sum()), f"writing {output.folder}", stream) as progress:
            for index, found in reader.questions(journal.done, selection.wanted):
                made = (
                    prepared_row(found, output.folder, wishes.storage) if isinstance(found, SourceQuestion) else found
                )
                if isinstance(made, RowFault):
                    if not wishes.skip_bad:
                        check(made, output)
                    skipped.append(f"{made.id}: {made.reason}")
                    stretch.counts["skipped"][PARTICULAR.sub("..", made.reason)] += 1
                else:
                    stretch.add(choose_split(wishes, bool(selection.validation[index])), made)
                progress.add(1)
                if stretch.rows >= STRETCH_ROWS or stretch.bytes >= wishes.shard_mib << 20:
                    output.commit(stretch, index + 1, skipped)
                    stretch, skipped = Stretch(output.folder, journal.stretches), []
        output.commit(stretch, len(reader), skipped)
    except BaseException:
        stretch.discard()
        raise


def choose_split(wishes: Wishes, validation: bool) -> str:
    return wishes.split if not wishes.validation else "val" if validation else "train"


def prepared_row(question: SourceQuestion, folder: Path, storage: Storage) -> dict[str, Any] | RowFault:
    """As the schema has it."""
    try:
        images = [stored(image, question.directory, folder, storage) for image in question.images]
        marks = sum(len(MARK.findall(text)) for text in (question.prompt, *(question.options or ())))
        if marks and marks != len(images):
            raise RowError(f"its text has {marks} <image> marks for {len(images)} images")
    except RowError as error:
        return RowFault(question.id, error.reason)
    row = {name: getattr(question, name) for name in ("id", "question_id", "prompt", "answer", "options", "source")}
    return {**row, "images": images}


def check(fault: RowFault, output: Output) -> None:
    rows = sum(output.journal.counts["rows"].values())
    raise DataError(
        f"{fault.id}: {fault.reason}. Repair it (--image-dir says where paths of images start), or leave such rows out "
        f"with --skip-bad; the {rows:,} rows written so far stay, and the same command goes on after them"
    )


def finish(output: Output, selection: Selection, wishes: Wishes) -> None:
    """The sheet and the card; last of all the journal says that everything is there."""
    journal: Journal = output.journal
    shards = output.shards()
    if not shards:
        raise DataError(f"no row could be used: {'; '.join(journal.counts['skipped'])}")
    draw_sheet(sample_rows(shards, wishes.seed), output.folder / "samples.png")
    notes = [f"{selection.unknown_ids:,} ids of the file are of no row."] if selection.unknown_ids else []
    with replacing(output.folder / "README.md") as out:
        out.write(card(wishes.title, journal, selection.left_out, selection.questions, notes).encode())
    journal.complete = True
    output.save()
