"""From single runs to figures: medians, spread, ratios in equal groups, and whether a text is what it should be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

from benchmarks.peers.protocol import PLAIN, Generation, split_method

OURS = "draftwood"


class Key(NamedTuple):
    """What a row of the table is about."""

    precision: str
    peer: str
    method: str


class Run(NamedTuple):
    """One generation. others: processor seconds that other programs used meanwhile, per second."""

    prompt: int
    repeat: int
    generation: Generation
    others: float

    @property
    def seconds_per_token(self) -> float:
        return self.generation.seconds / len(self.generation.tokens)


class Row(NamedTuple):
    """One peer, precision and method.

    tokens_per_second: median over prompts and repeats; low and high are its quartiles. of_plain, of_best: how many
    times as fast as the same peer's plain decoding, and as the best method of a peer other than Draftwood at the same
    precision (None where there is no such peer): medians of ratios within one repeat and prompt. same_as_plain: share
    of prompts on which every text is that of the same peer's plain decoding, token by token. same_as_first: the same,
    compared with the plain text of the first entry of the run. tokens_per_pass: of the target, None where the peer does
    not tell. others: see Run, median.
    """

    precision: str
    peer: str
    method: str
    tokens_per_second: float
    low: float
    high: float
    of_plain: float
    of_best: float | None
    same_as_plain: float
    same_as_first: float
    tokens_per_pass: float | None
    others: float

    @property
    def ours(self) -> bool:
        return self.peer.startswith(OURS)


def speeds(runs: Mapping[Key, Sequence[Run]]) -> dict[Key, float]:
    """Tokens per second over all runs of a key together."""
    tokens = {key: sum(len(run.generation.tokens) for run in own) for key, own in runs.items()}
    return {key: tokens[key] / sum(run.generation.seconds for run in own) for key, own in runs.items()}


def fastest(runs: Mapping[Key, Sequence[Run]], count: int) -> set[Key]:
    """Of every peer and precision the `count` fastest methods that have a length, and all that have none."""
    groups: dict[tuple[str, str], list[Key]] = defaultdict(list)
    by_speed = speeds(runs)
    for key in sorted(runs, key=lambda key: -by_speed[key]):
        groups[key.precision, key.peer].append(key)
    kept: set[Key] = set()
    for keys in groups.values():
        sized = [key for key in keys if split_method(key.method)[1]]
        kept |= (set(keys) - set(sized)) | set(sized[:count])
    return kept


def summarise(runs: dict[Key, list[Run]]) -> list[Row]:
    """Rows in the order of `runs`, which holds at least one. Every peer and precision has a plain method, every key the
    same prompts and repeats.

    Raises ValueError for an empty text, of which nothing can be said.
    """
    for key, own in runs.items():
        if not own or not all(run.generation.tokens for run in own):
            raise ValueError(f"{key.peer} ({key.precision}, {key.method}) wrote nothing")
    first = next(key for key in runs if key.method == PLAIN)
    return [row_of(key, runs, runs[first]) for key in runs]


def row_of(key: Key, runs: dict[Key, list[Run]], first: Sequence[Run]) -> Row:
    own, plain = runs[key], runs[key._replace(method=PLAIN)]
    speeds = [1 / run.seconds_per_token for run in own]
    low, middle, high = quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else speeds * 3
    best = best_of_others(key, runs)
    return Row(
        *key,
        tokens_per_second=middle,
        low=low,
        high=high,
        of_plain=times_as_fast(own, plain),
        of_best=times_as_fast(own, runs[best]) if best is not None else None,
        same_as_plain=same_texts(own, plain),
        same_as_first=same_texts(own, first),
        tokens_per_pass=tokens_per_pass(own),
        others=median(run.others for run in own),
    )


def best_of_others(key: Key, runs: dict[Key, list[Run]]) -> Key | None:
    """The fastest method at this precision of a peer that is not Draftwood in any variant."""
    theirs = [other for other in runs if other.precision == key.precision and not other.peer.startswith(OURS)]
    return min(theirs, key=lambda other: median(run.seconds_per_token for run in runs[other]), default=None)


def times_as_fast(own: Iterable[Run], other: Iterable[Run]) -> float:
    """Median ratio of seconds per token, each within one repeat and prompt, so that a slow phase hits both."""
    theirs = {(run.repeat, run.prompt): run.seconds_per_token for run in other}
    return median(theirs[run.repeat, run.prompt] / run.seconds_per_token for run in own)


def same_texts(own: Iterable[Run], other: Iterable[Run]) -> float:
    """Share of prompts on which all of both sides' texts are one and the same."""
    texts: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for run in (*own, *other):
        texts[run.prompt].add(tuple(run.generation.tokens))
    return mean(len(variants) == 1 for variants in texts.values())


def tokens_per_pass(runs: Sequence[Run]) -> float | None:
    """Tokens per pass of the target: from its number of passes, or of accepted tokens, as a peer tells either."""
    tokens = sum(len(run.generation.tokens) for run in runs)
    counters = [run.generation.counters for run in runs]
    if all("target_passes" in counter for counter in counters):
        return tokens / sum(counter["target_passes"] for counter in counters)
    if all("accepted" in counter for counter in counters):
        # Every pass yields one token of the target's own.
        return tokens / (tokens - sum(counter["accepted"] for counter in counters))
    return None


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with figures rounded to what they are worth."""
    return [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in row._asdict().items()}
        for row in rows
    ]
