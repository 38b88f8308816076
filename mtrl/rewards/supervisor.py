"""The process between the trainer and a reward worker. It ends the worker and all that it started, whoever goes first.

A function may hold the interpreter for hours, and what it starts may move to a session of its own. The supervisor runs
no code of users, so it always notices; and on Linux it is the "subreaper" of all that stands below it, so that whatever
loses its parent becomes its child. Imports nothing heavy.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of <linux/prctl.h>
LOOK_SECONDS = 1.0  # how often it looks for its parent where no signal says that it died
KILL_SECONDS = 3.0  # how long it tries to end what a worker left


def prctl(option: int, value: int) -> bool:
    """Whether the system knows this call and did it."""
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) == 0)
    except (ImportError, OSError, AttributeError):  # not Linux, or a Python without ctypes
        return False


def supervised(parent: int, scratch: str, descriptors: Iterable[int]) -> bool:
    """Forks, and comes back in the worker alone; this process becomes its supervisor. Whether even processes in
    sessions of their own will end with it.

    `parent`: the trainer's process id. `scratch`: a directory that must not outlive it. `descriptors`: the worker's.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a function that crashes must not fill the disk
    contained = prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor, worker = os.getpid(), os.fork()
    if worker == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before that
            os._exit(1)
        os.setsid()
        return contained
    try:
        for descriptor in descriptors:
            os.close(descriptor)
        status = watch(worker, parent)
        end_all(worker)
        if os.getppid() != parent:
            shutil.rmtree(scratch, ignore_errors=True)
        leave_as(status)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # the worker dies with us


def watch(worker: int, parent: int) -> int:
    """Waits for the worker's end, and gives its exit code (-N: signal N); -SIGKILL where the parent died, or asked for
    it by SIGTERM.

    The system sends SIGHUP when the *thread* that started us ends, which need not be the end of the parent.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for each in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
        signal.signal(each, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    while os.getppid() == parent:
        ended, _ = reaped()
        if worker in ended:
            return ended[worker]
        if select.select([reader], [], [], LOOK_SECONDS)[0] and signal.SIGTERM in os.read(reader, 1 << 16):
            break
    return -signal.SIGKILL


def reaped() -> tuple[dict[int, int], bool]:
    """The exit codes of the children that have ended, and whether others are left. Orphans from below are children."""
    ended: dict[int, int] = {}
    try:
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended[one[0]] = os.waitstatus_to_exitcode(one[1])
    except ChildProcessError:
        return ended, False
    return ended, True


def end_all(worker: int) -> None:
    """Kills the worker's group, then all children, until there is none: those of a child that died come to us."""
    limit = time.monotonic() + KILL_SECONDS
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    while reaped()[1] and time.monotonic() < limit:
        for child in children():
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def children() -> list[int]:
    """By /proc, where there is one."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{int(name)}/stat", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def leave_as(code: int) -> None:
    """Ends this process as the worker ended, for the trainer to see."""
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))
