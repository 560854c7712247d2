"""HeldAnswers: bounds the memory of all answers that clients have not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...engines.limits import available_bytes
from .clients import oldest_of_largest

LEAST_BYTES = 256 << 20  # of all answers together: ten of the largest
SHARE = 8  # they may take one in so many bytes of the memory that is available at the start


def answer_bytes() -> int:
    """The bytes that all answers may take by the memory that is available now."""
    return max(LEAST_BYTES, (available_bytes() or 0) // SHARE)


class HeldAnswer:
    """What the server holds of one answer. end: ends the answer when others need its memory; whoever writes the answer
    may replace it."""

    def __init__(self, owner: HeldAnswers, client: str, end: Callable[[], None]) -> None:
        self.client, self.end = client, end
        self.num_bytes = 0
        self._owner = owner

    def add(self, num_bytes: int) -> None:
        """Count further bytes, or fewer if `num_bytes` is below 0. May end this answer or another one."""
        self._owner.add(self, num_bytes)


class HeldAnswers:
    """The answers in progress. If they have too many bytes, the client with the most loses its oldest answer, which is
    the one that was read most slowly."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._answers: dict[HeldAnswer, None] = {}  # an ordered set, the oldest first
        self._num_bytes = 0

    @contextmanager
    def answer(self, client: str, end: Callable[[], None]) -> Iterator[HeldAnswer]:
        """An answer that is in progress for the time of the `with` block."""
        held = HeldAnswer(self, client, end)
        self._answers[held] = None
        try:
            yield held
        finally:
            self._forget(held)

    def add(self, held: HeldAnswer, num_bytes: int) -> None:
        """See HeldAnswer.add. An answer that was ended no longer counts."""
        if held not in self._answers:
            return
        held.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            ended = oldest_of_largest(self._answers, lambda each: each.num_bytes)
            self._forget(ended)
            ended.end()

    def _forget(self, held: HeldAnswer) -> None:
        if held in self._answers:
            del self._answers[held]
            self._num_bytes -= held.num_bytes
