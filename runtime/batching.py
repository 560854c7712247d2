"""Which passes of several requests run together, and running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from .engines.base import Engine, ForwardOutput, Pass
from .engines.pool import PooledEngine

R = TypeVar("R")


class Waiting(NamedTuple, Generic[R]):
    """A request, and the pass without which it cannot go on."""

    request: R
    wanted: Pass


def next_together(waiting: Sequence[Waiting[R]], order: Sequence[Engine]) -> list[Waiting[R]]:
    """The requests to serve with the next pass: of the first engine in `order` that anybody waits for, as many in turn
    as its widest pass holds. The draft comes first in it: requests that draft then reach the target at the same time.
    """
    for engine in order:
        mine = [each for each in waiting if each.wanted.engine is engine]
        if mine:
            return mine[: together(mine)] if isinstance(engine, PooledEngine) else mine[:1]
    raise ValueError("nobody waits for any of these engines")


def recalled(wanted: Pass) -> Pass | None:
    """What is left to compute of a pass, see PooledEngine.recall."""
    return wanted.engine.recall(wanted) if isinstance(wanted.engine, PooledEngine) else wanted


def together(waiting: Sequence[Waiting[R]]) -> int:
    """How many of these, from the first on, fit one pass."""
    room = waiting[0].wanted.engine.spec.max_width
    for count, each in enumerate(waiting):
        room -= each.wanted.batch.num_tokens
        if room < 0:
            return count
    return len(waiting)


def run_together(served: Sequence[Waiting[R]]) -> list[ForwardOutput]:
    """One output per request, valid until the engine's next pass. Raises EngineError."""
    engine = served[0].wanted.engine
    if isinstance(engine, PooledEngine):
        return engine.forward_together([each.wanted for each in served])
    return [each.wanted.run() for each in served]
