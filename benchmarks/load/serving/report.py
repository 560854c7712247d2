"""The figures of a load as tables: on the screen, and as Markdown for docs/benchmarks.md.

python -m benchmarks.load.serving.report benchmarks/results/load_serving_2026-11-21.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.load.serving.figures import ServerRow
from benchmarks.load.serving.servers import OURS
from benchmarks.peers.listing import Line, make_markdown, make_screen_table
from benchmarks.peers.protocol import PLAIN

LATENCIES = {
    "first token p50": "first_ms_p50",
    "first token p99": "first_ms_p99",
    "per token p50": "per_token_ms_p50",
    "per token p99": "per_token_ms_p99",
}
COLUMNS = ("tokens/s", "first token ms", "per token ms", "× own plain", "× best other", "tokens per pass", "same text")


def format_cells(row: ServerRow) -> list[str]:
    """The cells of COLUMNS; latencies are p50 and p99."""
    return [
        f"{row.tokens_per_second:.0f}",
        f"{row.first_ms_p50:.0f}, {row.first_ms_p99:.0f}",
        f"{row.per_token_ms_p50:.1f}, {row.per_token_ms_p99:.1f}",
        f"{row.of_plain:.2f}",
        "" if row.of_best is None else f"{row.of_best:.2f}",
        "" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
        f"{row.same_text:.0%}",
    ]


def group_by_concurrency(rows: Sequence[ServerRow]) -> dict[int, list[ServerRow]]:
    """Rows by concurrency, in the order of the run."""
    return {
        concurrency: [row for row in rows if row.concurrency == concurrency]
        for concurrency in dict.fromkeys(row.concurrency for row in rows)
    }


def group_lines(rows: Sequence[ServerRow]) -> dict[str, list[Line]]:
    return {
        f"{concurrency} at a time": [
            Line(row.peer, row.method, format_cells(row), row.others, row.peer == OURS) for row in group
        ]
        for concurrency, group in group_by_concurrency(rows).items()
    }


def make_table(rows: Sequence[ServerRow]) -> Table:
    """For the screen."""
    return make_screen_table(COLUMNS, group_lines(rows), unbroken=5)


def make_ratio_table(rows: Sequence[ServerRow]) -> Table:
    """Figures divided by those of the same peer's plain server: above 1 is better for tokens/s, below 1 for
    latencies."""
    groups = group_by_concurrency(rows)
    result = Table("by own plain", "", *(f"{concurrency} at a time" for concurrency in groups), box=box.SIMPLE)
    for column in result.columns[2:]:
        column.justify = "right"
    for peer, method in dict.fromkeys((row.peer, row.method) for row in rows if row.method != PLAIN):
        own, plain = (
            [next(row for row in group if (row.peer, row.method) == (peer, name)) for group in groups.values()]
            for name in (method, PLAIN)
        )
        result.add_row(f"{peer} {method}", "tokens/s", *(f"{row.of_plain:.2f}" for row in own))
        for label, name in LATENCIES.items():
            shares = (getattr(row, name) / getattr(base, name) for row, base in zip(own, plain, strict=True))
            result.add_row("", label, *(f"{share:.2f}" for share in shares))
    return result


def to_markdown(rows: Sequence[ServerRow]) -> str:
    """For the documentation."""
    return make_markdown(COLUMNS, group_lines(rows))


if __name__ == "__main__":
    print(to_markdown([ServerRow(**row) for row in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"]]))
