"""LLM: prompts in, text out, over a real bundle of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from bundling import built_native

from draftwood.runtime import (
    LLM,
    EngineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
)
from draftwood.runtime.decoding.chunk import TokenChunk
from draftwood.runtime.decoding.scheduler import Scheduler
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import ForwardOutput, KVCache, Pass, TokenBatch
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.prompt import Prompt
from draftwood.runtime.requests.async_llm import AsyncLLM
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.runtime.text.writer import StreamChunk, TextWriter

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle)


def test_a_prompt_gives_a_result(llm: LLM) -> None:
    result = llm.generate("hello", GREEDY)[0]
    assert isinstance(result, RequestOutput)
    assert len(result.token_ids) == 24 and result.finish_reason == "length"
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert result.prompt_token_ids == llm.tokenizer.encode("hello")
    assert result.stats.num_tokens == 24


def test_the_prompts_of_a_list_share_passes(tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the native engine, whose rows have the same bits in every pass: ONNX Runtime's differ on some processors."""
    llm, passes = LLM(built_native(tiny_pair, tmp_path / "bundle")), 0
    score = llm.target.score

    def counted(batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        nonlocal passes
        passes += 1
        return score(batch, cache)

    monkeypatch.setattr(llm.target, "score", counted)
    prompts: list[Prompt] = ["one", "two", "three", "four"]
    together = llm.generate(prompts, SamplingParams(max_tokens=24, seed=5, ignore_eos=True))
    shared, passes = passes, 0
    alone = [llm.generate(prompt, SamplingParams(max_tokens=24, seed=5, ignore_eos=True))[0] for prompt in prompts]
    llm.close()
    assert shared < 0.6 * passes
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]


def test_what_prompts_of_a_list_begin_with_is_read_once(llm: LLM) -> None:
    """A prompt that waits for a place finds the rows of those that ran before it."""
    begin = list(range(5, 45))
    prompts: list[Prompt] = [[*begin, number] for number in range(50, 60)]
    results = llm.generate(prompts, GREEDY)
    assert sum(result.stats.num_cached_tokens for result in results) >= 8 * len(begin)
    assert [result.token_ids for result in results] == [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("error", [EngineError("on purpose"), KeyboardInterrupt()], ids=["fails", "is interrupted"])
def test_a_list_that_fails_or_is_interrupted_leaves_no_caches(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    pools: list[PooledEngine] = []
    left, opened, score = iter(range(9)), llm.scheduler, llm.target.score

    def noted(*arguments: Any, **settings: Any) -> Scheduler[StreamChunk]:
        scheduler = opened(*arguments, **settings)
        pools.extend(scheduler.pools)  # type: ignore[arg-type]  # engines of this backend
        return scheduler

    def failing(batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        if next(left, None) is None:
            assert all(pool.caches for pool in pools)
            raise error
        return score(batch, cache)

    monkeypatch.setattr(llm, "scheduler", noted)
    monkeypatch.setattr(llm.target, "score", failing)
    with pytest.raises(type(error)):
        llm.generate(["one", "two", "three"], GREEDY)
    assert len(pools) == 2 and not any(pool.caches for pool in pools)


@pytest.mark.parametrize("error", [SystemExit(143), KeyboardInterrupt()], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_in_a_shared_pass_ends_a_list(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The exception comes once: a pass that is repeated for each request would lose it."""
    errors, forward = [error], PooledEngine.forward

    def interrupted(engine: PooledEngine, passes: Sequence[Pass]) -> list[ForwardOutput]:
        if errors:
            raise errors.pop()
        return forward(engine, passes)

    monkeypatch.setattr(PooledEngine, "forward", interrupted)
    with pytest.raises(type(error)):
        llm.generate(["one", "two", "three"], GREEDY)
    assert not errors and len(llm.generate(["one"], GREEDY)) == 1


def test_the_stream_is_the_result_in_parts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=3, logprobs=2, ignore_eos=True)
    chunks = list(llm.stream("hello", params))
    result = llm.generate("hello", params)[0]
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert "".join(piece.text for chunk in chunks for piece in chunk.pieces) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert result.logprobs is not None and len(result.logprobs) == 40
    for token, chosen in zip(result.token_ids, result.logprobs, strict=True):
        assert next(iter(chosen)) == token and 2 <= len(chosen) <= 3
        assert sorted(each.rank for each in chosen.values() if each.rank is not None) == [1, 2]


def test_interleaved_streams_do_not_disturb_each_other(llm: LLM) -> None:
    first, second = llm.stream("first", GREEDY), llm.stream("second", GREEDY)
    tokens: tuple[list[int], list[int]] = ([], [])
    for one, two in zip(first, second, strict=False):
        tokens[0].extend(one.token_ids)
        tokens[1].extend(two.token_ids)
    for got, prompt in zip(tokens, ("first", "second"), strict=True):
        expected = llm.generate(prompt, GREEDY)[0].token_ids
        assert len(got) > 4 and got == expected[: len(got)]


def test_an_abandoned_stream_leaves_the_llm_usable(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    del stream
    assert len(llm.generate("hello", GREEDY)[0].token_ids) == 24


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("x" * 5000, "shorten it"),
        ([1, 2, 10**6], "1000000"),
        ([1, -1], "-1"),
        ([1, "x"], "'x'"),
        ([True], "True"),
        ([1, np.bool_(True)], "True"),
        ([1, 2.0], "2.0"),
        ([1.5], "1.5"),
    ],
)
def test_bad_prompts_are_refused(llm: LLM, prompt: str | list[int], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.generate(prompt)
    with pytest.raises(RequestError, match=named):
        llm.stream(prompt)  # before the first chunk is asked for


def test_tokens_may_be_numpys(llm: LLM) -> None:
    expected = llm.generate([5, 6, 7], GREEDY)[0]
    array = np.array([5, 6, 7])
    for prompt in (array, list(array)):
        result = llm.generate(cast(Prompt, prompt), GREEDY)[0]
        assert result.token_ids == expected.token_ids and result.prompt_token_ids == [5, 6, 7]
        assert all(type(token) is int for token in result.prompt_token_ids)
    batch = llm.generate(cast(list[Prompt], [array, array[:2]]), GREEDY)
    assert [len(result.prompt_token_ids) for result in batch] == [3, 2]


def test_an_empty_prompt_is_the_begin_of_text_token(llm: LLM, stories_bundle: Path) -> None:
    assert llm.generate("", GREEDY)[0].prompt_token_ids == [llm.tokenizer.bos_token_id]


def test_an_empty_prompt_without_begin_of_text_is_refused(no_bos_bundle: Path) -> None:
    with LLM(no_bos_bundle) as llm, pytest.raises(RequestError, match="give it some text"):
        llm.generate("")


def test_the_context_limit_ends_the_text(llm: LLM) -> None:
    limit = llm.bundle.manifest.max_length
    prompt = np.random.default_rng(0).integers(3, 60, limit - 7).tolist()
    for verify in ("match", "auto"):
        config = SpeculativeConfig(verify=verify)
        with LLM(llm.bundle.folder, config) as other:
            result = other.generate(prompt, SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))[0]
        assert len(result.token_ids) == 7 and result.finish_reason == "length"
    result = llm.generate(prompt + [4] * 6, GREEDY)[0]
    assert len(result.token_ids) == 1 and result.finish_reason == "length"


def test_the_largest_proposals_fit(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, None) as llm:
        expected = llm.generate("hello", GREEDY)[0].token_ids
    for config in (
        SpeculativeConfig("topk", max_total_draft_tokens=63, max_draft_len=12, frontier_width=16),
        SpeculativeConfig("chain", max_draft_len=63),
    ):
        with LLM(tiny_bundle, config) as llm:
            assert llm.generate("hello", GREEDY)[0].token_ids == expected


class TestStopStrings:
    """A TextWriter fed by hand: which text and tokens are kept, and which are held back."""

    @pytest.fixture
    def tokenizer(self, tiny_bundle: Path) -> Tokenizer:
        return Tokenizer.load(tiny_bundle)

    def written(
        self, tokenizer: Tokenizer, text: str, sizes: list[int], params: SamplingParams
    ) -> tuple[str, list[int], str | None]:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        writer = TextWriter(tokenizer, tokenizer.encode("hello"), params)
        stats = SpecDecodeStats(num_tokens=len(tokens))
        out, kept = "", list[int]()
        while tokens:
            size = sizes[0] if sizes else len(tokens)
            chunk, tokens, sizes = tokens[:size], tokens[size:], sizes[1:]
            written = writer.write(TokenChunk(chunk, len(chunk), [], None if tokens else "length"), stats)
            out += written.text
            kept += written.token_ids
            assert "".join(piece.text for piece in written.pieces) == written.text
            if written.finish_reason is not None:
                assert stats.num_tokens >= len(kept)
                return out, kept, written.finish_reason
        raise AssertionError("the text never ended")

    @pytest.mark.parametrize("size", [1, 2, 100])
    @pytest.mark.parametrize("stop", [("ENDED",), ("ENDED", "E", "NDE")])
    def test_a_stop_string_may_begin_within_min_tokens(
        self, tokenizer: Tokenizer, size: int, stop: tuple[str, ...]
    ) -> None:
        """But not end there, be it inside the beginning of another one."""
        within = len(tokenizer.encode("ab E cd EN", add_special_tokens=False))
        params = SamplingParams(stop=stop, min_tokens=within, max_tokens=100)
        text, _, reason = self.written(tokenizer, "ab E cd ENDED ef", [size] * 100, params)
        assert reason == "stop" and text in ("ab E cd ", "ab E cd E")

    def test_what_begins_like_a_stop_string_within_min_tokens_is_not_lost(self, tokenizer: Tokenizer) -> None:
        params = SamplingParams(stop=("ENDED",), min_tokens=100, max_tokens=100)
        for text in ("ab EN", "ab ENDE ef", "ab ENDED ef"):
            assert self.written(tokenizer, text, [1] * 100, params)[::2] == (text, "length")


def test_64_requests_may_wait_unless_told_otherwise(llm: LLM) -> None:
    with AsyncLLM(llm) as several:
        assert several.max_requests - several.max_running == 64
    with AsyncLLM(llm, max_waiting=3) as several:
        assert several.max_requests - several.max_running == 3


def test_stop_strings_end_a_real_text(llm: LLM) -> None:
    free = llm.generate("hello", GREEDY)[0]
    stop = free.text[len(free.text) // 2 :][:3]
    ended = llm.generate("hello", SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=stop))[0]
    assert ended.finish_reason == "stop" and ended.text == free.text[: free.text.index(stop)]
    assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
    assert ended.stats.num_tokens == len(ended.token_ids)


def test_the_token_that_ends_a_text_has_none_of_its_own(llm: LLM) -> None:
    """As in vLLM: it is among the tokens, and not in the text."""
    free = llm.generate("hello", GREEDY)[0]
    stop = next(token for token in free.token_ids if llm.tokenizer.decode([token]).isalpha())
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
    ended = llm.generate("hello", params)[0]
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1] and ended.finish_reason == "stop"
    assert ended.text == llm.tokenizer.decode(ended.token_ids[:-1])
    assert "".join(chunk.text for chunk in llm.stream("hello", params)) == ended.text
