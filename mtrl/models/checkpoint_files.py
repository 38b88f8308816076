"""Check that the files of a model's directory are complete: no interrupted download, no git-lfs pointer, no pickled
weights. Of weights only the headers are read. A hub id is not checked: the hub's cache holds complete files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mtrl.utils.embedded_models import NOT_INSTALLED, current_path, is_not_installed
from mtrl.utils.files import regular_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
ADAPTER_CONFIG, ADAPTER_BASE = "adapter_config.json", "base_model_name_or_path"  # peft's file, and its key
SETTINGS_FILES = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
GIT_LFS = b"version https://git-lfs.github.com/spec/"
AGAIN = "it is damaged or half downloaded; get it again"


def check_files(path: str | Path, names: Sequence[str]) -> None:
    """Raise a ValueError for the first damaged file of these names in a local directory; files may be missing."""
    for file in (Path(path, name) for name in names):
        if _exists(file) and file.suffix == ".json":
            read_json_object(file)


def read_checkpoint_json(path: str, name: str) -> dict[str, Any]:
    """A JSON file of a local or hub checkpoint; empty if there is none."""
    file = find_checkpoint_file(path, name)
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}


def find_checkpoint_file(path: str, name: str) -> str | None:
    """The path of a file of a local or hub checkpoint; None if there is none."""
    from transformers.utils import cached_file

    return cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds adapters of another model, rather than a model."""
    return Path(path, ADAPTER_CONFIG).is_file()


def base_path(path: str | Path) -> str:
    """The path of a model's base: the path itself, unless it holds adapters."""
    if not is_adapter(path):
        return str(path)
    base = read_json_object(Path(path, ADAPTER_CONFIG)).get(ADAPTER_BASE)
    if not isinstance(base, str) or not base:
        raise ValueError(f"{Path(path, ADAPTER_CONFIG)} does not say which model its adapters are for ({ADAPTER_BASE})")
    base = current_path(base)
    if is_not_installed(base):
        raise ValueError(f"{path} holds adapters of an embedded model; {NOT_INSTALLED}")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ValueError(
            f"{path} holds adapters of {base}, which does not exist; put it back, or set {ADAPTER_BASE} in "
            f"{ADAPTER_CONFIG}"
        )
    return base


def check_weight_files(path: str | Path) -> None:
    """Raise a ValueError unless every weight file of the index exists, with the length that its header says."""
    directory = Path(path)
    if not directory.is_dir():
        return
    names = list_weight_files(directory)
    if missing := [name for name in names if not _exists(directory / name)]:
        problem = f"{len(missing)} of the {len(names)} files of weights that {INDEX} names are missing"
        raise ValueError(f"{directory}: {problem} ({missing[0]}); the download broke off, so get them again")
    for name in names:
        try:
            with safe_open(directory / name, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{directory / name}: {AGAIN} ({error})") from error


def list_weight_files(directory: Path) -> list[str]:
    """The safetensors files that hold a model's weights."""
    if _exists(directory / WEIGHTS):  # transformers takes it first, too
        return [WEIGHTS]
    if _exists(directory / INDEX):
        names = read_json_object(directory / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"{directory / INDEX} names no files of weights; {AGAIN}")
        return sorted(set(names.values()))
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in directory.glob(kind))
    if pickled:
        raise ValueError(
            f"{directory} has only pickled weights ({pickled[0]}), which may run code when they are read; save the "
            "model as safetensors, as save_pretrained of transformers does"
        )
    raise ValueError(
        f"{directory} has no weights: neither {WEIGHTS} nor {INDEX}; the download broke off, or the path is wrong"
    )


def read_json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {AGAIN} ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a JSON object: {AGAIN}")
    return content


@contextmanager
def convert_disk_errors() -> Iterator[None]:
    """safetensors reports a full disk as its own error; this raises an OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _exists(file: Path) -> bool:
    """Whether the file exists. Raises a ValueError for a pipe, an empty file or a git-lfs pointer."""
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
