"""Figures of peers from single runs: medians, quartiles, ratios within a repeat and prompt, and equal texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from benchmarks.peers.protocol import PLAIN, Generation, split_method

OURS = "draftwood"


class MethodKey(NamedTuple):
    """Identifies a row of the table. setting: name of the Setting."""

    precision: str
    peer: str
    method: str
    setting: str = ""


class MethodRun(NamedTuple):
    """One generation. prompt: number of the batch. others: processor seconds per second that other programs used
    meanwhile."""

    prompt: int
    repeat: int
    generation: Generation
    others: float

    @property
    def seconds_per_token(self) -> float:
        return self.generation.seconds / self.generation.num_tokens


class MethodRow(NamedTuple):
    """One peer, precision, method and setting.

    tokens_per_second: of all texts at the same time together, median over batches and repeats. low, high: quartiles of
    the same. of_plain: speed divided by that of the same peer's plain decoding. of_best: speed divided by that of the
    fastest method of another peer than Draftwood at the same precision and setting, None without such a peer; both are
    medians of the ratios within one repeat and batch. same_as_plain: share of prompts on which every text equals that
    of the same peer's plain decoding, token by token. same_as_first: the same, compared with the plain decoding of the
    setting's first entry. tokens_per_pass: of the target. acceptance: share of the proposed tokens that the target
    accepted. Both are None if the peer does not report them. others: see MethodRun, median.
    """

    precision: str
    peer: str
    method: str
    setting: str
    tokens_per_second: float
    low: float
    high: float
    of_plain: float
    of_best: float | None
    same_as_plain: float
    same_as_first: float
    tokens_per_pass: float | None
    acceptance: float | None
    others: float

    @property
    def ours(self) -> bool:
        return self.peer.startswith(OURS)


def measure_speeds(runs: Mapping[MethodKey, Sequence[MethodRun]]) -> dict[MethodKey, float]:
    """Tokens per second over all runs of a key together."""
    tokens = {key: sum(run.generation.num_tokens for run in own) for key, own in runs.items()}
    return {key: tokens[key] / sum(run.generation.seconds for run in own) for key, own in runs.items()}


def choose_fastest(runs: Mapping[MethodKey, Sequence[MethodRun]], count: int) -> set[MethodKey]:
    """The `count` fastest methods with a length of every peer and precision, and all methods without a length."""
    groups: dict[tuple[str, str], list[MethodKey]] = defaultdict(list)
    by_speed = measure_speeds(runs)
    for key in sorted(runs, key=lambda key: -by_speed[key]):
        groups[key.precision, key.peer].append(key)
    kept: set[MethodKey] = set()
    for keys in groups.values():
        sized = [key for key in keys if split_method(key.method)[1]]
        kept |= (set(keys) - set(sized)) | set(sized[:count])
    return kept


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
