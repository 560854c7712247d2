"""Request: one text, from the queue to its last chunk."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Pass
from ..engines.passes import Steps
from ..engines.rounds import Work
from .chunk import TokenChunk
from .stats import DraftCounts, SpecDecodeStats


class Chunk(Protocol):
    """The output of one round, in the form that `Request.write` returns."""

    @property
    def finish_reason(self) -> str | None:
        """None while more chunks follow."""


C = TypeVar("C", bound=Chunk)


NONE_COUNTED = DraftCounts()


def drop(item: object) -> None:
    """Deliver to nobody: who runs the scheduler reads its events."""


@dataclass(eq=False, slots=True, kw_only=True)
class Request(Generic[C]):
    """One text. Only the scheduler's thread advances it; any thread may set `aborted`."""

    # Yields each pass that the text needs, and a chunk after each round.
    steps: Steps[TokenChunk]
    # Converts the tokens of a round into the chunk for the caller.
    write: Callable[[TokenChunk], C]
    # Takes each chunk, and in the end perhaps an error, to the caller in another thread.
    deliver: Callable[[C | Exception], None] = drop
    # Updated by `steps`.
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    # The most cache slots that the text can need in each engine.
    num_slots: int = 0

    # Of a server's request.
    id: str = ""
    num_prompt_tokens: int = 0
    # Equal for the requests of one API call, such as the choices of a prompt.
    call: Hashable = None
    # By time.monotonic(), as all times here.
    arrived: float = 0.0
    deadline: float | None = None
    aborted: bool = False
    # When the last chunk was delivered, and what the metrics have counted by then.
    last_round: float | None = None
    counted: DraftCounts = NONE_COUNTED

    # Of the scheduler.
    number: int = 0
    started: bool = False
    # Whether it has returned a chunk.
    running: bool = False
    ended: bool = False
    # The next pass; None before the text has started. `rest`: its second part, where it was split.
    next_pass: Work | None = None
    rest: Pass | None = None
    # The states of the parts of its split pass that have run.
    states: list[NDArray[np.float32]] = field(default_factory=list)
    # Seconds of passes over prompts of others since its last chunk, by the cost model.
    waited: float = 0.0

    @property
    def writes(self) -> bool:
        """Whether its next pass is one of a running text, and reads no prompt."""
        return self.running and self.next_pass is not None and not self.next_pass.of_prompt


class Event(NamedTuple, Generic[C]):
    """What happened to a request. Without chunk and error it has started."""

    request: Request[C]
    # The next chunk of its text, which may be the last one.
    chunk: C | None = None
    # The error that ended it.
    error: BaseException | None = None


AnyRequest = Request[Any]
