"""No room has more lines, words or files than its line in budget.toml."""

from __future__ import annotations

import subprocess
import sys

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
