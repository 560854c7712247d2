"""Caches that keep of layers with a window only what a window reaches: a row is what it is in one that keeps all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from families import write_family
from hypothesis import given, settings
from hypothesis import strategies as st
from native_parts import open_native, spec_of
from numpy.typing import NDArray

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime.engines.backends import slot_bytes
from draftwood.runtime.engines.base import KVCache, Pass, TokenBatch
from draftwood.runtime.engines.native.cache import NativeKVCache, NearRows
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.passes import prefill, prefill_passes
from draftwood.runtime.engines.shared.memory import cache_budget
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.engines.shared.sequence import PooledKVCache
from draftwood.runtime.engines.shared.sizes import cache_bytes, near_bytes

WINDOW, CAPACITY, WIDTHS = 20, 1024, (1, 2, 4, 8, 16, 32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeEngine]:
    folder = tmp_path_factory.mktemp("windows")
    settings = {"sliding_window": WINDOW, "max_position_embeddings": CAPACITY}
    checkpoint = Checkpoint(write_family(folder / "checkpoint", "Gemma3", **settings))
    opened = open_native(checkpoint, spec_of(checkpoint, bindings.TARGET, "fp32", WIDTHS, CAPACITY), folder)
    yield opened
    opened.close()


def near_of(pool: PooledEngine) -> NearRows:
    storage = pool._storage
    assert isinstance(storage, NativeKVCache) and storage.near is not None
    return storage.near


def tokens_of(count: int, seed: int) -> list[int]:
    return [Random(seed * 1000 + index).randrange(VOCAB_SIZE) for index in range(count)]


def logits_after(engine: NativeEngine, text: Sequence[int]) -> NDArray[np.float32]:
    """By a cache of its own, which drops nothing."""
    output = prefill(engine, engine.new_cache(), text)
    assert output is not None
    return np.array(output.logits[0])


def read(pool: PooledEngine, cache: KVCache, text: Sequence[int]) -> tuple[NDArray[np.float32], int]:
    """The logits after a text, of which rows that the pool holds are taken over as the scheduler does it, and how many
    rows were computed."""
    passes, computed, output = prefill_passes(pool, cache, text), 0, None
    work = next(passes)
    while True:
        rest = pool.recall(work)
        if rest is not None:
            output = rest.run()
            computed += rest.num_rows
        try:
            work = passes.send(output)  # type: ignore[arg-type]  # nobody reads that of a pass without output
        except StopIteration:
            assert output is not None
            return output.logits[0].copy(), computed


def propose(pool: PooledEngine, cache: PooledKVCache, draw: Random) -> list[int]:
    """A tree of rows after a text, of which a path is committed; returns its tokens."""
    parents = [draw.randrange(-1, row) for row in range(draw.randrange(1, 12))]
    mask, depths = np.eye(len(parents), dtype=np.bool_), [0] * len(parents)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
            depths[row] = depths[parent] + 1
    ids = [draw.randrange(VOCAB_SIZE) for _ in parents]
    positions = cache.length + np.array(depths)
    batch = TokenBatch.pad(ids, positions, mask, pool.spec.width_for(len(ids)))
    pool.forward([Pass(pool, batch, cache)])
    row, path = draw.randrange(-1, len(parents)), list[int]()
    while row >= 0:
        path.insert(0, row)
        row = parents[row]
    cache.commit(path)
    return [ids[row] for row in path]


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_whatever_happens_to_a_pool_rows_see_their_window(engine: NativeEngine, seed: int) -> None:
    """Texts begin, share beginnings, grow by trees and by what is read, end, and are compacted."""
    draw = Random(seed)
    pool = PooledEngine(engine, 2 * CAPACITY)
    pool.share_prefixes(draw.choice([0, 64, 512]))
    common, texts = tokens_of(draw.randrange(120), seed), dict[PooledKVCache, list[int]]()
    for _ in range(25):
        event = draw.choice(["begin", "read", "read", "propose", "propose", "end", "compact", "release", "forget"])
        if event == "begin" and len(texts) < 4:
            text = common[: draw.randrange(len(common) + 1)] + tokens_of(draw.randrange(1, 120), draw.randrange(3))
            cache = pool.new_cache()
            np.testing.assert_array_equal(read(pool, cache, text)[0], logits_after(engine, text))
            texts[cache] = text
        elif event == "forget":
            pool._forget(near_of(pool))
        elif event in ("compact", "release"):
            if event == "release":
                pool.release()
            pool._compact(pool._find_live())
        elif texts:
            cache = draw.choice(list(texts))
            if event == "end":
                cache.close()
                del texts[cache]
            elif event == "propose":
                texts[cache] += propose(pool, cache, draw)
            else:
                more = tokens_of(draw.randrange(1, 60), draw.randrange(3))
                texts[cache] += more
                np.testing.assert_array_equal(read(pool, cache, more)[0], logits_after(engine, texts[cache]))
    pool.close()


def test_memory_does_not_grow_with_a_text(engine: NativeEngine) -> None:
    pool = PooledEngine(engine, CAPACITY)
    cache, text = pool.new_cache(), tokens_of(1000, 0)
    read(pool, cache, text[:500])
    before = near_of(pool).structure.capacity
    found, _ = read(pool, cache, text[500:])
    np.testing.assert_array_equal(found, logits_after(engine, text))
    slots, model = near_of(pool).structure.capacity, engine.spec.model
    assert slots <= 256 and before <= 512 < pool.allocated, "slots of layers with a window, and of others"
    assert near_bytes(engine.spec, 1) >= slots * slot_bytes(engine.spec, engine.spec.num_windowed_layers)
    assert 0 < engine.spec.num_windowed_layers < model.num_layers
    assert cache_bytes(engine.spec, 1000) < 1000 * slot_bytes(engine.spec) == cache_bytes(engine.spec, 1000, texts=99)


def test_more_texts_fit_the_same_memory(engine: NativeEngine) -> None:
    """The budget of a text that is short counts all of its rows."""
    spec, one = engine.spec, slot_bytes(engine.spec)
    far = slot_bytes(spec, spec.model.num_layers - spec.num_windowed_layers)
    assert cache_budget([spec], 100 * one).slots == 100
    slots = cache_budget([spec], 10_000 * one, texts=4).slots
    assert slots is not None and slots > 10_000
    assert slots * far + near_bytes(spec, 4) <= 10_000 * one < (slots + 1) * far + near_bytes(spec, 4)


def test_a_text_is_continued_from_rows_that_its_window_needs_and_others_are_computed_again(
    engine: NativeEngine,
) -> None:
    """In chunks, of which the first alone could not be taken over: its window was dropped."""
    pool = PooledEngine(engine, 2 * CAPACITY)
    pool.share_prefixes(32)
    text = tokens_of(400, 0)
    whole, other = pool.new_cache(), tokens_of(300, 1)
    assert read(pool, whole, text)[1] == 400
    whole.close()
    near = near_of(pool)
    pool._forget(near)
    assert near.held.sum() < 64
    for _ in range(2):
        cache = pool.new_cache()
        found, computed = read(pool, cache, [*text, 1, 2, 3])
        np.testing.assert_array_equal(found, logits_after(engine, [*text, 1, 2, 3]))
        assert computed <= 3
        cache.close()
    read(pool, pool.new_cache(), other)  # the most recent rows are this text's
    pool._forget(near_of(pool))
    again = pool.new_cache()
    assert read(pool, again, text[:200])[1] == 200, "the rows in the middle of the text were dropped"
    again.close()
    last = pool.new_cache()
    assert read(pool, last, [*text[:200], 5])[1] == 1, "and are there again"


@pytest.mark.parametrize("gone", [1, WINDOW - 1])
def test_a_row_that_a_window_needs_and_nobody_kept_is_an_error(engine: NativeEngine, gone: int) -> None:
    """And not another text. A row before them is needed no more."""
    pool = PooledEngine(engine, CAPACITY)
    cache, text = pool.new_cache(), tokens_of(48, 0)
    read(pool, cache, text)
    near_of(pool).held[cache.slots[-WINDOW]] = False
    np.testing.assert_array_equal(read(pool, cache, [1])[0], logits_after(engine, [*text, 1]))
    near_of(pool).held[cache.slots[-gone]] = False
    with pytest.raises(EngineError, match="dropped that a window still reaches"):
        read(pool, cache, [1])


@pytest.mark.parametrize("retained", [0, 16, 32, 48])
def test_an_ended_text_is_read_again_as_far_as_needed(engine: NativeEngine, retained: int) -> None:
    """Its last row, whose output is read, is always computed: the window before it must be there."""
    for length in range(370, 390, 3):
        pool, text = PooledEngine(engine, CAPACITY), tokens_of(length, 0)
        pool.share_prefixes(retained)
        first = pool.new_cache()
        read(pool, first, text)
        first.close()
        pool._forget(near_of(pool))
        found, computed = read(pool, pool.new_cache(), text)
        np.testing.assert_array_equal(found, logits_after(engine, text))
        assert computed in ((1,) if retained > 32 else (length,) if retained < 32 else (1, length))


def test_texts_share_a_beginning_after_all_have_left_it(engine: NativeEngine) -> None:
    pool = PooledEngine(engine, 2 * CAPACITY)
    pool.share_prefixes(64)
    common, caches = tokens_of(100, 0), [pool.new_cache() for _ in range(3)]
    for number, cache in enumerate(caches):
        _, computed = read(pool, cache, [*common, *tokens_of(90, number + 1)])
        assert computed == (90 if number else 190)
        if number:  # now two share it
            pool._forget(near_of(pool))


def test_ended_texts_keep_no_more_panels_than_retained_slots_fill(engine: NativeEngine) -> None:
    pool = PooledEngine(engine, CAPACITY)
    pool.share_prefixes(64)
    for number in range(30):
        cache = pool.new_cache()
        read(pool, cache, tokens_of(3, number))
        cache.close()
    pool.release()
    read(pool, pool.new_cache(), [1])
    pool._forget(near_of(pool))
    assert near_of(pool).held.sum() <= 64 + 16


def test_without_memory_to_restore_rows_a_text_keeps_its_own(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PooledEngine(engine, CAPACITY)
    pool.share_prefixes(0)
    text = tokens_of(100, 0)
    first, second = pool.new_cache(), pool.new_cache()
    read(pool, first, text)
    pool._forget(near_of(pool))

    def nothing_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pool._storage, "move_near", nothing_left)
    assert read(pool, second, text[:50])[1] == 50 and set(second.slots).isdisjoint(first.slots)
    monkeypatch.undo()
    np.testing.assert_array_equal(read(pool, second, [7])[0], logits_after(engine, [*text[:50], 7]))


@pytest.mark.parametrize("window", [CAPACITY, CAPACITY - 1])
def test_a_window_that_no_text_leaves_is_none(window: int, tmp_path: Path) -> None:
    settings = {"sliding_window": window, "max_position_embeddings": CAPACITY}
    checkpoint = Checkpoint(write_family(tmp_path / "checkpoint", "Gemma3", **settings))
    spec = spec_of(checkpoint, bindings.TARGET, "fp32", WIDTHS, CAPACITY)
    assert (spec.num_windowed_layers > 0) == (window < CAPACITY)
    opened: Callable[[], NativeKVCache] = open_native(checkpoint, spec, tmp_path).new_cache
    assert (opened().near is None) == (window == CAPACITY)
