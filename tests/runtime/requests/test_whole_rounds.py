"""A text on a server: its rounds are whole while it is alone, and its text is the same whoever comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from bundling import DEMO, built_native
from together import collect, run, tokens_of

from draftwood.runtime import LLM, AsyncLLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.native.rounds import NativeRounds
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.engines.shared.sequence import PooledRows

CHAIN = SpeculativeConfig("chain", max_draft_len=4, budget="fixed")
PARAMS = SamplingParams(max_tokens=48, temperature=0.7, seed=4, ignore_eos=True)
PROMPT = list(range(40, 72))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(built_native(DEMO, tmp_path_factory.mktemp("whole") / "bundle", "int8"), CHAIN) as llm:
        yield llm


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[NativeRounds]:
    """Those of every whole round."""
    run, found = NativeRounds.run, []

    def counted(self: NativeRounds) -> None:
        found.append(self)
        run(self)

    monkeypatch.setattr(NativeRounds, "run", counted)
    return found


def test_rounds_are_whole_while_a_text_is_alone(llm: LLM, rounds: list[NativeRounds]) -> None:
    expected = list(llm.generate(PROMPT, PARAMS)[0].token_ids)
    alone = len(rounds)
    rounds.clear()

    async def work(served: AsyncLLM) -> None:
        assert tokens_of(await collect(served.generate(PROMPT, PARAMS))) == expected
        assert len(rounds) == alone > 8
        together = await asyncio.gather(*(collect(served.generate(PROMPT, PARAMS)) for _ in range(3)))
        assert [tokens_of(each) for each in together] == [expected] * 3

    run(work, llm)


def test_a_round_without_memory_runs_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has freed the rows of ended texts meanwhile."""
    expected, happened = llm.generate(PROMPT, PARAMS)[0].token_ids, list[str]()
    run_round, release = NativeEngine.run_round, PooledEngine.release

    def fail_once(self: NativeEngine, draft: NativeEngine, wanted: int) -> None:
        if not happened:
            happened.append("no memory")
            raise MemoryError
        run_round(self, draft, wanted)

    def noted(self: PooledEngine) -> None:
        happened.append(f"{self.spec.role} freed")
        release(self)

    monkeypatch.setattr(NativeEngine, "run_round", fail_once)
    monkeypatch.setattr(PooledEngine, "release", noted)

    async def work(served: AsyncLLM) -> None:
        assert tokens_of(await collect(served.generate(PROMPT, PARAMS))) == list(expected)

    run(work, llm)
    assert happened == ["no memory", "target freed", "draft freed"]


def test_a_round_that_only_the_target_committed_runs_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out between the two commits."""
    expected, append, commits = llm.generate(PROMPT, PARAMS)[0].token_ids, PooledRows.append, list[int]()

    def fail_once(self: PooledRows, token_ids: Sequence[int]) -> None:
        commits.append(len(token_ids))
        if len(commits) == 6:
            raise MemoryError
        append(self, token_ids)

    monkeypatch.setattr(PooledRows, "append", fail_once)

    async def work(served: AsyncLLM) -> None:
        for _ in range(2):  # the second text finds rows of the first
            assert tokens_of(await collect(served.generate(PROMPT, PARAMS))) == list(expected)

    run(work, llm)
    assert len(commits) > 16
