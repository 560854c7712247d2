"""Figures of servers from single runs: throughput, percentiles over requests, ratios within a repeat, correct texts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from benchmarks.load.serving.aiperf import LoadResult
from benchmarks.load.serving.servers import OURS
from benchmarks.peers.protocol import PLAIN
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


class ServerKey(NamedTuple):
    """Identifies a row of the table. concurrency: number of clients, each with one request at a time."""

    peer: str
    method: str
    concurrency: int


class ServerRow(NamedTuple):
    """One server at one concurrency."""

    peer: str
    method: str
    concurrency: int
    # Of all clients together, median over repeats.
    tokens_per_second: float
    # Time to the first token and inter-token latency, over the requests of all repeats.
    first_ms_p50: float
    first_ms_p99: float
    per_token_ms_p50: float
    per_token_ms_p99: float
    # Throughput over that of the same peer's plain server, and over that of the fastest server of another peer than
    # Draftwood (None without one): medians of the ratios within each repeat.
    of_plain: float
    of_best: float | None
    # Share of answers equal to the plain text of the bundle.
    same_text: float
    # Tokens per verified proposal; None for a server that does not report it.
    acceptance_length: float | None


def summarise(runs: dict[ServerKey, list[LoadResult]], texts: Sequence[str]) -> list[ServerRow]:
    """Rows in the order of `runs`. Every peer must have a plain method at every concurrency. texts: the expected answer
    to every prompt."""
    return [make_row(key, runs, texts) for key in runs]


def make_row(key: ServerKey, runs: dict[ServerKey, list[LoadResult]], texts: Sequence[str]) -> ServerRow:
    own = runs[key]
    answers = [answer for run in own for answer in run.answers]
    first_p50, first_p99 = map(float, np.percentile([answer.first_ms for answer in answers], (50, 99)))
    later_p50, later_p99 = map(float, np.percentile([answer.per_token_ms for answer in answers], (50, 99)))
    lengths = [run.acceptance_length for run in own if run.acceptance_length is not None]
    best = find_best_other(key, runs)
    return ServerRow(
        *key,
        tokens_per_second=median(run.tokens_per_second for run in own),
        first_ms_p50=first_p50,
        first_ms_p99=first_p99,
        per_token_ms_p50=later_p50,
        per_token_ms_p99=later_p99,
        of_plain=median_throughput_ratio(own, runs[key._replace(method=PLAIN)]),
        of_best=None if best is None else median_throughput_ratio(own, runs[best]),
        same_text=mean(answer.text == texts[answer.prompt] for answer in answers),
        acceptance_length=median(lengths) if lengths else None,
    )


def find_best_other(key: ServerKey, runs: dict[ServerKey, list[LoadResult]]) -> ServerKey | None:
    """The server with the highest throughput at this concurrency, Draftwood's excluded."""
    theirs = [other for other in runs if other.concurrency == key.concurrency and other.peer != OURS]
    return max(theirs, key=lambda other: median(run.tokens_per_second for run in runs[other]), default=None)


def median_throughput_ratio(own: Sequence[LoadResult], other: Sequence[LoadResult]) -> float:
    """Median of the ratios of throughputs within each repeat: a slow phase of the machine affects both sides."""
    pairs = zip(own, other, strict=True)
    return median(run.tokens_per_second / base.tokens_per_second for run, base in pairs)


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
