"""The comparison's figures for a person: on the screen, and as Markdown for docs/benchmarks.md.

PYTHONPATH=benchmarks python -m peers.report benchmarks/results/peers_202m.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from peers.figures import Row

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


def by_precision(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Groups in the order of the run, the fastest first in each."""
    for precision in dict.fromkeys(row.precision for row in rows):
        group = [row for row in rows if row.precision == precision]
        yield precision, sorted(group, key=lambda row: -row.tokens_per_second)


def table(rows: Sequence[Row]) -> Table:
    """For the screen; with what other programs took of the processor meanwhile, in cores."""
    headers = [header.replace("× ", "×\N{NO-BREAK SPACE}").replace(" ", "\n") for header in (*COLUMNS, "others' cores")]
    result = Table("", "", *headers, box=box.SIMPLE, pad_edge=False)
    for column in result.columns[2:]:
        column.justify = "right"
    for column in result.columns[:2]:
        column.no_wrap = True
    for precision, group in by_precision(rows):
        result.add_section()
        result.add_row(precision, style="bold")
        for row in group:
            result.add_row(row.peer, row.method, *cells(row), f"{row.others:.1f}")
    return result


def markdown(rows: Sequence[Row]) -> str:
    """Draftwood's rows are bold."""
    lines = [f"| | | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for precision, group in by_precision(rows):
        lines.append(f"| **{precision}** |" + " |" * (len(COLUMNS) + 1))
        for row in group:
            name = f"**{row.peer}**" if row.ours else row.peer
            lines.append(f"| {name} | {row.method} | {' | '.join(cells(row))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown([Row(**row) for row in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"]]))
