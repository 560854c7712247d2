"""The engines that requests run on: an LLM's own, or shared ones with a pool of cache slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .decoding.decoder import count_one
from .engines.base import Engine
from .engines.shared.memory import CacheBudget
from .engines.shared.pool import PooledEngine
from .speculation.planning.budget import DraftBudget

PREFIX_CACHE_SLOTS = 1024  # default slots for the rows of ended requests


class Engines(NamedTuple):
    """The engines of a request; draft None decodes plainly. sharing: returns how many requests share passes. budget: of
    their draft tokens."""

    target: Engine
    draft: Engine | None
    sharing: Callable[[], int] = count_one
    budget: DraftBudget | None = None


class SharedEngines(NamedTuple):
    """Engines for several requests at a time. pools: the engines with a shared cache. budget: the slots of these caches
    that requests may use."""

    engines: Engines
    pools: tuple[PooledEngine, ...]
    budget: CacheBudget

    def close(self) -> None:
        """Free the shared caches. The engines stay open."""
        for pool in self.pools:
            pool.close()
