"""From a dataset reader to a prepared folder: select rows, write shards, then the card and the contact sheet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mtrl.data.parallel import Progress
from mtrl.data.row_settings import DataError, RowError
from mtrl.prepare.contact_sheet import draw_sheet, sample_rows
from mtrl.prepare.dataset_card import render_card
from mtrl.prepare.images import Storage, store_image
from mtrl.prepare.questions import RowFault, RowReader, SourceQuestion
from mtrl.prepare.select import PrepareOptions, Selection, select_rows
from mtrl.prepare.shards import ROWS_PER_SHARD, OutputFolder, ShardWriter, explain_full_disk
from mtrl.utils.files import atomic_write

ROW_DETAIL = re.compile(r"the image .+?(?= (?:does not|cannot|is|has))|'[^']*'|\d+")  # differs between rows


@dataclass(frozen=True)
class PreparedDataset:
    folder: Path
    rows: dict[str, int]
    questions: int
    left_out: dict[str, int]
    skipped: dict[str, int]
    was_there: bool  # complete before this start


def prepare(reader: RowReader, folder: Path, options: PrepareOptions) -> PreparedDataset:
    output = OutputFolder(folder, {**options.settings, "stamp": reader.stamp})
    try:
        with explain_full_disk(output):
            was_there = output.journal.complete
            selection = select_rows(reader, options)
            if not was_there:
                write_shards(reader, output, selection, options)
                finish(output, selection, options)
            rows, skipped = (dict(output.journal.counts[name]) for name in ("rows", "skipped"))
            return PreparedDataset(folder, rows, selection.questions, selection.left_out, skipped, was_there)
    finally:
        output.close()


def write_shards(reader: RowReader, output: OutputFolder, selection: Selection, options: PrepareOptions) -> None:
    journal = output.journal
    shard = ShardWriter(output.folder, journal.stretches)
    skipped: list[str] = []
    try:
        with Progress(int(selection.wanted[journal.done :].sum()), f"writing {output.folder}") as progress:
            for index, question in reader.questions(journal.done, selection.wanted):
                row = make_row(question, output.folder, options.storage)
                if isinstance(row, RowFault):
                    if not options.skip_bad:
                        raise_fault(row, output)
                    skipped.append(f"{row.id}: {row.reason}")
                    shard.counts["skipped"][ROW_DETAIL.sub("..", row.reason)] += 1
                else:
                    split = "val" if selection.validation[index] else "train"
                    shard.add(split if options.validation else options.split, row)
                progress.add(1)
                if shard.rows >= ROWS_PER_SHARD or shard.bytes >= options.shard_mib << 20:
                    output.commit(shard, index + 1, skipped)
                    shard, skipped = ShardWriter(output.folder, journal.stretches), []
        output.commit(shard, len(reader), skipped)
    except BaseException:
        shard.discard()
        raise


def make_row(question: SourceQuestion | RowFault, folder: Path, storage: Storage) -> dict[str, Any] | RowFault:
    """Convert a question to a row of the schema."""
    if isinstance(question, RowFault):
        return question
    try:
        images = [store_image(image, question.directory, folder, storage) for image in question.images]
        marks = sum(text.count("<image>") for text in (question.prompt, *(question.options or ())))
        if marks and marks != len(images):
            raise RowError(f"its text has {marks} <image> marks for {len(images)} images")
    except RowError as error:
        return RowFault(question.id, error.reason)
    row = {name: getattr(question, name) for name in ("id", "question_id", "prompt", "answer", "options", "source")}
    return {**row, "images": images}


def raise_fault(fault: RowFault, output: OutputFolder) -> NoReturn:
    rows = sum(output.journal.counts["rows"].values())
    raise DataError(
        f"{fault.id}: {fault.reason}. Repair it (--image-dir is where paths of images start), or leave such rows out "
        f"with --skip-bad; the {rows:,} rows written so far stay, and the same command continues after them"
    )


def finish(output: OutputFolder, selection: Selection, options: PrepareOptions) -> None:
    """Write the contact sheet and the card, then mark the journal as complete."""
    journal, shards = output.journal, output.shards()
    if not shards:
        raise DataError(f"no row could be used: {'; '.join(journal.counts['skipped'])}")
    draw_sheet(sample_rows(shards, options.seed), shards[0].parent, output.folder / "samples.png")
    notes = [f"No row has {selection.unknown_ids:,} of the ids in the file."] if selection.unknown_ids else []
    with atomic_write(output.folder / "README.md") as out:
        out.write(render_card(options.title, journal, selection.left_out, selection.questions, notes).encode())
    journal.complete = True
    output.save()
