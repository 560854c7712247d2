"""The comparison's figures for a person: on the screen, and as Markdown for docs/benchmarks.md.

python -m benchmarks.peers.report benchmarks/results/peers_202m_2026-11-22.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.peers.figures import Row
from benchmarks.peers.listing import Line, as_markdown, on_screen

COLUMNS = ("tokens/s", "quartiles", "× own plain", "× best other", "tokens per pass", "as own plain", "as first")


def cells(row: Row) -> list[str]:
    """What stands in COLUMNS."""
    return [
        f"{row.tokens_per_second:.0f}",
        f"{row.low:.0f}-{row.high:.0f}",
        f"{row.of_plain:.2f}",
        "" if row.of_best is None else f"{row.of_best:.2f}",
        "" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}",
        f"{row.same_as_plain:.0%}",
        f"{row.same_as_first:.0%}",
    ]


def by_precision(rows: Sequence[Row]) -> dict[str, list[Line]]:
    """In the order of the run, the fastest first in each group."""
    fastest = sorted(rows, key=lambda row: -row.tokens_per_second)
    return {
        precision: [
            Line(row.peer, row.method, cells(row), row.others, row.ours)
            for row in fastest
            if row.precision == precision
        ]
        for precision in dict.fromkeys(row.precision for row in rows)
    }


def table(rows: Sequence[Row]) -> Table:
    """For the screen."""
    return on_screen(COLUMNS, by_precision(rows), unbroken=2)


def markdown(rows: Sequence[Row]) -> str:
    """For the documentation."""
    return as_markdown(COLUMNS, by_precision(rows))


if __name__ == "__main__":
    print(markdown([Row(**row) for row in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"]]))
