"""What OpenAI clients learn about prompts that were read before, and how users that wait get their turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from together import held, until

from draftwood.runtime import LLM, AsyncLLM

pytest.importorskip("fastapi", reason="needs the [serve] extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")
from draftwood.runtime.serving.http.guard import Limits  # noqa: E402
from draftwood.runtime.serving.openai.app import create_app  # noqa: E402 - only where fastapi is installed

BODY = {"model": "m", "prompt": "you are kind, and you say", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
T = TypeVar("T")


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as llm:
        yield llm


def run(llm: LLM, work: Callable[[Any], Awaitable[T]], crowd: int = 0, **options: int) -> T:
    """`work` with an HTTP client of a server of its own, whose first pass waits for so many requests."""

    async def inside() -> T:
        with AsyncLLM(llm, **options) as async_llm:
            transport = httpx.ASGITransport(create_app(async_llm, "m", Limits(10000, 100)))
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120) as client:
                with held(llm.target):
                    working = asyncio.ensure_future(work(client))
                    await until(lambda: async_llm.num_running + async_llm.num_waiting >= crowd)
                return await working

    return asyncio.run(inside())


async def cached(client: Any, **changes: Any) -> int:
    """cached_tokens of an answer, or of a stream's last chunk."""
    answer = await client.post("/v1/completions", json=BODY | changes)
    text = answer.text
    if changes.get("stream"):
        text = [line for line in text.splitlines() if line][-2].removeprefix("data: ")
    usage = json.loads(text)["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    number: int = usage["prompt_tokens_details"]["cached_tokens"]
    return number


@pytest.mark.parametrize("slots", [1000, 0])
def test_usage_and_metrics_tell_what_was_read_before(llm: LLM, slots: int) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    length, other = len(llm.encode(str(BODY["prompt"]))), [9, 8, 7, 6, 5]

    async def work(client: Any) -> tuple[list[int], str]:
        found = [await cached(client, n=2), await cached(client), await cached(client, **streamed)]
        found += [await cached(client, prompt=[BODY["prompt"], "z"]), await cached(client, prompt=[other, other])]
        return found, (await client.get("/metrics")).text

    found, metrics = run(llm, work, prefix_cache_slots=slots)
    if not slots:
        assert found == [0] * 5 and "vllm:prefix_cache_hits_total 0.0\n" in metrics
        return
    assert found[0] == 0, "a prompt is read once for all its choices, but not never"
    assert found[1:3] == [length - 1] * 2 and found[3] >= length - 1
    assert f"vllm:prefix_cache_queries_total {5 * length + len(llm.encode('z')) + 2 * len(other)}.0\n" in metrics
    assert "vllm:prefix_cache_hits_total 0.0\n" not in metrics


@pytest.mark.parametrize("names", [{"user": "b"}, {"safety_identifier": "b"}])
def test_a_user_with_one_request_does_not_wait_for_anothers_twenty(llm: LLM, names: dict[str, str]) -> None:
    ended: list[str] = []

    async def ask(client: Any, who: str, **fields: str) -> None:
        answer = await client.post("/v1/completions", json=BODY | {"max_tokens": 20} | fields)
        assert answer.status_code == 200
        ended.append(who)

    async def work(client: Any) -> None:
        await asyncio.gather(*(ask(client, "a", user="a") for _ in range(20)), ask(client, "b", **names))

    run(llm, work, crowd=21, max_running=1)
    assert ended.index("b") <= 5, ended
