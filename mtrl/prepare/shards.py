"""The output on disk: Parquet shards and a journal.

Rows are written to one shard per split; the shards are renamed when they are complete, and then the journal records up
to which row of the dataset the output is complete. However the process ends, all earlier shards remain, and the same
command continues after them, with bitwise the same result.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from mtrl.data.row_settings import DataError
from mtrl.prepare.merge import JOURNAL
from mtrl.utils.errors import RunError
from mtrl.utils.files import atomic_write

VERSION = 1  # version of the output; raise it when the same rows would become other bytes
SKIPPED = "skipped.txt"  # one line per row; not an ending that a run reads as data
BYTES_PER_GROUP, ROWS_PER_GROUP = 4 << 20, 1000  # small row groups, so that a run reads single rows quickly
ROWS_PER_SHARD = 20_000
COUNTED = ("rows", "sources", "options", "images", "skipped")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TEXT = ("id", "question_id", "prompt", "answer", "source")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def _schema() -> pa.Schema:
    """Make the schema, with the metadata by which the library `datasets` recognizes images."""
    columns = [(name, pa.string()) for name in TEXT] + [("options", pa.list_(pa.string())), ("images", pa.list_(IMAGE))]
    text = {"dtype": "string", "_type": "Value"}
    lists = {"options": {"feature": text, "_type": "List"}, "images": {"feature": {"_type": "Image"}, "_type": "List"}}
    metadata = {"info": {"features": {name: lists.get(name, text) for name, _ in columns}}}
    return pa.schema(columns, metadata={"huggingface": json.dumps(metadata)})


SCHEMA = _schema()


@dataclass
class Journal:
    """Progress of the output; the fields are the keys of its file."""

    settings: dict[str, Any]
    done: int = 0  # rows of the dataset that have been processed
    stretches: int = 0  # shards written for each split
    skipped_bytes: int = 0  # length of the list of skipped rows
    counts: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in COUNTED})
    complete: bool = False


class OutputFolder:
    """A folder that only one process writes to at a time."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.journal = folder, Journal(json.loads(json.dumps({"version": VERSION, **settings})))
        folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            self._resume()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._lock)

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DataError(
                f"another mtrl prepare writes to {self.folder}; wait for it, or name another --out"
            ) from error

    def _resume(self) -> None:
        """Load the journal of an earlier start with the same settings; raise DataError if the folder is not ours."""
        file = self.folder / JOURNAL
        if not file.exists():
            if any(not path.name.startswith(f".{JOURNAL}.") for path in self.folder.iterdir()):
                raise DataError(f"{self.folder} holds something else; name another folder with --out")
            self.save()
            return
        earlier = json.loads(file.read_text(encoding="utf-8"))
        differ = [key for key, value in self.journal.settings.items() if earlier["settings"].get(key) != value]
        if differ:
            changes = ", ".join(f"{key} was {earlier['settings'].get(key)}" for key in differ if key != "stamp")
            raise DataError(
                f"{self.folder} was prepared differently ({changes or 'the dataset has changed since'}); name another "
                "folder with --out, or remove it"
            )
        counts = {name: Counter(earlier["counts"][name]) for name in COUNTED}
        self.journal = Journal(**{**earlier, "settings": self.journal.settings, "counts": counts})
        for part in self.folder.rglob(".*"):  # incomplete files of a process that was ended
            if part.is_file() and part.name != JOURNAL:
                part.unlink()
        if (self.folder / SKIPPED).exists():
            os.truncate(self.folder / SKIPPED, self.journal.skipped_bytes)

    def save(self) -> None:
        with atomic_write(self.folder / JOURNAL) as out:
            out.write(json.dumps(vars(self.journal), indent=1).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())

    def commit(self, shard: ShardWriter, done: int, skipped: list[str]) -> None:
        """Complete the shard on disk, then record it in the journal."""
        if shard.rows or skipped:
            shard.finish()
            if skipped:
                self._list_skipped(skipped)
            self.journal.stretches += bool(shard.rows)
            for name, counts in shard.counts.items():
                self.journal.counts[name] += counts
        self.journal.done = done
        self.save()

    def _list_skipped(self, skipped: list[str]) -> None:
        with (self.folder / SKIPPED).open("ab") as out:
            out.writelines(line.encode(errors="backslashreplace") + b"\n" for line in skipped)
            out.flush()
            os.fsync(out.fileno())
            self.journal.skipped_bytes = out.tell()

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*/[0-9]*.parquet"))


class ShardWriter:
    """Writes rows to one shard per split."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.name = folder, f"{number:05d}.parquet"
        self.rows = self.bytes = 0
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in COUNTED}
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._group: dict[str, list[dict[str, Any]]] = {}  # rows of the next row group, by split
        self._group_bytes: Counter[str] = Counter()

    def add(self, split: str, row: dict[str, Any]) -> None:
        size = sum(len(image["bytes"] or b"") for image in row["images"]) + len(row["prompt"]) + 200
        self._group.setdefault(split, []).append(row)
        self._group_bytes[split] += size
        self.rows, self.bytes = self.rows + 1, self.bytes + size
        options, source = row["options"], row["source"]
        self.counts["rows"][split] += 1
        self.counts["sources"][f"{split}/{source}"] += 1
        self.counts["options"][f"{source}/{'none' if options is None else len(options)}"] += 1
        self.counts["images"][f"{source}/{len(row['images'])}"] += 1
        if self._group_bytes[split] >= BYTES_PER_GROUP or len(self._group[split]) >= ROWS_PER_GROUP:
            self._write_group(split)

    def _part_path(self, split: str) -> Path:
        return self.folder / split / f".{self.name}.part"

    def _write_group(self, split: str) -> None:
        if split not in self._writers:
            self._part_path(split).parent.mkdir(exist_ok=True)
            self._writers[split] = pq.ParquetWriter(
                self._part_path(split), SCHEMA, compression="zstd", compression_level=1, use_dictionary=["source"],
                write_statistics=False, write_page_checksum=True,
            )  # fmt: skip
        table = pa.Table.from_pylist(self._group.pop(split), schema=SCHEMA)
        self._group_bytes[split] = 0
        self._writers[split].write_table(table, row_group_size=len(table))

    def finish(self) -> None:
        for split in list(self._group):
            self._write_group(split)
        for split, writer in self._writers.items():
            writer.close()
            with self._part_path(split).open("rb") as file:
                os.fsync(file.fileno())
        for split in self._writers:
            os.replace(self._part_path(split), self.folder / split / self.name)

    def discard(self) -> None:
        for split, writer in self._writers.items():
            with suppress(OSError, pa.ArrowException):
                writer.close()
            with suppress(OSError):
                self._part_path(split).unlink(missing_ok=True)


@contextmanager
def explain_full_disk(output: OutputFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        rows, free = sum(output.journal.counts["rows"].values()), shutil.disk_usage(output.folder).free >> 20
        raise RunError(
            f"{output.folder} cannot be written: {os.strerror(error.errno)} ({free:,} MiB are free); the {rows:,} rows "
            "written so far are complete. Free some space and run the same command again: it continues after them"
        ) from error
