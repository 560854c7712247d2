"""TritonModel: a Triton python-backend model over AsyncLLM. A model repository's `model.py` derives from it.

The model is decoupled: `execute` passes requests to an event loop in another thread and returns; responses are sent as
rounds end. Only that thread uses Triton's metrics, because two threads at a time crash the whole server (seen with
24.10).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any, ClassVar, TypeVar

from numpy.typing import NDArray

from ....models.errors import ConfigError, DraftwoodError, RequestError
from ...decoding.stats import SpecDecodeStats
from ...engines.shared.memory import OutOfMemoryError
from ...llm import LLM
from ...requests.async_llm import AsyncLLM, DeadlineError, QueueFullError, RequestStream, ShutdownError
from ...requests.stream import to_exception
from ...sampling.params import SamplingParams
from ..collector import freeze_loaded
from ..places import Places
from .contract import OPTIONAL_INPUTS, PROMPT, ModelSettings
from .metrics import TritonMetrics
from .request import TritonRequest, json_object, parse_request
from .response import ResponseWriter

POLL_SECONDS = 0.05  # interval of checks for disconnected clients, and of updates of the gauges
NAMELESS = ""  # the client's name of requests without one
WARM_UP = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)

T = TypeVar("T")


class CancelledError(DraftwoodError):
    """The client cancelled its request, or has disconnected."""


class TritonModel:
    """One instance of a model: one process with its own copy of the engines.

    backend: the module triton_python_backend_utils, which exists only inside Triton; model.py sets it.
    """

    backend: ClassVar[Any]

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle and decode a few tokens, so that the model is warm when Triton calls it ready."""
        if args["model_instance_kind"] == "GPU":  # must be set before any library looks for devices
            os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]
        parameters = json.loads(args["model_config"])["parameters"]
        settings = ModelSettings.from_parameters({name: value["string_value"] for name, value in parameters.items()})
        bundle = Path(args["model_repository"]) / settings.bundle
        threads = settings.threads, settings.draft_threads
        self._llm = LLM(bundle, settings.speculative, *threads, settings.provider, settings.private_weights)
        self._llm.generate("0", WARM_UP)
        self._engine = AsyncLLM(
            self._llm,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            kv_cache_bytes=settings.kv_cache_bytes or None,
            prefix_cache_slots=settings.prefix_cache_slots,
            max_pause_ms=settings.max_pause_ms,
        )
        self._places = Places(2 * self._engine.max_requests)  # as `draftwood serve`: texts are read and written, too
        labels = {
            "model": args["model_name"],
            "version": args["model_version"],
            "instance": args["model_instance_name"],
        }
        self._metrics = TritonMetrics(self.backend.MetricFamily, labels)
        self._loop = asyncio.new_event_loop()
        self._unloading = Event()
        freeze_loaded()  # Triton gives every instance a process of its own
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Accept requests; each is answered through its own response sender."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request, monotonic()), self._loop)

    def is_ready(self) -> bool:
        """Whether the model can answer requests. Triton calls it for the model's readiness since python_backend's pull
        request 430 of 2026; older releases, such as 24.10, never do."""
        return self._engine.trouble is None

    def finalize(self) -> None:
        """Triton calls this to unload the model, after every request is answered."""
        self._unloading.set()
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._engine.close()
        self._llm.close()

    async def _serve(self, request: Any, arrived: float) -> None:
        """Serve one request. arrived: by time.monotonic(). A final response is sent after any error, too."""
        call = Call(request, arrived, self.backend, self._metrics)
        try:
            await call.answer(self._engine, self._places)
        except BaseException as error:  # any error: without a final response the client would wait for ever
            call.fail(to_exception(error))

    def _run(self) -> None:
        """The thread of the event loop. The loop continues with other requests after any exception."""
        while not self._unloading.is_set():
            try:
                self._loop.run_until_complete(self._watch())
            except BaseException as error:
                self.backend.Logger.log_error(f"the event loop was interrupted: {error!r}")
                sleep(POLL_SECONDS)

    async def _watch(self) -> None:
        """The event loop's main task: updates the gauges until the model is unloaded."""
        while not self._unloading.is_set():
            self._metrics.record_now(self._engine.num_running, self._engine.num_waiting, self.is_ready())
            await asyncio.sleep(POLL_SECONDS)


class Call:
    """One request in progress."""

    def __init__(self, request: Any, arrived: float, backend: Any, metrics: TritonMetrics) -> None:
        self._request = request
        self._sender = request.get_response_sender()
        self._backend = backend
        self._metrics = metrics
        self._arrived = arrived
        self._stats = SpecDecodeStats()

    async def answer(self, engine: AsyncLLM, places: Places) -> None:
        """Send responses as rounds end. Raises the error that ends the request early; no final response is sent
        then."""
        parameters = json_object("the object of request parameters", self._request.parameters() or "{}")
        parsed = parse_request(self._tensors(), parameters, engine.llm.speculative)
        sequence = self._request.correlation_id()  # 0 and "" for none
        client = parsed.client or (str(sequence) if sequence else NAMELESS)
        with places.take(client):
            async with aclosing(await self._queue(engine, parsed, client)) as stream:
                await self._send_all(stream, parsed)

    async def _queue(self, engine: AsyncLLM, parsed: TritonRequest, client: str) -> RequestStream:
        """Queue the request, after its texts were read in the client's turn."""
        seconds = parsed.deadline_s or self._request.timeout() / 1e6 or None  # gRPC's, microseconds or 0
        prompt = await self._while_wanted(engine.encode(parsed.prompt, client), seconds)
        prepared = await self._while_wanted(engine.prepare(parsed.params, client), seconds)
        return engine.generate(
            prompt,
            parsed.params,
            speculative=parsed.speculative,
            deadline_s=seconds,
            arrived=self._arrived,
            client=client,
            cache_salt=parsed.cache_salt,
            prepared=prepared,
        )

    async def _send_all(self, stream: RequestStream, parsed: TritonRequest) -> None:
        """Send the responses of a queued request."""
        self._metrics.record_start(stream.num_prompt_tokens)
        writer = ResponseWriter(parsed, stream.num_prompt_tokens)
        last, finish_reason = self._arrived, None
        while finish_reason is None:
            chunk = await self._while_wanted(anext(stream))
            now, self._stats, finish_reason = monotonic(), chunk.stats, chunk.finish_reason
            self._metrics.record_round(len(chunk.token_ids), now - last, first=last == self._arrived)
            last = now
            tensors = writer.write(chunk)
            if tensors is not None:
                self._send(tensors, final=finish_reason is not None)
        self._metrics.record_end(finish_reason, monotonic() - self._arrived, self._stats)

    async def _while_wanted(self, work: Awaitable[T], seconds: float | None = None) -> T:
        """The result of `work`, which is given up if the client has disconnected (CancelledError), and when this many
        seconds have passed since the request's arrival (DeadlineError)."""
        pending = asyncio.ensure_future(work)
        try:
            while True:
                await asyncio.wait((pending,), timeout=POLL_SECONDS)
                if self._sender.is_cancelled():
                    raise CancelledError("the client cancelled this request")
                if pending.done():
                    return pending.result()
                if seconds is not None and monotonic() - self._arrived > seconds:
                    raise DeadlineError(f"the prompt was not read within its deadline of {seconds:g} s")
        finally:
            if pending.cancel():  # it had not ended
                await asyncio.gather(pending, return_exceptions=True)

    def fail(self, error: Exception) -> None:
        """Send an error as the final response."""
        code, reason = classify(error)
        self._metrics.record_end(reason, monotonic() - self._arrived, self._stats)
        if reason == "error":
            self._backend.Logger.log_error(f"request {self._request.request_id()!r}: {error!r}")
        described = self._backend.TritonError(str(error) or repr(error), getattr(self._backend.TritonError, code))
        self._sender.send(self._backend.InferenceResponse(error=described), flags=self._final)

    def _tensors(self) -> dict[str, NDArray[Any]]:
        """The input tensors of the request, by name."""
        found = {
            spec.name: self._backend.get_input_tensor_by_name(self._request, spec.name)
            for spec in (PROMPT, *OPTIONAL_INPUTS)
        }
        return {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}

    def _send(self, tensors: Mapping[str, NDArray[Any]], final: bool) -> None:
        outputs = [self._backend.Tensor(name, tensor) for name, tensor in tensors.items()]
        self._sender.send(self._backend.InferenceResponse(outputs), flags=self._final if final else 0)

    @property
    def _final(self) -> int:
        return int(self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def classify(error: Exception) -> tuple[str, str]:
    """The code of a TritonError, and the reason for TritonMetrics."""
    if isinstance(error, CancelledError):
        return "CANCELLED", "abort"
    if isinstance(error, DeadlineError):
        return "CANCELLED", "deadline"
    if isinstance(error, (QueueFullError, ShutdownError, OutOfMemoryError, MemoryError)):
        return "UNAVAILABLE", "refused"
    return ("INVALID_ARG", "refused") if isinstance(error, (RequestError, ConfigError)) else ("INTERNAL", "error")
