"""An engine that breaks under the HTTP application: the client learns that, and nothing more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from threading import current_thread, main_thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwood.runtime import LLM, SamplingParams, StructuredOutput
from draftwood.runtime.requests.async_llm import AsyncLLM
from draftwood.runtime.requests.text_threads import TextThreads
from draftwood.runtime.structured.grammars import Grammar
from draftwood.runtime.text.tokenizer import Tokenizer

pytest.importorskip("fastapi", reason="needs the [serve] extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")
from draftwood.runtime.serving.http.guard import Limits  # noqa: E402
from draftwood.runtime.serving.openai.app import create_app  # noqa: E402 - only where fastapi is installed

BODY: dict[str, Any] = {
    "model": "m",
    "prompt": "hello",
    "max_tokens": 20,
    "temperature": 0,
    "ignore_eos": True,
    "speculative": None,
}


@pytest.fixture
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle) as llm:
        yield llm


async def post(
    llm: LLM, body: dict[str, Any], request_seconds: float | None = None, path: str = "/v1/completions"
) -> tuple[int, str]:
    with AsyncLLM(llm) as async_llm:
        app = create_app(async_llm, "m", Limits(10000, 4), request_seconds)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.post(path, json=body)
            assert async_llm.num_running == 0
            assert (await client.get("/health")).status_code == 200
            return answer.status_code, answer.text


@pytest.mark.parametrize("slow", ["encode", "prepare"])
def test_the_time_limit_covers_what_happens_before_a_request_is_queued(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    async def wait(*arguments: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(AsyncLLM, slow, wait)
    status, text = asyncio.run(post(llm, BODY, request_seconds=0.01))
    assert status == 504 and json.loads(text)["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})])
def test_the_time_limit_covers_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    async def wait(*arguments: Any) -> None:
        await asyncio.sleep(3600)

    assert asyncio.run(post(llm, body, path=path))[0] == 200
    assert asyncio.run(post(llm, {**body, "model": "other"}, path=path))[0] == 404
    monkeypatch.setattr(TextThreads, "compute", wait)
    status, text = asyncio.run(post(llm, body, request_seconds=0.01, path=path))
    assert status == 504 and json.loads(text)["error"]["code"] == "deadline_exceeded"


def test_a_kept_grammar_is_tried_beside_the_event_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def find(form: StructuredOutput) -> Grammar:
        tried.append((form, current_thread() is main_thread()))
        return kept

    kept, form = Grammar(SimpleNamespace(), 1, np.zeros(0, np.int64), 0), StructuredOutput(regex="a")  # type: ignore[arg-type]
    monkeypatch.setattr(llm.grammars, "find", find)
    with AsyncLLM(llm) as async_llm:
        prepared = asyncio.run(async_llm.prepare(SamplingParams(structured=form)))
    assert prepared.grammar is kept and tried == [(form, False)]


@pytest.mark.parametrize(("stream", "passes"), [(False, 0), (True, 0), (True, 6)])
def test_what_breaks_is_an_error_without_details(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool, passes: int
) -> None:
    """A 500, or the last event of a stream that has begun."""
    forward, left = llm.target.score, iter(range(passes))

    def breaking(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise ZeroDivisionError("an address in memory")
        return forward(*arguments)

    monkeypatch.setattr(llm.target, "score", breaking)
    with caplog.at_level(logging.ERROR):
        status, text = asyncio.run(post(llm, {**BODY, "stream": stream}))
    if passes:
        *chunks, text, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert done == "[DONE]" and chunks
    assert status == (200 if passes else 500) and json.loads(text)["error"]["type"] == "server_error"
    assert "memory" not in text and (not passes or "an address in memory" in caplog.text)


def test_choices_and_prompts_of_one_request_are_one_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    generate = AsyncLLM.generate

    def noted(self: AsyncLLM, *arguments: Any, call: object = None, **options: Any) -> Any:
        calls.append(call)
        return generate(self, *arguments, call=call, **options)

    monkeypatch.setattr(AsyncLLM, "generate", noted)
    for _ in range(2):
        status, _ = asyncio.run(post(llm, {**BODY, "prompt": ["hello", "you"], "n": 2}))
        assert status == 200
    assert None not in calls and [calls.index(call) for call in calls] == [0] * 4 + [4] * 4


def test_a_request_that_leaves_no_token_is_the_clients_mistake(llm: LLM) -> None:
    vocab_size = llm.bundle.manifest.engines["target"].model.vocab_size
    body = {**BODY, "min_tokens": 5, "stop_token_ids": list(range(vocab_size))}
    status, text = asyncio.run(post(llm, body))
    assert status == 400 and "no token is left" in text


def test_bad_words_are_tokenized_once_for_all_choices_beside_the_event_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, read = Tokenizer.encode, list[tuple[str, bool]]()

    def noted(self: Tokenizer, text: str, *settings: Any) -> list[int]:
        read.append((text, current_thread() is main_thread()))
        return encode(self, text, *settings)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    status, _ = asyncio.run(post(llm, {**BODY, "n": 3, "bad_words": ["one", "two"]}))
    assert status == 200
    assert sorted(read) == [(text, False) for text in sorted([BODY["prompt"], "one", " one", "two", " two"])]
