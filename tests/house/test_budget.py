"""No room has more lines, words or files than its line in budget.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EDIT = "edit tests/house/budget.toml and say why in the same commit"


def excesses(found: size.Sizes, budget: size.Sizes) -> list[str]:
    """Rooms beyond their budget, and rooms without one."""
    return [
        f"{kind} of {room}: {number:,}, budget {budget[kind].get(room, 0):,}"
        for kind, rooms in found.items()
        for room, number in rooms.items()
        if number > budget[kind].get(room, 0)
    ]


def test_every_room_keeps_to_its_budget() -> None:
    try:
        found = size.sizes()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the git repository")
    budget = tomllib.loads(size.BUDGET.read_text(encoding="utf-8"))
    assert not (over := excesses(found, budget)), f"{'; '.join(over)}: {EDIT}"
    assert {kind: set(rooms) for kind, rooms in found.items()} == {kind: set(rooms) for kind, rooms in budget.items()}


def test_one_line_too_many_is_noticed() -> None:
    budget = {"lines": {"runtime": 10, "tests": 5}}
    assert excesses({"lines": {"runtime": 10, "tests": 5}}, budget) == []
    assert excesses({"lines": {"runtime": 11, "new": 1}}, budget) == [
        "lines of runtime: 11, budget 10",
        "lines of new: 1, budget 0",
    ]


def test_files_are_counted_by_room_and_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "runtime/a.py": "1\n2\n",
        "plugins/native/k.c": "1\n",
        "tests/t.py": "1\n2\n3\n",
        "runtime/data.json": "{}\n",
        "benchmarks/results/x.json": "{}\n",
        "README.md": "two words\n",
        "docs/papers.md": "one\n",
        "docs/internals/gpu.md": "one\n",
        "models/demo/README.md": "a model card\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "src").symlink_to("runtime")
    monkeypatch.setattr(size, "ROOT", tmp_path)
    for command in (["init", "-q"], ["add", "."]):
        size.git(*command)
    assert size.sizes() == {
        "lines": {"runtime": 2, "plugins": 1, "tests": 3, "product": 3},
        "words": {"users": 2, "internals": 2, "other": 3, "all": 7},
        "files": {"results": 1},
    }
