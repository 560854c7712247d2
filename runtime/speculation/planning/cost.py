"""CostModel: seconds of either engine's pass, by rows and context. `bundle/costs.py` stores the table."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engines.comparison import Comparison

MAX_SECONDS, MAX_TOKENS = 3600.0, 1 << 24  # greatest seconds of a pass, and greatest number of rows or context tokens
# The time outside the engines of each request that shares passes, over that of a request alone: an event loop takes
# turns with the decoding thread. Measured with 4 texts on two cores of a Zen 4.
SHARED_HOST = 2.0


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of one engine's passes. seconds[i][j]: of a pass of `widths[j]` rows after `contexts[i]` committed rows;
    both tuples ascend. padded: whether the engine pads other numbers of rows to the next larger width, so that they
    cost as much. spans: whether a row of a shared pass also reads the rows of the other requests."""

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    padded: bool = True
    spans: bool = True

    def __post_init__(self) -> None:
        if any(list(axis) != sorted(set(axis)) or not axis for axis in (self.widths, self.contexts)):
            raise ValueError(f"widths {self.widths} and contexts {self.contexts} must ascend")
        shape = (len(self.contexts), len(self.widths))
        seconds = np.asarray(self.seconds, np.float64) if {*map(len, self.seconds)} == {shape[1]} else np.zeros(0)
        if seconds.shape != shape or not np.all((seconds > 0) & (seconds <= MAX_SECONDS)):
            raise ValueError(f"seconds must be {shape[0]} x {shape[1]} numbers above 0, {MAX_SECONDS:g} at most")
        if self.widths[0] < 1 or self.contexts[0] < 0 or max(self.widths[-1], self.contexts[-1]) > MAX_TOKENS:
            raise ValueError(f"widths {self.widths} and contexts {self.contexts} must be from 1 or 0 to {MAX_TOKENS}")

    def at(self, rows: int, context: int) -> float:
        """Seconds, interpolated between the nearest contexts, and in proportion to rows beyond the measured ones."""
        at = bisect_left(self.widths, rows)
        between = len(self.contexts) == 1 or context < self.contexts[-1]
        if between and at < len(self.widths) and (self.widths[at] == rows or self.padded):
            return self._measured(at, context)
        return float(self.of(np.asarray(rows), context))

    def _measured(self, width: int, context: int) -> float:
        """Seconds of a measured width, by its index, before the last context. Every pass asks for one: no arrays."""
        if len(self.contexts) == 1:
            return self.seconds[0][width]
        upper = max(1, bisect_left(self.contexts, context))
        (before, after), first = self.contexts[upper - 1 : upper + 1], self.seconds[upper - 1][width]
        return first + max(0.0, (context - before) / (after - before)) * (self.seconds[upper][width] - first)

    def of(self, rows: NDArray[np.int64], context: int) -> NDArray[np.float64]:
        """`at` for an array of numbers of rows, of any shape."""
        widths = np.asarray(self.widths)
        if self.padded:
            rows = np.where(rows < widths[-1], widths[np.searchsorted(widths, np.minimum(rows, widths[-1]))], rows)
        seconds: NDArray[np.float64] = np.interp(rows, widths, self._after(context)) * np.maximum(1, rows / widths[-1])
        return seconds

    def shared(self, rows: NDArray[Any], context: int, batch_size: float) -> NDArray[np.float64]:
        """The seconds of passes that so many requests share; `context` tokens precede each on average."""
        return self.of(np.ceil(rows).astype(np.int64), self.read(context, batch_size))

    def read(self, context: int, batch_size: float) -> int:
        """The context whose rows a row of a pass reads that so many requests share."""
        return int(context * batch_size) if self.spans else context

    def _after(self, context: int) -> NDArray[np.float64]:
        """Seconds of every width. Beyond the last context they grow as between the last two contexts, because
        attention does. To limit noise, they never fall below the last context's, and a wider pass never costs less."""
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
    """Seconds outside both engines. plain: of a plain round. round: of a round with a proposal. token: additionally,
    of every proposed token."""

    plain: float
    round: float
    token: float

    def __post_init__(self) -> None:
        if not all(0 <= seconds <= MAX_SECONDS for seconds in (self.plain, self.round, self.token)):
            raise ValueError(f"seconds outside the engines must be from 0 to {MAX_SECONDS:g}, not {self}")

    @property
    def shared(self) -> HostCosts:
        """The same where several requests share passes."""
        plain, whole, token = (min(SHARED_HOST * each, MAX_SECONDS) for each in (self.plain, self.round, self.token))
        return HostCosts(plain, whole, token)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of both engines on one machine. draft: None for a bundle without one. greedy, sampled: host time at
    temperature 0 and above. machine: see `fingerprint` of `bundle/costs.py`; empty if nothing was measured. spread: for
    each pass, the upper quartile of its repeated measurements over the least; of these the median over all passes. None
    if unknown. compared: the target's backend with another one; None if they were not compared. further: of draft
    passes that follow another one of the draft; None if they were not measured apart."""

    target: PassCosts
    draft: PassCosts | None
    greedy: HostCosts
    sampled: HostCosts
    machine: Mapping[str, str | int]
    spread: float | None = None
    compared: Comparison | None = None
    further: PassCosts | None = None

    def __post_init__(self) -> None:
        shapes = {(each.widths, each.contexts) for each in (self.draft, self.further) if each is not None}
        if len(shapes) > 1 or (self.further is not None and self.draft is None):
            raise ValueError("further draft passes must have the widths and contexts of the first ones")
        if self.spread is not None and not 0 < self.spread < math.inf:
            raise ValueError(f"spread must be a number above 0, not {self.spread}")

    @property
    def chosen(self) -> HostCosts:
        """Host time above temperature 0 of proposals whose tokens are chosen: they are made as at temperature 0, and
        verified by drawing from the target, as plain rounds are."""
        drawing = max(0.0, self.sampled.plain - self.greedy.plain)
        return HostCosts(self.sampled.plain, self.greedy.round + drawing, self.greedy.token)

    @property
    def following(self) -> PassCosts | None:
        """Draft passes that follow another one of the draft, as far as is known."""
        return self.draft if self.further is None else self.further
