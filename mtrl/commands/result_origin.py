"""What the results of a configuration depend on: its resolved keys, the code and the data, for `mtrl compare`.

Files are described by their contents and not by their paths, so that a batch can resume on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from mtrl.compare.arms import OF_EACH_RUN
from mtrl.compose.task_source import open_data_sources
from mtrl.config import Config
from mtrl.config.paths import PathKind
from mtrl.config.tree import known_leaves
from mtrl.utils.package_version import code_version, digest
from mtrl.utils.plugins import split_spec


def describe_origin(config: Config) -> dict[str, str]:
    """Every key with its value, and digests of the code, the data and the files that keys name."""
    origin: dict[str, str] = {}
    for key, leaf in known_leaves().items():
        value = attrgetter(key)(config)
        if key not in OF_EACH_RUN and leaf.path_kind not in ("data", "folder"):
            origin[key] = repr(value) if leaf.path_kind is None else describe_files(value, leaf.path_kind)
    for split, files in (("train", config.dataset.train_files), ("validation", config.dataset.val_files)):
        sources = open_data_sources(files, split) if files or not config.dataset.train_files else []
        origin[f"{split} data"] = " ".join(source.fingerprint for source in sources)
    return origin | {"code": code_version()}


def describe_files(value: Any, kind: PathKind) -> str:
    """The value with the digest of each file instead of its folder."""
    if isinstance(value, Mapping):
        return repr({name: describe_files(each, kind) for name, each in value.items()})
    if isinstance(value, (list, tuple)):
        return repr([describe_files(each, kind) for each in value])
    if not isinstance(value, str):
        return repr(value)
    file, name = split_spec(value) if kind == "code" else (value, None)
    if not Path(file).expanduser().is_file():
        return repr(value)
    path = Path(file).expanduser()
    return f"{path.name}:{name or ''} {digest([path.read_bytes()])}"
