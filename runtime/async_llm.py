"""AsyncLLM: many requests at a time over one LLM, for servers. One thread runs the passes that they wait for together:
requests join and leave between passes (continuous batching)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from time import monotonic
from types import TracebackType
from typing import Any
from uuid import uuid4

from ..models.errors import ConfigError, RequestError
from .batching import MAX_RUNNING, Waiting, next_together, recalled, run_together
from .bundle_watch import BundleWatch
from .engine_health import EngineHealth
from .engines.base import Engine, ForwardOutput, Pass
from .engines.pool import PooledEngine
from .llm import LLM, Engines, Prompt, Speculation
from .metrics import SpecDecodeStats
from .request_stream import DeadlineError, Request, RequestStream, ShutdownError, without_frames
from .sampling import SamplingParams
from .scheduler import QueueFullError, Scheduler
from .serving.metrics import Drafted, ServingMetrics
from .text import StreamChunk

__all__ = ["AsyncLLM", "DeadlineError", "QueueFullError", "RequestStream", "ShutdownError"]

MAX_WAITING, PREFIX_CACHE_SLOTS = 64, 1024  # unless told otherwise


class AsyncLLM:
    """Runs the requests of many tasks over one LLM, the passes of several in one where the engines' caches allow it.

    Every request has caches and randomness of its own, so its text is the one it would get alone. The cost model knows
    how many share a pass and proposes less the more there are; it does so only for requests whose text cannot depend on
    it: greedy ones, and sampled ones without a seed. What goes wrong in a round ends that request only. Clients whose
    requests wait get places in turn. What one request has read of its prompt, or written, no other reads again.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_running: int = MAX_RUNNING,
        max_waiting: int = MAX_WAITING,
        kv_cache_bytes: int | None = None,
        prefix_cache_slots: int = PREFIX_CACHE_SLOTS,
    ) -> None:
        """The LLM stays the caller's to close.

        max_running: requests that take turns; a plan has caches for so many. max_waiting: further ones that may queue.
        kv_cache_bytes: lowers max_running to what fits into so much memory when every cache is full.
        prefix_cache_slots: to how many slots each shared cache may grow for the sake of ended requests, whose rows
        serve later prompts that begin likewise, and give way when running ones need room; attention spans them. 0: no
        request profits from another. Raises ConfigError when nothing fits.
        """
        if prefix_cache_slots < 0:
            raise ConfigError(f"prefix_cache_slots must be at least 0, not {prefix_cache_slots}")
        if kv_cache_bytes is not None:
            max_running = min(max_running, affordable(llm, kv_cache_bytes))
        max_running = min(max_running, llm.max_batch or max_running)
        self.llm = llm
        self.metrics = ServingMetrics()
        self._scheduler: Scheduler[Request] = Scheduler(max_running, max_waiting)
        self._pools = llm.pools(max_running)
        for engine in self._order:
            if isinstance(engine, PooledEngine) and prefix_cache_slots:
                engine.share_prefixes(prefix_cache_slots)
        self._changed = Condition()  # guards the scheduler and the two flags
        self._draining = self._closed = False
        self._health, self._watch = EngineHealth(), BundleWatch(llm.bundle)
        self._owns_llm = False
        self._thread = Thread(target=self._run, name="draftwood-engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, bundle: str | Path, *, max_running: int = MAX_RUNNING, max_waiting: int = MAX_WAITING, **options: Any
    ) -> AsyncLLM:
        """Over a bundle of its own, which `close` closes. options: those of LLM."""
        async_llm = cls(LLM(bundle, **options), max_running=max_running, max_waiting=max_waiting)
        async_llm._owns_llm = True
        return async_llm

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def max_running(self) -> int:
        return self._scheduler.max_running

    @property
    def max_requests(self) -> int:
        """Running and waiting together."""
        return self._scheduler.max_running + self._scheduler.max_waiting

    @property
    def alive(self) -> bool:
        """Whether requests in hand will be finished."""
        return not self._closed

    @property
    def trouble(self) -> str | None:
        """Why nobody can expect a text any more, see EngineHealth and BundleWatch; None while they can."""
        return (self._health.trouble or self._watch.trouble) if self.alive else "dead: the engine's thread has ended"

    @property
    def accepting(self) -> bool:
        """Whether new requests are taken: neither draining nor closed nor broken."""
        return not self._draining and not self._closed

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        speculative: Speculation = "own",
        request_id: str | None = None,
        deadline_s: float | None = None,
        client: str | None = None,
        user: str | None = None,
    ) -> RequestStream:
        """Queue a request and iterate over its chunks, one per round. Call it where an event loop runs.

        speculative: how this request speculates; None decodes plainly. deadline_s: seconds from now until the request
        ends with a DeadlineError, waiting included. client, user: whose request it is, and for whom that client sent
        it, see Scheduler.submit. At once, before anything is queued: raises RequestError or ConfigError for bad input,
        QueueFullError when no place is left, ShutdownError while draining or closed.
        """
        arrived = monotonic()
        if deadline_s is not None and not deadline_s > 0:
            raise RequestError(f"deadline_s must be positive, not {deadline_s!r}")
        tokens = self.llm.encode(prompt)
        request = Request(
            id=request_id or uuid4().hex,
            steps=self.llm.steps(tokens, params, speculative=speculative, engines=self._engines_of(params)),
            num_prompt_tokens=len(tokens),
            loop=asyncio.get_running_loop(),
            arrived=arrived,
            deadline=None if deadline_s is None else arrived + deadline_s,
            delivered=asyncio.Queue(),
        )
        with self._changed:
            if not self.accepting:
                raise ShutdownError("this server is stopping and takes no further requests: send them to another one")
            if any(other.id == request.id for other in self._scheduler):
                raise RequestError(f"a request {request.id!r} is in progress: choose another request_id")
            self._scheduler.submit(request, client, user)
            self._changed.notify_all()
        return RequestStream(request)

    def abort(self, request_id: str) -> bool:
        """End a request before its next round; its last chunk says "abort". Returns whether there was such a one."""
        with self._changed:
            found = [request for request in self._scheduler if request.id == request_id]
        for request in found:
            request.aborted = True
        return bool(found)

    def to_prometheus(self) -> str:
        """Its metrics, and what is true right now, in Prometheus' text format."""
        now = {"requests_running": self.num_running, "requests_waiting": self.num_waiting}
        now["engine_healthy"] = int(self.trouble is None)
        return self.metrics.to_prometheus({f"draftwood_{name}": value for name, value in now.items()})

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait until all are finished. Returns whether they were within `timeout_s`."""
        self._draining = True

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: not len(self._scheduler), timeout_s)

        return await asyncio.to_thread(wait)

    def close(self) -> None:
        """End every request with a ShutdownError and the engine's thread after the round it is in."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._pools is not None:
            for engine in self._order:
                engine.close()
        if self._owns_llm:
            self.llm.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _engines_of(self, params: SamplingParams) -> Engines | None:
        """The pools, and how many share their passes where a request's proposals may depend on it."""
        reproducible = params.seed is not None and not params.greedy
        if self._pools is None or reproducible:
            return self._pools
        return self._pools._replace(sharing=lambda: max(1, self._scheduler.num_running))

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while running := self._next():
                with self._health.watched():
                    self._serve(running)
            failure: Exception = ShutdownError("the server stopped before this text was finished")
        except Exception as error:  # a bug outside of any round: nobody may wait for ever because of it
            failure = error
        with self._changed:
            self._closed = True
            for request in self._scheduler:
                self._end(request, "error", failure)

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
        for request in running:
            if request.wanted is None:
                self.metrics.record_start(request.num_prompt_tokens, monotonic() - request.arrived)
                self._advance(request, None)
            self._recall(request)
        waiting = [Waiting(request, request.wanted) for request in running if request.wanted is not None]
        if not waiting:
            return
        served = next_together(waiting, self._order)
        outputs: Sequence[ForwardOutput] = ()
        with suppress(Exception):  # perhaps one request's fault: each on its own shows whose
            outputs = run_together(served)
        if not outputs:
            for each in served:
                self._serve_alone(each)
            return
        for each, output in zip(served, outputs, strict=True):
            self._turn_over(each.request)
            self._advance(each.request, output)

    def _recall(self, request: Request) -> None:
        """Let a request go on for as long as it waits for rows that are here already."""
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
        except Exception as error:  # whatever it is, it is this request's alone
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
        while True:
            try:
                step = request.steps.send(answer)
            except Exception as error:  # whatever it is, it is this request's alone
                self._fail(request, error)
                return
            if isinstance(step, Pass):
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

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request by what went wrong in its round."""
        self._health.record_failure(error)
        with self._changed:
            self._end(request, "error", without_frames(error))

    def _end(self, request: Request, reason: str, last: StreamChunk | Exception) -> None:
        """Give the request's caches back, its place to the next one, and its consumer the last item."""
        request.steps.close()
        request.wanted = None
        self._scheduler.remove(request)
        self.metrics.record_end(reason, monotonic() - request.arrived)
        request.deliver(last)
        self._changed.notify_all()


def affordable(llm: LLM, kv_cache_bytes: int) -> int:
    """Requests whose caches fit into so many bytes. Raises ConfigError when not even one's do."""
    each = llm.kv_cache_bytes
    if kv_cache_bytes < each:
        raise ConfigError(
            f"the caches of one request may take {each} bytes, more than the {kv_cache_bytes} allowed: "
            "allow more, or rebuild with a smaller --max-length"
        )
    return kv_cache_bytes // each
