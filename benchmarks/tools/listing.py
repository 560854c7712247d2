"""A comparison of programs as a table of Markdown: groups of lines with a heading each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Line(NamedTuple):
    """One program in one group."""

    peer: str
    method: str
    cells: Sequence[str]
    # Bold.
    ours: bool


def make_markdown(columns: Sequence[str], groups: Mapping[str, Sequence[Line]]) -> str:
    """groups: by heading."""
    rows = [f"| | | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for heading, lines in groups.items():
        rows.append(f"| **{heading}** |" + " |" * (len(columns) + 1))
        for line in lines:
            name = f"**{line.peer}**" if line.ours else line.peer
            rows.append(f"| {name} | {line.method} | {' | '.join(line.cells)} |")
    return "\n".join(rows)


def ratio(value: float | None) -> str:
    """A cell with two decimals; empty for None."""
    return "" if value is None else f"{value:.2f}"
