"""The files of a checkpoint that several ranks write: each rank gathers and writes some whole files.

Tensors are assigned to files of at most FILE_BYTES in their order, and the files to ranks in turn. So no rank holds
more than its share of the files, all write at once, and the result is an ordinary Hugging Face checkpoint, with an
index if there are several files. A model that fits into one file is written by the first rank, as by a single process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from mtrl.models.checkpoint_files import INDEX

FILE_BYTES = 5 * 10**9  # the size that hubs recommend
FORMAT = {"format": "pt"}  # the metadata that transformers requires in a file of weights


@dataclass(frozen=True)
class FilePlan:
    """`FilePlan("model", (("a", "b"), ("c",)), 9)`: two tensors in model-00001-of-00002.safetensors, one in the other,
    nine bytes together."""

    stem: str
    files: tuple[tuple[str, ...], ...]
    nbytes: int

    @classmethod
    def make(cls, stem: str, sizes: Mapping[str, int], limit: int) -> FilePlan:
        """No file exceeds the limit, unless a single tensor does."""
        files: list[list[str]] = [[]]
        room = limit
        for name, size in sizes.items():
            if files[-1] and size > room:
                files.append([])
                room = limit
            files[-1].append(name)
            room -= size
        return cls(stem, tuple(map(tuple, files)), sum(sizes.values()))

    @property
    def is_single(self) -> bool:
        return len(self.files) == 1

    def rank_tensors(self, rank: int, ranks: int) -> set[str]:
        """The names of the tensors that a rank writes."""
        return {name for file in self.files[rank::ranks] for name in file}

    def write(self, tensors: Mapping[str, Tensor], directory: Path, rank: int, ranks: int) -> None:
        for number in range(rank, len(self.files), ranks):
            part = {name: tensors[name].contiguous() for name in self.files[number]}
            save_file(part, directory / self.file_name(number), metadata=FORMAT)

    def write_index(self, directory: Path) -> None:
        weight_map = {name: self.file_name(number) for number, file in enumerate(self.files) for name in file}
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def file_name(self, number: int) -> str:
        suffix = "" if self.is_single else f"-{number + 1:05d}-of-{len(self.files):05d}"
        return f"{self.stem}{suffix}.safetensors"
