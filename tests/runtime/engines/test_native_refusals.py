"""What the native engine refuses before its kernels would leave their arrays, and how weights are mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from bundling import DEMO
from checkpoints import VOCAB_SIZE, write_checkpoint
from lowbit import one_by_one
from native_parts import held, no_compiler, open_native, spec_of

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.native import write_weights
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build, default_precision
from draftwood.builder.quantization.formats import rounding_kernels
from draftwood.models.bindings import output_names
from draftwood.models.errors import BundleError, ConfigError, EngineError, NoRoomError
from draftwood.plugins.native.cache import CACHE
from draftwood.plugins.native.library import row_bytes
from draftwood.runtime.bundle.bundle import Manifest
from draftwood.runtime.bundle.checks import Unsound, check_manifest, check_matrices
from draftwood.runtime.engines.backends import BACKENDS, NATIVE, cache_precision, slot_bytes
from draftwood.runtime.engines.base import EngineSpec
from draftwood.runtime.engines.native import engine as native
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.native.weights import expected_tensors, read_weights
from draftwood.runtime.engines.passes import causal_batch

ENGINES = 8
ROLLUP = Path("/proc/self/smaps_rollup")
needs_smaps = pytest.mark.skipif(not ROLLUP.is_file(), reason="only Linux tells a process's own memory")
Header = dict[str, Any]


def opened(precision: str, folder: Path) -> NativeEngine:
    weights = held(write_checkpoint(folder / "checkpoint", "gqa"), precision)
    return open_native(weights, spec_of(weights, "target", precision, (1, 2, 4, 8, 16, 32, 64), 1024), folder)


def test_passes_that_would_leave_their_arrays_are_refused(tmp_path: Path) -> None:
    engine = opened("fp32", tmp_path)
    batch, rows = causal_batch(engine.spec, [1, 2], 0), 65
    many = np.zeros(rows, np.int64)
    wide = replace(batch, token_ids=many, position_ids=many, mask=np.eye(rows, dtype=np.bool_), slots=np.arange(rows))

    def placed(slots: list[int], columns: int = 4) -> Any:
        return replace(batch, mask=np.zeros((2, columns), np.bool_), slots=np.array(slots))

    for wrong, message in (
        (replace(batch, token_ids=np.array([1, VOCAB_SIZE])), "outside the vocabulary"),
        (replace(batch, token_ids=np.array([-1, 1])), "outside the vocabulary"),
        (replace(batch, position_ids=np.array([0, 4096])), "beyond the engine's rotary table"),
        (replace(batch, position_ids=np.array([-1, 0])), "beyond the engine's rotary table"),
        (replace(batch, output_rows=np.array([2])), "a row is scored that the pass does not have"),
        (replace(batch, num_tokens=3), "do not fit a mask"),
        *((placed(slots), "slots") for slots in ([0, 0], [0], [3, 4], [-1, 0], [0, 1, 2])),
        (placed([0, 1], 1300), "1024 cache slots"),
        (replace(wide, num_tokens=rows), "are no pass of this engine"),
        (replace(batch, token_ids=np.array([1])), "are no pass of this engine"),
        (replace(batch, position_ids=np.array([0, 1], np.int32)), "are no pass of this engine"),
        (replace(batch, mask=batch.mask.astype(np.int64)), "are no pass of this engine"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.score(wrong, engine.new_cache())
    cache = engine.new_cache()
    engine.score(causal_batch(engine.spec, [1, 2, 3, 4], 0), cache)
    with pytest.raises(EngineError, match="columns"):
        engine.score(placed([0, 1], 2), cache)
    with pytest.raises(EngineError, match="name a row twice"):
        cache.commit([1, 1, 0])
    with pytest.raises(EngineError, match="threads must be 0"):
        NativeEngine(tmp_path / "target.weights", engine.spec, -1)


def rewrite(file: Path, change: Callable[[Header], object], content: bytes | None = None) -> None:
    """Edit the header of a file of weights; the tensors stay."""
    content = file.read_bytes() if content is None else content
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


CHANGES: list[tuple[Callable[[Header], object], str]] = [
    (lambda h: (h.pop("layers.0.qkv.scales"), h.pop("norm")), "lacks the tensor '(norm|layers.0.qkv.scales)'"),
    (lambda h: h.update(more=h["norm"]), "lies in another one"),
    (lambda h: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "holds a tensor 'more'"),
    (lambda h: h["norm"].update(dtype="U8"), "'norm' has other bytes"),
    (lambda h: h["norm"].update(dtype="F64"), "'norm' is not described"),
    (lambda h: h["norm"].update(shape=[4, h["norm"]["shape"][0] // 4]), r"tensor 'norm' is F32 \[4, "),
    (lambda h: h["cosine"].update(shape=list(reversed(h["cosine"]["shape"]))), "where the manifest says F32"),
    (lambda h: h["norm"].update(dtype=["F32"]), "'norm' is not described"),
    (lambda h: h["norm"].update(shape=[-1]), "not described"),
    (lambda h: h["norm"].update(shape=[True]), "not described"),
    (lambda h: h["norm"].update(shape="long"), "not described"),
    (lambda h: h["norm"].update(shape=[1 << 70]), "not described"),
    (lambda h: h["norm"].update(shape=[*h["norm"]["shape"], *[1] * 8]), "not described"),
    (lambda h: h["norm"].update(data_offsets=[1, 2, 3]), "other bytes"),
    (lambda h: h["norm"].update(data_offsets=[-64, 0]), "not described"),
    (lambda h: h.update(norm=None), "not described"),
    (lambda h: h["cosine"].update(data_offsets=[at + 4 for at in h["cosine"]["data_offsets"]]), "lies in another one"),
    (
        lambda h: h["cosine"].update(data_offsets=[at + (1 << 40) for at in h["cosine"]["data_offsets"]]),
        "cut",
    ),
    (lambda h: h.pop("__metadata__"), "layout None instead of '6'"),
    (lambda h: h.update(__metadata__=[1]), "layout None"),
    (lambda h: h["__metadata__"].update(draftwood_layout="9"), "layout '9'"),
]


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    engine, file = opened("int4", tmp_path), tmp_path / "target.weights"
    content = file.read_bytes()
    for change, named in CHANGES:
        rewrite(file, change, content)
        for read in (NativeEngine, read_weights):
            with pytest.raises(EngineError, match=f"{named}.*: rebuild the bundle"):
                read(file, engine.spec)
    deep = b"[" * 100_000 + b" " * 24
    long = len(deep).to_bytes(8, "little") + deep
    empty = (56).to_bytes(8, "little") + b"[]".ljust(56)
    readers: tuple[Callable[..., object], ...] = (NativeEngine, read_weights, partial(read_weights, private=True))
    for damaged in (b"", content[:5000], b"\xff" * 64, empty, content[:-64], long):
        file.write_bytes(damaged)
        for reader in readers:
            with pytest.raises(EngineError, match="rebuild the bundle"):
                reader(file, engine.spec)


def test_a_spec_that_is_not_the_weights_is_refused(tmp_path: Path) -> None:
    """Whatever number of a model is changed, no kernel sees it: the embedding alone reads as far as a vocabulary."""
    engine = opened("int8", tmp_path)
    model, file = engine.spec.model, tmp_path / "target.weights"
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    changes: list[dict[str, Any]] = [
        {"model": replace(model, **{name: value})}
        for name in sizes
        # A feed-forward size below a block is filled up to one: nothing is read that is not there.
        for value in (2 * getattr(model, name), 10_000, *([] if name == "intermediate_size" else [1]))
    ]
    changes += [{"capacity": 2 * engine.spec.capacity}, {"precision": "fp32"}, {"precision": "int4"}]
    for changed in (*changes, {"outputs": output_names("draft", True)}):
        with pytest.raises(EngineError, match="rebuild the bundle"):
            NativeEngine(file, replace(engine.spec, **changed))


def test_a_private_engine_survives_its_file(tmp_path: Path) -> None:
    """The embedding is mapped otherwise: what is written over it is read, and what is cut off ends the process."""
    mapped, file = opened("fp32", tmp_path), tmp_path / "target.weights"
    private = NativeEngine(file, mapped.spec, private=True)
    before = one_by_one(private, [1, 2, 3], [4])[-1].logits.copy()
    content, size = bytearray(file.read_bytes()), VOCAB_SIZE * 4 * mapped.spec.model.hidden_size
    content[-size:] = bytes(size)
    with file.open("r+b") as handle:
        handle.write(content)
    np.testing.assert_array_equal(one_by_one(private, [1, 2, 3], [4])[-1].logits, before)
    assert not np.array_equal(one_by_one(mapped, [1, 2, 3], [4])[-1].logits, before)
    os.truncate(file, 100)
    np.testing.assert_array_equal(one_by_one(private, [1, 2, 3], [4])[-1].logits, before)


def test_without_a_compiler_and_kernels_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    no_compiler(monkeypatch)
    for ask in (lambda: options(tmp_path, backend="native"), rounding_kernels):
        with pytest.raises(ConfigError, match="finds no C compiler"):
            ask()


def options(output: Path, **more: Any) -> BuildOptions:
    return BuildOptions(DEMO / "target", DEMO / "draft", output, **more)


def test_default_precisions_of_a_draft_and_of_caches(tmp_path: Path) -> None:
    """A draft has 8 bits unless told otherwise or its sizes forbid; fp16 lies beside rounded weights; an older bundle
    has a cache in fp32 whatever its weights."""
    odd, told = (
        Checkpoint(write_checkpoint(tmp_path / "checkpoint", "head_dim 6")),
        options(tmp_path, backend="native", precision="bf16"),
    )
    for checkpoint, default in ((Checkpoint(DEMO / "draft"), "int8"), (odd, "fp32")):
        assert default_precision(checkpoint, False, told) == default
        assert default_precision(checkpoint, True, told) == ("int4" if default == "int8" else "fp32")
    for name in NATIVE.precisions:
        assert told.cache_precision_of("target", name) == ("" if name == "fp32" else "fp16")
        spec = EngineSpec("target", "native", "", odd.config, (1,), 64, name, ("logits",))
        assert cache_precision(spec) == "fp32" and slot_bytes(spec) == slot_bytes(replace(spec, cache_precision="fp32"))
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


def test_a_manifest_with_another_format_is_refused(tmp_path: Path) -> None:
    built = build(options(tmp_path / "bundle", backend="native", precision="int8"), lambda step: lambda: None)
    for backend in (NATIVE, BACKENDS["onnxruntime"]):
        for stored in ("int4", "bf16", "q8_0"):
            engines = {
                role: replace(spec, backend=backend.name, file=f"{role}.{backend.file}", cache_precision=stored)
                for role, spec in built.manifest.engines.items()
            }
            manifest = replace(built.manifest, engines=engines)
            for check in (lambda: check_manifest(manifest), lambda: Manifest.from_json(manifest.to_json())):  # noqa: B023
                with pytest.raises(BundleError, match=f"target's keys and values are '{stored}'"):
                    check()


class File(NamedTuple):
    path: Path
    spec: EngineSpec
    size: int


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    folder = tmp_path_factory.mktemp("weights")
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    weights = held(write_checkpoint(folder / "checkpoint", **sizes), "fp32")
    path = folder / "target.weights"
    write_weights(weights, 64, path)
    return File(path, spec_of(weights, "target", "fp32", (1, 2), 64), path.stat().st_size)


def memory(kind: str) -> int:
    """Bytes of this process. kind: "Anonymous", its own, or "Pss", shared ones by the number of mappings."""
    [line] = [line for line in ROLLUP.read_text(encoding="utf-8").splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) << 10


def touched(file: File) -> object:
    """Weights of which every page was read."""
    weights = read_weights(file.path, file.spec)
    assert np.isfinite([float(tensor.sum()) for tensor in weights.values()]).all()
    return weights


@needs_smaps
def test_engines_share_one_copy(file: File) -> None:
    assert file.size > 50_000_000
    touched(file)  # whatever numpy needs for itself is there
    own, shared = memory("Anonymous"), memory("Pss")
    kept = [touched(file) for _ in range(ENGINES)]
    assert memory("Anonymous") - own < file.size / 10
    assert memory("Pss") - shared < 1.2 * file.size
    del kept


@needs_smaps
def test_rows_take_as_many_bytes_as_is_said_and_are_refused_without_them(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a manifest says of them: the system ends a process that takes more than there is."""
    spec = replace(file.spec, widths=(1, 4096))
    NativeEngine(file.path, file.spec).close()
    own = memory("Anonymous")
    engine = NativeEngine(file.path, spec, 1)
    needed = row_bytes(engine._model, 4096)
    assert needed > 50_000_000
    assert memory("Anonymous") - own < 1.1 * needed  # less where the process has memory of earlier tests left
    engine.close()
    assert not engine._weights
    monkeypatch.setattr(native, "available_bytes", lambda: needed)
    NativeEngine(file.path, spec, 1).close()
    monkeypatch.setattr(native, "available_bytes", lambda: needed - 1)
    with pytest.raises(NoRoomError, match=r"passes of up to 4096 rows take \d+ MiB .*: rebuild .* smaller --widths"):
        NativeEngine(file.path, spec, 1)


def test_mapped_and_private_weights_are_the_same(file: File) -> None:
    mapped, private = (read_weights(file.path, file.spec, how) for how in (False, True))
    assert mapped.keys() == private.keys()
    for name, tensor in mapped.items():
        np.testing.assert_array_equal(tensor, private[name])
        assert tensor.ctypes.data % 64 == private[name].ctypes.data % 64 == 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"matrices": {"head": "int4"}}, "matrix 'head' has the precision 'int4' beside int4"),
    ({"matrices": {"head": "int3"}}, "matrix 'head' has the precision 'int3'"),
    ({"matrices": {"head": "bf16"}}, "matrix 'head' has the precision 'bf16'"),
    ({"matrices": {"layers.0.q_proj": "int8"}}, "no matrix 'layers.0.q_proj'"),
    ({"matrices": {"layers.99.qkv": "int8"}}, "no matrix 'layers.99.qkv'"),
    ({"precision": "bf16"}, "native has one for all"),
    ({"precision": "int4k"}, "native has one for all"),
    ({"backend": "onnxruntime"}, "onnxruntime has one for all"),
]


@pytest.mark.parametrize(("changes", "named"), WRONG)
def test_precisions_of_matrices_that_no_build_writes_are_refused(changes: dict[str, Any], named: str) -> None:
    config = Checkpoint(DEMO / "target").config
    found = {"head": "int8", "embedding": "int6k", "layers.0.qkv": "int5"}
    spec = EngineSpec("target", "native", "", config, (1,), 64, "int4", output_names("target"), matrices=found)
    check_matrices("target", spec)
    with pytest.raises(Unsound, match=named):
        check_matrices("target", replace(spec, **changes))
    tied = replace(spec, model=replace(config, tie_embeddings=True))
    with pytest.raises(Unsound, match="no matrix 'embedding'"):
        check_matrices("target", tied)
    with pytest.raises(EngineError, match="64 inputs, which divide into no blocks of int4k"):
        dict(expected_tensors(replace(config, hidden_size=64), "int4", {"layers.0.qkv": "int4k"}, 64, None))
