"""Queues of work that runs late.

Work of one stream runs in order, work of several streams in any order: a seeded generator chooses. What a copy brings
to the host arrives when the host waits for the stream, never before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from .memory import CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, INVALID_HANDLE, Refused, Span

GLOBAL, THREAD_LOCAL = 0, 1  # capture modes: who must not call what may disturb a capture
AT_ONCE = 0.3  # how probable it is that the device does a piece of work while the host queues another


class Work(NamedTuple):
    """submitted: called when it is queued, again for each replay. It returns what runs on the device, and what the host
    sees when it has waited."""

    name: str
    submitted: Callable[[], tuple[Callable[[], object], Callable[[], None]]]
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]

    def disturbs(self, other: Work) -> bool:
        """Whether the order of the two matters."""
        return meets(self.writes, other.reads + other.writes) or meets(self.reads, other.writes)


@dataclass
class Capture:
    thread: int
    mode: int
    works: list[Work] = field(default_factory=list)
    is_broken: bool = False


@dataclass
class Stream:
    """queue: what has not run. unawaited: what was queued since the host's last wait, and what it then sees."""

    queue: deque[Callable[[], object]] = field(default_factory=deque)
    unawaited: list[tuple[Work, Callable[[], None]]] = field(default_factory=list)
    capture: Capture | None = None


class Streams:
    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._streams: dict[int, Stream] = {}

    def create(self) -> int:
        handle = 0x5000 + len(self._streams)
        self._streams[handle] = Stream()
        return handle

    def get(self, handle: int) -> Stream:
        if handle not in self._streams:
            raise Refused(INVALID_HANDLE, f"{handle:#x} is no stream")
        return self._streams[handle]

    def submit(self, works: Sequence[Work], handle: int) -> None:
        """Queue work, or record it if the stream is captured."""
        stream = self.get(handle)
        if stream.capture is not None:
            if stream.capture.thread != threading.get_ident():
                self.break_capture(stream, f"{works[0].name} by another thread than the one that captures the stream")
            stream.capture.works += works
            return
        for work in works:
            for other in self._streams.values():
                for earlier, _ in other.unawaited if other is not stream else ():
                    if work.disturbs(earlier):
                        raise Refused(INVALID_HANDLE, f"{work.name} and {earlier.name} of another stream have no order")
            run, seen = work.submitted()
            stream.queue.append(run)
            stream.unawaited.append((work, seen))
        while self._random.random() < AT_ONCE:
            self._step()

    def synchronize(self, handle: int) -> None:
        stream = self.get(handle)
        if stream.capture is not None:
            self.break_capture(stream, "the host waits for a stream that is captured")
        while stream.queue:
            self._step()
        awaited, stream.unawaited = stream.unawaited, []
        for _, seen in awaited:
            seen()

    def drop(self) -> None:
        """Forget all queued work, and end all captures."""
        for stream in self._streams.values():
            stream.queue.clear()
            stream.unawaited.clear()
            stream.capture = None

    def require_unused(self, span: Span) -> None:
        """Raises Refused for memory that queued work uses."""
        for stream in self._streams.values():
            for work, _ in stream.unawaited:
                if meets((span,), work.reads + work.writes):
                    raise Refused(INVALID_HANDLE, f"memory was freed before the host had waited for {work.name}")

    def require_no_capture(self, function: str) -> None:
        """Raises Refused while a capture forbids what may wait for the device."""
        for stream in self._streams.values():
            capture = stream.capture
            if capture is not None and (capture.mode == GLOBAL or capture.thread == threading.get_ident()):
                self.break_capture(stream, f"{function} while a stream is captured")

    def break_capture(self, stream: Stream, reason: str) -> None:
        assert stream.capture is not None
        stream.capture.is_broken = True
        raise Refused(CAPTURE_UNSUPPORTED, reason)

    def begin(self, handle: int, mode: int) -> None:
        stream = self.get(handle)
        if stream.capture is not None:
            self.break_capture(stream, "a capture of a stream that is captured")
        stream.capture = Capture(threading.get_ident(), mode)

    def end(self, handle: int) -> Capture:
        stream = self.get(handle)
        capture, stream.capture = stream.capture, None
        if capture is None or capture.thread != threading.get_ident():
            raise Refused(CAPTURE_WRONG_THREAD, "the end of a capture that this thread did not begin")
        return capture

    def _step(self) -> None:
        """The device does one piece of work."""
        waiting = [stream for stream in self._streams.values() if stream.queue]
        if waiting:
            self._random.choice(waiting).queue.popleft()()


def meets(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(span.overlaps(other) for span in spans for other in others)
