"""Keys and values of the native engine in fp16 and in codes of 8 bits, and attention in parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bundling import DEMO
from checkpoints import SHAPES, VOCAB_SIZE, edit_weights, write_checkpoint
from engine_parts import contents
from lowbit import greedy_texts, one_by_one
from native_parts import held, open_native, spec_of
from numpy.typing import NDArray
from trees import Tree

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.errors import BundleError, ConfigError
from draftwood.runtime import LLM, SpeculativeConfig
from draftwood.runtime.bundle.bundle import MANIFEST, Manifest
from draftwood.runtime.bundle.checks import check_manifest
from draftwood.runtime.engines.backends import BACKENDS, NATIVE, cache_precision, slot_bytes
from draftwood.runtime.engines.base import EngineSpec, Pass, TokenBatch
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.passes import causal_batch, prefill
from draftwood.runtime.engines.shared.pool import PooledEngine

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
LONG = 560  # tokens: two parts of 256 slots and more
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB_SIZE, LONG)]
TREE = Tree((9, 40, 41, 7, 200, 8, 8, 31), (-1, 0, 0, 1, 2, 2, 4, 6))


def opened(folder: Path, cache: str, model: str = "gqa", threads: int = 2, precision: str = "fp32") -> NativeEngine:
    weights = held(write_checkpoint(folder / "checkpoint", model), precision)
    spec = spec_of(weights, "target", precision, WIDTHS, 1024)
    return open_native(weights, replace(spec, cache_precision=cache), folder, threads)


@pytest.mark.parametrize("model", ["gqa", "head_dim 12", "head_dim 6"])
def test_what_is_stored_is_what_was_computed_rounded(model: str, tmp_path: Path) -> None:
    """The keys and values of the first layer, which no attention has changed yet."""
    exact, half, codes = (contents_of(tmp_path / name, name, model)[:2] for name in ("fp32", "fp16", "int8"))
    np.testing.assert_array_equal(half, exact.astype(np.float16).astype(np.float32))
    assert np.any(half != exact)
    step = np.abs(exact).max(-1, keepdims=True) / 127
    assert np.all(np.abs(codes - exact) <= 0.5001 * step) and np.any(codes != exact)


def contents_of(folder: Path, cache: str, model: str) -> NDArray[np.float32]:
    engine = opened(folder, cache, model)
    filled = engine.new_cache()
    prefill(engine, filled, TEXT[:40])
    return contents(filled)


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
    alone = np.eye(4, dtype=np.bool_)  # each row attends to itself only

    def scored(token: int) -> NDArray[np.float32]:
        batch = TokenBatch.pad([1, token, 2, 3], [0, 0, 0, 0], alone, 4)
        return engine.score(batch, engine.new_cache()).logits.copy()

    whole, damaged = scored(1), scored(7)
    assert np.isfinite(whole).all() and not np.array_equal(damaged[1], whole[1])
    np.testing.assert_array_equal(damaged[[0, 2, 3]], whole[[0, 2, 3]])


def test_logits_stay_close_to_those_of_an_exact_cache(tmp_path: Path) -> None:
    logits = {}
    for cache in NATIVE.caches:
        engine = opened(tmp_path / cache, cache)
        filled = engine.new_cache()
        prefill(engine, filled, TEXT[:300])
        logits[cache] = engine.score(TREE.batch(engine.spec, 300), filled).logits[:8].copy()
    size = np.abs(logits["fp32"]).max()
    differences = {cache: np.abs(found - logits["fp32"]).max() / size for cache, found in logits.items()}
    assert 0 < differences["fp16"] < 1e-3 and differences["fp16"] < differences["int8"] < 3e-2


@pytest.mark.parametrize("cache", NATIVE.caches)
@pytest.mark.parametrize("model", ["mqa", "gqa", "head_dim 12"])
def test_attention_in_parts_changes_no_bit(model: str, cache: str, tmp_path: Path) -> None:
    """One thread computes a unit of attention at once, and several threads the parts of one; at one row and at eight,
    behind a context of several parts, and in a tree whose rows see different slots."""
    engine = opened(tmp_path, cache, model, 1)
    expected = passes_of(engine)
    for threads in (2, 3, 8, 70):
        several = NativeEngine(tmp_path / "target.weights", engine.spec, threads)
        for found, alone in zip(passes_of(several), expected, strict=True):
            np.testing.assert_array_equal(found, alone)
        several.close()


def passes_of(engine: NativeEngine) -> list[NDArray[np.float32]]:
    cache = engine.new_cache()
    prefill(engine, cache, TEXT)
    results = [contents(cache), engine.score(TREE.batch(engine.spec, LONG), cache).logits[:8].copy()]
    cache.commit([0, 2, 4])
    for token in (5, 6):
        one = Tree((token,), (-1,)).batch(engine.spec, cache.length)
        results.append(engine.score(one, cache).logits[:1].copy())
        cache.commit([0])
    return [*results, contents(cache)]


@pytest.mark.parametrize("cache", NATIVE.caches)
def test_in_a_pool_no_neighbour_changes_a_bit(cache: str, tmp_path: Path) -> None:
    """Two texts whose rows lie between each other's, in shared passes and moved together, as each alone."""
    engine = opened(tmp_path, cache, precision="int8")
    texts = [[int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, 60)] for seed in (1, 2)]
    alone = [one_by_one(engine, text[:1], text[1:])[-1].logits for text in texts]
    pool = PooledEngine(engine, 2048)
    caches = [pool.new_cache() for _ in texts]
    for start in range(0, 60, 6):
        batches = [causal_batch(pool.spec, text[start : start + 6], start) for text in texts]
        outputs = pool.forward([Pass(pool, batch, at) for batch, at in zip(batches, caches, strict=True)])
        for at in caches:
            at.commit(range(6))
    for output, expected in zip(outputs, alone, strict=True):
        np.testing.assert_array_equal(output.logits[-1], expected)
    caches[0].truncate(10)  # its other rows are garbage now, and a compaction moves the second text's together
    live = np.zeros(pool._storage.speculative, np.bool_)
    live[np.concatenate([each.slots for each in caches])] = True
    pool._compact(live)
    assert max(each.slots.max() for each in caches) == live.sum() - 1
    assert all(np.all(np.diff(each.slots) == 1) for each in caches), "each sequence's rows lie together"
    again = pool.new_cache()
    prefill(pool, again, texts[1][:30])
    for at, text in ((caches[1], [5, 6]), (again, [*texts[1][30:], 5, 6])):
        last = prefill(pool, at, text)
        assert last is not None
        expected = one_by_one(engine, texts[1], [5, 6])[-1].logits
        np.testing.assert_array_equal(last.logits[0], expected)


@pytest.mark.parametrize("cache", NATIVE.caches)
@pytest.mark.parametrize("model", SHAPES)
def test_the_bytes_of_a_slot_are_those_of_the_arrays(model: str, cache: str, tmp_path: Path) -> None:
    engine = opened(tmp_path, cache, model)
    held = engine.new_cache()
    scales = 0 if held.scales is None else held.scales.nbytes
    assert held.capacity * slot_bytes(engine.spec) == held.keys.nbytes + held.values.nbytes + scales


@pytest.mark.parametrize("precision", NATIVE.precisions)
def test_an_older_bundle_has_a_cache_in_fp32_whatever_its_weights(precision: str) -> None:
    model = Checkpoint(DEMO / "target").config
    spec = EngineSpec("target", "native", "", model, (1,), 64, precision, ("logits",))
    assert cache_precision(spec) == "fp32" and slot_bytes(spec) == slot_bytes(replace(spec, cache_precision="fp32"))


def options(output: Path, **more: object) -> BuildOptions:
    return BuildOptions(DEMO / "target", DEMO / "draft", output, **more)  # type: ignore[arg-type]


def test_a_bundle_records_its_caches_and_speculates_losslessly(tmp_path: Path) -> None:
    """fp16 by default; every format has its own plain text, and keeps it."""
    prompts = ["def fibonacci(n):\n", "import os\n\n"]
    sizes, digests = {}, set()
    for cache in (None, *NATIVE.caches):
        folder = tmp_path / str(cache)
        manifest = build(
            options(folder, backend="native", precision="bf16", cache_precision=cache), lambda step: lambda: None
        ).manifest
        stored = {role: spec.cache_precision for role, spec in manifest.engines.items()}
        written = "" if cache == "fp32" else cache  # as activations: older releases read such a bundle
        assert stored == dict.fromkeys(("target", "draft"), written if cache else "fp16"), "the draft has int8 weights"
        digests.add(manifest.digest)
        assert manifest.parity["target"] < (0.02 if cache == "int8" else 0.01)  # activations are rounded, too
        plain = greedy_texts(folder, None, prompts, 60)
        assert (
            greedy_texts(folder, SpeculativeConfig("topk", max_total_draft_tokens=15, budget="fixed"), prompts, 60)
            == plain
        )
        with LLM(folder) as llm:
            sizes[cache] = llm.kv_cache_bytes
    assert len(digests) == 3, "a cost table belongs to a format"
    assert sizes[None] == sizes["fp16"] == sizes["fp32"] / 2 > sizes["int8"]
    written = json.loads((tmp_path / "fp16" / MANIFEST).read_text())["engines"]["target"]
    assert written["cache_precision"] == "fp16"


def test_the_default_is_fp16_beside_rounded_weights(tmp_path: Path) -> None:
    own = options(tmp_path, backend="native", precision="fp32")
    defaults = {name: own.cache_precision_of("target", name) for name in NATIVE.precisions}
    assert defaults == {"fp32": "", "fp16": "fp16", "bf16": "fp16", "int8": "fp16", "int4": "fp16"}
    assert options(tmp_path).cache_precision_of("target", "int8") == "", "as ONNX Runtime computes"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"cache_precision": "fp16"}, "is for the backend native; onnxruntime stores keys and values as it computes"),
        ({"backend": "native", "cache_precision": "int4"}, "'int4' is not available; choose one of fp32, fp16, int8"),
        (
            {"backend": "native", "draft_backend": "onnxruntime", "cache_precision": "fp16"},
            "is for the backend native; onnxruntime stores",
        ),
    ],
)
def test_a_format_that_a_backend_lacks_is_refused(chosen: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        options(tmp_path, **chosen)


@pytest.mark.parametrize("stored", ["int4", "bf16", "q8_0"])
def test_a_manifest_with_another_format_is_refused(stored: str, tmp_path: Path) -> None:
    built = build(options(tmp_path / "bundle", backend="native", precision="int8"), lambda step: lambda: None)
    for backend in (NATIVE, BACKENDS["onnxruntime"]):
        engines = {
            role: replace(spec, backend=backend.name, file=f"{role}.{backend.file}", cache_precision=stored)
            for role, spec in built.manifest.engines.items()
        }
        manifest = replace(built.manifest, engines=engines)
        with pytest.raises(BundleError, match=f"target's keys and values are '{stored}'"):
            check_manifest(manifest)
        with pytest.raises(BundleError, match=f"target's keys and values are '{stored}'"):
            Manifest.from_json(manifest.to_json())
