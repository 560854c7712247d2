"""Which passes of several requests run together, and running them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Generic, NamedTuple, TypeVar

from ..engines.base import Engine, ForwardOutput, Pass
from ..engines.shared.pool import PooledEngine
from ..engines.static.pool import StaticPool
from .decoder import Steps

C = TypeVar("C")
R = TypeVar("R")
MAX_RUNNING = 8  # requests at a time, unless told otherwise
SHARING = (PooledEngine, StaticPool)  # engines whose passes serve several requests


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
            return mine[: together(mine)] if isinstance(engine, SHARING) else mine[:1]
    raise ValueError("nobody waits for any of these engines")


def recalled(wanted: Pass) -> Pass | None:
    """What is left to compute of a pass, see PooledEngine.recall."""
    return wanted.engine.recall(wanted) if isinstance(wanted.engine, PooledEngine) else wanted


def together(waiting: Sequence[Waiting[R]]) -> int:
    """How many of these, from the first on, fit one pass. A chunk of a prompt that is wider has a pass of its own."""
    room = waiting[0].wanted.engine.spec.max_width
    for count, each in enumerate(waiting):
        room -= each.wanted.batch.num_tokens
        if room < 0:
            return max(1, count)
    return len(waiting)


def run_together(served: Sequence[Waiting[R]]) -> list[ForwardOutput]:
    """One output per request, valid until the engine's next pass. Raises EngineError."""
    engine = served[0].wanted.engine
    if isinstance(engine, SHARING):
        return engine.forward_together([each.wanted for each in served])
    return [each.wanted.run() for each in served]


def drive_together(steps: Sequence[Steps[C]], order: Sequence[Engine], at_most: int) -> Iterator[tuple[int, C]]:
    """The chunks of several requests, each with its request's number, as they come; passes of `order`'s engines are
    shared. At most so many requests run at a time, and the next one begins when one ends. Raises what any of them does.
    """
    waiting: dict[int, Pass] = {}
    begun = 0
    with ExitStack() as stack:  # what they hold is free at once, also when a pass fails or nobody wants the rest
        for each in steps:
            stack.enter_context(closing(each))
        ready: list[tuple[int, ForwardOutput | None]] = []
        while ready or waiting or begun < len(steps):
            if len(waiting) + len(ready) < at_most and begun < len(steps):
                ready.append((begun, None))
                begun += 1
            elif ready:
                number, answer = ready.pop(0)
                yield from chunks_until_pass(number, steps[number], answer, waiting)
            else:
                ready += answers(waiting, order)


def answers(waiting: dict[int, Pass], order: Sequence[Engine]) -> list[tuple[int, ForwardOutput]]:
    """Run the next pass for as many as it holds, who then wait no more. Keeps no pass: an ended request's caches are
    the next one's."""
    served = next_together([Waiting(number, wanted) for number, wanted in waiting.items()], order)
    outputs = run_together(served)
    for each in served:
        del waiting[each.request]
    return [(each.request, output) for each, output in zip(served, outputs, strict=True)]


def chunks_until_pass(
    number: int, steps: Steps[C], answer: ForwardOutput | None, waiting: dict[int, Pass]
) -> Iterator[tuple[int, C]]:
    """A request's chunks up to the pass it waits for next, if it does not end."""
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        if isinstance(step, Pass):
            waiting[number] = step
            return
        answer = None
        yield number, step
