"""The contract of every engine, on real weights of every shape, against Hugging Face transformers on the same folder.

Engines differ from transformers, and one pass from another of a different width, by rounding alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SHAPES, VOCAB_SIZE, Reference, transformers_logits, write_checkpoint
from engine_parts import (
    BUSHY,
    CAPACITY,
    SHARED,
    STAND_IN,
    STATIC,
    TOLERANCE,
    Open,
    contents,
    engine_spec,
    filled,
    random_text,
    score,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM
from trees import Tree, trees

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime.engines.base import Engine, TokenBatch
from draftwood.runtime.engines.passes import causal_batch, prefill

pytestmark = pytest.mark.usefixtures("sound")
FEW = {STAND_IN: ("gqa", "head_dim 12"), **dict.fromkeys(STATIC, ("gqa", "mqa"))}  # shapes where many show no more
few = settings(max_examples=8)
prefixes = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


@pytest.fixture(scope="module", params=[*SHAPES, "stories"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of each shape, and one that somebody else trained."""
    if request.param == "stories":
        return Path(request.getfixturevalue("stories")) / "target"
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / str(request.param), str(request.param))


@pytest.fixture(scope="module")
def engine(folder: Path, backend: str, open_engine: Open) -> Engine:
    if folder.name not in FEW.get(backend, [folder.name]):
        pytest.skip("what stands for a device does not depend on the shape")
    return open_engine(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return transformers_logits(folder)


def test_prefill_equals_transformers(engine: Engine, reference: Reference) -> None:
    text = random_text(80)
    output = prefill(engine, engine.new_cache(), text)
    assert output is not None
    np.testing.assert_allclose(output.logits[0], reference([text])[0], atol=TOLERANCE)


def test_uneven_chunks_equal_transformers(engine: Engine, reference: Reference) -> None:
    """Every row of every chunk, whatever the chunks: 1 to 32 rows, padded or not."""
    text = random_text(90, seed=1)
    cache, found = engine.new_cache(), []
    for rows in (1, 7, 32, 3, 20, 16, 2, 9):
        chunk = Tree(tuple(text[cache.length : cache.length + rows]), tuple(range(-1, rows - 1)))
        found.append(score(engine, chunk.batch(engine.spec, cache.length), cache))
        cache.commit(range(rows))
    expected = reference([text[: length + 1] for length in range(len(text))])
    np.testing.assert_allclose(np.concatenate(found), expected, atol=TOLERANCE)


@few
@given(tree=trees(), prefix=prefixes)
def test_i9_each_row_predicts_what_its_own_path_predicts(
    tree: Tree, prefix: list[int], engine: Engine, reference: Reference
) -> None:
    """I8, I9: also where the rows have duplicate siblings, several roots, or no prefix at all."""
    cache = filled(engine, prefix)
    found = score(engine, tree.batch(engine.spec, len(prefix)), cache)
    np.testing.assert_allclose(found, reference(tree.texts(prefix)), atol=TOLERANCE)


@few
@given(tree=trees(), prefix=prefixes, data=st.data())
def test_i9_rows_in_two_passes_equal_rows_in_one(
    tree: Tree, prefix: list[int], data: st.DataObject, one: Engine
) -> None:
    """A draft grows its tree layer by layer: rows of a later pass see speculative rows of an earlier one."""
    split = data.draw(st.integers(0, len(tree.tokens) - 1))
    cache = filled(one, prefix)
    expected = score(one, tree.batch(one.spec, len(prefix)), cache)
    cache.commit([])
    first = score(one, tree.batch(one.spec, len(prefix), stop=split), cache) if split else expected[:0]
    second = score(one, tree.batch(one.spec, len(prefix), first=split), cache)
    np.testing.assert_allclose(np.concatenate((first, second)), expected, atol=TOLERANCE)


@few
@given(tree=trees(), prefix=prefixes, data=st.data())
def test_i7_the_order_of_rows_changes_nothing(tree: Tree, prefix: list[int], data: st.DataObject, one: Engine) -> None:
    """Any order with parents first, siblings included."""
    keys = data.draw(st.permutations(range(len(tree.tokens))))
    order = sorted(keys, key=lambda row: [keys.index(each) for each in tree.path(row)])
    rank = {row: index for index, row in enumerate(order)} | {-1: -1}
    shuffled = Tree(tuple(tree.tokens[row] for row in order), tuple(rank[tree.parents[row]] for row in order))
    cache = filled(one, prefix)
    expected = score(one, tree.batch(one.spec, len(prefix)), cache)
    cache.commit([])
    found = score(one, shuffled.batch(one.spec, len(prefix)), cache)
    np.testing.assert_allclose(found, expected[order], atol=TOLERANCE)


def test_i7_padding_rows_change_nothing(one: Engine) -> None:
    """The same three rows, alone (narrowest pass) or with up to 29 padding rows, and what follows them."""
    text, tree = random_text(20), Tree((5, 6, 7), (-1, 0, 0))
    batch = tree.batch(one.spec, len(text))
    results = []
    for width in (4, 8, 16, 32):
        cache = filled(one, text)
        padded = TokenBatch.pad(tree.tokens, batch.position_ids[:3], batch.mask[:3, :3], width)
        scores = score(one, padded, cache)
        assert cache.speculative == 3
        cache.commit([0, 2])
        following = score(one, causal_batch(one.spec, [11], cache.length), cache)
        results.append(np.concatenate((scores, following)))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=TOLERANCE)


@pytest.mark.parametrize("slots", [[0, 2, 4, 6, 7], [0, 1, 3], [0], []])
def test_i10_a_committed_path_equals_a_fresh_prefill(one: Engine, slots: list[int]) -> None:
    prefix = random_text(33)
    cache = filled(one, prefix)
    one.score(BUSHY.batch(one.spec, len(prefix), stop=5), cache)
    one.score(BUSHY.batch(one.spec, len(prefix), first=5), cache)
    cache.commit(slots)
    text = [*prefix, *(BUSHY.tokens[slot] for slot in slots)]
    fresh = filled(one, text)
    assert (cache.length, cache.speculative) == (len(text), 0)
    np.testing.assert_allclose(contents(cache), contents(fresh), atol=TOLERANCE)
    following = [score(one, BUSHY.batch(one.spec, len(text)), each) for each in (cache, fresh)]
    np.testing.assert_allclose(following[0], following[1], atol=TOLERANCE)


def test_i10_truncated_text_is_forgotten(one: Engine) -> None:
    text = random_text(70)
    cache = filled(one, text)
    one.score(BUSHY.batch(one.spec, cache.length), cache)
    cache.truncate(41)
    assert (cache.length, cache.speculative) == (41, 0)
    other = random_text(20, seed=5)
    prefill(one, cache, other)
    np.testing.assert_allclose(contents(cache), contents(filled(one, text[:41] + other)), atol=TOLERANCE)
    cache.truncate(1000)
    assert cache.length == 61


def test_i10_a_growing_cache_keeps_what_it_holds(backend: str, one: Engine) -> None:
    """It starts with 256 slots, doubles, and stops at the engine's capacity; speculative rows move along."""
    if backend in STATIC:
        pytest.skip("caches of this engine have their full size at once")
    text = random_text(240)
    cache = filled(one, text)
    assert cache.capacity == 256
    one.score(BUSHY.batch(one.spec, 240, stop=6), cache)
    before = contents(cache)
    one.score(BUSHY.batch(one.spec, 240, first=6), cache)  # still fits
    assert cache.capacity == 256
    long = Tree(tuple(range(20)), tuple(range(-1, 19)))
    cache.commit([0, 2, 4, 6, 7])
    one.score(long.batch(one.spec, 245, stop=8), cache)
    one.score(long.batch(one.spec, 245, first=8), cache)
    assert cache.capacity == 512
    np.testing.assert_array_equal(contents(cache)[:, :, :, :240], before)
    cache.commit(range(20))
    fresh = filled(one, [*text, *(BUSHY.tokens[row] for row in (0, 2, 4, 6, 7)), *range(20)])
    np.testing.assert_allclose(contents(cache), contents(fresh), atol=TOLERANCE)
    prefill(one, cache, random_text(300))
    assert (cache.length, cache.capacity) == (565, CAPACITY)


def test_a_draft_ranks_its_columns_and_a_target_where_logits_are_dear(gqa: Path, open_engine: Open) -> None:
    draft, target = open_engine(gqa), open_engine(gqa, bindings.TARGET)
    batch = BUSHY.batch(draft.spec, 0)
    output, plain = draft.score(batch, draft.new_cache()), target.score(batch, target.new_cache())
    assert (plain.top_ids is not None) is (bindings.TOP_IDS.name in target.spec.outputs)
    np.testing.assert_allclose(output.logits, plain.logits, atol=1e-6)
    assert output.top_ids is not None and output.top_logprobs is not None
    logprobs = torch.log_softmax(torch.from_numpy(plain.logits.astype(np.float64)), dim=-1).numpy()
    best = np.argsort(-logprobs, axis=-1)[:, : bindings.TOP_COLUMNS]
    np.testing.assert_array_equal(output.top_ids, best)
    np.testing.assert_allclose(output.top_logprobs, np.take_along_axis(logprobs, best, -1), atol=1e-5)
    np.testing.assert_array_equal(output.rows([2, 0]).logits, output.logits[[2, 0]])
    dtypes = [array.dtype for array in (output.logits, output.top_ids, output.top_logprobs)]
    assert dtypes == [np.float32, np.int64, np.float32]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shards", [1, 3])
def test_how_weights_are_stored_changes_nothing(dtype: str, shards: int, open_engine: Open, tmp_path: Path) -> None:
    """16-bit weights are widened exactly, and shards are one checkpoint: bit for bit the fp32 file's logits."""
    stored = write_checkpoint(tmp_path / "stored", "biases", dtype=dtype, shards=shards)
    assert (shards > 1) == (stored / "model.safetensors.index.json").is_file()
    LlamaForCausalLM.from_pretrained(stored, dtype=torch.float32).save_pretrained(tmp_path / "wide")
    batch = causal_batch(engine_spec(Checkpoint(stored), "", bindings.DRAFT), random_text(30), 0)
    logits = []
    for folder in (stored, tmp_path / "wide"):
        engine = open_engine(folder)
        logits.append(engine.score(batch, engine.new_cache()).logits)
    np.testing.assert_array_equal(logits[0], logits[1])


def test_a_text_up_to_the_last_slot(backend: str, gqa: Path, open_engine: Open, gqa_reference: Reference) -> None:
    """A mask that is wider than what is left of the cache reads nothing after it."""
    engine, text = open_engine(gqa, capacity=43), random_text(189 if backend == SHARED else 40)
    cache = filled(engine, text)
    for token in (3, 4, 5):  # one, two, then three speculative rows: the last mask has four columns
        chain = Tree((3, 4, 5), (-1, 0, 1))
        output = score(engine, chain.batch(engine.spec, len(text), first=token - 3, stop=token - 2), cache)
        np.testing.assert_allclose(output, gqa_reference([[*text, *range(3, token + 1)]]), atol=TOLERANCE)
    cache.commit(range(3))
    assert cache.length == len(text) + 3


def test_a_full_cache_is_an_error_that_leaves_it_usable(backend: str, gqa: Path, open_engine: Open) -> None:
    if backend == SHARED:
        pytest.skip("test_static_engine.py: a region, and a share of the speculative rows")
    engine = open_engine(gqa, capacity=40)
    text = random_text(36)
    cache = filled(engine, text)
    with pytest.raises(EngineError, match=r"44 rows exceed .* 40 cache slots.*--max-length"):
        engine.score(BUSHY.batch(engine.spec, 36), cache)
    assert (cache.length, cache.speculative) == (36, 0)
    prefill(engine, cache, text[:4])
    np.testing.assert_allclose(contents(cache), contents(filled(engine, text + text[:4])), atol=TOLERANCE)


def test_a_closed_engine_says_so_however_often_it_is_closed(gqa: Path, open_engine: Open) -> None:
    """Also over caches whose passes were made, or captured, before."""
    engine = open_engine(gqa)
    cache = filled(engine, random_text(5))
    batch = BUSHY.batch(engine.spec, 5)
    for _ in range(3):
        engine.score(batch, cache)
        cache.commit([])
    for _ in range(2):
        engine.close()
        with pytest.raises(EngineError, match="the draft engine was closed"):
            engine.score(batch, cache)
    assert (cache.length, cache.speculative) == (5, 0)


@pytest.mark.parametrize("slots", [[8], [0, 9], [-1]])
def test_only_computed_rows_can_be_committed(one: Engine, slots: list[int]) -> None:
    cache = filled(one, random_text(5))
    one.score(BUSHY.batch(one.spec, 5), cache)
    with pytest.raises(EngineError, match="not computed; 8 speculative rows"):
        cache.commit(slots)
    assert (cache.length, cache.speculative) == (5, 8)


def test_a_pass_that_was_not_compiled_is_refused(one: Engine) -> None:
    with pytest.raises(EngineError, match=r"33 rows do not fit .* 32.*--widths"):
        causal_batch(one.spec, random_text(33), 0)
    odd = TokenBatch.pad([1, 2, 3], [0, 1, 2], np.tri(3, dtype=np.bool_), 3)
    with pytest.raises(EngineError, match=r"mask of 3 x 3 .* 2, 4, 8, 16, 32 rows"):
        one.score(odd, one.new_cache())
    cache = one.new_cache()
    one.score(BUSHY.batch(one.spec, 0), cache)
    with pytest.raises(EngineError, match="the 8 speculative rows before them"):
        one.score(BUSHY.batch(one.spec, 0), cache)
