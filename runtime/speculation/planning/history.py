"""History: what requests of one model teach each other for the plans of their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cost import HostCosts
from .drift import Drift
from .estimate import AcceptanceEstimate, Shapes
from .lookups import LookupEstimate
from .prices import Candidates, candidates_of

REMEMBERED = 64  # number of latest estimates that are kept: clients choose the shapes, so there may be many


class History:
    """What requests of one model teach each other: the estimate of all of them together, by shapes, kind and source;
    the number of plain rounds since the last probe, and of proposals since the other source was tried. Requests on
    several threads may disturb each other's counts: they only serve as a prior. lookups: how much of what prompt
    lookups found was right, by whether the temperature is 0. drift: how the real costs of passes differ from the table
    at present, for requests alone; None where plans must not depend on a clock."""

    def __init__(self, drift: Drift | None = None) -> None:
        self.drift = drift
        self.lookups = {greedy: LookupEstimate() for greedy in (True, False)}
        self._lock = Lock()
        self._general: dict[tuple[Shapes, bool, bool], AcceptanceEstimate] = {}
        self._candidates: dict[Any, tuple[tuple[NDArray[np.float64], ...], Candidates]] = {}
        self.plain_rounds = self.untried_rounds = 0

    def estimate_for(self, shapes: Shapes, greedy: bool, chosen: bool = False) -> AcceptanceEstimate:
        """The estimate of a new request, above that of all. Of too many the least recently used ones are dropped."""
        kind = shapes, greedy, chosen
        with self._lock:
            general = self._general.pop(kind, None) or AcceptanceEstimate(shapes)
            self._general[kind] = general
            if len(self._general) > REMEMBERED:
                del self._general[next(iter(self._general))]
        return AcceptanceEstimate(shapes, general)

    def candidates(
        self,
        estimates: Sequence[AcceptanceEstimate],
        shapes: Shapes,
        most: int,
        hosts: Sequence[HostCosts],
        reading: float,
    ) -> Candidates:
        """See `candidates_of`. The same object for the same arguments: requests that have not drafted yet have the
        estimate of all."""
        expected = tuple(estimate.expected_accepted() for estimate in estimates)
        key = *map(id, expected), shapes, most, *hosts, reading
        known = self._candidates.get(key)
        if known is None:
            if len(self._candidates) >= REMEMBERED:
                self._candidates.clear()
            # The estimates are kept as well: nothing else has their ids as long as they are.
            known = self._candidates[key] = expected, candidates_of(expected, shapes, most, hosts, reading)
        return known[1]
