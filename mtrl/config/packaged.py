"""The configurations and templates that come with the package: `experiments/zoo/dapo.yaml` wherever a file is named,
or `mtrl:zoo/dapo`."""

import os
import re
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent / "configs"
PREFIX = "mtrl:"  # names one of the package, whatever lies in the working directory
_MOST_NAMED = 3


def packaged() -> dict[str, Path]:
    """Configurations by the name that users give them."""
    return {path.relative_to(HOME).as_posix(): path for path in sorted(HOME.rglob("*.yaml"))}


def find(path: str | Path) -> Path:
    """The path itself where something is there; else the packaged configuration of that name, `.yaml` or not. After
    `mtrl:` the folder `experiments/` may be left out."""
    path = Path(path)
    if os.path.exists(path):
        return path
    known = packaged()
    name = path.as_posix().removeprefix(PREFIX)
    names = [name, f"experiments/{name}"] if path.as_posix().startswith(PREFIX) else [name]
    return next((known[each] for short in names for each in (short, f"{short}.yaml") if each in known), path)


def is_config(name: str) -> bool:
    """Whether a name is one of a configuration, rather than of data."""
    return Path(name).suffix in (".yaml", ".yml") or name.startswith(PREFIX) or find(name) != Path(name)


def near_names(path: str | Path) -> list[str]:
    """Packaged configurations that a wrong name may have meant, the likeliest first."""
    wanted = Path(str(path).removeprefix(PREFIX))
    stems = get_close_matches(wanted.stem, {Path(name).stem for name in packaged()}, n=_MOST_NAMED, cutoff=0.75)
    names = [name for name in packaged() if Path(name).stem in stems]
    likeness = {name: SequenceMatcher(None, wanted.as_posix(), name, autojunk=False).ratio() for name in names}
    return sorted(names, key=lambda name: -likeness[name])[:_MOST_NAMED]


def listing() -> str:
    """Every packaged configuration with its first line, and where they are."""
    named = packaged()
    width = max(map(len, named))
    lines = [f"{name:<{width}}  {_title(path)}" for name, path in named.items()]
    return "\n".join([*lines, "", f"They lie in {HOME}, with their templates. mtrl train NAME trains one."])


def _title(path: Path) -> str:
    comment = re.match(r"#\s*(.*)", path.read_text(encoding="utf-8"))
    return comment[1] if comment else ""
