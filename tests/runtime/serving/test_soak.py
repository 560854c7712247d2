"""Ten thousand rounds of requests that come, go, give up and fail: nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import POOLED, FakeCache, FakeEngine, Predict
from numpy.typing import NDArray

from draftwood.runtime import LLM, AsyncLLM, QueueFullError, SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.backends import BACKENDS
from draftwood.runtime.llm import Speculation
from draftwood.runtime.requests.async_llm import DeadlineError

ROUNDS = 10_000
WARM = 2_000  # rounds until every buffer and every table of the libraries has its size
RETAINED = 256  # slots whose rows outlive their requests
GROWTH = 1500  # blocks of memory, for what is retained: it varies by 1,000, and there are thousands of requests
HOWS: tuple[Speculation, ...] = ("own", None, SpeculativeConfig("chain", budget="fixed", max_draft_len=3))


def forgetful(seed: int, vocab_size: int) -> Predict:
    """Probabilities that remember nothing of what was asked, as those of `random_model` do."""
    rows = np.random.default_rng(seed).dirichlet(np.full(vocab_size, 0.1), 64) + 1e-6
    return lambda context: rows[(7 * sum(context) + len(context)) % 64]


def fake_engine(self: EngineBundle, role: str, *rest: object) -> FakeEngine:
    vocab_size = self.manifest.engines[role].model.vocab_size
    target, other = forgetful(0, vocab_size), forgetful(1, vocab_size)
    return FakeEngine(
        target if role == "target" else lambda context: 0.7 * target(context) + 0.3 * other(context), vocab_size, role
    )


@pytest.fixture
def llm(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(EngineBundle, "open_engine", fake_engine)
    monkeypatch.setitem(BACKENDS, "fake", POOLED)
    monkeypatch.setattr(FakeCache, "capacity", RETAINED)
    yield LLM(tiny_bundle, SpeculativeConfig(budget="fixed", max_total_draft_tokens=4))


def fails(output: Sequence[int], logits: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(output) > 3:
        raise ZeroDivisionError("on purpose")
    return logits


class Visitor:
    """Sends one request after the other. ends: how those of all visitors ended."""

    def __init__(self, served: AsyncLLM, number: int, ends: Counter[str]) -> None:
        self._served, self._random, self._ends = served, random.Random(number), ends
        self.rounds = 0

    async def visit(self, rounds: int) -> None:
        """Until so many rounds were seen."""
        end = self.rounds + rounds
        while self.rounds < end:
            try:
                self._ends[await self._one()] += 1
            except (ZeroDivisionError, DeadlineError, QueueFullError) as error:
                self._ends[type(error).__name__] += 1
                await asyncio.sleep(0.005)

    async def _one(self) -> str:
        draw = self._random
        params = SamplingParams(
            max_tokens=draw.randint(1, 20),
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randint(0, 9),
            ignore_eos=True,
            logits_processors=draw.choice([(), (), (), (fails,)]),
        )
        prompt = [draw.randint(8, 60) for _ in range(draw.randint(1, 9))]
        deadline = draw.choice([None, None, 0.002])
        stream = self._served.generate(prompt, params, speculative=draw.choice(HOWS), deadline_s=deadline)
        patience = draw.choice([3, 1000, 1000])
        reason: str | None = None
        async for chunk in stream:
            reason = chunk.finish_reason
            self.rounds += 1
            patience -= 1
            if not patience:
                await stream.aclose()
        return reason or "left"


@pytest.mark.full
def test_ten_thousand_rounds_leave_nothing_behind(llm: LLM) -> None:
    """Neither Python's memory, nor sequences in the pools, nor places."""

    async def blocks_after(served: AsyncLLM, visitors: list[Visitor], rounds: int) -> int:
        """Blocks of memory that Python holds once so many more rounds are over and nobody is left."""
        await asyncio.gather(*(visitor.visit(rounds // len(visitors)) for visitor in visitors))
        while served.num_running or served.num_waiting:
            await asyncio.sleep(0.01)
        gc.collect()
        pools: Sequence[Any] = served._scheduler.pools
        assert len(pools) == 2 and not len(served._scheduler.queue)
        for pool in pools:
            assert not pool.caches and pool._storage.speculative <= 2 * RETAINED
        return sys.getallocatedblocks()

    async def crowd() -> tuple[int, int, Counter[str]]:
        ends: Counter[str] = Counter()
        with AsyncLLM(llm, max_running=3, max_waiting=2, prefix_cache_slots=RETAINED) as served:
            visitors = [Visitor(served, number, ends) for number in range(6)]
            warm = await blocks_after(served, visitors, WARM)
            return warm, await blocks_after(served, visitors, ROUNDS - WARM), ends

    warm, last, ends = asyncio.run(crowd())
    assert last - warm < GROWTH, f"{last - warm} blocks of memory more after {ROUNDS} rounds"
    assert {"length", "left", "ZeroDivisionError", "DeadlineError", "QueueFullError"} <= set(ends), ends
