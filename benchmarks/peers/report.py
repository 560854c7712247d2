"""The figures of a comparison as tables: on the screen, and as Markdown for docs/benchmarks.md.

python -m benchmarks.peers.report benchmarks/results/peers_202m_2026-11-22.json

The tables of several files, the parts of one comparison, become one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.peers.figures import MethodRow
from benchmarks.peers.listing import Line, make_markdown, make_screen_table

COLUMNS = (
    "tokens/s",
    "quartiles",
    "× own plain",
    "× best other",
    "tokens per pass",
    "accepted",
    "as own plain",
    "as first",
)
EARLIER = {"setting": "", "acceptance": None}  # what files of earlier runs lack


def format_cells(row: MethodRow) -> list[str]:
    """The cells of COLUMNS."""
    return [
        f"{row.tokens_per_second:.0f}",
        f"{row.low:.0f}-{row.high:.0f}",
        f"{row.of_plain:.2f}",
        "" if row.of_best is None else f"{row.of_best:.2f}",
        "" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}",
        "" if row.acceptance is None else f"{row.acceptance:.0%}",
        f"{row.same_as_plain:.0%}",
        f"{row.same_as_first:.0%}",
    ]


def group_lines(rows: Sequence[MethodRow]) -> dict[str, list[Line]]:
    """Lines by setting and precision, in the order of the run; in each group the fastest comes first."""
    fastest = sorted(rows, key=lambda row: -row.tokens_per_second)
    precisions = list(dict.fromkeys(row.precision for row in rows))
    groups = [(setting, each) for setting in dict.fromkeys(row.setting for row in rows) for each in precisions]
    return {
        ", ".join(filter(None, group)): [
            Line(row.peer, row.method, format_cells(row), row.others, row.ours)
            for row in fastest
            if (row.setting, row.precision) == group
        ]
        for group in groups
        if any((row.setting, row.precision) == group for row in rows)
    }


def make_table(rows: Sequence[MethodRow]) -> Table:
    """For the screen."""
    return make_screen_table(COLUMNS, group_lines(rows), unbroken=2)


def to_markdown(rows: Sequence[MethodRow]) -> str:
    """For the documentation."""
    return make_markdown(COLUMNS, group_lines(rows))


def read_rows(files: Iterable[Path]) -> list[MethodRow]:
    """The rows of all files."""
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [MethodRow(**(EARLIER | row)) for content in contents for row in content["rows"]]


if __name__ == "__main__":
    print(to_markdown(read_rows(map(Path, sys.argv[1:]))))
