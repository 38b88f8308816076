"""The process between the trainer and a worker with user code. It ends the worker and all its processes when either
one ends.

User code may hold the interpreter for hours, and its processes may move to a new session. The supervisor runs no user
code, so it always notices; on Linux it is the "subreaper" of its descendants, so that orphans become its children.
Imports nothing heavy.
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

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>
POLL_SECONDS = 1.0  # interval of checks for the parent, if no signal reports its death
KILL_SECONDS = 3.0  # time limit of killing the processes of a worker


def prctl(option: int, value: int) -> bool:
    """Call prctl; return whether the system supports it and it succeeded."""
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) == 0)
    except (ImportError, OSError, AttributeError):  # not Linux, or a Python without ctypes
        return False


def fork_worker(parent: int, scratch: str, descriptors: Iterable[int]) -> bool:
    """Fork and return only in the worker; this process becomes its supervisor. Return whether even processes in new
    sessions will end with it.

    `parent`: the trainer's process id. `scratch`: a directory that must not outlive it. `descriptors`: the worker's.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # core files of a crashing function must not fill the disk
    contained = prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor, worker = os.getpid(), os.fork()
    if worker == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it has already died
            os._exit(1)
        os.setsid()
        return contained
    try:
        for descriptor in descriptors:
            os.close(descriptor)
        status = wait_for_worker(worker, parent)
        kill_all(worker)
        if os.getppid() != parent:
            shutil.rmtree(scratch, ignore_errors=True)
        exit_like(status)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # the worker dies with us


def wait_for_worker(worker: int, parent: int) -> int:
    """Return the worker's exit code (-N: signal N), or -SIGKILL if the parent died or sent SIGTERM.

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
        ended, _ = reap_children()
        if worker in ended:
            return ended[worker]
        if select.select([reader], [], [], POLL_SECONDS)[0] and signal.SIGTERM in os.read(reader, 1 << 16):
            break
    return -signal.SIGKILL


def reap_children() -> tuple[dict[int, int], bool]:
    """Return the exit codes of ended children, adopted orphans included, and whether others are left."""
    ended: dict[int, int] = {}
    try:
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended[one[0]] = os.waitstatus_to_exitcode(one[1])
    except ChildProcessError:
        return ended, False
    return ended, True


def kill_all(worker: int) -> None:
    """Kill the worker's process group, then all children until none is left: we adopt those of a dead child."""
    deadline = time.monotonic() + KILL_SECONDS
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    while reap_children()[1] and time.monotonic() < deadline:
        for child in list_children():
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def list_children() -> list[int]:
    """List our child processes by /proc, if there is one."""
    children = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{int(name)}/stat", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(name))
    return children


def exit_like(code: int) -> None:
    """Exit in the way the worker ended, for the trainer to see."""
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))
