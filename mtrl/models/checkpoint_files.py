"""Whether the files of a model's directory are whole: no download that broke off, no pointer in place of a file, no
pickled weights. Of weights only the headers are read. A hub id is left to the hub's cache, which keeps whole files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mtrl.utils.files import regular_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
SETTINGS_FILES = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
GIT_LFS = b"version https://git-lfs.github.com/spec/"
AGAIN = "it is damaged or half downloaded; get it again"


def check_files(path: str | Path, names: Sequence[str]) -> None:
    """Of the files of these names in a local directory, the first that cannot be what it should, by a ValueError."""
    for file in (Path(path, name) for name in names):
        if not _is_there(file):
            continue
        if file.suffix == ".json":
            read_json_object(file)


def check_weight_files(path: str | Path) -> None:
    """The same for the weights: every file that the index names must be there, as long as its header says."""
    directory = Path(path)
    if not directory.is_dir():
        return
    names = weight_files(directory)
    if missing := [name for name in names if not _is_there(directory / name)]:
        told = f"{len(missing)} of the {len(names)} files of weights that {INDEX} names are missing"
        raise ValueError(f"{directory}: {told} ({missing[0]}); the download broke off, so get them again")
    for name in names:
        try:
            with safe_open(directory / name, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{directory / name}: {AGAIN} ({error})") from error


def weight_files(directory: Path) -> list[str]:
    """The safetensors files that hold a model's weights."""
    if _is_there(directory / WEIGHTS):  # transformers takes it first too
        return [WEIGHTS]
    if _is_there(directory / INDEX):
        names = read_json_object(directory / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"{directory / INDEX} names no files of weights; {AGAIN}")
        return sorted(set(names.values()))
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in directory.glob(kind))
    if pickled:
        raise ValueError(
            f"{directory} has pickled weights alone ({pickled[0]}), which may run code when they are read, so they are "
            "not; save the model as safetensors, as save_pretrained of transformers does"
        )
    raise ValueError(
        f"{directory} has no weights: neither {WEIGHTS} nor {INDEX}; the download broke off, or see the path"
    )


def read_json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {AGAIN} ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, not a JSON object: {AGAIN}")
    return found


def _is_there(file: Path) -> bool:
    """Whether there is a file; what only looks like one is refused. A pipe would be waited for without end."""
    try:
        with regular_file(file).open("rb") as opened:
            head = opened.read(len(GIT_LFS))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    if not head:
        raise ValueError(f"{file} is empty: {AGAIN}")
    if head == GIT_LFS:
        raise ValueError(f"{file} is a git-lfs pointer, not the file itself; run `git lfs pull` in {file.parent}")
    return True
