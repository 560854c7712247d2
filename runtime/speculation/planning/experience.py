"""Experience: what requests of one model teach each other for the plans of their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .budget import Offer
from .cost import HostCosts
from .drift import Drift
from .estimate import AcceptanceEstimate, Shapes
from .lookups import LookupEstimate
from .prices import offer_of

REMEMBERED = 64  # number of latest estimates that are kept: clients choose the shapes, so there may be many


class Source(NamedTuple):
    """Where a proposal's tokens come from: drawing, or choosing. host: time of such rounds outside both engines.
    estimate: of what is accepted of such tokens."""

    host: HostCosts
    estimate: AcceptanceEstimate


class Experience:
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
        self._offers: dict[Any, tuple[tuple[NDArray[np.float64], ...], Offer]] = {}
        self.plain_rounds = self.untried_rounds = 0

    def estimate_for(self, shapes: Shapes, greedy: bool, chosen: bool = False) -> AcceptanceEstimate:
        """The estimate of a new request, above that of all. The least recently used ones are dropped if there are too
        many."""
        kind = shapes, greedy, chosen
        with self._lock:
            general = self._general.pop(kind, None) or AcceptanceEstimate(shapes)
            self._general[kind] = general
            if len(self._general) > REMEMBERED:
                del self._general[next(iter(self._general))]
        return AcceptanceEstimate(shapes, general)

    def offer(self, sources: Sequence[Source], shapes: Shapes, most: int, reading: float) -> Offer:
        """The same object for the same arguments: requests that have not drafted yet have the estimate of all."""
        expected = tuple(source.estimate.expected_accepted() for source in sources)
        hosts = tuple(source.host.shared for source in sources)
        key = *map(id, expected), shapes, most, hosts, reading
        known = self._offers.get(key)
        if known is None:
            if len(self._offers) >= REMEMBERED:
                self._offers.clear()
            # The estimates are kept as well: nothing else has their ids as long as they are.
            offer = offer_of([each[:, :most] for each in expected], shapes, hosts, reading)
            known = self._offers[key] = expected, offer
        return known[1]
