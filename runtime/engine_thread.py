"""EngineThread: one thread that runs the passes which many requests wait for together; requests join and leave between
passes (continuous batching). However it ends, every request is answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Condition, Thread
from time import monotonic

from .batching import Waiting, next_together, recalled, run_together
from .engine_health import EngineHealth
from .engines.base import Engine, ForwardOutput, Pass
from .engines.pool import PooledEngine, PooledKVCache
from .llm import LLM, Engines
from .memory import CacheBudget, OutOfMemoryError
from .metrics import SpecDecodeStats
from .request_stream import DeadlineError, Request, ShutdownError, contained, without_frames
from .scheduler import Scheduler
from .serving.metrics import Drafted, ServingMetrics
from .text import StreamChunk

log = logging.getLogger(__name__)


class EngineThread:
    """What goes wrong in a request's round, whatever it is, ends that request only; what goes wrong outside of any
    round ends the thread, with an error for everybody, and `trouble` says so for good.

    A request starts when the caches of all that have started leave room for those it may come to fill; until then it
    waits, and nobody who came later starts before it.
    """

    def __init__(self, llm: LLM, pools: Engines | None, scheduler: Scheduler[Request], budget: CacheBudget) -> None:
        """pools: what requests run on, the LLM's own engines where it is None."""
        self.llm = llm
        self.metrics = ServingMetrics()
        # Further reasons why nobody can expect a text, such as a bundle that was overwritten; None while all is well.
        self.watchers: list[Callable[[], str | None]] = []
        self._scheduler = scheduler
        self._pools = pools
        self._budget = budget
        self._changed = Condition()  # guards the scheduler and the flags
        self._closed = False
        self._health = EngineHealth()
        self._relieved = False  # whether memory that nobody needs was given back since a pass last went well
        self._room = budget.slots  # less while memory is short
        self._num_started = 0
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
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        """The engine's thread."""
        failure: BaseException = ShutdownError("the server stopped before this text was finished")
        try:
            while running := self._next():
                with self._health.watched():
                    self._serve(running)
        except BaseException as error:  # outside of any round: nobody may wait for ever because of it
            failure = error
            log.critical("the engine's thread ends, and every request with it", exc_info=error)
        finally:
            self._end_all(contained(failure))

    def _end_all(self, failure: Exception) -> None:
        with self._changed:
            self._closed = True
            for request in self._scheduler:
                with suppress(BaseException):  # whatever is broken, the next one is answered, too
                    self._end(request, "error", failure)
            self._changed.notify_all()

    def _next(self) -> tuple[Request, ...]:
        """Who runs, once everybody who gave up is gone. Blocks while there is nothing to do; nobody: stop."""
        with self._changed:
            while not self._closed:
                now = monotonic()
                for request in self._scheduler:
                    if request.aborted:
                        stats = request.stats or SpecDecodeStats()
                        self._end(request, "abort", StreamChunk("", [], [], [], "abort", stats))
                    elif request.deadline is not None and now >= request.deadline:
                        seconds = request.deadline - request.arrived
                        error = DeadlineError(f"the text was not finished within its deadline of {seconds:g} s")
                        self._end(request, "deadline", error)
                if running := self._scheduler.running:
                    return running
                self._changed.wait()
        return ()

    def _serve(self, running: Sequence[Request]) -> None:
        """The next pass, for as many of those who wait for it as it holds."""
        for request in self._startable(running):
            if request.wanted is None:
                self.metrics.record_start(request.num_prompt_tokens, monotonic() - request.arrived)
                self._advance(request, None)
            self._recall(request)
        waiting = [Waiting(request, request.wanted) for request in running if request.wanted is not None]
        if not waiting:
            return
        served = next_together(waiting, self._order)
        try:
            outputs = run_together(served)
        except BaseException as error:
            if isinstance(error, MemoryError) and isinstance(served[0].wanted.engine, PooledEngine):
                self._relieve()
                return
            outputs = []  # perhaps one request's fault: each on its own shows whose
        if not outputs:
            for each in served:
                self._serve_alone(each)
            return
        self._relieved = False
        for each, output in zip(served, outputs, strict=True):
            self._turn_over(each.request)
            self._advance(each.request, output)

    def _startable(self, running: Sequence[Request]) -> list[Request]:
        """Those that have started, and those that fit beside them, in the order they were admitted."""
        started = [request for request in running if request.wanted is not None]
        if not started and self._room != self._budget.slots:  # there may be more memory than when it ran out
            self._bound(self._budget.slots)
        free = None if self._room is None else self._room - sum(request.num_slots for request in started)
        for request in running:
            if request.wanted is None:
                if free is not None:
                    free -= request.num_slots
                    if free < 0:
                        break
                started.append(request)
        self._num_started = len(started)
        return started

    def _relieve(self) -> None:
        """Memory ran out in a shared pass, which has changed nothing. First nobody's rows go. If that was not enough,
        caches grow no more until all requests have ended, and of those that then do not fit, the last to come end."""
        pools = [engine for engine in self._order if isinstance(engine, PooledEngine)]
        if not self._relieved:
            self._relieved = True
            with suppress(MemoryError):
                for pool in pools:
                    pool.release()
            return
        self._relieved = False
        started = sorted((each for each in self._scheduler.running if each.wanted), key=lambda each: each.arrived)
        self._bound(min(pool.allocated for pool in pools) - self._budget.padding)
        taken = 0
        for number, request in enumerate(started):
            taken += request.num_slots
            if taken > (self._room or 0) or (number == 0 and len(started) == 1):
                self._fail(request, OutOfMemoryError("memory ran out in the middle of this text: send it again later"))

    def _bound(self, slots: int | None) -> None:
        """From now on requests fill so many slots at most."""
        self._room = slots
        for engine in self._order:
            if isinstance(engine, PooledEngine):
                engine.bound(None if slots is None else slots + self._budget.padding)

    def _recall(self, request: Request) -> None:
        """Let a request go on for as long as it waits for rows that are here already."""
        try:
            self._take_over(request)
        except MemoryError as error:  # nobody knows how far it came
            self._fail(request, error)

    def _take_over(self, request: Request) -> None:
        while (wanted := request.wanted) is not None and (rest := recalled(wanted)) is not wanted:
            if self._pools is not None and wanted.engine is self._pools.target:
                request.num_cached_tokens += wanted.batch.num_tokens - (rest.batch.num_tokens if rest else 0)
            request.wanted = rest
            if rest is None:
                self._advance(request, None)

    def _serve_alone(self, waiting: Waiting[Request]) -> None:
        self._turn_over(waiting.request)
        try:
            output = waiting.wanted.run()
        except BaseException as error:  # whatever it is, it is this request's alone
            self._fail(waiting.request, error)
            return
        self._advance(waiting.request, output)

    def _turn_over(self, request: Request) -> None:
        request.wanted = None
        with self._changed:
            self._scheduler.served(request)

    @property
    def _order(self) -> list[Engine]:
        """The draft's passes first."""
        engines = self._pools or self.llm.engines
        return [engine for engine in (engines.draft, engines.target) if engine is not None]

    def _advance(self, request: Request, answer: ForwardOutput | None) -> None:
        """Let a request go on until it waits for its next pass, or ends; hand out the chunks on the way."""
        try:
            self._go_on(request, answer)
        except MemoryError as error:  # between two rounds: a chunk may be lost
            self._fail(request, error)

    def _go_on(self, request: Request, answer: ForwardOutput | None) -> None:
        while True:
            try:
                step = request.steps.send(answer)
            except BaseException as error:  # whatever it is, it is this request's alone
                self._fail(request, error)
                return
            if isinstance(step, Pass):
                if isinstance(step.cache, PooledKVCache):
                    step.cache.salt = request.cache_salt
                request.wanted = step
                return
            answer = None
            self._record(request, step)
            if step.finish_reason is not None:
                with self._changed:
                    self._end(request, step.finish_reason, step)
                return
            request.deliver(step)

    def _record(self, request: Request, chunk: StreamChunk) -> None:
        self._health.record_round()
        chunk.stats.num_cached_tokens = request.num_cached_tokens
        now, drafted = monotonic(), Drafted.of(chunk.stats)
        since = request.arrived if request.last_round is None else request.last_round
        first = request.last_round is None
        if first:
            self.metrics.record_prompt(request.num_prompt_tokens, request.num_cached_tokens)
        self.metrics.record_round(len(chunk.token_ids), now - since, first, request.drafted, drafted)
        request.stats, request.drafted, request.last_round = chunk.stats, drafted, now

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request by what went wrong in its round."""
        failure = without_frames(error)
        self._health.record_failure(failure, request.call)
        with self._changed:
            self._end(request, "error", failure)

    def _end(self, request: Request, reason: str, last: StreamChunk | Exception) -> None:
        """Give the request's caches back, its place to the next one, and its consumer the last item."""
        try:
            with suppress(BaseException):  # a generator that objects to its end
                request.steps.close()
            request.wanted = None
            self._scheduler.remove(request)
            self.metrics.record_end(reason, monotonic() - request.arrived)
        finally:
            request.deliver(last)
            self._changed.notify_all()
