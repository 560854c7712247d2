"""The figures of a comparison as a table of Markdown.

    python -m benchmarks.peers.report benchmarks/results/peers_smollm2_zen3_questions_*.json

The tables of several files, the parts of one comparison, become one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.figures import MethodRow
from benchmarks.tools.listing import Line, make_markdown, ratio

COLUMNS = (
    "tokens/s",
    "quartiles",
    "× own plain",
    "× best other",
    "tokens per pass",
    "accepted",
    "as own plain",
    "as first",
    "others' cores",
)


def format_cells(row: MethodRow) -> list[str]:
    """The cells of COLUMNS."""
    return [
        f"{row.tokens_per_second:.0f}",
        f"{row.low:.0f}-{row.high:.0f}",
        *map(ratio, (row.of_plain, row.of_best, row.tokens_per_pass)),
        "" if row.acceptance is None else f"{row.acceptance:.0%}",
        f"{row.same_as_plain:.0%}",
        f"{row.same_as_first:.0%}",
        f"{row.others:.1f}",
    ]


def to_markdown(rows: Sequence[MethodRow]) -> str:
    """Groups by setting and precision, in the order of the run; in each group the fastest comes first."""
    groups: dict[str, list[Line]] = {}
    order = list(dict.fromkeys(row.setting for row in rows))
    pairs = dict.fromkeys((row.setting, row.precision) for row in rows)
    for setting, precision in sorted(pairs, key=lambda pair: order.index(pair[0])):
        group = [row for row in rows if (row.setting, row.precision) == (setting, precision)]
        groups[", ".join(filter(None, (setting, precision)))] = [
            Line(row.peer, row.method, format_cells(row), row.ours)
            for row in sorted(group, key=lambda row: -row.tokens_per_second)
        ]
    return make_markdown(COLUMNS, groups)


def read_rows(files: Iterable[Path]) -> list[MethodRow]:
    """The rows of all files."""
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [MethodRow(**row) for content in contents for row in content["rows"]]


if __name__ == "__main__":
    print(to_markdown(read_rows(map(Path, sys.argv[1:]))))
