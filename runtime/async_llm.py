"""AsyncLLM: many requests at a time over one LLM, for servers. One thread runs a round of each in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from time import monotonic
from types import TracebackType
from typing import Any
from uuid import uuid4

from ..models.errors import ConfigError, DraftwoodError, RequestError
from .llm import LLM, Prompt, Speculation
from .metrics import SpecDecodeStats
from .sampling import SamplingParams
from .scheduler import QueueFullError, Scheduler
from .serving.metrics import Drafted, ServingMetrics
from .text import StreamChunk

__all__ = ["AsyncLLM", "DeadlineError", "QueueFullError", "RequestStream", "ShutdownError"]


MAX_RUNNING, MAX_WAITING = 8, 64  # unless told otherwise


class DeadlineError(DraftwoodError):
    """A request's time was over before its text was."""


class ShutdownError(DraftwoodError):
    """No request is taken any more, or one was cut off, because the server stops."""


@dataclass(eq=False, slots=True)
class Request:
    """One request on its way. Only the engine's thread advances `chunks`; anybody may set `aborted`."""

    id: str
    chunks: Iterator[StreamChunk]
    num_prompt_tokens: int
    loop: asyncio.AbstractEventLoop
    arrived: float  # all times in seconds, monotonic
    deadline: float | None
    delivered: asyncio.Queue[StreamChunk | Exception]
    stats: SpecDecodeStats | None = None  # the request's own, from its first round on
    drafted: Drafted = field(default_factory=Drafted)
    last_round: float | None = None
    aborted: bool = False

    def deliver(self, item: StreamChunk | Exception) -> None:
        """Hand an item to the consumer's event loop."""
        try:
            self.loop.call_soon_threadsafe(self.delivered.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self.aborted = True


class RequestStream:
    """The chunks of one request, as an asynchronous iterator. The last one has a finish_reason and the final stats:
    "stop", "length", or "abort". Closing it, cancelling the task that waits for it, or dropping it aborts the request.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._ended = False

    @property
    def request_id(self) -> str:
        return self._request.id

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamChunk:
        """Raises DeadlineError, ShutdownError, or whatever went wrong in a round of this request."""
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._request.delivered.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    async def aclose(self) -> None:
        """Abort the request unless it ended; the engine is free from the next round on."""
        self._ended = True
        self._request.aborted = True

    def __del__(self) -> None:
        self._request.aborted = True


class AsyncLLM:
    """Runs the requests of many tasks over one LLM: a round of each in turn.

    Every request has caches and randomness of its own, so its text is the one it would get alone. What goes wrong in a
    round ends that request only.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_running: int = MAX_RUNNING,
        max_waiting: int = MAX_WAITING,
        kv_cache_bytes: int | None = None,
    ) -> None:
        """The LLM stays the caller's to close.

        max_running: requests that take turns; each holds caches. max_waiting: further ones that may queue.
        kv_cache_bytes: lowers max_running to what fits into so much memory when every cache is full. Raises
        ConfigError when nothing fits.
        """
        if kv_cache_bytes is not None:
            max_running = min(max_running, affordable(llm, kv_cache_bytes))
        self.llm = llm
        self.metrics = ServingMetrics()
        self._scheduler: Scheduler[Request] = Scheduler(max_running, max_waiting)
        self._changed = Condition()  # guards the scheduler and the two flags
        self._draining = self._closed = False
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
    ) -> RequestStream:
        """Queue a request and iterate over its chunks, one per round. Call it where an event loop runs.

        speculative: how this request speculates; None decodes plainly. deadline_s: seconds from now until the request
        ends with a DeadlineError, waiting included. At once, before anything is queued: raises RequestError or
        ConfigError for bad input, QueueFullError when no place is left, ShutdownError while draining or closed.
        """
        arrived = monotonic()
        if deadline_s is not None and not deadline_s > 0:
            raise RequestError(f"deadline_s must be positive, not {deadline_s!r}")
        tokens = self.llm.encode(prompt)
        request = Request(
            id=request_id or uuid4().hex,
            chunks=self.llm.stream(tokens, params, speculative=speculative),
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
            self._scheduler.submit(request)
            self._changed.notify_all()
        return RequestStream(request)

    def abort(self, request_id: str) -> bool:
        """End a request before its next round; its last chunk says "abort". Returns whether there was such a one."""
        with self._changed:
            found = [request for request in self._scheduler if request.id == request_id]
        for request in found:
            request.aborted = True
        return bool(found)

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
        if self._owns_llm:
            self.llm.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while (request := self._next()) is not None:
                self._round(request)
            failure: Exception = ShutdownError("the server stopped before this text was finished")
        except Exception as error:  # a bug outside of any round: nobody may wait for ever because of it
            failure = error
        with self._changed:
            self._closed = True
            for request in self._scheduler:
                self._end(request, "error", failure)

    def _next(self) -> Request | None:
        """Whose round is next, once everybody who gave up is gone. Blocks while there is nothing to do; None: stop."""
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
                chosen = self._scheduler.next()
                if chosen is not None:
                    return chosen
                self._changed.wait()
        return None

    def _round(self, request: Request) -> None:
        """One round of one request; the first one reads the prompt, too."""
        start = monotonic()
        if request.last_round is None:
            self.metrics.record_start(request.num_prompt_tokens, start - request.arrived)
        try:
            chunk = next(request.chunks)
        except Exception as error:  # whatever it is, it is this request's alone
            with self._changed:
                self._end(request, "error", error)
            return
        self._record(request, chunk)
        if chunk.finish_reason is None:
            request.deliver(chunk)
            return
        with self._changed:
            self._end(request, chunk.finish_reason, chunk)

    def _record(self, request: Request, chunk: StreamChunk) -> None:
        now, drafted = monotonic(), Drafted.of(chunk.stats)
        since = request.arrived if request.last_round is None else request.last_round
        first = request.last_round is None
        self.metrics.record_round(len(chunk.token_ids), now - since, first, request.drafted, drafted)
        request.stats, request.drafted, request.last_round = chunk.stats, drafted, now

    def _end(self, request: Request, reason: str, last: StreamChunk | Exception) -> None:
        """Give the request's caches back, its place to the next one, and its consumer the last item."""
        request.chunks.close()  # type: ignore[attr-defined]  # a generator: only it knows what it holds
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
