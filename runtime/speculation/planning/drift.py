"""Drift: what passes take at present, against the stored table.

Other programs on a machine, and other machines on a host, take memory bandwidth and cores away for minutes. Passes of
few rows read weights, and get slower with less bandwidth; passes of many rows compute, and get slower with fewer cores.
A table of a quiet minute then promises that ten rows cost as much as one, when they take twice as long. Therefore real
passes are compared with the table, by groups of widths. Each group has the drift of the next narrower one, and a
difference to it. A pass moves the differences up to its own group, the least certain ones most. The draft's passes have
the drift of the target's narrowest ones, and a difference to it that they alone move. A difference is forgotten while
nothing shows it, so its group is tried again.

A clock must not touch a text that a seed shall repeat, nor one whose distribution is enumerated: only who asks for a
drift has one, see `History` and `DraftBudget`. What a pass took does not depend on numbers that are drawn later, so
the output stays exact.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .cost import MAX_SECONDS, CostModel, PassCosts

GROUPS = (1, 3, 6, 10, 16)  # the widest pass of each group of widths but the last one: plain decoding has its own
# What is known is kept as a Kalman filter does. Variances are in those of what a pass shows: CHANGE is added with each
# pass, so that the latest 8 count. A difference is forgotten by FORGOTTEN with each pass.
CHANGE, FORGOTTEN = 0.015, 0.005
MAX_SHOWN = 0.7  # logarithm: a pass during which the program was interrupted shows no more
UNKNOWN = 2.0  # by how much more, for each variance: the first passes correct a table that another machine has measured
STEP, KEPT = 0.1, 0.8  # of the logarithms by which plans are made, and by how many steps they may be wrong: computing
# prices takes a while
MIN_SECONDS = 1e-9  # of a pass, where a clock is coarse
STALE = 32  # passes without a plain one, where proposals are hardly faster
SELDOM = 8.0  # how much longer it takes to become stale, for each plain speed by which they are faster
MAX_WAITING = 16  # passes that are counted together at most
MAX_KNOWN = 64  # costs that are kept

DRAFT = len(GROUPS) + 1  # the group of the draft's passes, after those of the target's
Factors = tuple[int, ...]  # of each group: logarithm of real over stored seconds, in steps
UNCHANGED: Factors = (0,) * (DRAFT + 1)
KEEPING = np.array([1.0] + [1 - FORGOTTEN] * len(GROUPS))  # of the drift of narrow passes, and of differences
KEPT_PRODUCTS, CHANGES = np.outer(KEEPING, KEEPING), CHANGE * np.eye(len(KEEPING))


class Drift:
    """The costs of one machine at present. Threads may disturb each other's counts: they are estimates."""

    def __init__(self, stored: CostModel) -> None:
        self._stored = stored
        # Logarithms of real over stored seconds: of each group's over those of the narrower one, and their covariances.
        self._differences = np.zeros(DRAFT)
        self._covariances = np.eye(DRAFT)
        self._draft, self._draft_variance = 0.0, 1.0  # the draft's difference to the narrowest group
        self._since_plain = sys.maxsize  # passes
        self._factors = UNCHANGED
        self._waiting: list[tuple[int, float, float]] = []  # passes that are not counted yet: group, stored, seconds
        self._known: dict[Factors, CostModel] = {UNCHANGED: stored}

    def is_stale(self, speed_up: float) -> bool:
        """Whether no plain pass was seen for so long that plain decoding may take any time. speed_up: of proposals over
        plain decoding. The faster they are, the more a plain round costs, and the less its time matters."""
        return self._since_plain >= STALE * max(1.0, SELDOM * (speed_up - 1))

    def look(self) -> None:
        """A plain pass is planned. It is asked for once: others may still share it."""
        self._since_plain = 0

    @property
    def factors(self) -> Factors:
        self._count_waiting()
        return self._factors

    def observe(self, rows: int, stored: float, seconds: float) -> None:
        """Learn from a pass of the target. stored: its seconds by the table."""
        self._since_plain = self._since_plain + 1 if rows > 1 else 0
        self._wait(bisect_left(GROUPS, rows), stored, seconds)

    def observe_draft(self, stored: float, seconds: float) -> None:
        """Learn from the draft's passes of a round. stored: their seconds by the table."""
        self._wait(DRAFT, stored, seconds)

    def _wait(self, group: int, stored: float, seconds: float) -> None:
        """Passes are counted together when factors are wanted, since a lone one finds nothing in the caches."""
        self._waiting.append((group, stored, seconds))
        if len(self._waiting) == MAX_WAITING:
            self._count_waiting()

    def _count_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._count(*each)

    def _count(self, group: int, stored: float, seconds: float) -> None:
        real = math.log(max(seconds, MIN_SECONDS) / stored)
        if group == DRAFT:
            self._draft_variance = self._draft_variance * KEEPING[-1] ** 2 + CHANGE
            gain = self._draft_variance / (self._draft_variance + 1)
            self._draft = KEEPING[-1] * self._draft
            shown = real - float(self._differences[0]) - self._draft
            self._draft += gain * clipped(shown, self._draft_variance)
            self._draft_variance *= 1 - gain
        else:
            self._differences *= KEEPING
            self._covariances = self._covariances * KEPT_PRODUCTS + CHANGES
            reach = self._covariances[:, : group + 1].sum(1)  # of each difference with what the pass shows
            variance = float(reach[: group + 1].sum())
            gains = reach / (variance + 1)
            self._differences += gains * clipped(real - float(self._differences[: group + 1].sum()), variance)
            self._covariances -= gains[:, None] * reach
        logs = [*self._differences.cumsum().tolist(), float(self._differences[0]) + self._draft]
        if any(abs(log / STEP - known) > KEPT for log, known in zip(logs, self._factors, strict=True)):
            self._factors = tuple(round(log / STEP) for log in logs)

    def observe_shared(self, rows: int, batch_size: int, context: int, seconds: float) -> None:
        """Learn from a pass that so many requests share. context: committed tokens of each, on average."""
        target = self._stored.target
        self.observe(rows, target.at(rows, target.read(context, batch_size)), seconds)

    def costs(self) -> CostModel:
        factors = self.factors
        if factors not in self._known:
            stored, slower = self._stored, np.exp(STEP * np.array(factors))
            target = scaled(stored.target, slower[np.searchsorted(GROUPS, stored.target.widths)])
            draft, further = (
                None if each is None else scaled(each, slower[DRAFT:]) for each in (stored.draft, stored.further)
            )
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[factors] = replace(stored, target=target, draft=draft, further=further)
        return self._known[factors]


def clipped(shown: float, variance: float) -> float:
    """A logarithm as far as one pass may show it: the further, the less is known."""
    most = MAX_SHOWN * (1 + UNKNOWN * variance)
    return min(max(shown, -most), most)


def scaled(costs: PassCosts, factors: NDArray[np.float64]) -> PassCosts:
    """Passes of each width take so many times as long. A wider pass never takes less."""
    seconds = np.maximum.accumulate(np.asarray(costs.seconds) * factors, axis=1).clip(MIN_SECONDS, MAX_SECONDS)
    return replace(costs, seconds=tuple(map(tuple, seconds.tolist())))
