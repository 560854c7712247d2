"""Tables of programs in groups: for the screen, and as Markdown for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table


class Line(NamedTuple):
    """One program. cells: of the columns. others: cores that other programs used meanwhile. ours: bold in Markdown."""

    peer: str
    method: str
    cells: Sequence[str]
    others: float
    ours: bool


Groups = Mapping[str, Sequence[Line]]  # by heading


def make_screen_table(columns: Sequence[str], groups: Groups, unbroken: int) -> Table:
    """A table for the screen. unbroken: number of first columns, names included, whose cells stay on one line."""
    headers = [header.replace("× ", "×\N{NO-BREAK SPACE}").replace(" ", "\n") for header in (*columns, "others' cores")]
    result = Table("", "", *headers, box=box.SIMPLE, pad_edge=False)
    for column in result.columns[2:]:
        column.justify = "right"
    for column in result.columns[:unbroken]:
        column.no_wrap = True
    for heading, lines in groups.items():
        result.add_section()
        result.add_row(heading, style="bold")
        for line in lines:
            result.add_row(line.peer, line.method, *line.cells, f"{line.others:.1f}")
    return result


def make_markdown(columns: Sequence[str], groups: Groups) -> str:
    """A table of Markdown."""
    rows = [f"| | | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for heading, lines in groups.items():
        rows.append(f"| **{heading}** |" + " |" * (len(columns) + 1))
        for line in lines:
            name = f"**{line.peer}**" if line.ours else line.peer
            rows.append(f"| {name} | {line.method} | {' | '.join(line.cells)} |")
    return "\n".join(rows)
