"""Rounds that propose what a prompt lookup found, in place of the round that is planned without one.

A text repeats itself, or its prompt, in some places and not in others. What followed the last earlier occurrence of
the text's last n tokens costs no pass of the draft, and is right the more often the longer n is. Therefore the
acceptance is learned for each length n and each depth, from all rounds in which a lookup found something: each of them
shows whether its tokens are those that were found, proposed or not.

A lookup of k tokens takes the place of a planned round where it brings more tokens than the planned rounds bring in the
same time:

    (1 + E[accepted | n, k]) - speed * seconds(k) > 0,   speed = tokens / seconds of the planned round

and k is the number for which this is largest. What was found depends on earlier tokens only, and so does the choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

# n -> the probability that the first token is right, before the first observation: about what SmolLM2-135M-Instruct has
# at temperatures 0 and 0.7.
FIRST_GUESSES = {0: 0.4, 2: 0.5, 3: 0.6, 4: 0.7, 6: 0.8, 8: 0.9}
LONGEST = max(FIRST_GUESSES)
FORCED = 100  # in the place of n, longer than any: what a grammar forces, which is right about as often
DEPTHS = 16  # that are counted apart: the last one for all deeper ones
PRIOR = 8.0  # weight of what others have shown, or of the guess, in observations
MEMORY, LONG_MEMORY = 0.98, 0.998  # factor on the weight of earlier observations: of a request, of all together


class Match(NamedTuple):
    """What followed the last earlier occurrence of the text's last `ngram` tokens, or with FORCED what a grammar leaves
    no choice of; no tokens where there is none."""

    ngram: int
    tokens: list[int]


NO_MATCH = Match(0, [])


class Gain(NamedTuple):
    """A lookup's number of tokens, the expected tokens of its round, and the seconds of the round."""

    depth: int
    tokens: float
    seconds: float


class LookupEstimate:
    """How often tokens that a lookup found are right, by the length of the n-gram and the depth."""

    def __init__(self, general: LookupEstimate | None = None) -> None:
        """general: the estimate of all requests, from which this departs, learning from the same rounds; else None."""
        self._general = general
        self._memory = LONG_MEMORY if general is None else MEMORY
        # n -> of every depth
        self._tried: dict[int, list[float]] = defaultdict(lambda: [0.0] * DEPTHS)
        self._right: dict[int, list[float]] = defaultdict(lambda: [0.0] * DEPTHS)

    def observe(self, match: Match, following: Sequence[int]) -> None:
        if self._general is not None:
            self._general.observe(match, following)
        tried, right, memory = self._tried[match.ngram], self._right[match.ngram], self._memory
        for place, (found, token) in enumerate(zip(match.tokens, following, strict=False)):
            depth = min(place, DEPTHS - 1)
            tried[depth] = tried[depth] * memory + 1
            right[depth] = right[depth] * memory + (found == token)
            if found != token:
                return

    def steps(self, ngram: int, most: int) -> list[float]:
        """The probability that each of the first `most` tokens, DEPTHS at most, is right where those before it are."""
        if self._general is None:  # a token after a right one fails half as often as the first
            first = FIRST_GUESSES[max(known for known in FIRST_GUESSES if known <= ngram)]
            before: Iterable[float] = [first, *[(1 + first) / 2] * (most - 1)]
        else:
            before = self._general.steps(ngram, most)
        counts = zip(before, self._tried[ngram], self._right[ngram], strict=False)
        return [(right + PRIOR * guess) / (tried + PRIOR) for guess, tried, right in counts]

    def expected(self, ngram: int, most: int) -> list[float]:
        """E[accepted] of lookups of 1, 2, ... `most` tokens."""
        steps = self.steps(ngram, min(most, DEPTHS))
        return list(accumulate(accumulate(steps + steps[-1:] * (most - len(steps)), mul)))


def best_lookup(expected: Sequence[float], seconds: Sequence[float], speed: float) -> Gain:
    """The number of tokens that brings most beyond what planned rounds bring in the same time. expected, seconds: of
    rounds that propose 1, 2, ... tokens. speed: tokens per second of planned rounds."""
    gains = [e - speed * s for e, s in zip(expected, seconds, strict=True)]
    best = gains.index(max(gains))
    return Gain(best + 1, 1 + expected[best], seconds[best])
