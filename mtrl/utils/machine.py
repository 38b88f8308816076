"""Memory, disk and processors of this machine or container, and the process that started this one."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

CONTAINERS = (  # memory limit, memory in use and the name of the file cache: cgroups version 2, then version 1
    (Path("/sys/fs/cgroup/memory.max"), "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file"),
)
CPU_QUOTA = (  # microseconds of processor time per period: cgroups version 2, then version 1
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)
CPU_TIMES = Path("/proc/stat")  # for each processor: user, nice, system, idle, iowait, ..
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")  # then a nice value counts within a terminal session alone
STOPS_WITH = "MTRL_STOPS_WITH"  # environment variable: descriptor of a pipe whose other end the parent holds
LOOPBACK = "127.0.0.1"
SAMPLE_SECONDS = 0.3  # over which free processors are measured; the kernel counts in hundredths


def cpu_memory() -> int:
    """Bytes of CPU memory of the machine, or the container's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in containers())])


def free_memory() -> int:
    """Bytes of CPU memory available without swapping. Only Linux reports it; elsewhere all memory counts as free."""
    if not sys.platform.startswith("linux"):
        return cpu_memory()
    available = 1024 * _read_fields(Path("/proc/meminfo"))["MemAvailable:"]
    return min([available, *(max(0, limit - used) for limit, used in containers())])


def containers() -> list[tuple[int, int]]:
    """(limit, used) in bytes for each container around this process. Cached files, such as a checkpoint just written,
    are evicted when memory is needed, so they do not count as used."""
    limits = []
    for limit, used, cached in CONTAINERS:
        if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
            held = int(limit.with_name(used).read_text()) - _read_fields(limit.with_name("memory.stat")).get(cached, 0)
            limits.append((int(text), held))
    return limits


def _read_fields(path: Path) -> dict[str, int]:
    """Read a kernel file with `name number` on each line."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}


def usable_cores() -> int:
    """Processors that this process may use: those it is bound to, or fewer by the container's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *map(math.ceil, _quotas())]))


def _quotas() -> list[float]:
    quotas = []
    for files in CPU_QUOTA:
        values = [value for file in files if file.is_file() for value in file.read_text().split()]
        if len(values) == 2 and all(map(str.isdecimal, values)) and int(values[1]):  # "max" and -1 mean no limit
            quotas.append(int(values[0]) / int(values[1]))
    return quotas


def cpu_times() -> tuple[float, float] | None:
    """(free, total) processor time so far, summed over the processors this process may use. Time of programs with a
    higher nice value counts as free where they give way. None if the system does not report it."""
    if not CPU_TIMES.is_file() or not hasattr(os, "sched_getaffinity"):
        return None
    bound = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = (line.split() for line in CPU_TIMES.read_text().splitlines())
    times = [[int(part) for part in row[1:9]] for row in rows if row and row[0] in bound]
    grouped = AUTOGROUP.is_file() and AUTOGROUP.read_text().strip() != "0"
    gives_way = os.getpriority(os.PRIO_PROCESS, 0) <= 0 and not grouped
    free = sum(gives_way * row[1] + row[3] + row[4] for row in times)
    return float(free), float(sum(map(sum, times)))


def free_share(before: tuple[float, float] | None) -> float | None:
    """The share of processor time that was free since `before` (`cpu_times`); None if unknown."""
    now = cpu_times()
    if before is None or now is None or now[1] <= before[1]:
        return None
    return (now[0] - before[0]) / (now[1] - before[1])


def free_cores() -> float:
    """How many processors were free over a short sample; all of them if unknown."""
    before = cpu_times()
    time.sleep(SAMPLE_SECONDS)
    share = free_share(before)
    return usable_cores() if share is None else share * len(os.sched_getaffinity(0))


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest parent that exists."""
    path = path.expanduser().absolute()
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def is_writable(path: Path) -> bool:
    """Whether the path is a directory that can be written to, or can be created as one."""
    parent = existing_parent(path)
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)


def free_disk(path: Path) -> int:
    return shutil.disk_usage(existing_parent(path)).free


def started_by_torchrun() -> bool:
    """Whether torchrun started this process (it sets this variable)."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def stop_with_parent() -> None:
    """If this process was given the end of a pipe (`STOPS_WITH`), raise SIGTERM in it when the other end is closed, as
    when the process that started it is killed. A run then finishes its step and saves."""
    if (descriptor := os.environ.pop(STOPS_WITH, None)) is None:
        return

    def wait() -> None:
        with suppress(OSError):
            os.read(int(descriptor), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()
