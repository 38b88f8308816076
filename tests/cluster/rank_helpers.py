"""Ranks as forked processes of a test: torch is already imported, so that two ranks take only a second."""

import multiprocessing
import os
import pickle
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from mtrl.models.parallel.ranks import all_ranks

FORK = multiprocessing.get_context("fork")
SECONDS = 300  # longer is a hang, even on a busy machine


def run_ranks(size, function, folder: Path, *arguments):
    """Results of `function(ranks, *arguments)` on each rank; raises the error of any rank with its traceback."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    processes = [FORK.Process(target=_rank, args=(rank, size, folder, function, arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    results = []
    for rank in range(size):
        file = folder / f"result_{rank}"
        assert file.exists(), f"rank {rank} of {size} hangs: {len(stuck)} did not end"
        result, error = pickle.loads(file.read_bytes())
        assert error is None, f"rank {rank} of {size}: {error}"
        results.append(result)
    return results


def _rank(rank, size, folder, function, arguments):
    file, result, error = folder / f"result_{rank}", None, None
    file.unlink(missing_ok=True)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        result = function(all_ranks(), *arguments)
        dist.barrier()
    except BaseException:
        error = traceback.format_exc()
    partial = folder / f"writing_{rank}"
    partial.write_bytes(pickle.dumps((result, error)))
    partial.rename(file)
    os._exit(0)
