"""The packaged configurations and templates, by names such as `experiments/zoo/dapo.yaml` or `mtrl:zoo/dapo`."""

import os
import re
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
PREFIX = "mtrl:"  # always names a packaged configuration, whatever is in the working directory
_MAX_SUGGESTED = 3


@cache
def packaged_configs() -> dict[str, Path]:
    """The packaged configurations by their names."""
    return {path.relative_to(CONFIG_DIR).as_posix(): path for path in sorted(CONFIG_DIR.rglob("*.yaml"))}


def find_config(path: str | Path) -> Path:
    """The path itself if it exists, else the packaged configuration of that name, if any."""
    return Path(path) if os.path.exists(path) else find_packaged(path) or Path(path)


def find_packaged(name: str | Path) -> Path | None:
    """The packaged configuration of that name; `.yaml` may be left out, and after `mtrl:` the folder `experiments/`."""
    known, text = packaged_configs(), Path(name).as_posix()
    short = text.removeprefix(PREFIX)
    names = [short, f"experiments/{short}"] if text.startswith(PREFIX) else [short]
    return next((known[each] for name in names for each in (name, f"{name}.yaml") if each in known), None)


def is_config(name: str) -> bool:
    """Whether the name refers to a configuration rather than to data."""
    return Path(name).suffix in (".yaml", ".yml") or name.startswith(PREFIX) or find_config(name) != Path(name)


def similar_names(path: str | Path) -> list[str]:
    """Packaged configurations with a similar name, most similar first."""
    wanted = Path(str(path).removeprefix(PREFIX))
    stems = get_close_matches(
        wanted.stem, {Path(name).stem for name in packaged_configs()}, n=_MAX_SUGGESTED, cutoff=0.75
    )
    names = [name for name in packaged_configs() if Path(name).stem in stems]
    likeness = {name: SequenceMatcher(None, wanted.as_posix(), name, autojunk=False).ratio() for name in names}
    return sorted(names, key=lambda name: -likeness[name])[:_MAX_SUGGESTED]


def list_configs() -> str:
    """One line per packaged configuration with its title, and the directory that contains them."""
    configs = packaged_configs()
    width = max(map(len, configs))
    lines = [f"{name:<{width}}  {_title(path)}" for name, path in configs.items()]
    return "\n".join([*lines, "", f"They are in {CONFIG_DIR}, with their templates. mtrl train NAME trains one."])


def _title(path: Path) -> str:
    comment = re.match(r"#\s*(.*)", path.read_text(encoding="utf-8"))
    return comment[1] if comment else ""
