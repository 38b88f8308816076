"""Memory and disk of this machine, or of the container that it is."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

CONTAINERS = (  # the limit of a container and what it uses: cgroups of the second version, and of the first
    (Path("/sys/fs/cgroup/memory.max"), "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file"),
)


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
