"""What the system allows a process, and its control groups: processor cores and memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

UNIFIED = ""  # the controllers of version 2 of control groups
SYSTEM = Path("/")
OLDER_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # of cgroup v1
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def cores(root: Path = SYSTEM) -> int:
    """How many threads compute at the same time: one for each physical core that this process may use, and no more than
    the processor time that its control groups allow. root: of the file system with /proc and /sys."""
    listed = hasattr(os, "sched_getaffinity")
    allowed = os.sched_getaffinity(0) if listed else set(range(os.cpu_count() or 1))
    # Two threads of one core share its arithmetic and its path to memory; a quota below one core still needs a thread.
    return max(1, min((len({siblings(root, each) for each in allowed}), *map(int, quotas(root)))))


def siblings(root: Path, processor: int) -> str:
    """The processors of the same core, as the system lists them; the processor itself where it does not."""
    lines = read_lines(root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    return lines[0] if lines else f"{processor}"


def quotas(root: Path) -> Iterator[float]:
    """The processors' time that each limited control group may use, as a number of processors."""
    for folder in group_folders(root, "cpu"):
        with suppress(ValueError, IndexError, ZeroDivisionError):  # there is no limit ("max", or -1), or no such file
            line = read_lines(folder / "cpu.max")
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = line[0].split() if line else (read_lines(folder / name)[0] for name in names)
            if int(quota) > 0:
                yield int(quota) / int(period)


def available_bytes(root: Path = SYSTEM) -> int | None:
    """The memory that this process may still allocate, by the limits of the machine, of its control groups and of the
    process. None where the system reports no limit. root: of the file system with /proc and /sys."""
    return min(read_limits(root), default=None)


def read_limits(root: Path) -> Iterator[int]:
    """The bytes that are left under each known limit."""
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    for folder in group_folders(root, "memory"):
        for names in (("memory.max", "memory.current", "inactive_file"), OLDER_NAMES):
            yield from read_group_limit(folder, *names)
    if sys.platform != "win32":
        import resource

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        sizes = [line.split()[0] for line in read_lines(root / "proc/self/statm")]
        if soft != resource.RLIM_INFINITY and sizes:
            yield max(0, soft - int(sizes[0]) * resource.getpagesize())


def read_group_limit(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """The bytes that are left in a control group, if it has a limit."""
    with suppress(ValueError, IndexError):  # the limit is "max", or the file is missing
        most, used = int(read_lines(folder / limit)[0]), int(read_lines(folder / usage)[0])
        cached = [line.split()[1] for line in read_lines(folder / "memory.stat") if line.startswith(f"{reclaimable} ")]
        if most < UNLIMITED:
            yield max(0, most - used + int(cached[0] if cached else 0))


def group_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of a group and its parents, of both versions. A container sees no more than the mount point."""
    for line in read_lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controller in controllers.split(","):
            mount /= controller
        elif (number, controllers) != ("0", UNIFIED):
            continue
        inner = mount / path.lstrip("/")
        yield from (inner, *(parent for parent in inner.parents if parent.is_relative_to(mount)))


def read_lines(file: Path) -> list[str]:
    """The lines of a system file; an empty list when the file cannot be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
