"""Drift: what passes of the target take at present, against the stored table.

Other programs on a machine, and other machines on a host, take memory bandwidth and cores away for minutes. A pass
reads all weights and computes products of every row, whichever takes longer:

    seconds(rows) = max(memory, rows x row)

Both times have a factor of their own, learned from real passes. Narrow passes show the first one, wide passes the
second one. Without them a table of a quiet minute promises that a tree of ten tokens is nearly free, when a neighbour
has taken one of two cores.

A factor is learned by a clock. Therefore it must not touch a text that a seed shall repeat, nor one whose distribution
is enumerated: only who asks for it has it, see `Experience`. A round's time does not depend on numbers that are drawn
later, so the output stays exact.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .cost import CostModel, PassCosts

RATE, FIRST = 0.08, 4.0  # of what a pass shows, in logarithms: the latest 12 passes count, at first fewer
MOST_SHOWN = 0.7  # logarithm: a pass during which the program was interrupted shows no more
FORGOTTEN = 0.004  # of a factor with each pass that shows the other one: the table is believed again, and tried
MOST = 1.4  # logarithm of a factor
STEP = 0.05  # of the logarithms by which plans are made: prices are computed for few of them
SHARPNESS = 4.0  # of the change from passes that show the one factor to those that show the other one


class Factors(NamedTuple):
    """Logarithms of real over stored seconds, in steps: of reading the weights, and of the rows' products."""

    memory: int
    rows: int


UNCHANGED = Factors(0, 0)


class Drift:
    """The costs of one machine at present. Threads may disturb each other's counts: they are estimates."""

    def __init__(self, stored: CostModel) -> None:
        self._stored = stored
        target = stored.target
        self._wide = np.asarray(target.widths) * (target.seconds[0][-1] / target.widths[-1] / target.seconds[0][0])
        self._share = float(self._wide[0]) / target.widths[0]  # time of a row's products, of reading the weights
        self._logs, self._shown = [0.0, 0.0], [0.0, 0.0]  # of memory and rows; passes that have shown them
        self._known: dict[Factors, CostModel] = {UNCHANGED: stored}

    def observe(self, rows: int, stored: float, seconds: float) -> None:
        """Learn from a pass of the target. stored: its seconds by the table."""
        memory, row = self._logs
        wide = math.log(rows * self._share)  # above 0 where the rows' products take longer, by the table
        shown = math.log(seconds / stored) - max(memory, wide + row) + max(0.0, wide)
        shown = min(max(shown, -MOST_SHOWN), MOST_SHOWN)
        by_rows = 1 / (1 + math.exp(SHARPNESS * (memory - wide - row)))
        for index, weight in enumerate((1 - by_rows, by_rows)):
            self._shown[index] += weight
            rate = max(RATE, 1 / (FIRST + self._shown[index]))
            moved = self._logs[index] * (1 - FORGOTTEN * (1 - weight)) + rate * weight * shown
            self._logs[index] = min(max(moved, -MOST), MOST)

    @property
    def factors(self) -> Factors:
        """As they are at present, rounded."""
        memory, row = self._logs
        return Factors(round(memory / STEP), round(row / STEP))

    def costs(self, factors: Factors) -> CostModel:
        """The costs with these factors. The draft's narrow passes read weights, as the target's do."""
        if factors not in self._known:
            memory, row = (math.exp(STEP * each) for each in factors)
            slower = np.maximum(memory, row * self._wide) / np.maximum(1.0, self._wide)
            stored = self._stored
            draft, further = (None if each is None else scaled(each, memory) for each in (stored.draft, stored.further))
            self._known[factors] = replace(stored, target=scaled(stored.target, slower), draft=draft, further=further)
        return self._known[factors]


def scaled(costs: PassCosts, factors: NDArray[np.float64] | float) -> PassCosts:
    """Every pass takes so many times as long; of an array, by its width."""
    return replace(costs, seconds=tuple(map(tuple, (np.asarray(costs.seconds) * factors).tolist())))
