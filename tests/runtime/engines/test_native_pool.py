"""Many requests over one native cache: attention reads the panels of a row's own request, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_parts import filled, random_text, score
from native_parts import held, open_native, spec_of

from draftwood.models.errors import EngineError
from draftwood.runtime.engines.base import TokenBatch
from draftwood.runtime.engines.native.engine import NativeEngine, NativeKVCache
from draftwood.runtime.engines.passes import causal_batch, prefill
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.engines.shared.sequence import PANEL

WIDTHS = (1, 2, 4, 8, 16, 32)


@pytest.fixture(params=["fp32", "int8"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> NativeEngine:
    """request.param: the precision of the cache."""
    from checkpoints import write_checkpoint

    weights = held(write_checkpoint(tmp_path / "checkpoint", "gqa"), "fp32")
    spec = spec_of(weights, "target", "fp32", WIDTHS, 1200)
    return open_native(weights, replace(spec, cache_precision=request.param), tmp_path, 2)


def poison(storage: NativeKVCache, own: set[int]) -> None:
    """Make every panel but these one of numbers that no product survives, even times nothing."""
    panels = np.array([panel for panel in range(storage.keys.shape[2]) if panel not in own])
    slots = (panels[:, None] * PANEL + np.arange(PANEL)).ravel()
    if storage.scales is None:
        storage.keys[:, :, panels] = np.nan
        storage.values[:, :, :, slots] = np.nan
    else:
        storage.scales[..., slots] = np.nan


def test_attention_reads_no_panel_of_another_request(engine: NativeEngine) -> None:
    """Whatever the others hold: so a row costs what it costs alone. Its bits are those of a cache of its own."""
    pool = PooledEngine(engine, 1200)
    caches, texts = [pool.new_cache() for _ in range(4)], [random_text(length, length) for length in (90, 40, 7, 130)]
    for step in range(0, 130, 10):  # their rows alternate
        for cache, text in zip(caches, texts, strict=True):
            if text[step : step + 10]:
                prefill(pool, cache, text[step : step + 10])
    storage = pool._storage
    assert isinstance(storage, NativeKVCache)
    for cache, text in zip(caches, texts, strict=True):
        kept = storage.keys.copy(), storage.values.copy(), None if storage.scales is None else storage.scales.copy()
        batch = causal_batch(pool.spec, [5, 6, 7], len(text))
        poison(storage, {*(cache.slots // PANEL).tolist(), *range(storage.speculative // PANEL, 75)})
        found = score(pool, batch, cache)
        np.testing.assert_array_equal(found, score(engine, batch, filled(engine, text)))
        cache.truncate(len(text))
        storage.keys[:], storage.values[:] = kept[:2]
        if storage.scales is not None:
            storage.scales[:] = kept[2]


def test_slots_that_a_pass_cannot_have_are_refused(engine: NativeEngine) -> None:
    batch = causal_batch(engine.spec, [1, 2], 0)

    def scored(slots: list[int], columns: int, cache: NativeKVCache | None = None) -> None:
        mask = np.zeros((2, columns), np.bool_)
        engine.score(replace(batch, mask=mask, slots=np.array(slots)), cache or engine.new_cache())

    for slots, columns in (([0, 0], 4), ([0], 4), ([3, 4], 4), ([-1, 0], 4), ([0, 1, 2], 4)):
        with pytest.raises(EngineError, match="slots"):
            scored(slots, columns)
    with pytest.raises(EngineError, match="columns"):
        scored([0, 1], 2, filled_speculatively(engine))
    with pytest.raises(EngineError, match="1200 cache slots"):
        scored([0, 1], 1300)


def test_rows_that_a_pass_cannot_have_are_refused(engine: NativeEngine) -> None:
    """Before the kernels would write beyond their buffers."""
    batch = causal_batch(engine.spec, [1, 2], 0)
    rows = engine.spec.pass_widths[-1] + 1
    many = np.zeros(rows, np.int64)
    wide = replace(batch, token_ids=many, position_ids=many, mask=np.eye(rows, dtype=np.bool_), slots=np.arange(rows))
    for wrong in (
        replace(wide, num_tokens=rows),
        replace(batch, token_ids=np.array([1])),
        replace(batch, position_ids=np.array([0, 1], np.int32)),
        replace(batch, mask=batch.mask.astype(np.int64)),
    ):
        with pytest.raises(EngineError, match="are no pass of this engine"):
            engine.score(wrong, engine.new_cache())
    cache = engine.new_cache()
    engine.score(batch, cache)
    with pytest.raises(EngineError, match="name a row twice"):
        cache.commit([1, 1, 0])


def filled_speculatively(engine: NativeEngine) -> NativeKVCache:
    cache = engine.new_cache()
    engine.score(TokenBatch.pad([1, 2, 3, 4], range(4), np.tri(4, dtype=np.bool_), 4), cache)
    return cache
