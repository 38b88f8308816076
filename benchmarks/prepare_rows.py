"""Seconds and peak memory of preparing and opening a million rows, compared with a thousand.

    OMP_NUM_THREADS=1 python -m benchmarks.prepare_rows [--rows 1000 1000000] [--every 4] [--scratch DIR] [--out FILE]

The rows have one schema, and one in `--every` has its own small JPEG. `mtrl prepare merge` selects and checks them,
splits them 9:1 and writes them; then a run's dataset opens all of them twice, first with a scan of every row and image
(without a tokenizer), then from the cache. Every stage is a separate process. Memory is the peak of its process tree,
sampled every 50 ms; a thousand rows show the cost of the imports. Seconds grow with other load on the machine, so the
CPU time of the tree and the load average are stored as well. Needs about 2 KB of disk per row with an image.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.data_start import watch_memory
from benchmarks.environment import finish

SHARD = 50_000
OPEN = """
import json, sys, time
from mtrl.data import DataSettings, open_dataset
begin = time.perf_counter()
dataset = open_dataset(sys.argv[1], DataSettings(), None)
opened = time.perf_counter()
tasks = [dataset.task(i * (len(dataset) // 256)) for i in range(256)]
assert all(len(task.media) == task.text.count("<image>") for task in tasks)
print(json.dumps({"rows": len(dataset), "open_s": opened - begin, "rows_256_s": time.perf_counter() - opened}))
"""


def make_data(directory: Path, rows: int, every: int, contents: int = 200) -> Path:
    """Parquet shards with `contents` different pictures; a JPEG comment makes every file unique."""
    import numpy as np
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]
    from PIL import Image

    generator, pictures = np.random.default_rng(0), []
    for _ in range(contents):
        data = io.BytesIO()
        coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((56, 56), Image.Resampling.BICUBIC).save(data, "JPEG", quality=80)
        pictures.append(data.getvalue())

    def image(i: int) -> list[dict[str, Any]]:
        remark, picture = f"row {i}".encode(), pictures[i // every % contents]
        comment = b"\xff\xfe" + (len(remark) + 2).to_bytes(2, "big") + remark
        return [] if i % every else [{"bytes": picture[:2] + comment + picture[2:], "path": f"{i}.jpg"}]

    kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    directory.mkdir(parents=True)
    for first in range(0, rows, SHARD):
        numbers = range(first, min(rows, first + SHARD))
        columns = {
            "id": pa.array([f"q{i:07d}" for i in numbers]),
            "prompt": pa.array([f"{'' if i % every else '<image>'}Which of the bags is number {i}?" for i in numbers]),
            "answer": pa.array(["ABCD"[i % 4] for i in numbers]),
            "options": pa.array([["a skateboarder", "a train", "a delivery", "a cab"]] * len(numbers)),
            "images": pa.array([image(i) for i in numbers], type=kind),
        }
        pq.write_table(pa.table(columns), directory / f"{first // SHARD:05d}.parquet", row_group_size=1000)
    return directory


def stage(command: list[str], cache: Path) -> dict[str, Any]:
    """Runs a process; returns its seconds, the peak memory of its tree, and the JSON of its last line."""
    environment = {**os.environ, "MTRL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    begin, load, before = time.perf_counter(), os.getloadavg()[0], sum(os.times()[2:4])
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, env=environment, text=True)
    peak, done = {"rss": 0, "pss": 0}, threading.Event()
    watcher = threading.Thread(target=watch_memory, args=(process.pid, peak, done))
    watcher.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(process.returncode)
    printed = json.loads(output.splitlines()[-1])
    counts = {name: round(printed[name], 2) for name in ("open_s", "rows_256_s") if name in printed}
    counts["rows"] = printed["rows"]
    memory = {"peak_rss_sum_mb": round(peak["rss"] / 1e6), "peak_pss_mb": round(peak["pss"] / 1e6)}
    cpu = round(sum(os.times()[2:4]) - before, 1)  # ended children only
    return {"process_s": round(seconds, 1), "cpu_s": cpu, "load_average_before": round(load, 1), **memory, **counts}


def measure(root: Path, rows: int, every: int) -> dict[str, Any]:
    source, prepared, cache = (root / name for name in ("rows", "prepared", "cache"))
    make_data(source, rows, every)
    result: dict[str, Any] = {"rows": rows, "source_mb": round(_bytes(source) / 1e6)}
    result["prepare"] = stage(["-m", "mtrl", "prepare", "merge", str(source), "--out", str(prepared)], cache)
    result["prepared_mb"] = round(_bytes(prepared) / 1e6)
    for name in ("first_open", "second_open"):
        print(json.dumps(result), file=sys.stderr, flush=True)
        result[name] = stage(["-c", OPEN, f"{prepared}/train, {prepared}/val"], cache)
    return result


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--scratch", type=Path, default=None, help="where the rows are made; removed afterwards")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        result = [measure(Path(scratch) / str(rows), rows, arguments.every) for rows in arguments.rows]
    images = f"one in {arguments.every} with a 56 x 56 JPEG of its own"
    what = f"rows, {images}: prepared, split 9:1, opened"
    finish({"what": what, "command": f"python -m benchmarks.prepare_rows --rows {' '.join(map(str, arguments.rows))}",
            "sizes": result}, arguments.out)  # fmt: skip


if __name__ == "__main__":
    main()
