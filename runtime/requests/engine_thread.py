"""EngineThread: runs a server's scheduler. Every request gets a last chunk or an error, even if the thread fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from time import monotonic

from ..decoding.request import Event, Request
from ..decoding.scheduler import Scheduler
from ..decoding.stats import DraftCounts
from ..llm import LLM
from ..text.writer import StreamChunk
from .health import EngineHealth
from .metrics import ServingMetrics
from .stream import DeadlineError, ShutdownError, drop_frames, to_exception

log = logging.getLogger(__name__)


class EngineThread:
    """Runs the scheduler. An error in a request's round ends that request only. An error outside of all rounds ends the
    thread and every request, and `trouble` reports it from then on."""

    def __init__(self, llm: LLM, scheduler: Scheduler[StreamChunk]) -> None:
        self.llm = llm
        self.metrics = ServingMetrics()
        # Further checks. Each returns the reason why requests cannot be served, such as an overwritten bundle, or None.
        self.watchers: list[Callable[[], str | None]] = []
        self._scheduler = scheduler  # its `changed` also guards the flags of this class
        self._closed = False
        self._health = EngineHealth()
        self._thread = Thread(target=self._run, name="draftwood-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and accepted requests will be finished."""
        return not self._closed and self._thread.is_alive()

    @property
    def trouble(self) -> str | None:
        """The reason why requests cannot be served, see EngineHealth and `watchers`; None while they can be served."""
        if not self.alive:
            return "dead: the engine's thread has ended"
        reasons = (self._health.trouble, *(watcher() for watcher in self.watchers))
        return next((reason for reason in reasons if reason is not None), None)

    def _stop(self) -> None:
        """End every request with a ShutdownError, and the thread after its present pass."""
        with self._scheduler.changed:
            self._closed = True
            self._scheduler.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        failure: BaseException = ShutdownError("the server stopped before this text was finished")
        try:
            while self._wait():
                with self._health.watch_pass():
                    for event in self._scheduler.step():
                        self._handle(event)
        except BaseException as error:  # an error outside of all rounds; each request must still get an answer
            failure = error
            log.critical("the engine's thread ends, and every request with it", exc_info=error)
        finally:
            self._end_all(to_exception(failure))

    def _end_all(self, failure: Exception) -> None:
        with self._scheduler.changed:
            self._closed = True
            for request in self._scheduler.queue:
                with suppress(BaseException):  # a failure here must not leave the other requests without an answer
                    self._end(request, "error", failure)
            self._scheduler.changed.notify_all()

    def _wait(self) -> bool:
        """End aborted and overdue requests, and block until a request runs. Returns False when the thread must stop."""
        with self._scheduler.changed:
            while not self._closed:
                now = monotonic()
                for request in self._scheduler.queue:
                    if request.aborted:
                        self._end(request, "abort", StreamChunk("", [], [], [], "abort", request.stats))
                    elif request.deadline is not None and now >= request.deadline:
                        seconds = request.deadline - request.arrived
                        error = DeadlineError(f"the text was not finished within its deadline of {seconds:g} s")
                        self._end(request, "deadline", error)
                if self._scheduler.queue.running:
                    return True
                self._scheduler.changed.wait()
        return False

    def _handle(self, event: Event[StreamChunk]) -> None:
        """Record an event of a request in the metrics, and deliver its chunk or error to the consumer."""
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
            except MemoryError as shortage:  # the chunk may be lost, so the text cannot continue
                self._fail(request, shortage)

    def _record(self, request: Request[StreamChunk], chunk: StreamChunk) -> None:
        self._health.record_round()
        now, counted = monotonic(), DraftCounts.of(chunk.stats)
        since = request.arrived if request.last_round is None else request.last_round
        first = request.last_round is None
        if first:
            self.metrics.record_prompt(request.num_prompt_tokens, chunk.stats.num_cached_tokens)
        self.metrics.record_round(len(chunk.token_ids), now - since, first, request.counted, counted)
        request.counted, request.last_round = counted, now

    def _fail(self, request: Request[StreamChunk], error: BaseException) -> None:
        failure = drop_frames(error)
        self._health.record_failure(failure, request.call)
        self._end(request, "error", failure)

    def _end(self, request: Request[StreamChunk], reason: str, last: StreamChunk | Exception) -> None:
        """End a running or waiting request and deliver the last item to its consumer."""
        try:
            if not request.ended:
                self._scheduler.remove(request)
            self.metrics.record_end(reason, monotonic() - request.arrived)
        finally:
            with self._scheduler.changed:
                request.deliver(last)
                self._scheduler.changed.notify_all()
