"""Rows of several sequences in one pass of a static engine, on the host: what every engine promises, and each sequence
is scored as by an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, Reference, transformers_logits, write_checkpoint
from cuda_driver.machine import Machine
from engine_parts import BUSHY, TOLERANCE, WIDTHS, Open, engine_spec, filled, random_text, score
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_program import static_engine
from trees import Tree, trees

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime.engines.base import Engine, KVCache, Pass
from draftwood.runtime.engines.layout import mask_columns
from draftwood.runtime.engines.passes import causal_batch, prefill
from draftwood.runtime.engines.static.engine import StaticEngine
from draftwood.runtime.engines.static.memory import cache_geometry
from draftwood.runtime.engines.static.pool import SharedKVCache, StaticPool
from tests.runtime.engines import test_engines as contract

BATCH, CAPACITY, COLUMNS = 3, 256, 192  # sequences, slots of each, columns of all: regions of 192 slots, shares of 53

test_i9_each_row_predicts_what_its_own_path_predicts = contract.test_i9_each_row_predicts_what_its_own_path_predicts
test_i9_rows_in_two_passes_equal_rows_in_one = contract.test_i9_rows_in_two_passes_equal_rows_in_one
test_i7_the_order_of_rows_changes_nothing = contract.test_i7_the_order_of_rows_changes_nothing
test_i7_padding_rows_change_nothing = contract.test_i7_padding_rows_change_nothing
test_i10_a_committed_path_equals_a_fresh_prefill = contract.test_i10_a_committed_path_equals_a_fresh_prefill
test_i10_truncated_text_is_forgotten = contract.test_i10_truncated_text_is_forgotten
test_a_closed_engine_says_so = contract.test_a_closed_engine_says_so_however_often_it_is_closed
test_columns_are_ranked = contract.test_a_draft_ranks_its_columns_and_a_target_where_logits_are_dear
test_only_computed_rows_can_be_committed = contract.test_only_computed_rows_can_be_committed
test_a_pass_that_was_not_compiled_is_refused = contract.test_a_pass_that_was_not_compiled_is_refused


pytestmark = pytest.mark.usefixtures("no_faults")


def opened(folder: Path, place: Path, gpu: Machine, role: str = bindings.DRAFT, max_batch: int = BATCH) -> StaticEngine:
    """The compact graph of a checkpoint for so many sequences, exported to `place` and opened."""
    checkpoint = Checkpoint(folder)
    file = place / f"{role}-{max_batch}.onnx"
    export(checkpoint, role, CAPACITY, file, lambda name: None, form=bindings.COMPACT, max_batch=max_batch)
    spec = replace(engine_spec(checkpoint, "tensorrt", role, CAPACITY), max_batch=max_batch)
    return static_engine(file, spec, gpu, columns=COLUMNS if max_batch > 1 else None)


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gqa"), "gqa")


@pytest.fixture(scope="module")
def reference(gqa: Path) -> Reference:
    return transformers_logits(gqa)


@pytest.fixture(scope="module")
def open_engine(tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Open:
    def open_one(folder: Path, role: str = bindings.DRAFT, capacity: int = CAPACITY) -> Engine:
        assert capacity <= CAPACITY  # the engine has as many slots in any case
        engine = opened(folder, tmp_path_factory.mktemp("engine"), gpu, role)
        new_cache = engine.new_cache

        def replacing(
            salt: str | None = None,
        ) -> KVCache:  # tests of the contract close none: the oldest one makes room
            if len(engine.pool._caches) == BATCH:
                next(iter(engine.pool._caches.values())).close()
            return new_cache()

        engine.new_cache = replacing  # type: ignore[method-assign]
        return engine

    return open_one


@pytest.fixture(scope="module")
def one(gqa: Path, open_engine: Open) -> Engine:
    return open_engine(gqa)


engine = one  # the contract's engine of every shape


@pytest.fixture(scope="module")
def alone(gqa: Path, tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Engine:
    """What scores one sequence."""
    return opened(gqa, tmp_path_factory.mktemp("alone"), gpu, max_batch=1)


@pytest.fixture
def pool(one: Engine) -> Iterator[StaticPool]:
    pool = cast(StaticEngine, one).pool
    close_all(pool)
    yield pool
    close_all(pool)


def close_all(pool: StaticPool) -> None:
    for cache in list(pool._caches.values()):
        cache.close()


class Mirrored:
    """A sequence of a pool and the same one on an engine of its own; the pool's passes are checked against it."""

    def __init__(self, shared: Engine, alone: Engine) -> None:
        self.alone = alone
        self.cache, self.expected_cache = shared.new_cache(), alone.new_cache()
        self.tree, self.scored = Tree((), ()), 0

    def wanted(self, rows: int, spec: Any) -> Any:
        """A batch of the next `rows` rows of its tree, whose earlier ones are speculative."""
        stop = min(len(self.tree.tokens), self.scored + rows)
        return self.tree.batch(spec, self.cache.length, self.scored, stop)

    def prepare(self, tree: Tree, commit: bool) -> None:
        """Commit a path where that is asked for or nothing is left to score; have a tree."""
        if self.scored and (commit or self.scored == len(self.tree.tokens)):
            self.commit(self.tree.path(self.scored - 1))
        self.tree = self.tree if self.tree.tokens else tree

    def check(self, batch: Any, found: Any) -> None:
        expected = self.alone.score(batch, self.expected_cache)
        rows = batch.num_tokens if len(batch.output_rows) > 1 else 1
        np.testing.assert_allclose(found.logits[:rows], expected.logits[:rows], atol=TOLERANCE)
        assert len(found.logits) == rows and (found.top_ids[:, 0] == found.logits.argmax(-1)).all()

    def commit(self, slots: Sequence[int]) -> None:
        for cache in (self.cache, self.expected_cache):
            cache.commit(slots)
        self.tree, self.scored = Tree((), ()), 0


def test_prompts_trees_and_single_rows_share_a_pass(one: Engine, pool: StaticPool, alone: Engine) -> None:
    """Of different lengths, at different places, one of them with rows of an earlier pass."""
    long, short, fresh = (Mirrored(one, alone) for _ in range(3))
    for mirrored, length in ((long, 120), (short, 7)):
        for cache, owner in ((mirrored.cache, one), (mirrored.expected_cache, alone)):
            prefill(owner, cache, random_text(length, length))
    short.tree = BUSHY
    first = short.wanted(3, pool.spec)
    short.check(first, one.score(first, short.cache))
    short.scored = 3
    batches = [
        Tree((7,), (-1,)).batch(pool.spec, 120),
        short.wanted(5, pool.spec),
        causal_batch(pool.spec, random_text(15, 1), 0),
    ]
    group = (long, short, fresh)
    passes = [Pass(one, batch, each.cache) for batch, each in zip(batches, group, strict=True)]
    for each, batch, output in zip(group, batches, one.forward(passes), strict=True):
        each.check(batch, output)
    for each, slots in zip(group, ([0], [0, 2, 4, 6, 7], range(15)), strict=True):
        each.commit(slots)
    for each in group:
        each.tree = BUSHY
        batch = each.wanted(8, pool.spec)
        each.check(batch, one.score(batch, each.cache))


def run_together(one: Engine, group: Sequence[Mirrored], rows: int) -> None:
    """The next rows of everybody's tree in one pass."""
    batches = [each.wanted(rows, one.spec) for each in group]
    passes = [Pass(one, batch, each.cache) for batch, each in zip(batches, group, strict=True)]
    for each, batch, output in zip(group, batches, one.forward(passes), strict=True):
        each.check(batch, output)
        each.scored += batch.num_tokens


step = st.tuples(st.sampled_from(["pass", "pass", "commit", "leave"]), st.integers(0, 7), st.integers(1, 9), trees())


@settings(max_examples=20, derandomize=True)
@given(steps=st.lists(step, min_size=4, max_size=14))
def test_any_mix_of_sequences_is_scored_as_alone(steps: list[Any], one: Engine, alone: Engine) -> None:
    """Sequences come and go, draw rows over several passes, and commit what they like; `chosen` says whose turn it is,
    as bits."""
    close_all(cast(StaticEngine, one).pool)
    group = [Mirrored(one, alone) for _ in range(BATCH)]
    for kind, chosen, rows, tree in steps:
        turn = [number for number in range(BATCH) if chosen >> number & 1]
        if kind == "leave":
            for number in turn:
                group[number].cache.close()  # its region is the next one's
                group[number] = Mirrored(one, alone)
            continue
        for number in turn:
            group[number].prepare(tree, kind == "commit")
        if kind == "pass" and turn:
            run_together(one, [group[number] for number in turn], rows)


def test_a_round_of_all_is_one_launch_one_copy_each_way_and_one_wait(gqa: Path, tmp_path: Path, gpu: Machine) -> None:
    """Commits of all sequences are one move, queued with the next pass."""
    engine = opened(gqa, tmp_path, gpu)
    caches = [filled(engine, random_text(10 * (number + 1), number)) for number in range(BATCH)]
    for _ in range(3):
        gpu.counts.clear()
        engine.forward([Pass(engine, BUSHY.batch(engine.spec, cache.length), cache) for cache in caches])
        for cache in caches:
            cache.commit([0, 2, 4])
    assert gpu.calls == {"launch": 1, "graph": 1, "download": 1, "wait": 1}


def test_the_speculative_area_is_used_again(one: Engine, pool: StaticPool, alone: Engine) -> None:
    """Rows move together where a pass is narrower for it, and those of sequences in the middle of a tree are kept."""
    keeper, other = Mirrored(one, alone), Mirrored(one, alone)
    keeper.tree = Tree((1, 2, 3, 4), (-1, 0, 1, 2))
    for _ in range(4):
        other.tree = BUSHY
        run_together(one, [other], 8)
        run_together(one, [keeper], 1)  # behind rows that are garbage in a moment
        other.commit([0, 2])
        assert pool._used <= mask_columns(8, keeper.scored + 8, COLUMNS)
    assert pool._used < 4 * 8


def test_only_wanted_rows_come_back(gqa: Path, tmp_path: Path, gpu: Machine) -> None:
    """Of two pieces of prompt two rows of logits, first in their block, though thirty rows are computed."""
    engine = opened(gqa, tmp_path, gpu)
    caches = [engine.new_cache() for _ in range(2)]
    batches = [causal_batch(engine.spec, random_text(15, seed), 0) for seed in range(2)]
    outputs = engine.forward([Pass(engine, *each) for each in zip(batches, caches, strict=True)])
    assert [output.logits.shape for output in outputs] == [(1, VOCAB_SIZE)] * 2
    row, ranks = 4 * VOCAB_SIZE, 12 * 32 * bindings.TOP_COLUMNS
    assert gpu.calls["download"] == 1 and 2 * row <= gpu.counts["download bytes"] <= 2 * row + ranks


def test_limits_of_a_sequence_are_its_own(one: Engine, pool: StaticPool) -> None:
    """What one asks for beyond its region or its share harms nobody, itself included."""
    greedy, other = pool.new_cache(), pool.new_cache()
    chain = Tree(tuple(range(60)), tuple(range(-1, 59)))
    for first in range(0, 48, 16):
        one.score(chain.batch(pool.spec, 0, first, first + 16), greedy)
    with pytest.raises(EngineError, match=r"56 speculative rows exceed the 53 .* each of 3 sequences: .*--widths"):
        one.score(chain.batch(pool.spec, 0, 48, 56), greedy)
    other_text = random_text(190)
    prefill(one, other, other_text)
    with pytest.raises(EngineError, match=r"194 rows exceed the 192 cache slots .* for a sequence: .*--max-length"):
        one.score(causal_batch(pool.spec, [1, 2, 3, 4], 190), other)
    one.score(causal_batch(pool.spec, [1, 2], 190), other)
    other.commit([0, 1])
    assert (greedy.speculative, other.length) == (48, 192)


def test_every_sequence_may_use_its_whole_share_at_once(one: Engine, pool: StaticPool) -> None:
    caches = [pool.new_cache() for _ in range(BATCH)]
    chain = Tree(tuple(range(pool.share)), tuple(range(-1, pool.share - 1)))
    for row in range(pool.share):
        one.forward([Pass(one, chain.batch(pool.spec, 0, row, row + 1), cache) for cache in caches])
    assert {cache.speculative for cache in caches} == {pool.share}


def test_a_sequence_more_than_the_engine_was_built_for(one: Engine, pool: StaticPool) -> None:
    held = [pool.new_cache() for _ in range(BATCH)]
    with pytest.raises(EngineError, match=r"all 3 sequences .* are in use: run fewer .*--max-batch"):
        pool.new_cache()
    held[1].close()
    again = pool.new_cache()
    with pytest.raises(EngineError, match="this cache was closed"):
        one.score(causal_batch(one.spec, [1, 2], 0), held[1])
    held[1].close()  # changes nothing: its region is another's by now
    one.score(causal_batch(one.spec, [1, 2], 0), again)
    with pytest.raises(EngineError, match="all 3 sequences"):
        pool.new_cache()


def test_threads_do_not_see_each_other(one: Engine, pool: StaticPool, alone: Engine) -> None:
    """Each with a sequence of its own; outputs are read while another's pass runs."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            text, cache = random_text(12, seed), one.new_cache()
            for _ in range(8):
                cache.truncate(0)
                prefill(one, cache, text)
                found = one.score(BUSHY.batch(one.spec, 12), cache).logits[:8]
                np.testing.assert_allclose(found, wanted[seed], atol=TOLERANCE)
            cache.close()
        except BaseException as error:
            failures.append(error)

    wanted = [score(alone, BUSHY.batch(alone.spec, 12), filled(alone, random_text(12, seed))) for seed in range(3)]
    threads = [Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_memory_is_that_of_every_sequence(gqa: Path, tmp_path: Path, gpu: Machine) -> None:
    engine, single = opened(gqa, tmp_path, gpu), opened(gqa, tmp_path, gpu, max_batch=1)
    model = engine.spec.model
    assert engine.memory.kv_cache == cache_geometry(engine.spec, 4).nbytes == BATCH * single.memory.kv_cache
    assert engine.memory.kv_cache == 2 * model.num_layers * BATCH * CAPACITY * model.num_kv_heads * model.head_dim * 4
    assert engine.pool is engine.pool and engine.new_cache().__class__ is SharedKVCache
    assert "enqueue" not in gpu.calls
    assert WIDTHS[-1] == 32 and engine.pool.share == 53
