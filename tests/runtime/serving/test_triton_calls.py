"""A call of Triton's over an engine that waits: what ends it before it is queued, and who gets a place."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwood.runtime import ConfigError, EngineError, RequestError, SpecDecodeStats, StreamChunk
from draftwood.runtime.decoding.chunk import TokenLogprob
from draftwood.runtime.requests.async_llm import DeadlineError, QueueFullError, ShutdownError
from draftwood.runtime.serving.places import Places
from draftwood.runtime.serving.triton.call import classify
from draftwood.runtime.serving.triton.metrics import REASONS
from draftwood.runtime.serving.triton.model import TritonModel
from draftwood.runtime.serving.triton.request import MAX_SETTINGS
from draftwood.runtime.serving.waiting import ClientGone

PROMPT = np.array([[b"hello"]], np.object_)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (RequestError("x"), "INVALID_ARG", "refused"),
        (ConfigError("x"), "INVALID_ARG", "refused"),
        (QueueFullError("x"), "UNAVAILABLE", "refused"),
        (ShutdownError("x"), "UNAVAILABLE", "refused"),
        (ClientGone("x"), "CANCELLED", "abort"),
        (DeadlineError("x"), "CANCELLED", "deadline"),
        (EngineError("x"), "INTERNAL", "error"),  # a pass that failed is nothing the client can change
        (RuntimeError("x"), "INTERNAL", "error"),
    ],
)
def test_errors_have_tritons_codes(error: Exception, code: str, reason: str) -> None:
    assert classify(error) == (code, reason) and reason in REASONS


WHOLE = {"text_output": [b"hellox"], "sequence_index": [0], "batch_index": [0]}


class TritonError:
    """Triton's error, whose codes are their names here."""

    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"

    def __init__(self, text: str, code: str) -> None:
        self.text, self.code = text, code


class Model(TritonModel):
    """The model over an engine that stands for AsyncLLM."""

    backend = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonError=TritonError,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=lambda outputs=(), error=None: (
            error or {name: array.reshape(-1).tolist() for name, array in outputs}
        ),
        get_input_tensor_by_name=lambda request, name: (
            SimpleNamespace(as_numpy=lambda: PROMPT) if name == "text_input" else None
        ),
    )

    def __init__(self, engine: Any, places: int = 4) -> None:
        self._engine = engine
        self._places = Places(places)
        self.ended: list[str] = []
        metrics: Any = SimpleNamespace(record_end=lambda reason, *_: self.ended.append(reason))
        self._metrics = metrics


class Engine:
    """Its method `slow` waits until `go` is set."""

    def __init__(self, slow: str) -> None:
        self.slow, self.go, self.is_waiting = slow, asyncio.Event(), False
        self.llm = SimpleNamespace(speculative=None)
        self.read: list[str] = []  # by which methods
        self.given_up: list[str] = []  # the methods that were cancelled
        self.generated = 0

    async def encode(self, prompt: str, client: str) -> list[int]:
        await self._read("encode")
        return [1]

    async def prepare(self, params: object, client: str) -> None:
        await self._read("prepare")

    def generate(self, prompt: list[int], params: object, **options: Any) -> Stream:
        self.generated += 1
        return Stream()

    async def _read(self, step: str) -> None:
        self.read.append(step)
        try:
            if step == self.slow:
                self.is_waiting = True
                await self.go.wait()
        except asyncio.CancelledError:
            self.given_up.append(step)
            raise


class Stream:
    """A text of one chunk."""

    num_prompt_tokens = 1

    async def __anext__(self) -> StreamChunk:
        logprobs, stats = [TokenLogprob(1, -0.5, {})], SpecDecodeStats(2, num_draft_tokens=8, num_accepted_tokens=2)
        return StreamChunk("x", [1], [], logprobs, "stop", stats)

    async def aclose(self) -> None:
        pass


class Request:
    """A request of Triton's, and the sender of its responses."""

    def __init__(self, parameters: str = "", timeout: int = 0) -> None:
        self.parameters, self.correlation_id, self.timeout = lambda: parameters, lambda: 0, lambda: timeout
        self.is_cancelled = lambda: False
        self.request_id = lambda: "one"
        self.responses: list[Any] = []

    def get_response_sender(self) -> Request:
        return self

    def send(self, response: Any, flags: int) -> None:
        self.responses.append(response)

    @property
    def error(self) -> TritonError:
        (only,) = self.responses
        assert isinstance(only, TritonError)
        return only


def test_a_response_has_the_outputs_that_are_asked_for() -> None:
    flags = ("num_output_tokens", "num_input_tokens", "log_probs", "finish_reason", "perf_metrics")
    sent = Request(json.dumps({f"return_{name}": True for name in flags}))
    asyncio.run(Model(Engine(slow=""))._serve(sent, arrived=0.0))
    expected = {"num_output_tokens": [1], "num_input_tokens": [1], "output_log_probs": [-0.5], "cum_log_probs": [-0.5]}
    expected |= {"acceptance_rate": [0.25], "total_accepted_draft_tokens": [2], "total_draft_tokens": [8]}
    assert sent.responses == [WHOLE | expected | {"finish_reason": [b"stop"]}]


@pytest.mark.parametrize("slow", ["encode", "prepare"])
@pytest.mark.parametrize(
    ("parameters", "timeout", "reason", "text"),
    [
        ("", 0, "abort", "the client cancelled"),
        ("", 1, "deadline", "within the deadline of 1e-06 s"),
        ('{"timeout": 2}', 1, "deadline", "within the deadline of 2e-06 s"),
    ],
    ids=["cancelled", "deadline of gRPC", "deadline"],
)
def test_a_request_may_end_while_its_texts_are_read(
    slow: str, parameters: str, timeout: int, reason: str, text: str
) -> None:
    engine, sent = Engine(slow), Request(parameters, timeout=timeout)
    sent.is_cancelled = lambda: reason == "abort" and engine.is_waiting
    model = Model(engine)
    asyncio.run(model._serve(sent, arrived=0.0))
    assert sent.error.code == "CANCELLED" and text in sent.error.text
    assert model.ended == [reason] and not engine.generated and (reason != "abort" or engine.given_up == [slow])


def test_more_requests_than_places_are_refused_before_their_texts_are_read() -> None:
    """A client gets half of the places and one more; a place is free again when its request has ended."""

    async def crowd() -> None:
        engine = Engine(slow="encode")
        model = Model(engine, places=4)
        requests = [Request() for _ in range(4)] + [Request('{"client": "other"}') for _ in range(2)]
        tasks = [asyncio.create_task(model._serve(request, 0.0)) for request in requests]
        refused = (requests[3], requests[5])
        while not all(request.responses for request in refused):
            await asyncio.sleep(0.01)
        for request, held in zip(refused, (3, 1), strict=True):
            assert request.error.code == "UNAVAILABLE"
            assert f"{held} of them yours" in request.error.text and "retry later" in request.error.text
        engine.go.set()
        await asyncio.gather(*tasks)
        await model._serve(later := Request(), 0.0)
        assert [request.responses for request in [*requests, later] if request not in refused] == [[WHOLE]] * 5

    asyncio.run(crowd())


def test_too_many_request_parameters_are_refused_unread() -> None:
    engine, sent = Engine(slow=""), Request('{"client": "' + "x" * MAX_SETTINGS + '"}')
    asyncio.run(Model(engine)._serve(sent, arrived=0.0))
    assert sent.error.code == "INVALID_ARG" and f"may have {MAX_SETTINGS}: send less" in sent.error.text
    assert not engine.read
