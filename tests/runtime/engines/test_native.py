"""The native engine: the same bits for a row wherever it is scored. `test_engines.py` holds it to the contract."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundling import DEMO
from checkpoints import SHAPES, VOCAB_SIZE, trained_head, write_checkpoint
from engine_parts import contents
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit import assert_a_tree_changes_no_bit, greedy_texts, one_by_one
from native_parts import PRECISIONS, held, open_native, spec_of
from trees import Tree, trees

from benchmarks.tools.torch_engine import TorchEngine
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.options import BuildOptions
from draftwood.builder.parity import largest_difference, rows_of
from draftwood.builder.pipeline import build, precision_for
from draftwood.builder.quantization.formats import rounding_kernels
from draftwood.builder.reference import score_rows
from draftwood.models.bindings import DRAFT, LOW_BIT, TARGET, output_names
from draftwood.models.errors import ConfigError, EngineError
from draftwood.models.head_config import HeadConfig
from draftwood.plugins.native.cache import CACHE
from draftwood.plugins.native.packing import PAIR_BLOCK
from draftwood.runtime import SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.backends import NATIVE, bits_of_weight
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.native.weights import check_weights
from draftwood.runtime.engines.passes import causal_batch, prefill

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
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
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model, precision, cache = request.param
    return opened(model, precision, tmp_path_factory.mktemp("native"), cache=cache)


@few
@given(tree=trees(), prefix=prefixes, data=st.data())
def test_a_row_has_the_same_bits_alone_and_in_a_tree(
    tree: Tree, prefix: list[int], data: st.DataObject, engine: Engine
) -> None:
    assert_a_tree_changes_no_bit(engine, prefix, tree, data)


@pytest.mark.parametrize("cache", NATIVE.caches)
def test_capacity_chunks_and_threads_change_no_bit(cache: str, tmp_path: Path) -> None:
    """A text that outgrows the first buffer, prefilled in passes of 64 rows, or a few tokens at a time by one."""
    text = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB_SIZE, 300)]
    for name in ("many", "one"):
        (tmp_path / name).mkdir()
    many, one = (
        opened("demo target", "int4", tmp_path / name, threads, cache) for name, threads in (("many", 2), ("one", 1))
    )
    first, second = many.new_cache(), one.new_cache()
    prefill(many, first, text)
    for start in range(0, 300, 7):
        prefill(one, second, text[start : start + 7])
    assert first.capacity == 512
    np.testing.assert_array_equal(contents(first), contents(second))
    first.truncate(100)
    first.shrink(100)
    assert first.capacity == 256
    np.testing.assert_array_equal(contents(first), contents(second)[:, :, :, :100])


@pytest.mark.parametrize(("model", "precision"), KINDS)
def test_every_shape_computes_what_torch_computes(model: str, precision: str, tmp_path: Path) -> None:
    """Biases, tied embeddings, odd head sizes, inner sizes that are filled up: on the weights that the engine holds."""
    weights = held(write_checkpoint(tmp_path / "checkpoint", model), precision)
    spec = spec_of(weights, "target", precision, WIDTHS, 256)
    engine = open_native(weights, spec, tmp_path)
    reference = score_rows(weights.tensor, weights.config, rows_of(spec))
    rounding, most = {"int8": ("int8", 0.1), "int4": ("int4", 0.1), "bf16": ("bf16", 0.03)}.get(
        precision, ("fp32", 1e-5)
    )
    assert largest_difference(engine, reference, rounding) < most


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_of_a_weight_are_those_of_the_file(precision: str, tmp_path: Path) -> None:
    """Whose matrices have whole panels; int8 fills the inner size up, bf16 the inputs of its last matrix."""
    engine = opened("demo target", precision, tmp_path)
    matrices = [name for name in engine._weights if name.endswith(".weights")]
    stored = sum(engine._weights[name].nbytes for name in matrices)
    stored += sum(array.nbytes for name, array in engine._weights.items() if name.endswith(".scales"))
    inner = engine.spec.model.intermediate_size
    hidden, layers = engine.spec.model.hidden_size, engine.spec.model.num_layers
    query, key = engine.spec.model.query_size, engine.spec.model.kv_size
    last = -(-inner // PAIR_BLOCK) * PAIR_BLOCK if precision == "bf16" else inner
    weights = layers * hidden * (2 * query + 2 * key + 2 * inner + last) + hidden * engine.spec.model.vocab_size
    projection = hidden * engine.spec.model.vocab_size / weights  # its share
    expected = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8.5, "int4": 5 + 3.5 * projection}[precision]
    assert bits_of_weight(engine.spec) == pytest.approx(8 * stored / weights) == pytest.approx(expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_speculative_text_is_plain_text_and_the_bundle_says_how(precision: str, tmp_path: Path) -> None:
    folders = (DEMO / "target", DEMO / "draft", tmp_path / "bundle")
    options = BuildOptions(*folders, "native", precision, cache_precision="fp32")  # others: test_native_cache_formats
    manifest = build(options, lambda step: lambda: None).manifest
    target, draft = manifest.engines["target"], manifest.engines["draft"]
    assert (target.backend, target.precision) == ("native", precision)
    assert (draft.backend, draft.precision) == ("native", "int8")
    assert target.widths == (*range(1, 17), 24, 32, 48, 64)
    assert {"target.weights", "draft.weights"} < manifest.files.keys()
    assert not [name for name in manifest.files if name.endswith(".so")], "a bundle holds no executable code"
    assert manifest.parity["target"] < {"bf16": 0.01, "int8": 0.05, "int4": 0.05}.get(precision, 1e-5)
    prompts = ["def fibonacci(n):\n", "import os\n\n", "class Stack:\n    "]
    plain = greedy_texts(options.output, None, prompts, 100)
    for config in (
        SpeculativeConfig("chain", max_draft_len=4, budget="fixed"),
        SpeculativeConfig("topk", max_total_draft_tokens=15, max_draft_len=6, budget="fixed"),
        SpeculativeConfig(),
    ):
        assert greedy_texts(options.output, config, prompts, 100) == plain


def test_a_native_draft_has_8_bits_unless_told_otherwise_or_its_sizes_forbid(tmp_path: Path) -> None:
    odd = Checkpoint(write_checkpoint(tmp_path / "checkpoint", "head_dim 6"))
    options = BuildOptions(DEMO / "target", DEMO / "draft", tmp_path / "bundle", "native", "bf16")
    chosen = {name: replace(options, draft_precision=name) for name in ("fp32", "int8")}
    for checkpoint, default in ((Checkpoint(DEMO / "draft"), "int8"), (odd, "fp32")):
        assert precision_for(DRAFT, checkpoint, options) == default
        assert precision_for(TARGET, checkpoint, options) == "bf16"
        assert all(precision_for(DRAFT, checkpoint, told) == name for name, told in chosen.items())


def test_the_draft_ranks_and_its_head_speaks(tmp_path: Path) -> None:
    """As in ONNX Runtime, from the same checkpoint and head."""
    outputs = []
    for backend in ("native", "onnxruntime"):
        folders = (DEMO / "target", DEMO / "draft", tmp_path / backend)
        options = BuildOptions(*folders, backend, acceptance_head=DEMO / "head", draft_precision="fp32")
        build(options, lambda step: lambda: None)
        engine = EngineBundle.open(tmp_path / backend).open_engine("draft")
        outputs.append(
            engine.score(Tree((5, 6, 7), (-1, 0, 1)).batch(engine.spec, 0), engine.new_cache()).rows(range(3))
        )
    native, reference = outputs
    for found, expected in zip(native[:4], reference[:4], strict=True):
        assert found is not None and expected is not None
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert native.top_ids is not None
    np.testing.assert_array_equal(native.top_ids[:, 0], native.logits.argmax(-1))


@pytest.mark.parametrize(("layers", "tied"), [(0, False), (1, True), (2, False), (3, True)])
@pytest.mark.parametrize("model", ["gqa", "head_dim 6"])  # 30 hidden numbers: panels that are filled up
def test_every_head_says_what_torch_says_and_the_same_in_any_company(
    model: str, layers: int, tied: bool, tmp_path: Path
) -> None:
    weights = held(write_checkpoint(tmp_path / "checkpoint", model), "fp32")
    head = trained_head(HeadConfig(weights.config.hidden_size, layers, tied), layers)
    spec = spec_of(weights, "draft", "fp32", WIDTHS, 256)
    spec = replace(spec, outputs=output_names("draft", True))
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


def test_tokens_and_positions_out_of_range_are_refused(tmp_path: Path) -> None:
    """Before the kernels would read beyond their tables."""
    engine = opened("gqa", "fp32", tmp_path)
    batch = causal_batch(engine.spec, [1, 2], 0)
    for wrong, message in (
        (replace(batch, token_ids=np.array([1, VOCAB_SIZE])), "outside the vocabulary"),
        (replace(batch, token_ids=np.array([-1, 1])), "outside the vocabulary"),
        (replace(batch, position_ids=np.array([0, 4096])), "beyond the engine's rotary table"),
        (replace(batch, position_ids=np.array([-1, 0])), "beyond the engine's rotary table"),
        (replace(batch, output_rows=np.array([2])), "a row is scored that the pass does not have"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.score(wrong, engine.new_cache())
    with pytest.raises(EngineError, match="do not fit a mask"):
        engine.score(replace(batch, num_tokens=3), engine.new_cache())
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        engine.score(batch, engine.new_cache())
    with pytest.raises(EngineError, match="threads must be 0"):
        NativeEngine(tmp_path / "target.weights", engine.spec, -1)


Header = dict[str, Any]


def rewrite(file: Path, change: Callable[[Header], object], content: bytes | None = None) -> None:
    """Edit the header of a file of weights; the tensors stay."""
    content = file.read_bytes() if content is None else content
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def size_of(entry: Header) -> int:
    start, end = entry["data_offsets"]
    return int(end - start)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    engine = opened("gqa", "int4", tmp_path)
    file = tmp_path / "target.weights"
    content = file.read_bytes()
    first: Callable[[Header], Header] = lambda header: header["cosine"]  # noqa: E731
    changes: list[tuple[Callable[[Header], object], str]] = [
        (lambda h: (h.pop("layers.0.qkv.scales"), h.pop("norm")), "lacks the tensor '(norm|layers.0.qkv.scales)'"),
        (lambda h: h.update(more=h["norm"]), "lies in another one"),
        (lambda h: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "holds a tensor 'more'"),
        (lambda h: h["norm"].update(dtype="U8"), "'norm' has other bytes"),
        (lambda h: h["norm"].update(dtype="F64"), "'norm' is not described"),
        (lambda h: h["norm"].update(shape=[4, h["norm"]["shape"][0] // 4]), r"tensor 'norm' is F32 \[4, "),
        (lambda h: first(h).update(shape=list(reversed(first(h)["shape"]))), "where the manifest says F32"),
        (lambda h: h["norm"].update(dtype=["F32"]), "'norm' is not described"),
        (lambda h: h["norm"].update(shape=[-1]), "not described"),
        (lambda h: h["norm"].update(shape=[True]), "not described"),
        (lambda h: h["norm"].update(shape="long"), "not described"),
        (lambda h: h["norm"].update(shape=[1 << 70]), "not described"),
        (lambda h: h["norm"].update(shape=[*h["norm"]["shape"], *[1] * 8]), "not described"),
        (lambda h: h["norm"].update(data_offsets=[1, 2, 3]), "other bytes"),
        (lambda h: h["norm"].update(data_offsets=[-64, 0]), "not described"),
        (lambda h: h.update(norm=None), "not described"),
        (lambda h: first(h).update(data_offsets=[at + 4 for at in first(h)["data_offsets"]]), "lies in another one"),
        (
            lambda h: h["embedding"].update(data_offsets=[at + (1 << 40) for at in h["embedding"]["data_offsets"]]),
            "cut",
        ),
        (lambda h: h.pop("__metadata__"), "layout None instead of '3'"),
        (lambda h: h.update(__metadata__=[1]), "layout None"),
        (lambda h: h["__metadata__"].update(draftwood_layout="9"), "layout '9'"),
    ]
    for change, named in changes:
        rewrite(file, change, content)
        with pytest.raises(EngineError, match=f"{named}.*: rebuild the bundle"):
            NativeEngine(file, engine.spec)
        with pytest.raises(EngineError, match=f"{named}.*: rebuild the bundle"):
            check_weights(file, engine.spec)
    deep = b"[" * 100_000 + b" " * 24
    for damaged in (b"", content[:5000], b"\xff" * 64, (56).to_bytes(8, "little") + b"[]".ljust(56), content[:-64]):
        file.write_bytes(damaged)
        with pytest.raises(EngineError, match="rebuild the bundle"):
            NativeEngine(file, engine.spec)
    file.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(EngineError, match="rebuild the bundle"):
        NativeEngine(file, engine.spec)


def test_bf16_of_a_release_that_did_not_round_rows_is_refused(tmp_path: Path) -> None:
    engine = opened("gqa", "bf16", tmp_path)
    file = tmp_path / "target.weights"
    rewrite(file, lambda h: h["__metadata__"].update(draftwood_layout="2"), file.read_bytes())
    for read in (NativeEngine, check_weights):
        with pytest.raises(
            EngineError, match=r"packed by another release, in layout '2' instead of '3'.*: rebuild the"
        ):
            read(file, engine.spec)


def test_a_spec_that_is_not_the_weights_is_refused(tmp_path: Path) -> None:
    """Whatever number of a model is changed, no kernel sees it: the embedding alone reads as far as a vocabulary."""
    engine = opened("gqa", "int8", tmp_path)
    model, file = engine.spec.model, tmp_path / "target.weights"
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in sizes:
        # A feed-forward size below a block is filled up to one: nothing is read that is not there.
        for value in (2 * getattr(model, name), 10_000, *([] if name == "intermediate_size" else [1])):
            with pytest.raises(EngineError, match="rebuild the bundle"):
                NativeEngine(file, replace(engine.spec, model=replace(model, **{name: value})))
    for changed in (
        {"capacity": 2 * engine.spec.capacity},
        {"precision": "fp32"},
        {"precision": "int4"},
        {"outputs": output_names("draft", True)},
    ):
        with pytest.raises(EngineError, match="rebuild the bundle"):
            NativeEngine(file, replace(engine.spec, **changed))


def test_a_private_engine_survives_its_file(tmp_path: Path) -> None:
    """The embedding is mapped otherwise: what is written over it is read, and what is cut off ends the process."""
    mapped, file = opened("gqa", "fp32", tmp_path), tmp_path / "target.weights"
    private = NativeEngine(file, mapped.spec, private=True)
    before = one_by_one(private, [1, 2, 3], [4])[-1].logits.copy()
    content = bytearray(file.read_bytes())
    content[-VOCAB_SIZE * 4 * mapped.spec.model.hidden_size :] = bytes(VOCAB_SIZE * 4 * mapped.spec.model.hidden_size)
    with file.open("r+b") as handle:
        handle.write(content)
    np.testing.assert_array_equal(one_by_one(private, [1, 2, 3], [4])[-1].logits, before)
    assert not np.array_equal(one_by_one(mapped, [1, 2, 3], [4])[-1].logits, before)
    os.truncate(file, 100)
    np.testing.assert_array_equal(one_by_one(private, [1, 2, 3], [4])[-1].logits, before)


def test_without_a_compiler_and_kernels_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr("draftwood.plugins.native.compile.shutil.which", lambda name: None)
    monkeypatch.setattr("draftwood.plugins.native.compile.importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="finds no C compiler"):
        BuildOptions(DEMO / "target", DEMO / "draft", tmp_path, "native")
    with pytest.raises(ConfigError, match="finds no C compiler"):
        rounding_kernels()
