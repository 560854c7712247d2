"""What only engines of static shapes promise: graphs, copies, memory, and one cache for several sequences.

They run over a driver in the place of libcuda (`cuda_driver`) and a program that tests replace (`onnx_program.py`): the
ONNX graph that TensorRT's plans are compiled from. `test_engines.py` holds them to the contract.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from cuda_driver.machine import Machine
from cuda_driver.memory import DEVICE
from engine_parts import (
    BUSHY,
    SHARED_CAPACITY,
    SHARED_COLUMNS,
    TOLERANCE,
    WIDTHS,
    contents,
    filled,
    random_text,
    score,
)
from numpy.typing import NDArray
from onnx_program import OnnxProgram, open_static
from rich.console import Console
from tensorrt_bundles import demo_bundles
from trees import Tree

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.cli.progress import warm_up
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime import SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.base import Pass
from draftwood.runtime.engines.layout import Layout, PassShape, mask_columns
from draftwood.runtime.engines.passes import causal_batch, prefill
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.engines.static.engine import StaticEngine
from draftwood.runtime.engines.static.memory import cache_parts
from draftwood.runtime.engines.static.pool import StaticPool

pytestmark = pytest.mark.usefixtures("no_faults")
BATCH = 3  # sequences
OpenStatic = Callable[..., StaticEngine]
CHAIN = Tree((1, 2, 3, 4, 5), (-1, 0, 1, 2, 3))


@pytest.fixture
def opened(gqa: Path, tmp_path: Path, gpu: Machine) -> OpenStatic:
    def open_one(max_batch: int = 1, role: str = bindings.DRAFT) -> StaticEngine:
        return open_static(Checkpoint(gqa), tmp_path, gpu, role, SHARED_CAPACITY, max_batch)

    return open_one


@pytest.fixture(scope="module")
def three(gqa: Path, tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> StaticEngine:
    return open_static(Checkpoint(gqa), tmp_path_factory.mktemp("three"), gpu, bindings.DRAFT, SHARED_CAPACITY, BATCH)


@pytest.fixture
def pool(three: StaticEngine) -> Iterator[StaticPool]:
    yield three.pool
    for cache in list(three.pool._caches.values()):
        cache.close()


@pytest.mark.parametrize("sequences", [1, BATCH])
def test_a_round_of_all_is_one_launch_one_copy_each_way_and_one_wait(
    sequences: int, opened: OpenStatic, gpu: Machine
) -> None:
    """Commits of all sequences are one move, queued with the next pass. Rows that are in place are not moved."""
    engine = opened(sequences)
    caches = [filled(engine, random_text(10 * (number + 1), number)) for number in range(sequences)]
    for _ in range(3):
        gpu.counts.clear()
        engine.forward([Pass(engine, BUSHY.batch(engine.spec, cache.length), cache) for cache in caches])
        for cache in caches:
            cache.commit([0, 2, 4])
    assert gpu.calls == {"launch": 1, "graph": 1, "download": 1, "wait": 1}
    if sequences == 1:
        gpu.counts.clear()
        engine.score(BUSHY.batch(engine.spec, caches[0].length), caches[0])
        caches[0].commit([0, 1, 2])
        assert "launch" not in gpu.calls


def test_a_graph_is_captured_once_for_a_shape_and_an_execution_made_once(opened: OpenStatic, gpu: Machine) -> None:
    engine = opened()
    program = cast(OnnxProgram, engine.program)
    for cache in (engine.new_cache(), engine.new_cache()):
        prefill(engine, cache, random_text(96))
        engine.score(BUSHY.batch(engine.spec, 96, stop=5), cache)
        engine.score(BUSHY.batch(engine.spec, 96, first=5), cache)
    # 32 rows of a prompt; 8 rows that see 8 columns; 4 rows that see 8 or, as these here, 12 of 16.
    assert program.widths == [32, 8, 4]
    assert gpu.calls["captured"] == 2 * 2 * len(program.widths)  # copy and program, for each cache


def test_what_cannot_be_captured_is_queued_each_time(
    opened: OpenStatic, gpu: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_text(70)
    expected = contents(filled(opened(), text))
    monkeypatch.setattr(gpu, "captures", False)
    gpu.counts.clear()
    np.testing.assert_allclose(contents(filled(opened(), text)), expected, atol=TOLERANCE)
    assert "graph" not in gpu.calls
    said = "a pass of 32 rows cannot be captured as a CUDA graph; it is queued each time"
    assert caplog.messages.count(said) == 1


def test_only_what_is_read_comes_back(opened: OpenStatic, gpu: Machine) -> None:
    """Logits lie last in their block: a copy that stops early leaves out padding rows. At temperature 0 a verified row
    is one number, not a row of the vocabulary. Of two pieces of prompt there are two rows of logits."""
    engine = opened(role=bindings.TARGET)
    layout = Layout.outputs(engine.spec, PassShape(8, 8, 8))
    first, row = layout.fields[bindings.LOGITS.name].offset, 4 * engine.spec.model.vocab_size
    assert [layout.needed_bytes(rows, False) - first for rows in (1, 5, 8, 9)] == [row, 5 * row, 8 * row, 8 * row]
    assert layout.needed_bytes(5, True) == first
    batch = CHAIN.batch(engine.spec, 0)
    output = engine.score(batch, engine.new_cache())
    assert output.logits[:5].any(axis=1).all() and not output.logits[5:].any()
    expected, whole = output.logits[:5].argmax(-1), opened(role=bindings.TARGET)
    ranked = whole.score(replace(batch, ranking_only=True), whole.new_cache())
    assert ranked.top_ids is not None and not ranked.logits.any()
    np.testing.assert_array_equal(ranked.top_ids[:5, 0], expected)
    engine = opened(BATCH)
    batches = [causal_batch(engine.spec, random_text(15, seed), 0) for seed in range(2)]
    gpu.counts.clear()
    outputs = engine.forward([Pass(engine, each, engine.new_cache()) for each in batches])
    assert [output.logits.shape for output in outputs] == [(1, VOCAB_SIZE)] * 2
    ranks = 12 * 32 * bindings.TOP_COLUMNS
    assert gpu.calls["download"] == 1 and 2 * row <= gpu.counts["download bytes"] <= 2 * row + ranks


def test_requests_cannot_share_more_slots_than_a_cache_has(opened: OpenStatic) -> None:
    pool = PooledEngine(opened(), SHARED_CAPACITY + 200)
    with pytest.raises(EngineError, match=r"caches have 256 slots and cannot grow .* fewer requests"):
        filled(pool, random_text(SHARED_CAPACITY + 1))


def test_slots_out_of_order_are_refused(opened: OpenStatic) -> None:
    """Rows are moved in place, in order: an ancestor always has the smaller slot."""
    engine = opened()
    cache = filled(engine, [1])
    engine.score(BUSHY.batch(engine.spec, 1), cache)
    with pytest.raises(EngineError, match="ascending order, ancestors first"):
        cache.commit([0, 3, 2])


@pytest.mark.parametrize("sequences", [1, BATCH])
def test_memory_is_that_of_every_sequence(sequences: int, opened: OpenStatic, tmp_path: Path) -> None:
    engine = opened(sequences)
    model, memory = engine.spec.model, engine.memory
    assert memory.weights == (tmp_path / "draft.onnx").stat().st_size
    numbers = model.num_layers * sequences * SHARED_CAPACITY * model.num_kv_heads * model.head_dim
    (part,) = cache_parts(engine.spec, 4, 0)
    assert memory.kv_cache == part.geometry.nbytes == 2 * numbers * 4
    logits = 4 * 32 * model.vocab_size
    assert logits < memory.pinned < logits + 32 * bindings.TOP_COLUMNS * 12 + 8 * 1024


def test_the_speculative_area_is_used_again(three: StaticEngine, pool: StaticPool) -> None:
    """Rows move together where a pass is narrower for it, and those of sequences in the middle of a tree are kept."""
    keeper, other = pool.new_cache(), pool.new_cache()
    for row in range(4):
        three.score(BUSHY.batch(three.spec, other.length), other)
        three.score(CHAIN.batch(three.spec, 0, row, row + 1), keeper)  # after rows that are garbage in a moment
        other.commit([0, 2])
        assert pool._used <= mask_columns(8, row + 9, SHARED_COLUMNS)
    assert pool._used < 4 * 8
    keeper.commit(range(4))
    np.testing.assert_allclose(contents(keeper), contents(filled(three, CHAIN.tokens[:4])), atol=TOLERANCE)


def test_limits_of_a_sequence_are_its_own(three: StaticEngine, pool: StaticPool) -> None:
    """What one asks for beyond its region or its share harms nobody, itself included."""
    greedy, other = pool.new_cache(), pool.new_cache()
    chain = Tree(tuple(range(60)), tuple(range(-1, 59)))
    for first in range(0, 48, 16):
        three.score(chain.batch(pool.spec, 0, first, first + 16), greedy)
    with pytest.raises(EngineError, match=r"56 speculative rows exceed the 53 .* each of 3 sequences: .*--widths"):
        three.score(chain.batch(pool.spec, 0, 48, 56), greedy)
    prefill(three, other, random_text(190))
    with pytest.raises(EngineError, match=r"194 rows exceed the 192 cache slots .* for a sequence: .*--max-length"):
        three.score(causal_batch(pool.spec, [1, 2, 3, 4], 190), other)
    three.score(causal_batch(pool.spec, [1, 2], 190), other)
    other.commit([0, 1])
    assert (greedy.speculative, other.length) == (48, 192)


def test_every_sequence_may_use_its_whole_share_at_once(three: StaticEngine, pool: StaticPool) -> None:
    caches = [pool.new_cache() for _ in range(BATCH)]
    chain = Tree(tuple(range(pool.share)), tuple(range(-1, pool.share - 1)))
    for row in range(pool.share):
        three.forward([Pass(three, chain.batch(pool.spec, 0, row, row + 1), cache) for cache in caches])
    assert {cache.speculative for cache in caches} == {pool.share} == {53}


def test_a_sequence_more_than_the_engine_was_built_for(three: StaticEngine, pool: StaticPool) -> None:
    held = [pool.new_cache() for _ in range(BATCH)]
    with pytest.raises(EngineError, match=r"all 3 sequences .* are in use: run fewer .*--max-batch"):
        pool.new_cache()
    held[1].close()
    again = pool.new_cache()
    with pytest.raises(EngineError, match="this cache was closed"):
        three.score(causal_batch(three.spec, [1, 2], 0), held[1])
    held[1].close()  # changes nothing: its region is another's by now
    three.score(causal_batch(three.spec, [1, 2], 0), again)
    with pytest.raises(EngineError, match="all 3 sequences"):
        pool.new_cache()


@pytest.mark.usefixtures("pool")
def test_threads_do_not_see_each_other(three: StaticEngine) -> None:
    """Each with a sequence of its own; outputs are read while another's pass runs."""

    def work(seed: int, rounds: int) -> list[NDArray[np.float32]]:
        cache, found = three.new_cache(), []
        for _ in range(rounds):
            cache.truncate(0)
            prefill(three, cache, random_text(12, seed))
            found.append(three.score(BUSHY.batch(three.spec, 12), cache).logits[:8])
        cache.close()
        return found

    expected = [work(seed, 1)[0].copy() for seed in range(BATCH)]
    with ThreadPoolExecutor(BATCH) as threads:
        for found, alone in zip(threads.map(work, range(BATCH), [8] * BATCH), expected, strict=True):
            np.testing.assert_allclose(found, [alone] * 8, atol=TOLERANCE)


def scores(engine: StaticEngine) -> list[NDArray[np.float32]]:
    """A text in chunks of several widths, and a tree after it, twice: each over a cache of its own."""
    found = []
    for seed in range(2):
        cache = filled(engine, random_text(32 + 8 + 4 + 2 + 1, seed))
        found.append(score(engine, BUSHY.batch(engine.spec, cache.length), cache))
        cache.close()
    return found


@pytest.mark.parametrize("max_batch", [1, BATCH])
def test_the_first_passes_of_a_warm_engine_are_replayed(max_batch: int, opened: OpenStatic, gpu: Machine) -> None:
    before = gpu.memory.used(DEVICE)
    engine = opened(max_batch)
    expected = scores(engine)
    engine.close()
    engine = opened(max_batch)
    steps = engine.warm_up()
    for step in steps:
        step()
    assert gpu.counts["captured"] and len(steps) == 2 * len(WIDTHS) - 1
    gpu.counts.clear()
    np.testing.assert_array_equal(scores(engine), expected)
    assert gpu.counts["graph"] > 0 and gpu.counts["enqueue"] == gpu.counts["captured"] == 0
    engine.close()
    del engine, steps, step
    gc.collect()
    assert gpu.memory.used(DEVICE) <= before, "nothing is kept of a closed engine"


def test_a_command_prepares_both_engines_and_shows_how_far_it_is(tmp_path: Path, gpu: Machine) -> None:
    shown, chain = io.StringIO(), SpeculativeConfig("chain", budget="fixed", max_draft_len=4)
    params, texts = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), []
    with demo_bundles(tmp_path, gpu) as open_llm:
        for is_warm in (False, True):
            with open_llm(1, chain) as llm:
                if is_warm:
                    warm_up(llm, Console(file=shown, width=80, force_terminal=True))
                texts.append(llm.generate(["import os\n"], params)[0].token_ids)
    assert texts[0] == texts[1] and "Preparing passes" in shown.getvalue()
