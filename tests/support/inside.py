"""The HTTP application over an LLM in this process, so that tests can change what is after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx
from together import held, until

from draftwood.runtime import LLM, AsyncLLM
from draftwood.runtime.serving.app import create_app
from draftwood.runtime.serving.http.guard import Limits

BODY: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
COMPLETIONS = "/v1/completions"
T = TypeVar("T")


def inside(
    llm: LLM, work: Callable[[Any], Awaitable[T]], crowd: int = 0, app: Mapping[str, Any] | None = None, **options: int
) -> T:
    """`work` with an HTTP client of an application of its own, whose first pass waits for so many requests. app: of
    create_app. options: of AsyncLLM. Afterwards nothing runs, and it is healthy."""

    async def run() -> T:
        with AsyncLLM(llm, **options) as async_llm:
            transport = httpx.ASGITransport(
                create_app(async_llm, "m", Limits(10_000, 100), **app or {}), raise_app_exceptions=False
            )
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120) as client:
                if crowd:
                    with held(llm.target):
                        working = asyncio.ensure_future(work(client))
                        await until(lambda: async_llm.num_running + async_llm.num_waiting >= crowd)
                    result = await working
                else:
                    result = await work(client)
                assert async_llm.num_running == 0 and (await client.get("/health")).status_code == 200
                return result

    return asyncio.run(run())


def post(llm: LLM, body: Mapping[str, Any], path: str = COMPLETIONS, headers: Any = None, **app: Any) -> Any:
    """The answer to one request."""
    return inside(llm, lambda client: client.post(path, json=body, headers=headers), app=app)
