"""Engines of static shapes, on the host: the contract of every engine, and what only they promise.

`tensorrt` is the engine that runs TensorRT plans, over a driver in the place of libcuda (`cuda_driver`) and a program
that tests replace (`onnx_program.py`): the ONNX graph that plans are compiled from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from checkpoints import Reference, transformers_logits, write_checkpoint
from cuda_driver.machine import Machine
from engine_parts import BUSHY, CAPACITY, TOLERANCE, Open, contents, engine_spec, filled, random_text, score
from onnx_program import OnnxProgram, static_engine
from trees import Tree

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime.engines.base import Engine, Pass
from draftwood.runtime.engines.layout import Layout, PassShape
from draftwood.runtime.engines.passes import causal_batch, prefill
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.engines.static.engine import StaticEngine
from draftwood.runtime.engines.static.memory import cache_geometry
from tests.runtime.engines import test_engines as contract

BACKENDS = ["tensorrt"]
pytestmark = pytest.mark.usefixtures("no_faults")

test_i9_each_row_predicts_what_its_own_path_predicts = contract.test_i9_each_row_predicts_what_its_own_path_predicts
test_i9_rows_in_two_passes_equal_rows_in_one = contract.test_i9_rows_in_two_passes_equal_rows_in_one
test_i7_the_order_of_rows_changes_nothing = contract.test_i7_the_order_of_rows_changes_nothing
test_i7_padding_rows_change_nothing = contract.test_i7_padding_rows_change_nothing
test_i10_a_committed_path_equals_a_fresh_prefill = contract.test_i10_a_committed_path_equals_a_fresh_prefill
test_i10_truncated_text_is_forgotten = contract.test_i10_truncated_text_is_forgotten
test_columns_are_ranked = contract.test_a_draft_ranks_its_columns_and_a_target_where_logits_are_dear
test_a_full_cache_is_an_error_that_leaves_it_usable = contract.test_a_full_cache_is_an_error_that_leaves_it_usable
test_a_closed_engine_says_so = contract.test_a_closed_engine_says_so_however_often_it_is_closed
test_only_computed_rows_can_be_committed = contract.test_only_computed_rows_can_be_committed
test_a_pass_that_was_not_compiled_is_refused = contract.test_a_pass_that_was_not_compiled_is_refused


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def open_engine(backend: str, tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Open:
    """Opens a checkpoint folder as an engine of the backend under test."""

    def opened(folder: Path, role: str = bindings.DRAFT, capacity: int = CAPACITY) -> Engine:
        return opened_static(folder, tmp_path_factory.mktemp("engine"), gpu, role, capacity)

    return opened


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gqa"), "gqa")


@pytest.fixture(scope="module")
def reference(gqa: Path) -> Reference:
    return transformers_logits(gqa)


@pytest.fixture(scope="module")
def one(gqa: Path, open_engine: Open) -> Engine:
    return open_engine(gqa)


engine = one  # the contract's engine of every shape is that of one here; others follow below


def opened_static(
    folder: Path, place: Path, gpu: Machine, role: str = bindings.DRAFT, capacity: int = CAPACITY
) -> StaticEngine:
    """The compact graph of a checkpoint, exported to `place` and opened."""
    checkpoint = Checkpoint(folder)
    file = place / f"{role}.onnx"
    export(checkpoint, role, capacity, file, lambda name: None, form=bindings.COMPACT)
    return static_engine(file, engine_spec(checkpoint, "tensorrt", role, capacity), gpu)


@pytest.mark.parametrize("shape", ["mha", "mqa", "head_dim 6"])
def test_uneven_chunks_of_other_shapes(shape: str, open_engine: Open, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", shape)
    contract.test_uneven_chunks_equal_transformers(open_engine(folder), transformers_logits(folder))


def test_two_caches_do_not_see_each_other(one: Engine) -> None:
    """They share the engine's stream and programs, captured or not, in any order."""
    texts = [random_text(50, seed) for seed in range(2)]
    alone = [score(one, BUSHY.batch(one.spec, 50), filled(one, text)) for text in texts]
    caches = [one.new_cache() for _ in texts]
    for start in range(0, 50, 10):
        for cache, text in zip(caches, texts, strict=True):
            one.score(causal_batch(one.spec, text[start : start + 10], start), cache)
            cache.commit(range(10))
    for cache, expected in zip(caches, alone, strict=True):
        np.testing.assert_allclose(score(one, BUSHY.batch(one.spec, 50), cache), expected, atol=TOLERANCE)


def test_a_text_up_to_the_last_slot(open_engine: Open, gqa: Path, reference: Reference) -> None:
    """A mask that is wider than what is left of the cache reads nothing behind it."""
    engine = open_engine(gqa, capacity=43)
    text = random_text(40)
    cache = filled(engine, text)
    for token in (3, 4, 5):  # one, two, then three speculative rows: the last mask has four columns
        chain = Tree((3, 4, 5), (-1, 0, 1))
        output = score(engine, chain.batch(engine.spec, 40, first=token - 3, stop=token - 2), cache)
        np.testing.assert_allclose(output, reference([[*text, *range(3, token + 1)]]), atol=TOLERANCE)
    cache.commit(range(3))
    assert cache.length == 43


def test_requests_share_a_cache_that_cannot_grow(one: Engine) -> None:
    """Rows of two requests in one pass, and what happens when more slots are promised than there are."""
    texts = [random_text(30, seed) for seed in range(2)]
    alone = [score(one, BUSHY.batch(one.spec, 30), filled(one, text)) for text in texts]
    pool = PooledEngine(one, CAPACITY + 200)
    caches = [filled(pool, text) for text in texts]
    passes = [Pass(pool, BUSHY.batch(one.spec, 30), cache) for cache in caches]
    for output, expected in zip(pool.forward(passes), alone, strict=True):
        np.testing.assert_allclose(output.logits[: len(expected)], expected, atol=TOLERANCE)
    with pytest.raises(EngineError, match=rf"caches have {CAPACITY} slots and cannot grow .* fewer requests"):
        filled(pool, random_text(CAPACITY))


def test_a_round_is_one_copy_each_way_one_launch_and_one_wait(gqa: Path, tmp_path: Path, gpu: Machine) -> None:
    engine = opened_static(gqa, tmp_path, gpu)
    cache = filled(engine, random_text(64))
    for _ in range(3):
        gpu.counts.clear()
        engine.score(BUSHY.batch(engine.spec, cache.length), cache)
        cache.commit([0, 2, 4])
    assert gpu.calls == {"graph": 1, "download": 1, "wait": 1, "launch": 1}
    gpu.counts.clear()
    engine.score(BUSHY.batch(engine.spec, cache.length), cache)
    cache.commit([0, 1, 2])
    assert "launch" not in gpu.calls, "rows that are in place were moved"


def test_a_graph_is_captured_once_for_a_shape_and_an_execution_made_once(
    gqa: Path, tmp_path: Path, gpu: Machine
) -> None:
    engine = opened_static(gqa, tmp_path, gpu)
    program = cast(OnnxProgram, engine.program)
    for cache in (engine.new_cache(), engine.new_cache()):
        prefill(engine, cache, random_text(96))
        engine.score(BUSHY.batch(engine.spec, 96, stop=5), cache)
        engine.score(BUSHY.batch(engine.spec, 96, first=5), cache)
    # 32 rows of a prompt; 8 rows that see 8 columns; 4 rows that see 8 or, as these here, 12 of 16.
    assert program.widths == [32, 8, 4]
    assert gpu.calls["captured"] == 2 * 2 * len(program.widths)  # copy and program, for each cache


def test_what_cannot_be_captured_is_queued_each_time(
    gqa: Path, tmp_path: Path, gpu: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_text(70)
    expected = contents(filled(opened_static(gqa, tmp_path, gpu), text))
    monkeypatch.setattr(gpu, "captures", False)
    gpu.counts.clear()
    engine = opened_static(gqa, tmp_path, gpu)
    np.testing.assert_allclose(contents(filled(engine, text)), expected, atol=TOLERANCE)
    assert "graph" not in gpu.calls
    assert [record.message for record in caplog.records].count(
        "a pass of 32 rows cannot be captured as a CUDA graph; it is queued each time"
    ) == 1


def test_only_rows_of_the_batch_come_back(gqa: Path, tmp_path: Path, gpu: Machine) -> None:
    """Logits lie last in their block: a copy that stops early leaves out padding rows."""
    engine = opened_static(gqa, tmp_path, gpu, bindings.TARGET)
    layout = Layout.outputs(engine.spec, PassShape(8, 8, 8))
    first, row = layout.fields[bindings.LOGITS.name].offset, 4 * engine.spec.model.vocab_size
    assert [layout.needed_bytes(rows, False) - first for rows in (1, 5, 8, 9)] == [row, 5 * row, 8 * row, 8 * row]
    output = engine.score(Tree((1, 2, 3, 4, 5), (-1, 0, 1, 2, 3)).batch(engine.spec, 0), engine.new_cache())
    assert output.logits[:5].any(axis=1).all() and not output.logits[5:].any()


def test_no_logits_come_back_where_the_ranking_is_enough(gqa: Path, tmp_path: Path, gpu: Machine) -> None:
    """At temperature 0 a verified row is one number, not a row of the vocabulary."""
    engine, whole = (opened_static(gqa, tmp_path, gpu, bindings.TARGET) for _ in range(2))
    layout = Layout.outputs(engine.spec, PassShape(8, 8, 8))
    assert layout.needed_bytes(5, True) == layout.fields[bindings.LOGITS.name].offset < layout.needed_bytes(1, False)
    batch = Tree((1, 2, 3, 4, 5), (-1, 0, 1, 2, 3)).batch(engine.spec, 0)
    expected = whole.score(batch, whole.new_cache()).logits[:5].argmax(-1)
    output = engine.score(replace(batch, ranking_only=True), engine.new_cache())
    assert output.top_ids is not None and not output.logits.any()
    np.testing.assert_array_equal(output.top_ids[:5, 0], expected)


def test_slots_out_of_order_are_refused(gqa: Path, tmp_path: Path, gpu: Machine) -> None:
    """Rows are moved in place, in order: an ancestor always has the smaller slot."""
    engine = opened_static(gqa, tmp_path, gpu)
    cache = filled(engine, [1])
    engine.score(BUSHY.batch(engine.spec, 1), cache)
    with pytest.raises(EngineError, match="ascending order, ancestors first"):
        cache.commit([0, 3, 2])


def test_memory_is_accounted_for(gqa: Path, tmp_path: Path, gpu: Machine) -> None:
    engine = opened_static(gqa, tmp_path, gpu)
    model, memory = engine.spec.model, engine.memory
    assert memory.weights == (tmp_path / "draft.onnx").stat().st_size
    assert memory.kv_cache == cache_geometry(engine.spec, 4).nbytes == engine.new_cache().buffer.nbytes  # type: ignore[attr-defined]
    assert memory.device == memory.weights + memory.kv_cache
    logits = 4 * 32 * model.vocab_size
    assert logits < memory.pinned < logits + 32 * bindings.TOP_COLUMNS * 12 + 8 * 1024
