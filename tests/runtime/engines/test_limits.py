"""How many threads a process should start, by the system's own files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftwood.runtime.engines.limits import cores, quotas

V2, V1 = "sys/fs/cgroup/", "sys/fs/cgroup/cpu/"


def files_of(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def older(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    return {f"{folder}cpu.cfs_quota_us": f"{quota}\n", f"{folder}cpu.cfs_period_us": f"{period}\n"}


def siblings(pairs: list[str]) -> dict[str, str]:
    names = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {names.format(index): f"{pair}\n" for index, pair in enumerate(pairs)}


PAIRS = siblings([f"{index % 8},{index % 8 + 8}" for index in range(16)])


@pytest.fixture(autouse=True)
def sixteen_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/a/b\n", V2 + "a/cpu.max": "250000 100000", V2 + "a/b/cpu.max": "max 100000"}, 2),
        ({"proc/self/cgroup": "0::/a\n", V2 + "a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a\n", V2 + "a/cpu.max": "9000000 100000\n"}, 16),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/a\n", **older(V1 + "a/", 300000), **older(V1, -1)}, 3),
        ({"proc/self/cgroup": "4:cpu:/not/seen/from/inside\n", **older(V1, 100000, 50000)}, 2),
        ({"proc/self/cgroup": "5:memory:/a\n", **older(V1, 100000)}, 16),
        *(({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": text}, 16) for text in ("no number", "100000 0\n", "")),
        (PAIRS, 8),
        (siblings(["0-1", "0-1"]), 15),
        ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "1200000 100000"} | PAIRS, 8),
    ],
)
def test_quota_and_physical_cores_count(tmp_path: Path, content: dict[str, str], expected: int) -> None:
    assert cores(files_of(tmp_path, content)) == expected


def test_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 9, 3})
    files = files_of(tmp_path, PAIRS)
    assert cores(files) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores(files) == 1


def test_each_group_with_a_limit_is_read(tmp_path: Path) -> None:
    content = {"proc/self/cgroup": "0::/a\n", V2 + "a/cpu.max": "150000 100000", V2 + "cpu.max": "max 100000"}
    assert list(quotas(files_of(tmp_path, content))) == [1.5]
