"""The native engine: the same bits for a row wherever it is scored, in every precision of weights and of the cache.
`test_engines.py` holds it to the contract."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bundling import DEMO
from checkpoints import SHAPES, VOCAB_SIZE, edit_weights, trained_head, write_checkpoint
from engine_parts import BUSHY, contents, filled, random_text, score
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit import assert_a_tree_changes_no_bit, greedy_texts, one_by_one
from native_parts import PRECISIONS, held, open_native, spec_of
from numpy.typing import NDArray
from scipy.linalg import hadamard
from trees import Tree, trees

from benchmarks.tools.torch_engine import TorchEngine
from draftwood.builder.options import BuildOptions
from draftwood.builder.parity import largest_difference, rows_of
from draftwood.builder.pipeline import build
from draftwood.builder.reference import score_rows
from draftwood.models.bindings import INTEGERS, LOW_BIT, output_names
from draftwood.models.head_config import HeadConfig
from draftwood.plugins.native.packing import PAIR_BLOCK
from draftwood.runtime import SpeculativeConfig
from draftwood.runtime.engines.backends import NATIVE, bits_of_weight, slot_bytes
from draftwood.runtime.engines.base import Pass, TokenBatch
from draftwood.runtime.engines.native.cache import NativeKVCache
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.passes import causal_batch, prefill
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.engines.shared.sequence import PANEL

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
LONG = 560  # tokens: two parts of 256 slots and more, which attention computes apart
TEXT = random_text(LONG)
MODELS = ("gqa", "mha", "mqa", "demo target")  # of the bits; what every shape computes is compared with torch
# Odd head sizes leave a matrix whose inputs are no multiple of a block: those are refused (test_quantize.py).
KINDS = [(model, kind) for model in SHAPES for kind in PRECISIONS if not (kind in LOW_BIT and "head_dim" in model)]
few = settings(max_examples=6)
prefixes = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40)


def opened(model: str, precision: str, folder: Path, threads: int = 2, cache: str = "fp32") -> NativeEngine:
    source = write_checkpoint(folder / "checkpoint", model) if model in SHAPES else DEMO / "target"
    weights = held(source, precision)
    spec = spec_of(weights, "target", precision, WIDTHS, 1024)
    return open_native(weights, replace(spec, cache_precision=cache), folder, threads)


COMBINATIONS = [(model, precision, "fp32") for model in MODELS for precision in PRECISIONS]
COMBINATIONS += [
    ("gqa", "int8", "fp16"),
    ("demo target", "int4", "fp16"),
    ("mqa", "bf16", "int8"),
    ("mha", "int4", "int8"),
]


@pytest.fixture(scope="module", params=COMBINATIONS, ids=str)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    model, precision, cache = request.param
    return opened(model, precision, tmp_path_factory.mktemp("native"), cache=cache)


@few
@given(tree=trees(), prefix=prefixes, data=st.data())
def test_a_row_has_the_same_bits_alone_and_in_a_tree(
    tree: Tree, prefix: list[int], data: st.DataObject, engine: NativeEngine
) -> None:
    assert_a_tree_changes_no_bit(engine, prefix, tree, data)


def passes_of(engine: NativeEngine, chunk: int) -> list[NDArray[np.float32]]:
    """A text that outgrows the first buffer, a tree whose rows see different slots, and rows one by one."""
    cache = engine.new_cache()
    for start in range(0, LONG, chunk):
        prefill(engine, cache, TEXT[start : start + chunk])
    results = [contents(cache), score(engine, BUSHY.batch(engine.spec, LONG), cache)]
    cache.commit([0, 2, 4])
    for token in (5, 6):
        results.append(score(engine, causal_batch(engine.spec, [token], cache.length), cache))
        cache.commit([0])
    return [*results, contents(cache)]


@pytest.mark.parametrize("cache", NATIVE.caches)
@pytest.mark.parametrize(("model", "precision"), [("mqa", "fp32"), ("head_dim 12", "fp32"), ("demo target", "int4")])
def test_threads_chunks_and_capacity_change_no_bit(model: str, precision: str, cache: str, tmp_path: Path) -> None:
    """One thread computes a unit of attention at once, and several threads the parts of one."""
    engine = opened(model, precision, tmp_path, 1, cache)
    expected = passes_of(engine, LONG)
    for threads, chunk in ((1, 7), (2, LONG), (3, 64), (8, LONG), (70, 100)):
        several = NativeEngine(tmp_path / "target.weights", engine.spec, threads)
        for found, alone in zip(passes_of(several, chunk), expected, strict=True):
            np.testing.assert_array_equal(found, alone)
        several.close()
    held = filled(engine, TEXT)
    assert held.capacity == 1024
    held.truncate(100)
    held.shrink(100)
    assert held.capacity == 256
    np.testing.assert_array_equal(contents(held), expected[0][:, :, :, :100])


@pytest.mark.parametrize(("model", "precision"), KINDS)
def test_every_shape_computes_what_torch_computes(model: str, precision: str, tmp_path: Path) -> None:
    """Biases, tied embeddings, odd head sizes, inner sizes that are filled up: on the weights that the engine holds."""
    weights = held(write_checkpoint(tmp_path / "checkpoint", model), precision)
    spec = spec_of(weights, "target", precision, WIDTHS, 256)
    engine = open_native(weights, spec, tmp_path)
    reference = score_rows(weights.tensor, weights.config, rows_of(spec))
    limits = {"bf16": ("bf16", 0.03), **{integers: (integers, 0.1) for integers in INTEGERS}}
    rounding, most = limits.get(precision, ("fp32", 1e-5))
    assert largest_difference(engine, reference, rounding) < most


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_of_a_weight_are_those_of_the_file(precision: str, tmp_path: Path) -> None:
    """Whose matrices have whole panels; int8 fills the inner size up, bf16 the inputs of its last matrix."""
    engine = opened("demo target", precision, tmp_path)
    parts = [array.nbytes for name, array in engine._weights.items() if name.endswith((".weights", ".scales"))]
    model = engine.spec.model
    inner, hidden = model.intermediate_size, model.hidden_size
    last = -(-inner // PAIR_BLOCK) * PAIR_BLOCK if precision == "bf16" else inner
    of_layer = hidden * (2 * model.query_size + 2 * model.kv_size + 2 * inner + last)
    tables = 2 * hidden * model.vocab_size  # the embedding and the projection
    weights = model.num_layers * of_layer + tables
    expected = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8.5, "int6": 7, "int5": 6}.get(
        precision, 5 + 3.5 * tables / weights
    )
    assert bits_of_weight(engine.spec) == pytest.approx(8 * sum(parts) / weights) == pytest.approx(expected)


@pytest.mark.parametrize(("layers", "tied"), [(0, False), (1, True), (2, False), (3, True)])
@pytest.mark.parametrize("model", ["gqa", "head_dim 6"])  # 30 hidden numbers: panels that are filled up
def test_every_head_says_what_torch_says_and_the_same_in_any_company(
    model: str, layers: int, tied: bool, tmp_path: Path
) -> None:
    weights = held(write_checkpoint(tmp_path / "checkpoint", model), "fp32")
    head = trained_head(HeadConfig(weights.config.hidden_size, layers, tied), layers)
    spec = replace(spec_of(weights, "draft", "fp32", WIDTHS, 256), outputs=output_names("draft", True))
    engine = open_native(weights, spec, tmp_path, head=head)
    tree = Tree(tuple(range(2, 21)), tuple(range(-1, 18)))
    together = engine.score(tree.batch(spec, 0), engine.new_cache()).acceptance
    reference = TorchEngine(weights.tensor, spec, head=head)
    expected = reference.score(tree.batch(spec, 0), reference.new_cache()).acceptance
    assert together is not None and expected is not None
    np.testing.assert_allclose(together[:19], expected[:19], atol=1e-5)
    cache = engine.new_cache()
    for row, token in enumerate(tree.tokens):
        alone = engine.score(causal_batch(spec, [token], row), cache).acceptance
        assert alone is not None and alone[0] == together[row]
        cache.commit([0])


def test_what_is_stored_is_what_was_computed_rounded_and_logits_stay_close(tmp_path: Path) -> None:
    """The keys and values of the first layer, which no attention has changed yet. Keys of int8 are spread."""
    stored, logits = {}, {}
    for cache in NATIVE.caches:
        engine = opened("head_dim 6", "fp32", tmp_path / cache, cache=cache)
        text = filled(engine, TEXT[:300])
        stored[cache] = contents(text)[:2]
        logits[cache] = score(engine, BUSHY.batch(engine.spec, 300), text)
    exact = stored["fp32"]
    np.testing.assert_array_equal(stored["fp16"], exact.astype(np.float16).astype(np.float32))
    keys, values = exact
    pairs = keys.reshape(*keys.shape[:-1], 3, 2)  # 2 is the largest power of two that divides 6
    spread = np.stack(((pairs @ hadamard(2)).reshape(keys.shape), values))
    step = np.abs(spread).max(-1, keepdims=True) / 127
    assert np.all(np.abs(stored["int8"] - spread) <= 0.5001 * step) and np.any(stored["int8"] != spread)
    size = np.abs(logits["fp32"]).max()
    differences = {cache: np.abs(found - logits["fp32"]).max() / size for cache, found in logits.items()}
    assert 0 < differences["fp16"] < 1e-3 and differences["fp16"] < differences["int8"] < 3e-2


def test_keys_of_8_bits_keep_what_is_small_beside_a_few_huge_numbers(tmp_path: Path) -> None:
    """Qwen2.5 has keys whose biases are a hundred times as large as what a token adds."""
    folder = write_checkpoint(tmp_path / "checkpoint", "biases", head_dim=64)

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("k_proj.bias")]:
            tensors[name][5::64], tensors[name][31::64] = 20, 100  # which positions turn quickly, and slowly

    edit_weights(folder, enlarge)
    weights, logits = held(folder, "fp32"), {}
    spec = spec_of(weights, "target", "fp32", WIDTHS, 1024)
    open_native(weights, spec, tmp_path).close()
    for cache in ("fp32", "int8"):
        engine = NativeEngine(tmp_path / "target.weights", replace(spec, cache_precision=cache), 2)
        logits[cache] = score(engine, BUSHY.batch(spec, 300), filled(engine, TEXT[:300]))
    size = np.abs(logits["fp32"]).max()
    assert np.abs(logits["int8"] - logits["fp32"]).max() < 3e-2 * size  # 4e-2 and more without either remedy


@pytest.mark.parametrize("cache", NATIVE.caches)
def test_what_is_no_number_stays_with_the_row_that_has_it(cache: str, tmp_path: Path) -> None:
    """A value in the cache that is no number, times a weight of 0, would reach every row that reads its panel."""
    folder = write_checkpoint(tmp_path / "checkpoint", "gqa")

    def overflow(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        embedding[:, 0], embedding[7, 0] = 0, 9
        for name in ("k_proj", "v_proj"):
            tensors[f"model.layers.0.self_attn.{name}.weight"][:, 0] = 3e38  # which only token 7 has a number for

    edit_weights(folder, overflow)
    weights = held(folder, "fp32")
    spec = replace(spec_of(weights, "target", "fp32", WIDTHS, 1024), cache_precision=cache)
    engine = open_native(weights, spec, tmp_path, 2)

    def scored(token: int) -> NDArray[np.float32]:
        """Each row attends to itself only."""
        batch = TokenBatch.pad([1, token, 2, 3], [0, 0, 0, 0], np.eye(4, dtype=np.bool_), 4)
        return score(engine, batch, engine.new_cache())

    whole, damaged = scored(1), scored(7)
    assert np.isfinite(whole).all() and not np.array_equal(damaged[1], whole[1])
    np.testing.assert_array_equal(damaged[[0, 2, 3]], whole[[0, 2, 3]])


def poison(storage: NativeKVCache, own: set[int]) -> None:
    """Make every panel but these one of numbers that no product survives, even times nothing."""
    panels = np.array([panel for panel in range(storage.rows.keys.shape[2]) if panel not in own])
    slots = (panels[:, None] * PANEL + np.arange(PANEL)).ravel()
    if storage.rows.scales is None:
        storage.rows.keys[:, :, panels] = np.nan
        storage.rows.values[:, :, :, slots] = np.nan
    else:
        storage.rows.scales[..., slots] = np.nan


@pytest.mark.parametrize("cache", NATIVE.caches)
def test_in_a_pool_no_neighbour_changes_a_bit_and_none_is_read(cache: str, tmp_path: Path) -> None:
    """Texts whose rows lie between each other's, in shared passes and moved together, as each alone: so a row costs
    what it costs alone. And bit for bit what it was after rows that were moved together."""
    engine = opened("gqa", "int8", tmp_path, cache=cache)
    texts = [random_text(60, seed) for seed in (1, 2, 3)]
    alone = [one_by_one(engine, text, [5, 6])[-1].logits for text in texts]
    pool = PooledEngine(engine, 1200)
    caches = [pool.new_cache() for _ in texts]
    for start in range(0, 60, 6):
        batches = [causal_batch(pool.spec, text[start : start + 6], start) for text in texts]
        pool.forward([Pass(pool, batch, each) for batch, each in zip(batches, caches, strict=True)])
        for each in caches:
            each.commit(range(6))
    storage = pool._storage
    assert isinstance(storage, NativeKVCache)
    for each, expected in zip(caches, alone, strict=True):
        arrays = [array for array in (storage.rows.keys, storage.rows.values, storage.rows.scales) if array is not None]
        kept = [array.copy() for array in arrays]
        poison(storage, {*(each.slots // PANEL).tolist(), *range(storage.speculative // PANEL, 75)})
        np.testing.assert_array_equal(score(pool, causal_batch(pool.spec, [5, 6], 60), each)[0], expected)
        each.truncate(60)
        for array, content in zip(arrays, kept, strict=True):
            array[:] = content
    caches[0].truncate(10)  # its other rows are garbage now, and a compaction moves the others' together
    live = pool._find_live()
    pool._compact(live)
    assert max(each.slots.max() for each in caches) == live.sum() - 1
    assert all(np.all(np.diff(each.slots) == 1) for each in caches), "each sequence's rows lie together"
    for each, expected in zip(caches[1:], alone[1:], strict=True):
        last = prefill(pool, each, [5, 6])
        assert last is not None
        np.testing.assert_array_equal(last.logits[0], expected)


@pytest.mark.parametrize("cache", NATIVE.caches)
@pytest.mark.parametrize("model", SHAPES)
def test_the_bytes_of_a_slot_are_those_of_the_arrays(model: str, cache: str, tmp_path: Path) -> None:
    engine = opened(model, "fp32", tmp_path, cache=cache)
    held = engine.new_cache()
    scales = 0 if held.rows.scales is None else held.rows.scales.nbytes
    assert held.capacity * slot_bytes(engine.spec) == held.rows.keys.nbytes + held.rows.values.nbytes + scales


@pytest.mark.parametrize(
    ("precision", "cache", "parity"),
    [
        ("fp32", "fp32", 1e-5),
        ("fp16", "fp32", 1e-5),
        ("bf16", None, 0.01),  # fp16 by default: test_native_refusals.py
        ("bf16", "int8", 0.02),
        ("int8", "fp16", 0.05),
        ("int4", "fp32", 0.05),
    ],
)
def test_a_bundle_records_its_formats_and_its_speculative_text_is_plain_text(
    precision: str, cache: str | None, parity: float, tmp_path: Path
) -> None:
    """Every format has its own plain text, and keeps it."""
    folders = (DEMO / "target", DEMO / "draft", tmp_path / "bundle")
    manifest = build(
        BuildOptions(*folders, "native", precision, cache_precision=cache), lambda step: lambda: None
    ).manifest
    target, draft = manifest.engines["target"], manifest.engines["draft"]
    assert (target.backend, target.precision, draft.backend, draft.precision) == ("native", precision, "native", "int8")
    written = "" if cache == "fp32" else cache or "fp16"  # as activations: older releases read such a bundle
    assert target.cache_precision == draft.cache_precision == written
    assert target.widths == (*range(1, 17), 24, 32, 48, 64)
    assert {"target.weights", "draft.weights"} < manifest.files.keys()
    assert not [name for name in manifest.files if name.endswith(".so")], "a bundle holds no executable code"
    assert manifest.parity["target"] < parity
    prompts = ["def fibonacci(n):\n", "import os\n\n", "class Stack:\n    "]
    plain = greedy_texts(folders[2], None, prompts, 80)
    for config in (
        SpeculativeConfig("chain", max_draft_len=4, budget="fixed"),
        SpeculativeConfig("topk", max_total_draft_tokens=15, max_draft_len=6, budget="fixed"),
        SpeculativeConfig(),
    ):
        assert greedy_texts(folders[2], config, prompts, 80) == plain
