"""Call: answers one request of Triton's through its response sender."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from time import monotonic
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ....models.errors import ConfigError, RequestError
from ...decoding.stats import SpecDecodeStats
from ...engines.shared.memory import OutOfMemoryError
from ...requests.async_llm import AsyncLLM, DeadlineError, QueueFullError, RequestStream, ShutdownError
from ...text.writer import StreamChunk
from ..places import Places
from ..waiting import ClientGone, TimeLimit, while_connected
from .contract import OPTIONAL_INPUTS, PROMPT
from .metrics import TritonMetrics
from .request import TritonRequest, json_object, parse_request

POLL_SECONDS = 0.05  # interval of checks for disconnected clients, and of updates of the metrics
NAMELESS = ""  # the client's name of requests without one

T = TypeVar("T")


class Call:
    """One request in progress."""

    def __init__(self, request: Any, arrived: float, backend: Any, metrics: TritonMetrics) -> None:
        """arrived: by time.monotonic(). backend: the module triton_python_backend_utils."""
        self._request, self._backend, self._metrics = request, backend, metrics
        self._sender = request.get_response_sender()
        self._arrived = arrived
        self._queued = False  # then the engine counts the request's end

    async def answer(self, engine: AsyncLLM, places: Places) -> None:
        """Send responses as rounds end. Raises the error that ends the request early; no final response is sent
        then."""
        parameters = json_object("the object of request parameters", self._request.parameters() or "{}")
        parsed = parse_request(self._tensors(), parameters, engine.llm.speculative)
        sequence = self._request.correlation_id()  # 0 and "" for none
        client = parsed.body.client or (str(sequence) if sequence else NAMELESS)
        with places.take(client):
            async with aclosing(await self._queue(engine, parsed, client)) as stream:
                writer, ended = ResponseWriter(parsed, stream.num_prompt_tokens), False
                while not ended:
                    chunk = await self._while_connected(anext(stream))
                    ended = chunk.finish_reason is not None
                    if (tensors := writer.write(chunk)) is not None:
                        outputs = [self._backend.Tensor(name, tensor) for name, tensor in tensors.items()]
                        self._send(self._backend.InferenceResponse(outputs), final=ended)

    def fail(self, error: Exception) -> None:
        """Send an error as the final response."""
        code, reason = classify(error)
        if not self._queued:
            self._metrics.record_end(reason, monotonic() - self._arrived)
        if reason == "error":
            self._backend.Logger.log_error(f"request {self._request.request_id()!r}: {error!r}")
        described = self._backend.TritonError(str(error) or repr(error), getattr(self._backend.TritonError, code))
        self._send(self._backend.InferenceResponse(error=described), final=True)

    async def _queue(self, engine: AsyncLLM, parsed: TritonRequest, client: str) -> RequestStream:
        """Queue the request, after its texts were read in the client's turn."""
        limit = TimeLimit(parsed.deadline_s or self._request.timeout() / 1e6 or None, self._arrived)  # gRPC's, or 0
        prompt = await self._while_connected(engine.encode(parsed.prompt, client), limit)
        prepared = await self._while_connected(engine.prepare(parsed.params, client), limit)
        stream = engine.generate(
            prompt,
            parsed.params,
            speculative=parsed.speculative,
            deadline_s=limit.seconds,
            arrived=self._arrived,
            client=client,
            cache_salt=parsed.body.cache_salt,
            prepared=prepared,
        )
        self._queued = True
        return stream

    async def _while_connected(self, work: Coroutine[Any, Any, T], limit: TimeLimit | None = None) -> T:
        return await while_connected(work, self._cancelled(), limit)

    async def _cancelled(self) -> None:
        """Wait until the client has cancelled the request or disconnected."""
        while not self._sender.is_cancelled():
            await asyncio.sleep(POLL_SECONDS)

    def _tensors(self) -> dict[str, NDArray[Any]]:
        """The input tensors of the request, by name."""
        found = {
            spec.name: self._backend.get_input_tensor_by_name(self._request, spec.name)
            for spec in (PROMPT, *OPTIONAL_INPUTS)
        }
        return {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}

    def _send(self, response: Any, final: bool) -> None:
        self._sender.send(response, flags=int(self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL) if final else 0)


class ResponseWriter:
    """The responses of one request: one per chunk of a stream, otherwise one at the end.

    A response has the text, two indices that are always 0 (one prompt, one sequence), and the outputs of the request's
    `return_…` flags. As with TensorRT-LLM, a stream never repeats the prompt, and a whole text begins with the prompt
    unless `exclude_input_in_output` is set. Counts and log-probabilities are those of the response; `cum_log_probs`
    covers the whole text so far.
    """

    def __init__(self, request: TritonRequest, num_input_tokens: int) -> None:
        self._body, self._num_input_tokens = request.body, num_input_tokens
        self._text = "" if self._body.stream or self._body.exclude_input_in_output else request.prompt
        self._num_tokens = 0
        self._logprobs: list[float] = []
        self._cum_logprob = 0.0

    def write(self, chunk: StreamChunk) -> dict[str, NDArray[Any]] | None:
        """The tensors of the next response by name, each with a batch axis of 1; None if nothing is to be sent yet."""
        self._text += chunk.text
        self._num_tokens += len(chunk.token_ids)
        self._logprobs += [logprob.logprob for logprob in chunk.logprobs]
        self._cum_logprob += sum(logprob.logprob for logprob in chunk.logprobs)
        if not self._body.stream and chunk.finish_reason is None:
            return None
        tensors = self._tensors() | (
            {} if chunk.finish_reason is None else self._last(chunk.finish_reason, chunk.stats)
        )
        self._text, self._num_tokens, self._logprobs = "", 0, []
        return tensors

    def _tensors(self) -> dict[str, NDArray[Any]]:
        tensors = {"text_output": strings(self._text), "sequence_index": integer(0), "batch_index": integer(0)}
        if self._body.return_num_input_tokens:
            tensors["num_input_tokens"] = integer(self._num_input_tokens)
        if self._body.return_num_output_tokens:
            tensors["num_output_tokens"] = integer(self._num_tokens)
        if self._body.return_log_probs:
            tensors["output_log_probs"] = np.array([[self._logprobs]], np.float32)
            tensors["cum_log_probs"] = np.array([[self._cum_logprob]], np.float32)
        return tensors

    def _last(self, finish_reason: str, stats: SpecDecodeStats) -> dict[str, NDArray[Any]]:
        """Further tensors of the last response."""
        tensors: dict[str, NDArray[Any]] = {}
        if self._body.return_finish_reason:
            tensors["finish_reason"] = strings(finish_reason)
        if self._body.return_perf_metrics:
            tensors["acceptance_rate"] = np.array([[stats.acceptance_rate]], np.float32)
            tensors["total_accepted_draft_tokens"] = integer(stats.num_accepted_tokens)
            tensors["total_draft_tokens"] = integer(stats.num_draft_tokens)
        return tensors


def classify(error: Exception) -> tuple[str, str]:
    """The code of a TritonError, and the reason for TritonMetrics."""
    if isinstance(error, ClientGone):
        return "CANCELLED", "abort"
    if isinstance(error, DeadlineError):
        return "CANCELLED", "deadline"
    if isinstance(error, (QueueFullError, ShutdownError, OutOfMemoryError, MemoryError)):
        return "UNAVAILABLE", "refused"
    return ("INVALID_ARG", "refused") if isinstance(error, (RequestError, ConfigError)) else ("INTERNAL", "error")


def strings(text: str) -> NDArray[np.object_]:
    """[1, 1] of UTF-8 bytes, Triton's form of text."""
    return np.array([[text.encode("utf-8")]], np.object_)


def integer(value: int) -> NDArray[np.int32]:
    """[1, 1] int32."""
    return np.array([[value]], np.int32)
