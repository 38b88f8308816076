"""Where the weights of the embedded models are: in the package mtrl-embedded, which is installed beside this one."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "mtrl_embedded"
CHECKOUT = Path(__file__).parents[2] / "embedded" / PACKAGE


def find_weights() -> Path:
    """The folder of the package. A checkout reads its own, whatever is installed: two commits may have two."""
    installed = None if CHECKOUT.is_dir() else find_spec(PACKAGE)
    return CHECKOUT if installed is None or installed.origin is None else Path(installed.origin).parent


MODELS = {name: find_weights() / name for name in ("zoo", "scenes", "lookagain")}
"""The names that `worker.actor.model.model_path` accepts; the default is the first."""
UNMADE = ("lookagain",)  # of these the package has no weights yet
NOT_INSTALLED = (
    "this embedded model is not installed: pip install 'mtrl[embedded]'; lookagain is not in that package yet, and a "
    "checkout makes it on a GPU: python -m pretraining.pretrain lookagain"
)
FOLDERS = {  # how a path of such a folder ends, on other machines and in older versions
    f"{PACKAGE}/zoo": "zoo",
    f"{PACKAGE}/scenes": "scenes",
    f"{PACKAGE}/lookagain": "lookagain",
    "mtrl/embedded/model": "zoo",
    "mtrl/embedded/scenes_model": "scenes",
    "mtrl/zoo/model": "zoo",
    "mtrl/zoo/scenes_model": "scenes",
}


def is_not_installed(path: str | Path) -> bool:
    return Path(path) in MODELS.values() and not Path(path, "config.json").is_file()


def current_path(path: str) -> str:
    """The path itself, or the folder here if it is that of an embedded model elsewhere: a checkpoint of adapters
    names the folder of its base."""
    posix = f"/{Path(path).as_posix()}"
    names = [name for end, name in FOLDERS.items() if posix.endswith(f"/{end}") and not os.path.exists(path)]
    return str(MODELS[names[0]]) if names else path
