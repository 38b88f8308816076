"""Memory, disk and processors of this machine, or of the container that it is."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from pathlib import Path

CONTAINERS = (  # the limit of a container and what it uses: cgroups of the second version, and of the first
    (Path("/sys/fs/cgroup/memory.max"), "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file"),
)

CPU_QUOTA = (  # microseconds of processor time that a container may use in each period: of both versions, too
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)
CPU_TIMES = Path("/proc/stat")  # for each processor: user, nice, system, idle, iowait, ..
LOOK_SECONDS = 0.3  # how long is looked for free processors; the kernel counts hundredths


def main_memory() -> int:
    """Bytes of main memory: the machine's, or what a container may use of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in containers())])


def free_memory() -> int:
    """Bytes that could be had without swapping, in a container too. Only Linux says so; elsewhere all of the memory
    counts as free."""
    if not sys.platform.startswith("linux"):
        return main_memory()
    available = 1024 * _fields(Path("/proc/meminfo"))["MemAvailable:"]
    return min([available, *(max(0, limit - used) for limit, used in containers())])


def containers() -> list[tuple[int, int]]:
    """(limit, used) in bytes for each container that this process is in. Files in the cache of the system, such as a
    checkpoint that was just written, make room when it is needed, so they do not count as used."""
    found = []
    for limit, used, cached in CONTAINERS:
        if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
            held = int(limit.with_name(used).read_text()) - _fields(limit.with_name("memory.stat")).get(cached, 0)
            found.append((int(text), held))
    return found


def _fields(path: Path) -> dict[str, int]:
    """Reads a file of the kernel with a `name number` on each line."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}


def usable_cores() -> int:
    """Processors that this process may use: those it is bound to, or what a container's quota is worth."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *map(math.ceil, _quotas())]))


def _quotas() -> list[float]:
    found = []
    for files in CPU_QUOTA:
        words = [word for file in files if file.is_file() for word in file.read_text().split()]
        if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):  # "max" and -1 are no limit
            found.append(int(words[0]) / int(words[1]))
    return found


def cpu_times() -> tuple[float, float] | None:
    """(free, all) time of the processors that this process may use, summed over them, since some moment. Programs that
    are nicer than this one count as free: they give way. None where the system does not say."""
    if not CPU_TIMES.is_file() or not hasattr(os, "sched_getaffinity"):
        return None
    bound = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = (line.split() for line in CPU_TIMES.read_text().splitlines())
    times = [[int(part) for part in row[1:9]] for row in rows if row and row[0] in bound]
    nice = 1 if os.getpriority(os.PRIO_PROCESS, 0) <= 0 else 0
    free = sum(nice * row[1] + row[3] + row[4] for row in times)
    return float(free), float(sum(map(sum, times)))


def free_share(before: tuple[float, float] | None) -> float | None:
    """Which share of the processors' time was free since then; None where nobody knows."""
    now = cpu_times()
    if before is None or now is None or now[1] <= before[1]:
        return None
    return (now[0] - before[0]) / (now[1] - before[1])


def free_cores() -> float:
    """How many processors are free, over a moment; all of them where nobody knows."""
    before = cpu_times()
    time.sleep(LOOK_SECONDS)
    share = free_share(before)
    return usable_cores() if share is None else share * len(os.sched_getaffinity(0))


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    path = path.expanduser().absolute()
    return next(place for place in (path, *path.parents) if os.path.exists(place))


def may_write(path: Path) -> bool:
    """Whether the path is a folder that can be written to, or can be made one."""
    place = existing_parent(path)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def free_disk(path: Path) -> int:
    return shutil.disk_usage(existing_parent(path)).free


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun has started, by a variable that it sets."""
    return "TORCHELASTIC_RUN_ID" in os.environ
