"""Prepare a public dataset for training: one schema, Parquet shards, a card, a sheet of samples.

mtrl prepare aokvqa|arxivqa|mmmu-pro [SOURCE] [--out DIR] [--split S] [--subset N] [--seed N] [--ids FILE]
             [--images embed|paths] [--image-dir DIR] [--options 4,10,vision] [--shard-mib N] [--skip-bad]
mtrl prepare merge [DIR[@split] ...] [--val 0.1] [--out DIR] [--subset N] [--seed N] [--images embed|paths] ...

SOURCE is a hub id or a local copy: Parquet, Arrow or JSON with images; it defaults to the dataset's own id. --subset is
a number of questions, --ids a file of their ids. --options is only for MMMU-Pro. merge joins prepared folders (by
default the three above) and holds out a share of the questions, not of the rows, for validation: data/ddm, which the
experiments read. A missing or damaged image is an error, unless --skip-bad. The same command resumes after an
interruption, with bitwise the same result. The last line is JSON.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtrl.commands.load_arguments import OptionParser, check_call, log_line, whole_number
from mtrl.data.hub import use_cache_if_offline
from mtrl.prepare import aokvqa, arxivqa, merge, mmmu_pro
from mtrl.prepare.prepare_dataset import PreparedDataset, prepare
from mtrl.prepare.questions import RowReader
from mtrl.prepare.select import PrepareOptions, read_ids
from mtrl.utils.errors import RunError, StartError

DATASETS = {"aokvqa": aokvqa, "arxivqa": arxivqa, "mmmu-pro": mmmu_pro}
TITLES = {"aokvqa": "A-OKVQA", "arxivqa": "VisRAG-ArxivQA", "mmmu-pro": "MMMU-Pro", "merge": "A merged set"}
# Options of prepare_aokvqa_for_trl.py, of forks of TRL, and ours; "" is the source itself, None is left out.
TRL_FLAGS = {
    "--dataset_path": "", "--out_dir": "--out", "--question_id_file": "--ids", "--subset_size": "--subset",
    "--train_size": "--subset", "--eval_size": None, "--use_chat_template": None,
}  # fmt: skip
MERGED = "data/ddm"  # where the experiments read it


def run(arguments: Sequence[str]) -> int:
    name, *others = arguments or [""]
    if name not in (*DATASETS, "merge"):
        raise StartError(f"which dataset? mtrl prepare {' | '.join((*DATASETS, 'merge'))}")
    parser = make_parser(name)
    if any(word.partition("=")[0] in TRL_FLAGS for word in others):
        raise StartError(f"these are options of prepare_aokvqa_for_trl.py; write: {translate_flags(name, others)}")
    options, sources = parser.parse_paths(others)
    if name == "merge":
        sources = sources or [f"data/{each}" for each in DATASETS]
    elif len(sources) > 1:
        parser.error(f"{sources[1]}: one SOURCE is enough, mtrl prepare merge joins several")
    report(check_call(prepare_sources, name, sources or [DATASETS[name].HUB], options))
    return 0


def make_parser(name: str) -> OptionParser:
    own = {"merge": "--val", "aokvqa": "--split, --image-dir", "arxivqa": "--split", "mmmu-pro": "--split, --options"}
    shared = "--out, --subset, --seed, --ids, --images, --shard-mib, --skip-bad"
    parser = OptionParser(f"mtrl prepare {name} takes {shared}, {own[name]}", "--ids")
    parser.set_defaults(split=None, image_dir=None, variants=("4", "10"), val=0.0)
    parser.add_argument("--out", default=MERGED if name == "merge" else f"data/{name}")
    parser.add_argument("--subset", type=whole_number())
    parser.add_argument("--seed", type=whole_number(0), default=0)
    parser.add_argument("--images", choices=("embed", "paths"), default="embed")
    parser.add_argument("--shard-mib", type=whole_number(), default=256)
    parser.add_argument("--skip-bad", action="store_true")
    if name == "merge":
        parser.add_argument("--val", type=parse_share, default=0.1)
    else:
        parser.add_argument("--split", default=DATASETS[name].SPLIT)
    if name == "aokvqa":
        parser.add_argument("--image-dir")
    if name == "mmmu-pro":
        parser.add_argument("--options", dest="variants", type=parse_variants)
    return parser


def translate_flags(name: str, words: Sequence[str]) -> str:
    """Our command for one with options of prepare_aokvqa_for_trl.py."""
    ours, pending = [], [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while pending:
        word = pending.pop(0)
        if word not in TRL_FLAGS:
            ours.append(word)
            continue
        value = pending.pop(0) if pending and word != "--use_chat_template" else ""
        flag = TRL_FLAGS[word]
        if flag is not None and value and (word, value) != ("--subset_size", "0"):  # 0 means all there
            ours += [flag, value] if flag else [value]
    return shlex.join(["mtrl", "prepare", name, *ours])


def parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ArgumentTypeError(f"{text} is no share of at least 0 and less than 1")
    return share


def parse_variants(text: str) -> tuple[str, ...]:
    variants = tuple(part.strip() for part in text.split(","))
    if unknown := [each for each in variants if each not in mmmu_pro.CONFIGS]:
        raise ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(mmmu_pro.CONFIGS)}")
    return variants


def prepare_sources(name: str, sources: Sequence[str], options: Namespace) -> PreparedDataset:
    reader = open_reader(name, sources, options)
    ids = read_ids(options.ids) if options.ids else None
    named: dict[str, Any] = {"dataset": name, "from": list(sources), "seed": options.seed}
    if ids is not None:
        digest = hashlib.blake2b("\n".join(sorted(ids)).encode(), digest_size=4).hexdigest()
        named["ids"] = f"{len(ids)} of {Path(options.ids).name} ({digest})"
    named |= {"subset": options.subset, "images": options.images, "shard_mib": options.shard_mib}
    if name == "merge":
        named["validation"] = options.val
    else:
        named["split"] = options.split
    if name == "mmmu-pro":
        named["options"] = list(options.variants)
    if options.images == "paths":
        named["image_dir"] = options.image_dir
    prepare_options = PrepareOptions(
        title=TITLES[name],
        split=options.split or "train",
        settings=named,
        seed=options.seed,
        subset=options.subset,
        ids=ids,
        validation=options.val,
        storage=options.images,
        skip_bad=options.skip_bad,
        shard_mib=options.shard_mib,
    )
    return prepare(reader, Path(options.out).expanduser(), prepare_options)


def open_reader(name: str, sources: Sequence[str], options: Namespace) -> RowReader:
    if name == "merge":
        return merge.open_reader(sources)
    (source,) = sources
    with use_cache_if_offline(source):
        if name == "aokvqa":
            return aokvqa.open_reader(source, options.split, options.image_dir)
        if name == "arxivqa":
            return arxivqa.ArxivReader(source, options.split)
        return mmmu_pro.open_reader(source, options.split, options.variants)


def report(prepared: PreparedDataset) -> None:
    if not prepared.rows:
        raise RunError(f"{prepared.folder} holds no row")
    if prepared.was_there:
        log_line(f"{prepared.folder} was prepared already; nothing was done")
    for split, rows in sorted(prepared.rows.items()):
        print(f"{rows:>9,} rows  {prepared.folder / split}")
    for reason, count in sorted({**prepared.left_out, **prepared.skipped}.items()):
        print(f"{count:>9,} rows left out: {reason}")
    print(f"See {prepared.folder / 'samples.png'} and {prepared.folder / 'README.md'}.")
    print(json.dumps({**asdict(prepared), "folder": str(prepared.folder)}))
