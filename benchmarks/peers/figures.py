"""Figures of peers from single runs: medians, quartiles, ratios within a repeat and prompt, and equal texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from benchmarks.peers.protocol import PLAIN, Generation

OURS = "draftwood"


class MethodKey(NamedTuple):
    """Identifies a row of the table."""

    precision: str
    peer: str
    method: str
    # The name of a Setting.
    setting: str = ""


class MethodRun(NamedTuple):
    """One generation."""

    # Number of the batch.
    prompt: int
    repeat: int
    generation: Generation
    # Processor seconds per second that other programs used meanwhile.
    others: float

    @property
    def seconds_per_token(self) -> float:
        return self.generation.seconds / self.generation.num_tokens


class MethodRow(NamedTuple):
    """One peer, precision, method and setting."""

    precision: str
    peer: str
    method: str
    setting: str
    # Of all texts at the same time together: median and quartiles over batches and repeats.
    tokens_per_second: float
    low: float
    high: float
    # Speed over that of the same peer's plain decoding, and over that of the fastest method of another peer than
    # Draftwood (None without one): medians of the ratios within one repeat and batch.
    of_plain: float
    of_best: float | None
    # Share of prompts on which every text equals plain decoding of the same peer, and of the setting's first entry.
    same_as_plain: float
    same_as_first: float
    # Of the target, and the share of proposed tokens that it accepted; None if the peer does not report them.
    tokens_per_pass: float | None
    acceptance: float | None
    # See MethodRun, median.
    others: float

    @property
    def ours(self) -> bool:
        return self.peer.startswith(OURS)


def summarise(runs: dict[MethodKey, list[MethodRun]]) -> list[MethodRow]:
    """Rows in the order of `runs`. Every peer, precision and setting must have a plain method, and every key of a
    setting the same batches and repeats.

    Raises ValueError for an empty text.
    """
    for key, own in runs.items():
        if not own or not all(all(run.generation.texts) for run in own):
            raise ValueError(f"{key.peer} ({key.precision}, {key.method}) wrote nothing")
    first: dict[str, MethodKey] = {}
    for key in runs:
        if key.method == PLAIN:
            first.setdefault(key.setting, key)
    return [make_row(key, runs, runs[first[key.setting]]) for key in runs]


def make_row(key: MethodKey, runs: dict[MethodKey, list[MethodRun]], first: Sequence[MethodRun]) -> MethodRow:
    own, plain = runs[key], runs[key._replace(method=PLAIN)]
    speeds = [1 / run.seconds_per_token for run in own]
    low, middle, high = map(float, np.percentile(speeds, (25, 50, 75)))
    best = find_best_other(key, runs)
    return MethodRow(
        *key,
        tokens_per_second=middle,
        low=low,
        high=high,
        of_plain=median_speed_ratio(own, plain),
        of_best=median_speed_ratio(own, runs[best]) if best is not None else None,
        same_as_plain=share_of_same_texts(own, plain),
        same_as_first=share_of_same_texts(own, first),
        tokens_per_pass=count_tokens_per_pass(own),
        acceptance=measure_acceptance(own),
        others=median(run.others for run in own),
    )


def find_best_other(key: MethodKey, runs: dict[MethodKey, list[MethodRun]]) -> MethodKey | None:
    """The fastest method at this precision and setting, all variants of Draftwood excluded."""
    group = [other for other in runs if (other.precision, other.setting) == (key.precision, key.setting)]
    theirs = [other for other in group if not other.peer.startswith(OURS)]
    return min(theirs, key=lambda other: median(run.seconds_per_token for run in runs[other]), default=None)


def median_speed_ratio(own: Iterable[MethodRun], other: Iterable[MethodRun]) -> float:
    """Median of the speed ratios within one repeat and batch: a slow phase of the machine affects both sides."""
    theirs = {(run.repeat, run.prompt): run.seconds_per_token for run in other}
    return median(theirs[run.repeat, run.prompt] / run.seconds_per_token for run in own)


def share_of_same_texts(own: Iterable[MethodRun], other: Iterable[MethodRun]) -> float:
    """Share of prompts on which all texts of both sides are equal."""
    texts: dict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(set)
    for run in (*own, *other):
        for number, text in enumerate(run.generation.texts):
            texts[run.prompt, number].add(tuple(text))
    return mean(len(variants) == 1 for variants in texts.values())


def count_tokens_per_pass(runs: Sequence[MethodRun]) -> float | None:
    """Tokens per target pass, from the number of passes or of accepted tokens, whichever the peer reports."""
    tokens = sum(run.generation.num_tokens for run in runs)
    counters = [run.generation.counters for run in runs]
    if all("target_passes" in counter for counter in counters):
        return tokens / sum(counter["target_passes"] for counter in counters)
    if all("accepted" in counter for counter in counters):
        # Every pass yields one token that the target chose itself.
        return tokens / (tokens - sum(counter["accepted"] for counter in counters))
    return None


def measure_acceptance(runs: Sequence[MethodRun]) -> float | None:
    """Accepted tokens divided by proposed ones; None if the peer does not report both, or proposed nothing."""
    counters = [run.generation.counters for run in runs]
    if not all("drafted" in counter and "accepted" in counter for counter in counters):
        return None
    drafted = sum(counter["drafted"] for counter in counters)
    return sum(counter["accepted"] for counter in counters) / drafted if drafted else None
