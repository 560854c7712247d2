"""EngineThread: one thread that runs the loop of a server's requests. However it ends, every request is answered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from time import monotonic

from ..decoding.loop import JobEvent, Loop
from ..llm import LLM
from ..text.writer import StreamChunk
from .health import EngineHealth
from .metrics import DraftCounts, ServingMetrics
from .stream import DeadlineError, Request, ShutdownError, drop_frames, to_exception

log = logging.getLogger(__name__)


class EngineThread:
    """What goes wrong in a request's round, whatever it is, ends that request only; what goes wrong outside of any
    round ends the thread, with an error for everybody, and `trouble` says so for good."""

    def __init__(self, llm: LLM, loop: Loop[Request, StreamChunk]) -> None:
        self.llm = llm
        self.metrics = ServingMetrics()
        # Further reasons why nobody can expect a text, such as a bundle that was overwritten; None while all is well.
        self.watchers: list[Callable[[], str | None]] = []
        self._loop = loop  # its `changed` guards the flags, too
        self._closed = False
        self._health = EngineHealth()
        self._thread = Thread(target=self._run, name="draftwood-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether requests in hand will be finished."""
        return not self._closed and self._thread.is_alive()

    @property
    def trouble(self) -> str | None:
        """Why nobody can expect a text any more, see EngineHealth and `watchers`; None while they can."""
        if not self.alive:
            return "dead: the engine's thread has ended"
        reasons = (self._health.trouble, *(watcher() for watcher in self.watchers))
        return next((reason for reason in reasons if reason is not None), None)

    def _stop(self) -> None:
        """End every request with a ShutdownError and the thread after the round it is in."""
        with self._loop.changed:
            self._closed = True
            self._loop.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        """The engine's thread."""
        failure: BaseException = ShutdownError("the server stopped before this text was finished")
        try:
            while self._wait():
                with self._health.watch_pass():
                    for event in self._loop.step():
                        self._handle(event)
        except BaseException as error:  # outside of any round: nobody may wait for ever because of it
            failure = error
            log.critical("the engine's thread ends, and every request with it", exc_info=error)
        finally:
            self._end_all(to_exception(failure))

    def _end_all(self, failure: Exception) -> None:
        with self._loop.changed:
            self._closed = True
            for request in self._loop.scheduler:
                with suppress(BaseException):  # whatever is broken, the next one is answered, too
                    self._end(request, "error", failure)
            self._loop.changed.notify_all()

    def _wait(self) -> bool:
        """Whether there is something to do, once everybody who gave up is gone. Blocks until there is; False: stop."""
        with self._loop.changed:
            while not self._closed:
                now = monotonic()
                for request in self._loop.scheduler:
                    if request.aborted:
                        self._end(request, "abort", StreamChunk("", [], [], [], "abort", request.stats))
                    elif request.deadline is not None and now >= request.deadline:
                        seconds = request.deadline - request.arrived
                        error = DeadlineError(f"the text was not finished within its deadline of {seconds:g} s")
                        self._end(request, "deadline", error)
                if self._loop.scheduler.num_running:
                    return True
                self._loop.changed.wait()
        return False

    def _handle(self, event: JobEvent[Request, StreamChunk]) -> None:
        """Record what happened to a request, and hand it to the request's consumer."""
        request, chunk, error = event
        if error is not None:
            self._fail(request, error)
        elif chunk is None:
            self.metrics.record_start(request.num_prompt_tokens, monotonic() - request.arrived)
        else:
            try:
                self._record(request, chunk)
                if chunk.finish_reason is None:
                    request.deliver(chunk)
                else:
                    self._end(request, chunk.finish_reason, chunk)
            except MemoryError as shortage:  # a chunk may be lost
                self._fail(request, shortage)

    def _record(self, request: Request, chunk: StreamChunk) -> None:
        self._health.record_round()
        now, draft_counts = monotonic(), DraftCounts.of(chunk.stats)
        since = request.arrived if request.last_round is None else request.last_round
        first = request.last_round is None
        if first:
            self.metrics.record_prompt(request.num_prompt_tokens, chunk.stats.num_cached_tokens)
        self.metrics.record_round(len(chunk.token_ids), now - since, first, request.draft_counts, draft_counts)
        request.draft_counts, request.last_round = draft_counts, now

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request by what went wrong in its round."""
        failure = drop_frames(error)
        self._health.record_failure(failure, request.call)
        self._end(request, "error", failure)

    def _end(self, request: Request, reason: str, last: StreamChunk | Exception) -> None:
        """End a request, wherever it is, and hand its consumer the last item."""
        try:
            if not request.ended:
                self._loop.remove(request)
            self.metrics.record_end(reason, monotonic() - request.arrived)
        finally:
            with self._loop.changed:
                request.deliver(last)
                self._loop.changed.notify_all()
