"""AsyncLLM: runs many requests at a time over one LLM, for servers."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from numbers import Real
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

from ...models.closing import Closing
from ...models.errors import ConfigError, RequestError, shown
from ..bundle.watch import BundleWatch
from ..decoding.prefill import MAX_PAUSE_MS
from ..decoding.queue import FairQueue, QueueFullError, check_hashable
from ..decoding.round import Observer
from ..decoding.scheduler import MAX_RUNNING
from ..engines.shared.pool import PREFIX_CACHE_SLOTS
from ..llm import LLM, Speculation
from ..prompt import PromptType, plain_prompt
from ..sampling.params import SamplingParams, as_float
from ..structured.grammars import Prepared
from ..text.conversation import ASKED, ChatSettings
from ..text.infill import Infill
from ..text.tokenizer import token_sequences
from .engine_thread import EngineThread
from .metrics import GAUGES, Values, written
from .stream import DeadlineError, RequestStream, ShutdownError
from .text_threads import TextThreads

__all__ = ["AsyncLLM", "DeadlineError", "QueueFullError", "RequestStream", "ShutdownError"]

MAX_WAITING = 64  # default number of waiting requests


class AsyncLLM(EngineThread, Closing):
    """Runs the requests of many asyncio tasks over one LLM. Several requests share a pass where the engines' caches
    allow it.

    Every request has its own caches and random streams, so its text does not depend on other requests. The cost model
    plans smaller proposals the more requests share a pass. It does so only for greedy requests, whose text does not
    depend on the proposals, and for sampled requests without a seed. An error in a round ends that request only.
    Clients get free places in turn. Requests of the same `cache_salt` share the cache rows of common prefixes of their
    prompts and outputs.
    """

    def __init__(
        self,
        model: str | Path | LLM,
        *,
        max_running: int = MAX_RUNNING,
        max_waiting: int = MAX_WAITING,
        kv_cache_bytes: int | None = None,
        prefix_cache_slots: int = PREFIX_CACHE_SLOTS,
        max_pause_ms: float = MAX_PAUSE_MS,
        **options: Any,
    ) -> None:
        """model: an LLM, which the caller closes, or what LLM takes, with `options` of LLM; `close` closes it then.

        max_running: requests that run at a time; engines with caches of a fixed size may lower it. max_waiting: further
        requests that may wait. kv_cache_bytes: memory for all caches; lowers max_running to the number of requests
        whose full caches fit.
        None takes a share of the memory that is available now (see `memory.CACHE_SHARE`); requests whose caches do not
        fit then wait. prefix_cache_slots: the slots to which each shared cache may grow in order to keep the rows of
        ended requests for later prompts with the same prefix. Running requests replace these rows when they need the
        slots. Attention may span all slots (on ONNX Runtime), so more slots cost time. 0: requests share no rows.
        max_pause_ms: the most milliseconds that a running text waits for the prompts of others between two of its
        chunks, by the costs of the bundle, see PrefillLimit. Raises ConfigError when the memory suffices for no
        request.
        """
        if prefix_cache_slots < 0:
            raise ConfigError(f"prefix_cache_slots must be at least 0, not {prefix_cache_slots}")
        FairQueue(max_running, max_waiting)  # refuses limits under which no request could run
        if isinstance(model, LLM) and options:
            raise ConfigError(f"{next(iter(options))} is an option of LLM, which is open already: leave it out")
        with ExitStack() as opened:
            llm = model if isinstance(model, LLM) else opened.enter_context(LLM(model, **options))
            if kv_cache_bytes is not None:
                max_running = min(max_running, count_affordable(llm, kv_cache_bytes))
            max_running = min(max_running, llm.max_running or max_running)
            scheduler = llm.scheduler(max_running, max_waiting, kv_cache_bytes, prefix_cache_slots, max_pause_ms)
            opened.callback(scheduler.close)
            llm.grammars.open()  # nobody waits for it yet
            super().__init__(llm, scheduler)
            watch = BundleWatch(llm.bundle)
            self.watchers.append(lambda: watch.trouble)
            self.texts = TextThreads()  # that encode texts
            self._draining = False
            self._opened = opened.pop_all()  # what `close` closes
        self._thread.start()

    @property
    def num_running(self) -> int:
        return self._scheduler.queue.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.queue.num_waiting

    @property
    def max_running(self) -> int:
        return self._scheduler.queue.max_running

    @property
    def max_requests(self) -> int:
        """The largest number of running and waiting requests together."""
        return self._scheduler.queue.max_running + self._scheduler.queue.max_waiting

    @property
    def accepting(self) -> bool:
        """Whether new requests are accepted: the engine's thread runs, and `drain` was not called."""
        return not self._draining and self.alive

    async def encode(self, prompt: PromptType | Infill, client: str | None = None) -> list[int]:
        """LLM.encode, or `encode_infill`, in another thread. Long texts are encoded one at a time, those of a client in
        its turn, and short texts do not wait for them. Also raises ShutdownError."""
        if isinstance(prompt, Infill):
            return await self.texts.compute(partial(self.llm.encode_infill, prompt), prompt.size, client)
        plain = plain_prompt(prompt)
        size = len(plain.encode("utf-8", "surrogatepass")) if isinstance(plain, str) else len(plain)
        return await self.texts.compute(partial(self.llm.encode, plain), size, client)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], settings: ChatSettings = ASKED, client: str | None = None
    ) -> list[int]:
        """LLM.encode_chat in another thread. Cancelling the task ends the chat template's process."""
        text = await self.texts.write(lambda given_up: self.llm.write_chat(messages, given_up, settings), client)
        return await self.texts.compute(partial(self.llm.encode_written, text), len(text), client)

    async def prepare(self, params: SamplingParams, client: str | None = None) -> Prepared:
        """LLM.prepare in other threads, for all choices of a call. Cancelling the task gives the grammar up."""
        words, form = params.bad_words, params.structured
        sequences, grammar = list[list[int]](), None
        if words:
            tokenized = partial(token_sequences, self.llm.tokenizer, words)
            sequences = await self.texts.compute(tokenized, sum(map(len, words)), client)
        if form is not None:
            # A kept grammar waits for no grammar that is compiled.
            grammar = await self.texts.compute(lambda _: self.llm.grammars.find(form), 0, client)
            grammar = grammar or await self.texts.compile(partial(self.llm.grammars.compile, form), client)
        return Prepared(grammar, sequences)

    def max_tokens_after(self, prompt: Sequence[int]) -> int:
        """The largest max_tokens that the memory allows for a prompt. The context length may end a text earlier."""
        return self._scheduler.slots.tokens_after(len(prompt))

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        speculative: Speculation = "own",
        request_id: str | None = None,
        deadline_s: float | None = None,
        arrived: float | None = None,
        client: str | None = None,
        user: str | None = None,
        cache_salt: str | None = None,
        call: Hashable = None,
        prepared: Prepared | None = None,
        observe: Observer | None = None,
    ) -> RequestStream:
        """Queue a request; returns an iterator over its chunks, one per round. Needs a running event loop.

        speculative: the configuration of this request; None decodes plainly. deadline_s: seconds from its arrival,
        waiting included, after which the request ends with a DeadlineError. arrived: by time.monotonic(), if it is
        earlier than this call. client, user: the sender of the request, and the
        sender's user, see Scheduler.submit. cache_salt: the request shares cache rows only with requests of the same
        salt. A client without the salt then cannot infer earlier prompts from response times or token counts. call: an
        identifier of the API call; failures of the requests of one call count once. prepared: what `prepare` returned
        for `sampling_params`; without it, this call prepares them and the event loop waits. observe: see
        LLM.generate; the engine's thread calls it. Errors before the request is queued: RequestError or ConfigError for
        bad input and for a request that needs more memory than there is, QueueFullError when no place is left,
        ShutdownError while draining or closed.
        """
        arrived = monotonic() if arrived is None else arrived
        deadline_s = None if deadline_s is None else checked_seconds(deadline_s)
        check_hashable("call", call)
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be text, not {shown(cache_salt)}")
        if cache_salt == "":
            raise RequestError("cache_salt must not be empty: leave it out to share rows with requests without a salt")
        request = self.llm.request(prompt, sampling_params, self._scheduler, observe, speculative, prepared, cache_salt)
        request.id = request_id or uuid4().hex
        request.call = request.id if call is None else call
        request.arrived, request.deadline = arrived, None if deadline_s is None else arrived + deadline_s
        stream = RequestStream(request)
        with self._scheduler.changed:
            if not self.accepting:
                raise ShutdownError("this server is stopping and takes no further requests: send them to another one")
            if any(other.id == request.id for other in self._scheduler.queue):
                raise RequestError(f"a request {request.id!r} is in progress: choose another request_id")
            self._scheduler.add(request, client, user)
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request before its next round, with the finish_reason "abort". Returns whether there is such a one."""
        with self._scheduler.changed:
            found = [request for request in self._scheduler.queue if request.id == request_id]
        for request in found:
            request.aborted = True
        return bool(found)

    @property
    def values(self) -> Values:
        """All metrics at present."""
        running, waiting = self.num_running, self.num_waiting
        values = (running, waiting, int(self.trouble is None), running, waiting)
        return self.metrics.values(dict(zip(GAUGES, values, strict=True)))

    def to_prometheus(self) -> str:
        """The same in Prometheus' text format."""
        return written({None: self.values})

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait until all requests are finished. Returns False when `timeout_s` passed first."""
        self._draining = True

        def wait() -> bool:
            with self._scheduler.changed:
                return self._scheduler.changed.wait_for(lambda: not len(self._scheduler.queue), timeout_s)

        return await asyncio.to_thread(wait)

    def close(self) -> None:
        """End the engine's thread after its pass, and with a ShutdownError every request and every call that waits."""
        self.texts.close()
        self._stop()
        self._opened.close()


def checked_seconds(deadline_s: Any) -> float:
    """The deadline as a Python number. Raises RequestError."""
    number = isinstance(deadline_s, Real) and not isinstance(deadline_s, bool)
    seconds = as_float(deadline_s) if number else None
    if not isinstance(seconds, float) or not seconds > 0:
        raise RequestError(f"deadline_s must be positive seconds, not {shown(deadline_s)}")
    return seconds


def count_affordable(llm: LLM, kv_cache_bytes: int) -> int:
    """The number of requests whose full caches fit into `kv_cache_bytes`. Raises ConfigError when it is 0."""
    each = llm.kv_cache_bytes
    if kv_cache_bytes < each:
        raise ConfigError(
            f"the caches of one request may take {each} bytes, more than the {kv_cache_bytes} allowed: "
            "allow more, or rebuild with a smaller --max-length"
        )
    return kv_cache_bytes // each
