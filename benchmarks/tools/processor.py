"""Processor time and memory of this machine's processes, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def read_busy_seconds() -> float:
    """Seconds that all processors together have worked since the machine started; 0 without /proc."""
    try:
        fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def read_tree_seconds(pid: int) -> float:
    """Processor seconds of a process and of all its descendants so far."""
    return read_process_seconds(pid) + sum(map(read_tree_seconds, find_children(pid)))


def read_process_seconds(pid: int) -> float:
    """Processor seconds of one process so far; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def read_tree_memory(pid: int) -> int:
    """Bytes that a process and its descendants occupy now, mapped files included."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        pages = 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(read_tree_memory, find_children(pid)))


def find_children(pid: int) -> list[int]:
    """Process ids of the direct children, of all threads."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, file.read_text().split())
        except OSError:  # the thread has ended
            continue
    return found
