"""The figures of a load as a table of Markdown.

python -m benchmarks.load.serving.report benchmarks/results/load_serving_2026-11-22.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load.serving.figures import ServerRow
from benchmarks.load.serving.servers import OURS
from benchmarks.tools.listing import Line, make_markdown, ratio

COLUMNS = (
    "tokens/s",
    "first token ms",
    "per token ms",
    "× own plain",
    "× best other",
    "tokens per pass",
    "same text",
)


def format_cells(row: ServerRow) -> list[str]:
    """The cells of COLUMNS; latencies are p50 and p99."""
    return [
        f"{row.tokens_per_second:.0f}",
        f"{row.first_ms_p50:.0f}, {row.first_ms_p99:.0f}",
        f"{row.per_token_ms_p50:.1f}, {row.per_token_ms_p99:.1f}",
        *map(ratio, (row.of_plain, row.of_best, row.acceptance_length)),
        f"{row.same_text:.0%}",
    ]


def to_markdown(rows: Sequence[ServerRow]) -> str:
    """Groups by concurrency, in the order of the run."""
    groups: dict[str, list[Line]] = {}
    for row in rows:
        line = Line(row.peer, row.method, format_cells(row), row.peer == OURS)
        groups.setdefault(f"{row.concurrency} at a time", []).append(line)
    return make_markdown(COLUMNS, groups)


if __name__ == "__main__":
    rows = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"]
    print(to_markdown([ServerRow(**{name: row[name] for name in ServerRow._fields}) for row in rows]))
