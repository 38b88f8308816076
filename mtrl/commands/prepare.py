"""`mtrl prepare`: a public dataset made ready for training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mtrl.commands.load_arguments import say, started, take_option
from mtrl.compose.hub import seeking_data
from mtrl.config import ConfigError
from mtrl.prepare import aokvqa, arxivqa, merge, mmmu_pro
from mtrl.prepare.prepare_dataset import Prepared, Wishes, prepare
from mtrl.prepare.questions import RowReader
from mtrl.prepare.select import read_ids
from mtrl.utils.errors import RunError

DATASETS = {"aokvqa": aokvqa, "arxivqa": arxivqa, "mmmu-pro": mmmu_pro}
TITLES = {"aokvqa": "A-OKVQA", "arxivqa": "VisRAG-ArxivQA", "mmmu-pro": "MMMU-Pro", "merge": "A merged set"}
MERGED = "data/ddm"  # where the experiments read it
Value = TypeVar("Value")


@dataclass(frozen=True)
class PrepareOptions:
    places: tuple[str, ...]
    out: str
    split: str | None
    subset: int | None
    seed: int
    ids: str | None
    images: str
    image_dir: str | None
    variants: tuple[str, ...]
    shard_mib: int
    validation: float
    skip_bad: bool


def run(arguments: Sequence[str]) -> int:
    name, *others = arguments or [""]
    if name not in (*DATASETS, "merge"):
        raise ConfigError([f"which dataset? mtrl prepare {' | '.join((*DATASETS, 'merge'))}"])
    options = read_options(name, others)
    prepared = started(lambda: begin(name, options))
    tell(prepared)
    return 0


def begin(name: str, options: PrepareOptions) -> Prepared:
    reader = open_reader(name, options)
    ids = read_ids(options.ids) if options.ids else None
    named: dict[str, Any] = {"dataset": name, "from": list(options.places), "seed": options.seed}
    if ids is not None:
        digest = hashlib.blake2b("\n".join(sorted(ids)).encode(), digest_size=4).hexdigest()
        named["ids"] = f"{len(ids)} of {Path(str(options.ids)).name} ({digest})"
    named |= {"subset": options.subset, "images": options.images, "shard_mib": options.shard_mib}
    if name == "merge":
        named["validation"] = options.validation
    else:
        named["split"] = options.split
    if name == "mmmu-pro":
        named["options"] = list(options.variants)
    if options.images == "paths":
        named["image_dir"] = options.image_dir
    wishes = Wishes(
        title=TITLES[name],
        split=options.split or "train",
        named=named,
        seed=options.seed,
        subset=options.subset,
        ids=ids,
        validation=options.validation,
        storage="paths" if options.images == "paths" else "embed",
        skip_bad=options.skip_bad,
        shard_mib=options.shard_mib,
    )
    return prepare(reader, Path(options.out).expanduser(), wishes)


def open_reader(name: str, options: PrepareOptions) -> RowReader:
    if name == "merge":
        return merge.reader(options.places)
    (where,), split = options.places, str(options.split)
    with seeking_data(where):
        if name == "aokvqa":
            return aokvqa.reader(where, split, options.image_dir)
        if name == "arxivqa":
            return arxivqa.reader(where, split)
        return mmmu_pro.reader(where, split, options.variants)


def read_options(name: str, arguments: Sequence[str]) -> PrepareOptions:
    taken: dict[str, str | None] = {}
    skip_bad, others = "--skip-bad" in arguments, [word for word in arguments if word != "--skip-bad"]
    for option, wanted in wanted_by(name).items():
        taken[option], others = take_option(others, option, wanted)
    if strange := [word for word in others if word.startswith("-")]:
        raise ConfigError([f"{strange[0]}: mtrl prepare {name} takes {', '.join(wanted_by(name))}, --skip-bad"])
    if name == "merge":
        places = tuple(others) or tuple(f"data/{each}" for each in DATASETS)
    elif len(others) > 1:
        raise ConfigError([f"{others[1]}: one SOURCE is enough; mtrl prepare merge joins several"])
    else:
        places = tuple(others) or (DATASETS[name].HUB,)
    variants = tuple(part.strip() for part in (taken.get("--options") or "4,10").split(","))
    images = taken["--images"] or "embed"
    if wrong := [each for each in variants if each not in mmmu_pro.CONFIGS]:
        raise ConfigError([f"--options: {wrong[0]!r} is none of {', '.join(mmmu_pro.CONFIGS)}"])
    if images not in ("embed", "paths"):
        raise ConfigError([f"--images: {images!r} is neither embed nor paths"])
    return PrepareOptions(
        places=places,
        out=taken["--out"] or (MERGED if name == "merge" else f"data/{name}"),
        split=None if name == "merge" else taken["--split"] or DATASETS[name].SPLIT,
        subset=number(taken["--subset"], "--subset", int, lambda value: value >= 1),
        seed=number(taken["--seed"], "--seed", int, lambda value: value >= 0) or 0,
        ids=taken["--ids"],
        images=images,
        image_dir=taken.get("--image-dir"),
        variants=variants,
        shard_mib=number(taken["--shard-mib"], "--shard-mib", int, lambda value: value >= 1) or 256,
        validation=(number(taken["--val"] or "0.1", "--val", float, lambda value: 0 <= value < 1) or 0.0)
        if name == "merge"
        else 0.0,
        skip_bad=skip_bad,
    )


def wanted_by(name: str) -> dict[str, str]:
    """The options of a dataset, and what each wants."""
    wanted = {"--out": "name a folder", "--subset": "how many questions?", "--seed": "a whole number"}
    wanted |= {"--ids": "name a file of question ids", "--images": "embed or paths", "--shard-mib": "a size in MiB"}
    if name == "merge":
        return wanted | {"--val": "a share of the questions, such as 0.1"}
    wanted |= {"--split": "name a split of the dataset"}
    if name == "aokvqa":
        wanted |= {"--image-dir": "name the folder of the images"}
    return wanted | ({"--options": "4, 10 or vision, with commas between"} if name == "mmmu-pro" else {})


def number(
    text: str | None, option: str, kind: Callable[[str], Value], allowed: Callable[[Value], bool]
) -> Value | None:
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError([f"{option}: {text!r} is no number that it takes"]) from None
    if not allowed(value):
        raise ConfigError([f"{option}: {text} is out of its range"])
    return value


def tell(prepared: Prepared) -> None:
    if not prepared.rows:
        raise RunError(f"{prepared.folder} holds no row")
    if prepared.was_there:
        say(f"{prepared.folder} was prepared already; nothing was done")
    for split, rows in sorted(prepared.rows.items()):
        print(f"{rows:>9,} rows  {prepared.folder / split}")
    for reason, count in sorted({**prepared.left_out, **prepared.skipped}.items()):
        print(f"{count:>9,} rows left out: {reason}")
    print(f"See {prepared.folder / 'samples.png'} and {prepared.folder / 'README.md'}.")
    print(json.dumps({**asdict(prepared), "folder": str(prepared.folder)}))
