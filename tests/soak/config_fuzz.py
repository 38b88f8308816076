"""Mutated configurations: any file or override loads, or fails with `ConfigError`, within a time limit.

python tests/soak/config_fuzz.py --cases 10000 [--seed 0]

Each case depends only on (seed, number), so that a failed one can be run again: --only NUMBER. A case starts from
sections of the reference, of a packaged configuration or of another project's file, and damages them as text or as a
tree; or it is a damaged mapping or command line. Some go through `mtrl convert` too. The last line is JSON.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from mtrl.config import ConfigError, find_warnings, load_config, to_yaml
from mtrl.config.foreign_config import convert
from mtrl.config.foreign_keys import TABLES
from mtrl.config.packaged import packaged_configs
from mtrl.config.tree import known_leaves, known_sections

ROOT = Path(__file__).resolve().parents[2]
SLOWEST = 300  # times the median, of this process's own time: other load on the machine does not count
LEAVES, SECTIONS = list(known_leaves()), sorted(known_sections())
FOREIGN = [key for table in TABLES.values() for key in table]
SEEDS = [
    (ROOT / "docs" / "config-reference.yaml").read_text(),
    *(path.read_text() for path in packaged_configs().values()),
    *(path.read_text() for path in sorted((ROOT / "tests" / "data" / "others").glob("*.yaml"))),
    "",
]
SCRIPT = (ROOT / "tests" / "data" / "others" / "trl_grpo.py").read_text()
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 10**9, 10**18, 2**63, -(2**70), 10**400, 0.0, -0.0, 0.5, 1e-300, 1e308,
    float("inf"), float("-inf"), float("nan"), "", " ", "a", "null", "true", "007", "1e5", "1e400", ".nan",
    "${", "${}", "${dataset.seed}", "${dataset}", "${.}", "${..}", "\\${x}", "${oc.env:HOME}",
    "${oc.env:NO_SUCH}", "a\0b", "\ud800", "a\nb", "\x1b[31m", "答案", "x" * 5000, "???", "..", "/", "~", "a:b",
    "a.py:b", [], [[]], [None], ["a", 1], [1] * 300, {}, {"a": 1}, {"a": {"b": [{}]}}, {"": 1}, {"a.b": 1},
    {"name": "entropy_change"}, b"x", (1, 2), 3 + 4j, object,
]  # fmt: skip
SNIPPETS = [
    "[", "]", "{", "}", ":", ": ", "- ", "&a ", "*a", "<<: *a", "!!", "!!int ", "!!python/object:x ", "!x ",
    "? ", "|\n", ">\n", "---\n", "...\n", "%YAML 1.2\n", "\t", "\n", "\0", "\ufeff", "#", "'", '"', "${", "}",
    "null", "~: 1\n", "1: 2\n", "true: 1\n", "=", "0x", "0b1", "1:2:3", "1e999", "9" * 200, "[" * 200,
    "{a: " * 200, "\x85", "\u2028", "\U0001f600", "dataset: *a\n", "dataset: &a {x: *a}\n", "\r", "\\", "  ",
]  # fmt: skip


def pick_blocks(rng: random.Random, text: str) -> str:
    """A few blocks of a text; a block starts at the margin."""
    blocks = re.split(r"\n(?=\S)", text)
    first = rng.randrange(len(blocks))
    return "\n".join(blocks[first : first + rng.randint(1, 3)])[:3000] + "\n"


def damaged_text(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 3)):
        at, width = rng.randrange(len(text) + 1), rng.choice([0, 0, 1, 3, 20, 200])
        kind = rng.randrange(4)
        repeated = text[at : at + width] * rng.choice([2, 30]) if kind == 2 else ""
        piece = rng.choice(SNIPPETS) if kind < 2 else repeated
        if kind == 1:  # at the start of a line, where it is most likely to mean something
            at = text.rfind("\n", 0, at) + 1
        text = text[:at] + piece + text[at + width :]
    return text


def any_key(rng: random.Random) -> str:
    key = rng.choice([rng.choice(LEAVES), rng.choice(LEAVES), rng.choice(SECTIONS), rng.choice(FOREIGN)])
    kind = rng.randrange(10)
    if kind == 0:
        at = rng.randrange(len(key))
        return key[:at] + rng.choice(["", "x", ".", "..", "é", "\n", "[0]", " "]) + key[at + 1 :]
    if kind == 1:
        return f"{key}.{rng.choice(['a', 'a.b', '', 'x' * 300])}"
    return key.rpartition(".")[2] if kind == 2 else key


def damaged_tree(rng: random.Random, text: str) -> str:
    """Valid YAML with odd values and keys."""
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError:  # cut in the middle
        tree = {}
    if not isinstance(tree, dict):
        return text
    for _ in range(rng.randint(1, 3)):
        *path, name = any_key(rng).split(".")
        node = tree
        for step in path:
            node = node[step] if isinstance(node.get(step), dict) else node.setdefault(f"{step}", {})
            if not isinstance(node, dict):
                return text
        node[rng.choice([name, name, name, None, 3, True])] = rng.choice([each for each in ODD if plain(each)])
    return yaml.safe_dump(tree, allow_unicode=True)


def plain(value: Any) -> bool:
    return not isinstance(value, (tuple, complex, type)) and value != "\ud800" and value != 10**400


def damaged_mapping(rng: random.Random) -> dict[Any, Any]:
    keys = [any_key(rng) for _ in range(rng.randint(1, 6))]
    odd = {rng.choice([key, key, key, key, key, None, 3]): rng.choice(ODD) for key in keys}
    if rng.random() < 0.5:  # one oddity among values that fit
        fitting = rng.sample(LEAVES, 5)
        return {**{key: known_leaves()[key].default for key in fitting}, fitting[0]: rng.choice(ODD)}
    return odd


def damaged_arguments(rng: random.Random) -> list[str]:
    words = []
    for _ in range(rng.randint(1, 6)):
        value = rng.choice(
            ["1", "true", str(rng.choice(ODD)) if rng.random() < 0.9 else "", damaged_text(rng, "{a: [1, b]}")]
        )
        key = any_key(rng)
        words += rng.choice([[f"{key}={value}"], [f"--{key}={value}"], [f"--{key}", value], [key], [value], ["--"]])
    return [word for word in words if plain(word)]


def attempts(rng: random.Random, folder: Path) -> list[Callable[[], object]]:
    """What one case tries."""
    path = folder / "run.yaml"
    kind = rng.randrange(5)
    if kind == 0:
        mapping = damaged_mapping(rng)
        return [lambda: checked(None, mapping, folder)]
    if kind == 1:
        words = damaged_arguments(rng)
        return [lambda: checked(None, words, folder)]
    text = pick_blocks(rng, rng.choice(SEEDS))
    text = damaged_text(rng, text) if kind < 3 else damaged_tree(rng, text)
    raw = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.randbytes(rng.randint(1, 4)) + raw[at:]
    path.write_bytes(raw)
    tried = [lambda: checked(path, (), folder)]
    if rng.random() < 0.3:
        tried.append(lambda: converted(path, folder))
    if rng.random() < 0.1:
        script = folder / "train.py"
        script.write_text(damaged_text(rng, SCRIPT), encoding="utf-8", errors="replace")
        tried.append(lambda: converted(script, folder))
    return tried


def checked(path: Path | None, overrides: Any, folder: Path) -> str:
    """What loads is written, and loads again to the same."""
    config = load_config(path, overrides)
    list(find_warnings(config))
    saved = folder / "saved.yaml"
    saved.write_text(to_yaml(config), encoding="utf-8")
    if load_config(saved, saved=True) != config:
        raise AssertionError("another configuration after it was written and read")
    return "loaded"


def converted(path: Path, folder: Path) -> str:
    """What is converted loads, and every line is one line."""
    found = convert(path)
    if any("\n" in str(line) for line in found.lines):
        raise AssertionError("a line of two")
    (folder / "converted.yaml").write_text(found.yaml(), encoding="utf-8")
    load_config(folder / "converted.yaml", saved=True)
    return "converted"


def outcome(attempt: Callable[[], object]) -> tuple[str, str]:
    """("loaded" | "converted" | "refused" | "failed", the error)."""
    try:
        result = str(attempt())
    except ConfigError as error:
        result = "refused"
        wrong = [line for line in error.errors if "\n" in line or len(line) > 2000]
        if wrong or not error.errors:
            return "failed", f"not one line each: {wrong[:1]!r:.300}"
    except Exception:
        return "failed", traceback.format_exc(limit=-4)
    return result, ""


def timed(attempt: Callable[[], object]) -> tuple[float, tuple[str, str]]:
    start = time.process_time()
    result = outcome(attempt)
    return time.process_time() - start, result


def fuzz(cases: range, seed: int) -> tuple[Counter[str], list[str], float]:
    """Counts of the outcomes, the failures, and the longest time of one attempt."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in cases:
            rng = random.Random(f"{seed} {number}")
            for attempt in attempts(rng, Path(folder)):
                seconds, (result, wrong) = timed(attempt)
                spent.append(seconds)
                counts[result] += 1
                if wrong:
                    failures.append(f"case {number}: {wrong}")
                elif len(spent) > 20 and spent[-1] > SLOWEST * median(spent):
                    spent[-1] = min(timed(attempt)[0] for _ in range(2))  # a collection of garbage is not its fault
                    if spent[-1] > SLOWEST * median(spent):
                        failures.append(f"case {number}: {spent[-1]:.1f} s, the median is {median(spent):.3f} s")
    return counts, failures, max(spent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run one case alone")
    words = parser.parse_args()
    cases = range(words.cases) if words.only is None else range(words.only, words.only + 1)
    start = time.monotonic()
    counts, failures, slowest = fuzz(cases, words.seed)
    print("\n\n".join(failures[:20]), file=sys.stderr)
    spent = time.monotonic() - start
    result = {"cases": len(cases), "seed": words.seed, **counts, "failed": len(failures)}
    print(json.dumps({**result, "slowest_s": round(slowest, 3), "seconds": round(spent, 1)}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
