"""Two ranks as started by torchrun, one of which is killed repeatedly, compared with two undisturbed ones.

They are forked from a process that has imported everything, so that a start takes seconds. The parent does what
`torchrun --max-restarts` does: when one rank ends, it terminates the others and starts the same command again."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from interruptions import rows_logged
from run_helpers import (
    COMBINED,
    check_combined,
    get_run_dir,
    load_in_one_thread,
    same_end,
    train_arguments,
    write_into,
)

from soak.ledger import Ledger
from soak.struck_runs import MARK, left_behind

RANKS = 2
MOMENTS = ("start", "step", "save")
LONGEST_WAIT = {"start": 3.0, "step": 0.3, "save": 0.03}  # seconds after the moment, drawn at random
GRACE = 60.0  # seconds until the processes of a rank must have ended
SECONDS = 5.0  # seconds in which a rank that lost the other ends by itself, before it is terminated
PATIENCE = 600.0  # seconds without the moment, or for which a rank outlives another: then something hangs
IMPORTED = ("mtrl.cli", "mtrl.commands.train", "mtrl.compose.run", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
OFFLOADED = (
    "worker.actor.fsdp.cpu_offload=true", "worker.actor.offload.offload_params=true",
    "worker.actor.offload.offload_optimizer=true", "worker.ref.offload_params=true",
    "optimization.disable_divergence=false",
)  # fmt: skip
FORK = multiprocessing.get_context("fork")


def torchrun_ranks(ledger: Ledger, count: int, combined: bool = False, offloaded: bool = False) -> None:
    """Kills the first or the second rank `count` times, at start-up, within a step and during the writing of a
    checkpoint; then compares. `combined`: with critic, adapters and replay. `offloaded`: weights, gradients and
    optimizer state are in CPU memory, streamed unit by unit."""
    os.environ |= {MARK: str(ledger.directory), "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "soak"}
    for module in IMPORTED:
        import_module(module)
    steps = 2 * count + 2  # no kill waits for more than two
    settings = [
        f"training.max_steps={steps}", "training.save_freq=1", "training.save_limit=2", "training.val_freq=-1",
        "training.val_before_train=false", f"training.n_gpus_per_node={RANKS}",
        *(COMBINED if combined else ()), *(OFFLOADED if offloaded else ()),
    ]  # fmt: skip
    whole, struck = ledger.directory / "whole", ledger.directory / "struck"
    if not ledger.get("undisturbed"):
        shutil.rmtree(whole, ignore_errors=True)  # of a soak that was stopped, which disturbed it
        completed(whole, settings)
        ledger.record(undisturbed=steps)
    for number in range(ledger.get("ranks killed"), count):
        moment, dice = MOMENTS[number % len(MOMENTS)], random.Random(number)
        strike(struck, settings, moment, dice)
        ledger.record(**{"ranks killed": number + 1, f"at {moment}": ledger.get(f"at {moment}") + 1})
        print(f"{ledger.directory.name}: {number + 1} of {count}", flush=True)
    completed(struck, settings)
    same_end(get_run_dir(whole), get_run_dir(struck), steps)
    if combined:
        check_combined(get_run_dir(struck), steps)
    ledger.record(passed=True)


def completed(output: Path, settings: Sequence[str]) -> None:
    ranks = start(output, settings)
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * RANKS, said(output)
    assert not (left := left_behind(GRACE)), f"{left} still run"


def strike(output: Path, settings: Sequence[str], moment: str, dice: random.Random) -> None:
    """Starts the ranks and kills one; the other one and all their processes must end."""
    run, killed = get_run_dir(output), dice.randrange(RANKS)
    rows, wait = rows_logged(run) + dice.randint(1, 2), dice.uniform(0.0, LONGEST_WAIT[moment])
    has_come = {
        "start": lambda: True,
        "step": lambda: rows_logged(run) >= rows,
        "save": lambda: rows_logged(run) >= rows and any((run / "checkpoints").glob(".step_*")),
    }[moment]
    ranks = start(output, settings)
    try:
        began = time.monotonic()
        while not has_come():
            assert all(rank.is_alive() for rank in ranks), (
                f"the run ended before its moment ({moment}):\n{said(output)}"
            )
            assert time.monotonic() - began < PATIENCE, f"the moment ({moment}) never came:\n{said(output)}"
            time.sleep(0.002)
        time.sleep(wait)
        ranks[killed].kill()
        ranks[killed].join()
        other = ranks[1 - killed]
        other.join(SECONDS)  # where they had met, it finds the connection closed
        other.terminate()
        other.join(PATIENCE)
        assert not other.is_alive(), f"a rank outlives the other, and SIGTERM ({moment}):\n{said(output)}"
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[killed].exitcode == -signal.SIGKILL and other.exitcode != 0, said(output)
    assert not (left := left_behind(GRACE)), f"{left} still run after a kill at {moment}"


def start(output: Path, settings: Sequence[str]) -> list[multiprocessing.context.ForkProcess]:
    return fork_ranks(RANKS, output, train_arguments(output, *settings))


def fork_ranks(
    count: int, output: Path, arguments: list[str], main: Callable[[list[str]], int] | None = None
) -> list[multiprocessing.context.ForkProcess]:
    """Processes as torchrun starts them, each with `mtrl` and these arguments, or with another function of them."""
    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [FORK.Process(target=be_rank, args=(rank, shared, arguments, output, main)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    return ranks


def be_rank(
    rank: int, shared: dict[str, str], arguments: list[str], output: Path, main: Callable[[list[str]], int] | None
) -> None:
    import mtrl.cli

    write_into(output / "said.txt")
    load_in_one_thread()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}
    sys.exit((main or mtrl.cli.main)(arguments))


def said(output: Path) -> str:
    return (output / "said.txt").read_text(errors="replace")[-6000:]
