"""The HTTP application over an LLM that tests can break, slow down and watch: what its clients learn, and no more."""

from __future__ import annotations

import asyncio
import json
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

pytest.importorskip("httpx", reason="needs httpx")
from inside import BODY, COMPLETIONS, inside, post

from draftwood.runtime.serving.anthropic.answers import MessageAnswer
from draftwood.runtime.serving.ollama.api import OllamaAnswer
from draftwood.runtime.serving.openai.answers import Answer
from draftwood.runtime.serving.openai.responses_answer import ResponseAnswer

PLAIN = BODY | {"speculative": None}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
SHORT = CHAT | {"max_tokens": 3}
IN_STREAMS: list[tuple[type[Answer], str, dict[str, Any], str]] = [
    (Answer, "/v1/chat/completions", SHORT, "server_error"),
    (MessageAnswer, "/v1/messages", SHORT, "api_error"),
    (ResponseAnswer, "/v1/responses", {"input": "hello", "max_output_tokens": 3}, "response.failed"),
    (
        OllamaAnswer,
        "/api/chat",
        CHAT | {"options": {"num_predict": 3, "logit_bias": {"70": 100}}},
        '{"error": "the server failed',
    ),
]


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as llm:
        yield llm


@pytest.mark.parametrize(("answer", "path", "body", "named"), IN_STREAMS)
def test_an_error_in_a_stream_is_its_last_event(
    thinking_bundle: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, path: str, body: Any, named: str
) -> None:
    def broken(*_: Any) -> Iterator[bytes]:
        raise ValueError("an address in memory")

    monkeypatch.setattr(answer, "ended", broken)
    with LLM(thinking_bundle, threads=1) as llm:
        text = post(llm, {**body, "stream": True}, path).text
    *before, last = [line for line in text.splitlines() if "{" in line]
    assert before and named in last and "its log says why" in last and "memory" not in text


@pytest.mark.parametrize(
    ("owner", "slow", "path", "body"),
    [
        (AsyncLLM, "encode", COMPLETIONS, PLAIN),
        (AsyncLLM, "prepare", COMPLETIONS, PLAIN),
        (TextThreads, "compute", "/tokenize", {"prompt": "a"}),
        (TextThreads, "compute", "/detokenize", {"tokens": [5]}),
    ],
)
def test_the_time_limit_covers_what_happens_before_a_request_is_queued(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, slow: str, path: str, body: dict[str, Any]
) -> None:
    async def wait(*arguments: Any) -> None:
        await asyncio.sleep(3600)

    assert post(llm, body, path).status_code == 200
    assert post(llm, body | {"model": "other"}, path).status_code == 404
    monkeypatch.setattr(owner, slow, wait)
    answer = post(llm, body, path, request_seconds=0.01)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"


def test_a_kept_grammar_is_tried_beside_the_event_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def find(form: StructuredOutput) -> Grammar:
        tried.append((form, current_thread() is main_thread()))
        return kept

    kept, form = Grammar(SimpleNamespace(), SimpleNamespace(), 1, np.zeros(0, np.int64), 0), StructuredOutput(regex="a")  # type: ignore[arg-type]
    monkeypatch.setattr(llm.grammars, "find", find)
    with AsyncLLM(llm) as async_llm:
        prepared = asyncio.run(async_llm.prepare(SamplingParams(structured=form)))
    assert prepared.grammar is kept and tried == [(form, False)]


def test_choices_and_prompts_of_one_request_are_one_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    generate = AsyncLLM.generate

    def noted(self: AsyncLLM, *arguments: Any, call: object = None, **options: Any) -> Any:
        calls.append(call)
        return generate(self, *arguments, call=call, **options)

    monkeypatch.setattr(AsyncLLM, "generate", noted)
    for _ in range(2):
        assert post(llm, PLAIN | {"prompt": ["hello", "you"], "n": 2}).status_code == 200
    assert None not in calls and [calls.index(call) for call in calls] == [0] * 4 + [4] * 4


def test_a_request_that_leaves_no_token_is_the_clients_mistake(llm: LLM) -> None:
    vocab_size = llm.bundle.manifest.engines["target"].model.vocab_size
    answer = post(llm, PLAIN | {"min_tokens": 5, "stop_token_ids": list(range(vocab_size))})
    assert answer.status_code == 400 and "no token is left" in answer.text


def test_bad_words_are_tokenized_once_for_all_choices_beside_the_event_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, read = Tokenizer.encode, list[tuple[str, bool]]()

    def noted(self: Tokenizer, text: str, *settings: Any) -> list[int]:
        read.append((text, current_thread() is main_thread()))
        return encode(self, text, *settings)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    assert post(llm, PLAIN | {"n": 3, "bad_words": ["one", "two"]}).status_code == 200
    assert sorted(read) == [(text, False) for text in sorted([PLAIN["prompt"], "one", " one", "two", " two"])]


@pytest.mark.parametrize("slots", [1000, 0])
def test_usage_and_metrics_tell_what_was_read_before(llm: LLM, slots: int) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    prompt, other = "you are kind, and you say", [9, 8, 7, 6, 5]
    length = len(llm.encode(prompt))

    async def cached(client: Any, **changes: Any) -> int:
        """cached_tokens of an answer, or of a stream's last chunk."""
        text = (await client.post(COMPLETIONS, json=BODY | {"prompt": prompt} | changes)).text
        if changes.get("stream"):
            text = [line for line in text.splitlines() if line][-2].removeprefix("data: ")
        usage = json.loads(text)["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def work(client: Any) -> tuple[list[int], str]:
        asked: Any = ({"n": 2}, {}, streamed, {"prompt": [prompt, "z"]}, {"prompt": [other, other]})
        return [await cached(client, **changes) for changes in asked], (await client.get("/metrics")).text

    found, metrics = inside(llm, work, prefix_cache_slots=slots)
    if not slots:
        assert found == [0] * 5 and "vllm:prefix_cache_hits_total 0.0\n" in metrics
        return
    assert found[0] == 0, "a prompt is read once for all its choices, but not never"
    assert found[1:3] == [length - 1] * 2 and found[3] >= length - 1
    assert f"vllm:prefix_cache_queries_total {5 * length + len(llm.encode('z')) + 2 * len(other)}.0\n" in metrics
    assert "vllm:prefix_cache_hits_total 0.0\n" not in metrics


@pytest.mark.parametrize("name", ["user", "safety_identifier"])
def test_a_user_with_one_request_does_not_wait_for_anothers_twenty(llm: LLM, name: str) -> None:
    ended: list[str] = []

    async def ask(client: Any, who: str, **fields: str) -> None:
        assert (await client.post(COMPLETIONS, json=BODY | fields)).status_code == 200
        ended.append(who)

    async def work(client: Any) -> None:
        await asyncio.gather(*(ask(client, "a", user="a") for _ in range(20)), ask(client, "b", **{name: "b"}))

    inside(llm, work, crowd=21, max_running=1)
    assert ended.index("b") <= 5, ended
