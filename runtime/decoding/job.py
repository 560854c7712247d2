"""Job: one text that a loop decodes, and the events of its decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..engines.base import Pass
from ..engines.passes import Steps
from .chunk import TokenChunk
from .stats import SpecDecodeStats


class Chunk(Protocol):
    """The output of one round, in the form that a job's `write` returns."""

    @property
    def finish_reason(self) -> str | None:
        """None while more chunks follow."""


C = TypeVar("C", bound=Chunk)
J = TypeVar("J", bound="Job[Any]")


@dataclass(eq=False, slots=True, kw_only=True)
class Job(Generic[C]):
    """One text that a loop decodes. Only the loop advances `steps`.

    write: converts the tokens of a round into the chunk for the caller. num_slots: the most slots that the text can
    need in each engine's cache. cache_salt: the text shares cache rows only with texts of the same salt.
    """

    steps: Steps[TokenChunk]
    write: Callable[[TokenChunk], C]
    num_slots: int = 0
    cache_salt: str | None = None
    next_pass: Pass | None = None  # the next pass of the text; None before the text has started
    rest: Pass | None = None  # the second part of this pass, where that was split
    started: bool = False
    running: bool = False  # whether it has returned a chunk of its text
    waited: float = 0.0  # seconds of passes over prompts since its last chunk, by the cost model
    ended: bool = False
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)  # updated by `steps`
    number: int = 0  # counts the jobs of a loop in the order in which they were added

    @property
    def writes(self) -> bool:
        """Whether its next pass is one of a running text, and reads no prompt."""
        return self.running and self.next_pass is not None and not self.next_pass.of_prompt


class JobEvent(NamedTuple, Generic[J, C]):
    """A change of a job. chunk: the next chunk of its text, which may be the last one. error: the error that ended the
    job. Both are None when the job started."""

    job: J
    chunk: C | None = None
    error: BaseException | None = None
