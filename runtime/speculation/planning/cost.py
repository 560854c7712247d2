"""CostModel: what a pass of either engine costs, by rows and context. Pure; `bundle/costs.py` stores it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....models.config import LlamaConfig
from ....models.layers import num_parameters

MOST_SECONDS, MOST_TOKENS = 3600.0, 1 << 24  # of a pass, and of its rows or context
BYTES_PER_SECOND = 40e9  # of a machine nobody has measured: a small server's memory
ROW_SHARE = 0.06  # what each further row adds to a pass there, as a share of the first
ASSUMED_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of one engine's passes. seconds[i][j]: `widths[j]` rows behind `contexts[i]` committed ones, both
    ascending. padded: other numbers of rows cost as much as the next larger width, which they are filled up to."""

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    padded: bool = True

    def __post_init__(self) -> None:
        if any(list(axis) != sorted(set(axis)) or not axis for axis in (self.widths, self.contexts)):
            raise ValueError(f"widths {self.widths} and contexts {self.contexts} must ascend")
        shape = (len(self.contexts), len(self.widths))
        seconds = np.asarray(self.seconds, np.float64) if {*map(len, self.seconds)} == {shape[1]} else np.zeros(0)
        if seconds.shape != shape or not np.all((seconds > 0) & (seconds <= MOST_SECONDS)):
            raise ValueError(f"seconds must be {shape[0]} x {shape[1]} numbers above 0, {MOST_SECONDS:g} at most")
        if self.widths[0] < 1 or self.contexts[0] < 0 or max(self.widths[-1], self.contexts[-1]) > MOST_TOKENS:
            raise ValueError(f"widths {self.widths} and contexts {self.contexts} must be from 1 or 0 to {MOST_TOKENS}")

    def at(self, rows: int, context: int) -> float:
        """Seconds of a pass, between the nearest contexts; of more rows than were measured, in proportion."""
        return float(self.of(np.asarray(rows), context))

    def of(self, rows: NDArray[np.int64], context: int) -> NDArray[np.float64]:
        """The same of passes of so many rows each, of any shape."""
        widths = np.asarray(self.widths)
        if self.padded:
            rows = np.where(rows < widths[-1], widths[np.searchsorted(widths, np.minimum(rows, widths[-1]))], rows)
        seconds: NDArray[np.float64] = np.interp(rows, widths, self._behind(context)) * np.maximum(1, rows / widths[-1])
        return seconds

    def _behind(self, context: int) -> NDArray[np.float64]:
        """Seconds of every width. Beyond the last context they grow as between the last two, since attention does:
        never below the last, and a wider pass costs no less there either, whatever noise there is in its growth."""
        seconds = np.asarray(self.seconds)
        if len(self.contexts) == 1:
            return np.asarray(seconds[0])
        upper = min(max(1, bisect_left(self.contexts, context)), len(self.contexts) - 1)
        before, after = self.contexts[upper - 1 : upper + 1]
        growth = seconds[upper] - seconds[upper - 1]
        share = max(0.0, (context - before) / (after - before))
        if share < 1:
            return np.asarray(seconds[upper - 1] + share * growth)
        beyond = seconds[upper] + (share - 1) * np.maximum(growth, 0.0)
        return np.asarray(np.minimum.accumulate(beyond[::-1])[::-1])


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds outside both engines: of a plain round, of one with a proposal, and of every token proposed in it."""

    plain: float
    round: float
    token: float

    def __post_init__(self) -> None:
        if not all(0 <= seconds <= MOST_SECONDS for seconds in (self.plain, self.round, self.token)):
            raise ValueError(f"seconds outside the engines must be from 0 to {MOST_SECONDS:g}, not {self}")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of both engines on one machine. greedy, sampled: host time at temperature 0 and above. machine: see
    `fingerprint` of `bundle/costs.py`; empty where nothing was measured. spread: upper quartile / least of the seconds
    a pass took when it was repeated, the median over all passes; None where it is not known."""

    target: PassCosts
    draft: PassCosts
    greedy: HostCosts
    sampled: HostCosts
    machine: Mapping[str, str | int]
    spread: float | None = None

    def __post_init__(self) -> None:
        if self.spread is not None and not 0 < self.spread < math.inf:
            raise ValueError(f"spread must be a number above 0, not {self.spread}")


def assumed(target: LlamaConfig, draft: LlamaConfig) -> CostModel:
    """Costs nobody has measured: every pass reads all weights once at a usual memory's speed, rows add a little."""

    def passes(model: LlamaConfig) -> PassCosts:
        once = 4 * num_parameters(model) / BYTES_PER_SECOND + 1e-4
        return PassCosts(ASSUMED_ROWS, (0,), (tuple(once * (1 + ROW_SHARE * (rows - 1)) for rows in ASSUMED_ROWS),))

    return CostModel(passes(target), passes(draft), HostCosts(5e-5, 1e-4, 1e-5), HostCosts(8e-5, 1.5e-4, 4e-5), {})
