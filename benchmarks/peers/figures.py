"""Figures of a comparison from its turns: medians, ratios with their intervals, equal texts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.peers.comparison import Turn
from benchmarks.peers.program import PLAIN
from benchmarks.tools.listing import Line, make_markdown, ratio

OURS = "draftwood"
ALL = "all"
SAMPLES, INTERVAL = 2000, (2.5, 97.5)  # of the bootstrap; per cent
COLUMNS = (
    "tokens/s",
    "first token ms",
    "× own plain",
    "× best other",
    "slowest × plain",
    "tokens per pass",
    "as plain",
    "KL",
    "others",
    "MiB",
)


class Ratio(NamedTuple):
    """The median of ratios within one repeat and batch, and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


class Row(NamedTuple):
    """One program, precision and setting on one kind of text, or on all."""

    kind: str
    program: str
    precision: str
    setting: str
    lookups: bool
    # Of all texts at the same time together: median over batches and repeats.
    tokens_per_second: float
    # Median time to the first text; None if answers come whole.
    first_ms: float | None
    # Speed over that of the same program's plain decoding, and over that of the fastest setting of any other program
    # than ours; None without one.
    of_plain: Ratio
    of_best: Ratio | None
    # The least of_plain of a batch, which has the median of its repeats.
    slowest: float
    # Of the target; None if the program does not tell.
    tokens_per_pass: float | None
    # Share of batches whose texts equal those of the same program's plain decoding.
    same_as_plain: float
    # Processor seconds per second of everything else on the machine, median.
    others: float
    # Greatest of the server, 2**20 bytes.
    memory_mib: int

    @property
    def ours(self) -> bool:
        return self.program == OURS


def summarise(turns: Sequence[Turn]) -> list[Row]:
    """Rows of all texts, then of each kind, in the order of the run. Every program has plain turns."""
    kinds = list(dict.fromkeys(turn.kind for turn in turns))
    groups = {ALL: list(turns)} | (
        {kind: [turn for turn in turns if turn.kind == kind] for kind in kinds} if len(kinds) > 1 else {}
    )
    return [row for kind, group in groups.items() for row in make_rows(kind, group)]


def make_rows(kind: str, turns: Sequence[Turn]) -> list[Row]:
    runs: dict[str, list[Turn]] = {}
    for turn in turns:
        runs.setdefault(turn.entry.name, []).append(turn)
    others = [own for own in runs.values() if own[0].entry.program.name != OURS]
    best = min(others, key=typical, default=None)
    rows = []
    for own in runs.values():
        program, setting = own[0].entry
        plain = runs[f"{program.key} {PLAIN}"]
        first = [answer.first for turn in own for answer in turn.answers.answers if answer.first is not None]
        rows.append(
            Row(
                kind,
                program.name,
                program.precision,
                setting.name,
                setting.lookups,
                1 / typical(own),
                1e3 * median(first) if first else None,
                speed_ratio(own, plain),
                None if best is None else speed_ratio(own, best),
                round(min(median(ratios) for ratios in ratios_of(own, plain).values()), 3),
                count_tokens_per_pass(own),
                share_of_same_texts(own, plain),
                median(turn.others for turn in own),
                max(turn.memory for turn in own) >> 20,
            )
        )
    return rows


def typical(turns: Sequence[Turn]) -> float:
    """Median seconds per token."""
    return median(turn.seconds_per_token for turn in turns)


def ratios_of(own: Sequence[Turn], other: Sequence[Turn]) -> dict[int, list[float]]:
    """Speeds over the other's, by batch. Both of one repeat: a slow phase of the machine affects both sides."""
    theirs = {(turn.repeat, turn.batch): turn.seconds_per_token for turn in other}
    found: dict[int, list[float]] = {}
    for turn in own:
        found.setdefault(turn.batch, []).append(theirs[turn.repeat, turn.batch] / turn.seconds_per_token)
    return found


def speed_ratio(own: Sequence[Turn], other: Sequence[Turn]) -> Ratio:
    ratios = np.array([each for repeats in ratios_of(own, other).values() for each in repeats])
    drawn = np.random.default_rng(0).integers(0, len(ratios), (SAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), INTERVAL)
    return Ratio(*(round(float(value), 3) for value in (np.median(ratios), low, high)))


def share_of_same_texts(own: Sequence[Turn], plain: Sequence[Turn]) -> float:
    expected = {(turn.repeat, turn.batch): texts_of(turn) for turn in plain}
    return sum(texts_of(turn) == expected[turn.repeat, turn.batch] for turn in own) / len(own)


def texts_of(turn: Turn) -> list[str]:
    return [answer.text for answer in turn.answers.answers]


def count_tokens_per_pass(turns: Sequence[Turn]) -> float | None:
    """Every pass yields the accepted tokens and one that the target chose itself."""
    answers = [answer for turn in turns for answer in turn.answers.answers]
    accepted = [answer.accepted for answer in answers if answer.accepted is not None]
    if not accepted:
        return None
    tokens = sum(answer.tokens for answer in answers)
    return tokens / (tokens - sum(accepted))


def to_markdown(rows: Sequence[Row], divergences: dict[str, float | None]) -> str:
    """Groups by kind; in each the fastest comes first. divergences: in nats per token, by program/precision."""
    groups: dict[str, list[Line]] = {}
    for row in sorted(rows, key=lambda row: -row.tokens_per_second):
        cells = [
            f"{row.tokens_per_second:.1f}",
            "" if row.first_ms is None else f"{row.first_ms:.0f}",
            *map(interval, (row.of_plain, row.of_best)),
            ratio(row.slowest),
            ratio(row.tokens_per_pass),
            f"{row.same_as_plain:.0%}",
            "" if (found := divergences.get(f"{row.program}/{row.precision}")) is None else f"{found:.4f}",
            f"{row.others:.1f}",
            str(row.memory_mib),
        ]
        line = Line(f"{row.program}/{row.precision}", row.setting, cells, row.ours)
        groups.setdefault(row.kind, []).append(line)
    return make_markdown(COLUMNS, {kind: groups[kind] for kind in dict.fromkeys(row.kind for row in rows)})


def interval(found: Ratio | None) -> str:
    return "" if found is None else f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})"
