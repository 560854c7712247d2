"""AsyncLLM: many requests at a time over one LLM, for servers."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any
from uuid import uuid4

from ...models.errors import ConfigError, RequestError
from ..bundle.watch import BundleWatch
from ..decoding.loop import MAX_RUNNING, Loop
from ..decoding.scheduler import QueueFullError, Scheduler
from ..llm import LLM, PREFIX_CACHE_SLOTS, Prompt, Speculation
from ..sampling.sampler import SamplingParams
from ..text.writer import StreamChunk
from .engine_thread import EngineThread
from .stream import DeadlineError, Request, RequestStream, ShutdownError
from .text_threads import TextThreads

__all__ = ["AsyncLLM", "DeadlineError", "QueueFullError", "RequestStream", "ShutdownError"]

MAX_WAITING = 64  # requests, unless told otherwise


class AsyncLLM(EngineThread):
    """Runs the requests of many tasks over one LLM, the passes of several in one where the engines' caches allow it.

    Every request has caches and randomness of its own, so its text is the one it would get alone. The cost model knows
    how many share a pass and proposes less the more there are; it does so only for requests whose text cannot depend on
    it: greedy ones, and sampled ones without a seed. What goes wrong in a round ends that request only. Clients whose
    requests wait get places in turn. What one request has read of its prompt, or written, no other of the same
    `cache_salt` reads again.
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
        kv_cache_bytes: for all caches; lowers max_running to the requests whose full caches fit. None takes a share of
        the memory that is available now (see `memory.CACHE_SHARE`) and lets requests wait whose caches do not fit.
        prefix_cache_slots: to how many slots each shared cache may grow for the sake of ended requests, whose rows
        serve later prompts that begin likewise, and give way when running ones need room; attention spans them. 0: no
        request profits from another. Raises ConfigError when nothing fits.
        """
        if prefix_cache_slots < 0:
            raise ConfigError(f"prefix_cache_slots must be at least 0, not {prefix_cache_slots}")
        if kv_cache_bytes is not None:
            max_running = min(max_running, count_affordable(llm, kv_cache_bytes))
        max_running = min(max_running, llm.max_batch or max_running)
        scheduler: Scheduler[Request] = Scheduler(max_running, max_waiting)
        self._shared = llm.share(max_running, kv_cache_bytes, prefix_cache_slots)
        loop: Loop[Request, StreamChunk] = Loop(scheduler, self._shared.pools, self._shared.budget)
        super().__init__(llm, loop)
        self._engines = self._shared.engines._replace(sharing=lambda: loop.num_sharing)
        watch = BundleWatch(llm.bundle)
        self.watchers.append(lambda: watch.trouble)
        self._texts = TextThreads()
        self._draining = False
        self._owns_llm = False
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
        return self._loop.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._loop.scheduler.num_waiting

    @property
    def max_running(self) -> int:
        return self._loop.scheduler.max_running

    @property
    def max_requests(self) -> int:
        """Running and waiting together."""
        return self._loop.scheduler.max_running + self._loop.scheduler.max_waiting

    @property
    def accepting(self) -> bool:
        """Whether new requests are taken: neither draining nor closed nor broken."""
        return not self._draining and self.alive

    async def encode(self, prompt: Prompt) -> list[int]:
        """LLM.encode, beside the event loop. Long texts wait for each other, and for nobody else's. Raises
        ShutdownError, too."""
        size = len(prompt.encode("utf-8", "surrogatepass")) if isinstance(prompt, str) else len(prompt)
        return await self._texts.compute(lambda: self.llm.encode(prompt), size)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """LLM.encode_chat, beside the event loop. Cancelling it ends the chat template's process."""
        text = await self._texts.write(lambda given_up: self.llm.write_chat(messages, given_up))
        return await self._texts.compute(lambda: self.llm.encode_written(text), len(text))

    @property
    def texts(self) -> TextThreads:
        """Where texts are computed beside the event loop."""
        return self._texts

    def max_tokens_behind(self, prompt: Sequence[int]) -> int:
        """The largest max_tokens for which there is memory behind a prompt; the context may end a text earlier."""
        return self._shared.budget.tokens_behind(len(prompt))

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
        cache_salt: str | None = None,
        call: Hashable = None,
    ) -> RequestStream:
        """Queue a request and iterate over its chunks, one per round. Call it where an event loop runs.

        speculative: how this request speculates; None decodes plainly. deadline_s: seconds from now until the request
        ends with a DeadlineError, waiting included. client, user: whose request it is, and for whom that client sent
        it, see Scheduler.submit. cache_salt: cache rows are shared only with requests of an equal one, so that nobody
        without it can tell from times or counts what was asked before. call: equal for requests of one call, whose
        failures count once. At once, before anything is queued: raises RequestError or ConfigError for bad input and
        for more than memory is there for, QueueFullError when no place is left, ShutdownError while draining or closed.
        """
        arrived = monotonic()
        if deadline_s is not None and not deadline_s > 0:
            raise RequestError(f"deadline_s must be positive, not {deadline_s!r}")
        if cache_salt == "":
            raise RequestError("cache_salt must not be empty: leave it out to share with everybody who does")
        tokens = self.llm.encode(prompt)
        name = request_id or uuid4().hex
        job = self.llm.job(tokens, params, speculative=speculative, engines=self._engines)
        request = Request(
            id=name,
            steps=job.steps,
            write=job.write,
            stats=job.stats,
            num_prompt_tokens=len(tokens),
            num_slots=self._shared.budget.needed(len(tokens), params.max_tokens),
            call=name if call is None else call,
            cache_salt=cache_salt,
            loop=asyncio.get_running_loop(),
            arrived=arrived,
            deadline=None if deadline_s is None else arrived + deadline_s,
            delivered=asyncio.Queue(),
        )
        with self._loop.changed:
            if not self.accepting:
                raise ShutdownError("this server is stopping and takes no further requests: send them to another one")
            if any(other.id == request.id for other in self._loop.scheduler):
                raise RequestError(f"a request {request.id!r} is in progress: choose another request_id")
            self._loop.add(request, client, user)
        return RequestStream(request)

    def abort(self, request_id: str) -> bool:
        """End a request before its next round; its last chunk says "abort". Returns whether there was such a one."""
        with self._loop.changed:
            found = [request for request in self._loop.scheduler if request.id == request_id]
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
            with self._loop.changed:
                return self._loop.changed.wait_for(lambda: not len(self._loop.scheduler), timeout_s)

        return await asyncio.to_thread(wait)

    def close(self) -> None:
        """End every request with a ShutdownError and the engine's thread after the round it is in; who still waits for
        a text to be read gets one at once."""
        self._texts.close()
        self._stop()
        self._shared.close()
        if self._owns_llm:
            self.llm.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def count_affordable(llm: LLM, kv_cache_bytes: int) -> int:
    """Requests whose caches fit into so many bytes. Raises ConfigError when not even one's do."""
    each = llm.kv_cache_bytes
    if kv_cache_bytes < each:
        raise ConfigError(
            f"the caches of one request may take {each} bytes, more than the {kv_cache_bytes} allowed: "
            "allow more, or rebuild with a smaller --max-length"
        )
    return kv_cache_bytes // each
