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
    return _run_processes(size, _as_rank, folder, size, function, arguments)


def run_in_fork(function, folder: Path, *arguments):
    """The result of `function(*arguments)` in a separate process: threads that it starts would break later forks of
    this one."""
    folder.mkdir(parents=True, exist_ok=True)
    return _run_processes(1, _without_rank, folder, function, arguments)[0]


def _run_processes(size, run, folder, *arguments):
    processes = [FORK.Process(target=_process, args=(rank, run, folder, arguments)) for rank in range(size)]
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


def _process(rank, run, folder, arguments):
    file, result, error = folder / f"result_{rank}", None, None
    file.unlink(missing_ok=True)
    torch.set_num_threads(1)
    try:
        result = run(rank, folder, *arguments)
    except BaseException:
        error = traceback.format_exc()
    partial = folder / f"writing_{rank}"
    partial.write_bytes(pickle.dumps((result, error)))
    partial.rename(file)
    os._exit(0)


def _as_rank(rank, folder, size, function, arguments):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    result = function(all_ranks(), *arguments)
    dist.barrier()
    return result


def _without_rank(_rank, _folder, function, arguments):
    return function(*arguments)
