"""cache_salt: requests share what was read only with those of an equal salt, and no text depends on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes import POOLED
from hypothesis import given, settings
from hypothesis import strategies as st
from together import collect, fake_engine, run, tokens_of

from draftwood.models.errors import RequestError
from draftwood.runtime import LLM, AsyncLLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.backends import BACKENDS
from draftwood.runtime.serving.body import MAX_SALT
from draftwood.runtime.serving.openai.bodies import CompletionBody
from draftwood.runtime.serving.triton.request import parse_request
from tests.runtime.engines.test_prefix import VOCAB, churn, read, shared_pool, text_of
from tests.runtime.requests.test_async_prefix import remembering_engine

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SALTS = st.sampled_from([None, "a", "b", "c"])


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBundle, "open_engine", remembering_engine)
        patch.setitem(BACKENDS, "fake", POOLED)
        yield LLM(tiny_bundle, SpeculativeConfig(budget="fixed"))


@pytest.fixture(scope="module")
def alone(tiny_bundle: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBundle, "open_engine", fake_engine)
        yield LLM(tiny_bundle, SpeculativeConfig(budget="fixed"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SALTS, st.lists(st.integers(0, 1), min_size=1, max_size=30)), min_size=2, max_size=20),
    st.integers(0, 3),
)
def test_rows_are_taken_over_from_equal_salts_only(reads: list[tuple[str | None, list[int]]], moves: int) -> None:
    """Whatever else is read, and however often rows are moved."""
    pool, _ = shared_pool(retained=400)
    seen: dict[str | None, list[list[int]]] = {}
    for number, (salt, text) in enumerate(reads):
        cache = pool.new_cache()
        cache.salt = salt
        known, _ = read(pool, cache, text)
        before = seen.setdefault(salt, [])
        common = [int(np.cumprod([a == b for a, b in zip(text, other, strict=False)]).sum()) for other in before]
        assert known <= max(common, default=0), "rows of another salt"
        if number < moves:  # those of ended sequences stay
            live = np.ones(pool._storage.speculative, np.bool_)
            pool._compact(live)
        assert text_of(pool, cache) == tuple(text)
        before.append(text)
        cache.close()


def test_salts_survive_compactions_and_are_forgotten_with_their_rows() -> None:
    pool, _ = shared_pool(retained=400)
    for first in ("a", "b"):
        cache = pool.new_cache()
        cache.salt = first
        read(pool, cache, [1, 2, 3, 4] * 5)
        cache.close()
    for salt, expected in (("a", 20), ("b", 20), ("c", 0), (None, 0)):
        reader = pool.new_cache()
        reader.salt = salt
        assert read(pool, reader, [1, 2, 3, 4] * 5)[0] == expected
        reader.close()
    for seed in range(12):
        churn(pool, seed)
    assert pool.prefixes is not None and set(pool.prefixes._empty_texts) <= {"a", "b", "c"}
    pool.release()
    assert not pool.prefixes._empty_texts and not pool.prefixes._after
    reader = pool.new_cache()
    assert read(pool, reader, [0] * (VOCAB + 5))[0] == 0 and text_of(pool, reader) == (0,) * (VOCAB + 5)


def test_requests_tell_nothing_of_those_with_another_salt(llm: LLM, alone: LLM) -> None:
    prompt = [8 + number % 7 for number in range(90)]
    text = tokens_of(list(alone.stream(prompt, GREEDY)))

    async def cached(served: AsyncLLM, salt: str | None) -> int:
        chunks = await collect(served.generate(prompt, GREEDY, cache_salt=salt))
        assert tokens_of(chunks) == text
        return chunks[-1].stats.num_cached_tokens

    async def one_by_one(served: AsyncLLM) -> None:
        assert [await cached(served, salt) for salt in ("a", "a", "b", None, "b", None)] == [0, 89, 0, 0, 89, 89]
        with pytest.raises(RequestError, match="must not be empty"):
            served.generate(prompt, GREEDY, cache_salt="")

    async def at_once(served: AsyncLLM) -> None:
        salts = [f"tenant {number}" for number in range(4)]
        assert await asyncio.gather(*(cached(served, salt) for salt in salts)) == [0] * 4

    run(one_by_one, llm)
    run(at_once, llm)


@pytest.mark.parametrize("salt", ["", "x" * (MAX_SALT + 1), 5])
def test_a_salt_is_a_text_of_some_length(salt: object) -> None:
    with pytest.raises(ValueError, match="cache_salt"):
        CompletionBody.model_validate({"prompt": "x", "cache_salt": salt})
    assert CompletionBody.model_validate({"prompt": "x", "cache_salt": "x" * MAX_SALT}).cache_salt


def test_triton_takes_it_as_a_parameter() -> None:
    tensors = {"text_input": np.array([[b"x"]], np.object_)}
    assert parse_request(tensors, {"cache_salt": "a"}, None).body.cache_salt == "a"
    content = {"sampling_parameters": np.array([[json.dumps({"cache_salt": "b"}).encode()]], np.object_)}
    assert parse_request(tensors | content, {}, None).body.cache_salt == "b"
    assert parse_request(tensors, {}, None).body.cache_salt is None
