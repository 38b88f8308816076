"""Records in a checkpoint: tensors by path in NAME.safetensors, everything else in NAME.json."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from mtrl.models.checkpoint_files import convert_disk_errors


@dataclass(frozen=True)
class RecordSnapshot:
    """A snapshot of records. They never change, so it may be written at any time."""

    copied = True
    name: str
    tensors: Mapping[str, Tensor]
    rows: Any  # for JSON

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def detached(self) -> RecordSnapshot:
        return self

    def write(self, directory: Path) -> None:
        tensors, rows = record_files(directory, self.name)
        with convert_disk_errors():
            save_file(dict(self.tensors), tensors)
        rows.write_text(json.dumps(self.rows, indent=1), encoding="utf-8")


def read_records(directory: Path, name: str) -> tuple[dict[str, dict[str, Tensor]], Any]:
    """The tensors by the first part of their path, and the rows."""
    tensors, rows = record_files(directory, name)
    return group_by_folder(load_file(tensors)), json.loads(rows.read_text(encoding="utf-8"))


def record_files(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.safetensors", directory / f"{name}.json"


def record_tensors(record: Any) -> dict[str, Tensor]:
    """The tensors of a record, and of records and mappings in it, by path."""
    tensors: dict[str, Tensor] = {}
    items = {f.name: getattr(record, f.name) for f in fields(record)} if is_dataclass(record) else record
    for name, value in items.items():
        if isinstance(value, Tensor):
            tensors[name] = value.contiguous()
        elif isinstance(value, Mapping) or is_dataclass(value):
            tensors |= {f"{name}/{path}": tensor for path, tensor in record_tensors(value).items()}
    return tensors


def group_by_folder(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors under each first part of a path, by the rest of it."""
    folders: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path, tensor in tensors.items():
        folder, _, rest = current_name(path).partition("/")
        folders[folder][rest] = tensor
    return folders


RENAMED = {  # fields of records in checkpoints of 0.1.0
    "rollouts/behaviour": "rollouts/rollout_logprobs",
    "greedy/behaviour": "greedy/rollout_logprobs",
    "signals/old": "signals/old_logprobs",
    "signals/perturbed": "signals/perturbed_logprobs",
    "signals/reference": "signals/ref_logprobs",
    "signals/mass": "signals/attention_mass",
    "signals/prompt_mass": "signals/prompt_attention_mass",
}


def current_name(path: str) -> str:
    """The path of a tensor with the current field names."""
    head, _, field = path.rpartition("/")
    parents, _, record = head.rpartition("/")
    renamed = RENAMED.get(f"{record}/{field}", f"{record}/{field}")
    return f"{parents}/{renamed}" if parents else renamed
