"""From single runs to figures: throughput, percentiles over all requests, ratios within a repeat, and whether every
answer is the text it should be."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

from benchmarks.load.serving.aiperf import Load
from benchmarks.load.serving.servers import OURS
from benchmarks.peers.protocol import PLAIN


class Key(NamedTuple):
    """What a row of the table is about. concurrency: clients, each with one request at a time."""

    peer: str
    method: str
    concurrency: int


class Run(NamedTuple):
    """One load; runs[i] of every key are of the same repeat. others: processor seconds per second that neither the
    servers nor AIPerf used."""

    load: Load
    others: float


class Row(NamedTuple):
    """One server at one concurrency.

    tokens_per_second: of all clients together, median over repeats. first_ms, per_token_ms: time to the first token and
    inter-token latency of a request, percentiles over the requests of all repeats. of_plain, of_best: its throughput
    by that of the same peer's plain server, and of the fastest server that is not Draftwood's (None without one):
    medians of ratios within a repeat. same_text: share of answers that are the bundle's own plain text, character by
    character. acceptance_length: of AIPerf's table "Spec Decode", None for a server that does not tell. others: see
    Run, median.
    """

    peer: str
    method: str
    concurrency: int
    tokens_per_second: float
    first_ms_p50: float
    first_ms_p99: float
    per_token_ms_p50: float
    per_token_ms_p99: float
    of_plain: float
    of_best: float | None
    same_text: float
    acceptance_length: float | None
    others: float


def summarise(runs: dict[Key, list[Run]], texts: Sequence[str]) -> list[Row]:
    """Rows in the order of `runs`; every peer has a plain method at every concurrency. texts: what every prompt's
    answer should be."""
    return [row_of(key, runs, texts) for key in runs]


def row_of(key: Key, runs: dict[Key, list[Run]], texts: Sequence[str]) -> Row:
    own = runs[key]
    answers = [answer for run in own for answer in run.load.answers]
    firsts, laters = [answer.first_ms for answer in answers], [answer.per_token_ms for answer in answers]
    lengths = [run.load.acceptance_length for run in own if run.load.acceptance_length is not None]
    best = best_of_others(key, runs)
    return Row(
        *key,
        tokens_per_second=median(run.load.tokens_per_second for run in own),
        first_ms_p50=median(firsts),
        first_ms_p99=p99(firsts),
        per_token_ms_p50=median(laters),
        per_token_ms_p99=p99(laters),
        of_plain=times_as_much(own, runs[key._replace(method=PLAIN)]),
        of_best=None if best is None else times_as_much(own, runs[best]),
        same_text=mean(answer.text == texts[answer.prompt] for answer in answers),
        acceptance_length=median(lengths) if lengths else None,
        others=median(run.others for run in own),
    )


def best_of_others(key: Key, runs: dict[Key, list[Run]]) -> Key | None:
    """The server of the highest throughput at this concurrency that is not Draftwood's."""
    theirs = [other for other in runs if other.concurrency == key.concurrency and other.peer != OURS]
    return max(theirs, key=lambda other: median(run.load.tokens_per_second for run in runs[other]), default=None)


def times_as_much(own: Sequence[Run], other: Sequence[Run]) -> float:
    """Median ratio of throughputs, each within one repeat, so that a slow phase hits both."""
    pairs = zip(own, other, strict=True)
    return median(run.load.tokens_per_second / base.load.tokens_per_second for run, base in pairs)


def p99(values: Sequence[float]) -> float:
    """Interpolated between the largest values; of fewer than a hundred it is close to the largest, never beyond it."""
    return quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with figures rounded to what they are worth."""
    return [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in row._asdict().items()}
        for row in rows
    ]
