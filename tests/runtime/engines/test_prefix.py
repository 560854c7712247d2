"""Rows that one sequence computed serve every other whose text begins likewise, and nothing else about it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from checkpoints import write_checkpoint
from engine_parts import filled, score
from fakes import random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from native_parts import open_native, spec_of
from remembering import RememberingCache, RememberingEngine

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models.errors import EngineError
from draftwood.runtime.engines.base import ForwardOutput, Pass, TokenBatch
from draftwood.runtime.engines.passes import causal_batch, prefill_passes
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.engines.shared.sequence import PooledKVCache

VOCAB = 5
SLOTS = 400


def shared_pool(
    retained: int, slots: int = SLOTS, max_width: int = 16, places: bool = False
) -> tuple[PooledEngine, RememberingEngine]:
    engine = RememberingEngine(random_model(0, VOCAB), VOCAB, max_width=max_width, places=places)
    engine.spec = replace(engine.spec, capacity=slots)
    pool = PooledEngine(engine, slots)
    pool.share_prefixes(retained)
    return pool, engine


def read(
    pool: PooledEngine, cache: PooledKVCache, text: Sequence[int], output_read: bool = False
) -> tuple[int, ForwardOutput | None]:
    """Append a text the way AsyncLLM does; how many rows were taken over, and the last row's output."""
    passes, answer, known = prefill_passes(pool, cache, text, output_read=output_read), None, 0
    try:
        wanted = next(passes)
        while True:
            rest = pool.recall(wanted)
            known += wanted.batch.num_tokens - (rest.batch.num_tokens if rest else 0)
            answer = rest.run() if rest else None
            wanted = passes.send(answer)  # type: ignore[arg-type]  # nobody reads an answer that is None
    except StopIteration as end:
        return known, end.value


def read_once(pool: PooledEngine, text: Sequence[int], output_read: bool = False) -> tuple[int, ForwardOutput | None]:
    """The same by a sequence that ends with it."""
    cache = pool.new_cache()
    try:
        return read(pool, cache, text, output_read)
    finally:
        cache.close()


def text_of(pool: PooledEngine, cache: PooledKVCache) -> tuple[int, ...]:
    """What the rows of a sequence were computed of, by the engine's own account."""
    storage = pool._storage
    assert isinstance(storage, RememberingCache)
    texts = storage.texts
    assert all(texts[slot] == texts[cache.slots[-1]][: index + 1] for index, slot in enumerate(cache.slots.tolist()))
    return tuple(texts[cache.slots[-1]]) if len(cache.slots) else ()


texts = st.lists(st.integers(0, 1), max_size=60)
# what happens next, to which sequence, with which text or length
events = st.tuples(st.sampled_from(["begin", "begin", "read", "draft", "truncate", "end"]), st.integers(0, 5), texts)


@settings(max_examples=60)
@given(st.lists(events, min_size=5, max_size=60), st.sampled_from([0, 20, 120, SLOTS]), st.booleans())
def test_sequences_are_what_they_were_given_and_the_longest_prefix_is_found(
    happened: list[tuple[str, int, list[int]]], retained: int, places: bool
) -> None:
    pool, _ = shared_pool(retained, places=places)
    caches: list[PooledKVCache] = []
    expected: list[tuple[int, ...]] = []
    for event, which, text in happened:
        if event == "begin" and len(caches) < 4:
            longest = max((common(other, text) for other in expected), default=0)
            caches.append(pool.new_cache())
            known, _ = read(pool, caches[-1], text)
            expected.append(tuple(text))
            assert longest <= known <= len(text)
        elif not caches:
            continue
        elif event == "read" and len(expected[which % len(caches)]) < 30:
            index = which % len(caches)
            read(pool, caches[index], text)
            expected[index] += tuple(text)
        elif event == "draft":
            index = which % len(caches)
            siblings = [Pass(pool, tree(pool, caches[index]), caches[index])]
            pool.forward(siblings)
            caches[index].commit([0, 2])
            expected[index] += (3, 1)
        elif event == "truncate":
            index = which % len(caches)
            caches[index].truncate(len(text))
            expected[index] = expected[index][: len(text)]
        elif event == "end":
            caches.pop(which % len(caches)).close()
            del expected[which % len(expected)]
        assert [text_of(pool, cache) for cache in caches] == expected


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts begin with alike."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def tree(pool: PooledEngine, cache: PooledKVCache) -> TokenBatch:
    """A root 3 with the children 0 and 1."""
    mask = np.eye(3, dtype=np.bool_)
    mask[1:, 0] = True
    return TokenBatch.pad([3, 0, 1], cache.length + np.array([0, 1, 1]), mask, pool.spec.width_for(3))


def test_a_text_that_is_here_takes_no_pass_and_the_row_that_is_wanted_takes_one() -> None:
    pool, engine = shared_pool(retained=100)
    text = [index % VOCAB for index in range(40)]
    first = pool.new_cache()
    assert read(pool, first, text) == (0, None) or engine.scored == 40
    second = pool.new_cache()
    passes = engine.passes
    assert read(pool, second, text) == (40, None) and engine.passes == passes
    assert second.slots.tolist() == first.slots.tolist()
    known, output = read_once(pool, text, output_read=True)
    assert known == 39 and output is not None
    np.testing.assert_allclose(np.exp(output.logits[0]), random_model(0, VOCAB)(tuple(text)))


def test_of_rows_computed_twice_one_stays() -> None:
    """Two sequences read the same text in one pass, and go on together."""
    pool, _ = shared_pool(retained=0)
    caches = [pool.new_cache(), pool.new_cache()]
    pool.forward([Pass(pool, causal_batch(pool.spec, [1, 2, 3], 0), cache) for cache in caches])
    for cache in caches:
        cache.commit(range(3))
    assert caches[0].slots.tolist() == caches[1].slots.tolist() == [0, 1, 2]


proposals = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=40)


@settings(max_examples=60)
@given(proposals, st.sampled_from([0, 120]), st.booleans())
def test_the_slots_of_a_text_ascend_whoever_commits_first(
    turns: list[tuple[int, int, bool]], retained: int, places: bool
) -> None:
    """Several sequences draft the same text, side by side and before any of it is committed, and then each commits
    part of its draft: an engine adds values up in the order of the slots. Runs of their own keep it."""
    with patch("draftwood.runtime.engines.shared.pool.PANEL", 4):
        pool, _ = shared_pool(retained, slots=130, places=places)
        text = np.random.default_rng(0).integers(0, VOCAB, 400)
        caches = [pool.new_cache() for _ in range(3)]
        for which, rows, committed in turns:
            if which == len(caches):
                caches[rows % len(caches)].close()
                caches[rows % len(caches)] = pool.new_cache()
                continue
            cache = caches[which]
            if cache.length + cache.speculative <= 25:
                start, seen = cache.length + cache.speculative, cache.speculative
                mask = np.tri(rows, seen + rows, seen, dtype=np.bool_)
                chain = text[start : start + rows]
                batch = TokenBatch.pad(chain, np.arange(start, start + rows), mask, pool.spec.width_for(rows))
                pool.score(batch, cache)
            if committed:
                cache.commit(range(min(rows, cache.speculative)))
            for each in caches:
                assert text_of(pool, each) == tuple(text[: each.length])
                assert (np.diff(each.slots) > 0).all()
                assert pool.prefixes is not None
                assert all(slot > before for (before, _), slot in pool.prefixes._after.items())


def test_a_draft_that_is_committed_late_does_not_change_the_order_of_addition(tmp_path: Path) -> None:
    """Bit for bit the logits of a sequence that is alone, though another committed part of its text first."""
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "checkpoint", "gqa"))
    engine = open_native(checkpoint, spec_of(checkpoint, "target", "fp32", (1, 2, 4, 8, 16), 200), tmp_path)
    text = np.random.default_rng(0).integers(0, engine.spec.model.vocab_size, 21).tolist()
    pool = PooledEngine(engine, 800)
    pool.share_prefixes(100)
    late, early = pool.new_cache(), pool.new_cache()
    for cache, rows in ((late, 20), (early, 10)):
        for row in range(rows):
            mask = np.ones((1, row + 1), np.bool_)
            pool.score(TokenBatch.pad([text[row]], [row], mask, 1), cache)
    early.commit(range(10))
    late.commit(range(20))
    alone = filled(engine, text[:20])
    last = causal_batch(engine.spec, text[20:], 20)
    np.testing.assert_array_equal(score(pool, last, late), score(engine, last, alone))


def churn(pool: PooledEngine, seed: int) -> None:
    """Fill and empty the buffer with texts that nobody asks for again."""
    rng = np.random.default_rng(seed)
    for _ in range(6):
        read_once(pool, rng.integers(0, VOCAB, 80).tolist())


def found(pool: PooledEngine, text: Sequence[int]) -> int:
    assert pool.prefixes is not None
    return len(pool.prefixes.find(-1, text))


def test_the_texts_used_last_are_kept_and_of_the_oldest_its_beginning() -> None:
    pool, _ = shared_pool(retained=SLOTS)
    old, middle, new = ([first] * 30 for first in range(3))
    for text in (old, old, middle, new, middle):
        read_once(pool, text)
    reader = pool.new_cache()
    read(pool, reader, [4] * 20)
    live = np.zeros(pool._storage.speculative, np.bool_)
    live[reader.slots] = True
    pool._keep_recent(live, 70)
    pool._compact(live)
    assert [found(pool, text) for text in (old, middle, new, [4] * 20)] == [10, 30, 30, 20]
    assert pool._storage.speculative == 90 and text_of(pool, reader) == (4,) * 20


def test_the_cache_grows_for_ended_sequences_only_once_texts_begin_alike() -> None:
    pool, _ = shared_pool(retained=SLOTS)
    for first in range(VOCAB):
        read_once(pool, [1, 2, 3, *[first] * 30])
    assert pool._storage.capacity == 64
    for first in range(VOCAB):
        read_once(pool, [*range(VOCAB), *[4] * 27, *[first] * 8])
    assert pool._storage.capacity >= 128 and found(pool, [*range(VOCAB), *[4] * 27, *[0] * 8]) == 40


def test_the_widest_pass_finds_room_in_the_smallest_cache() -> None:
    pool, engine = shared_pool(retained=1000, slots=130, max_width=64)
    for number in range(40):
        text = [number % VOCAB, *np.random.default_rng(number).integers(0, VOCAB, 63).tolist()]
        read_once(pool, text)
        assert pool._storage.speculative <= 130
    assert engine.scored > 40 * 50


def test_what_is_retained_gives_way_and_never_grows_the_cache_beyond_its_bound() -> None:
    """A live sequence gets every slot there is."""
    pool, _ = shared_pool(retained=150)
    for seed in range(5):
        churn(pool, seed)
        for _ in range(2):
            read_once(pool, [seed] * 40)
        assert pool._storage.capacity <= 256, "the next step of doubling beyond 150"
    keeper = pool.new_cache()
    with pytest.raises(EngineError, match="leave no room"):
        for _ in range(SLOTS):
            read(pool, keeper, [keeper.length % VOCAB] * 8)
    assert keeper.length >= SLOTS - 16
    assert text_of(pool, keeper)[:9] == (0,) * 8 + (3,)
