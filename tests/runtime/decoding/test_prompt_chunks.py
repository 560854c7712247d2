"""Prompts are read in passes wider than a round's, where an engine has them and nobody waits meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundling import DEMO, built
from checkpoints import write_checkpoint
from engine_parts import contents, random_text
from hypothesis import given
from hypothesis import strategies as st
from lowbit import PRECISIONS, greedy_texts, held, open_engine
from native_parts import open_native, spec_of

from draftwood.builder.options import BuildOptions
from draftwood.runtime import SpeculativeConfig
from draftwood.runtime.bundle.bundle import MANIFEST, EngineBundle, checksum
from draftwood.runtime.decoding.chunk import TokenChunk
from draftwood.runtime.decoding.request import Request
from draftwood.runtime.decoding.scheduler import select_joint
from draftwood.runtime.engines.backends import ONNXRUNTIME
from draftwood.runtime.engines.base import Engine, EngineSpec, ForwardOutput, KVCache, Pass, TokenBatch
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine
from draftwood.runtime.engines.passes import Steps, causal_batch, prefill_passes
from draftwood.runtime.engines.shared.pool import PooledEngine

Open = Callable[[tuple[int, ...]], Engine]


@pytest.fixture(scope="module", params=[*PRECISIONS, "native"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens an engine with these widths for prompts, by ONNX Runtime or, at int4, by the native kernels."""
    kind, folder = str(request.param), tmp_path_factory.mktemp("engine")
    source = write_checkpoint(folder / "checkpoint", "gqa")

    def engine(prompt_widths: tuple[int, ...]) -> Engine:
        if kind == "native":
            weights = held(source, kind, "int4")
            spec = spec_of(weights, "target", "int4", (1, 2, 4, 8, 16, 32, 64), 1024)
            return open_native(weights, replace(spec, prompt_widths=prompt_widths), folder)
        found = open_engine(source, "onnxruntime", kind, folder / "target.onnx")
        assert isinstance(found, OnnxRuntimeEngine)
        found.spec = replace(found.spec, prompt_widths=prompt_widths)
        return found

    return engine


def read(engine: Engine, cache: Any, text: list[int]) -> tuple[list[int], Any]:
    """The rows of each pass over a prompt, and the logits of its last token."""
    passes, output = prefill_passes(engine, cache, text), None
    rows: list[int] = []
    while True:
        try:
            wanted = next(passes) if output is None else passes.send(output)
        except StopIteration as end:
            return rows, end.value.logits.copy()
        rows.append(len(wanted.batch.mask))
        assert len(wanted.batch.output_rows) == 1  # the vocabulary is no part of reading
        output = wanted.run()


def no_steps() -> Steps[TokenChunk]:
    yield from ()


def test_wide_chunks_change_no_bit(opened: Open) -> None:
    text, results = random_text(600), []
    for widths, expected in (((), [*[64] * 9, 32]), (ONNXRUNTIME.prompt_widths, [256, 256, 64, 32])):
        engine = opened(widths)
        cache = engine.new_cache()
        rows, logits = read(engine, cache, text)
        assert rows == expected
        results.append((logits, contents(cache)))
        engine.close()
    for narrow, wide in zip(*results, strict=True):
        np.testing.assert_array_equal(narrow, wide)


@given(widths=st.sets(st.integers(2, 80), min_size=1, max_size=4), length=st.integers(2, 600), data=st.data())
def test_every_prompt_fits_however_narrow_the_passes(widths: set[int], length: int, data: st.DataObject) -> None:
    """Behind the longest text there is room for the padding of any chunk, also of one that is cut off at the front."""
    options = BuildOptions(Path(), Path(), Path(), widths=(1, *sorted(widths)), max_length=length)
    shape = options.widths_of("target"), length + options.columns
    model: Any = None
    spec = EngineSpec("target", "", "", model, *shape, "fp32", (), prompt_widths=options.prompt_widths_of("target"))
    assert all(width > spec.max_width for width in spec.prompt_widths)
    end, tokens = 0, data.draw(st.integers(1, length - 1))
    while end < tokens:
        rows = spec.chunk_size(tokens - end)
        assert 0 < rows <= tokens - end
        left = data.draw(st.integers(1, rows))
        assert end + rows - left + spec.width_for(left) <= spec.capacity
        end += rows


def test_a_wide_pass_joins_no_other(opened: Open) -> None:
    engine = opened(ONNXRUNTIME.prompt_widths)
    pool, text = PooledEngine(engine, 4 * engine.spec.capacity), random_text(600)
    cache, rows = pool.new_cache(), []
    passes = prefill_passes(pool, cache, text)
    wanted = next(passes)
    guest = pool.new_cache()
    waiting: list[Request[TokenChunk]] = [
        Request(steps=no_steps(), write=lambda chunk: chunk, next_pass=each)
        for each in (wanted, next(prefill_passes(pool, guest, [1, 2, 3])))
    ]
    assert select_joint(waiting) == waiting[:1]
    assert select_joint(waiting[::-1]) == waiting[1:]
    with pytest.raises(StopIteration) as end:
        while True:
            rows.append(wanted.batch.num_tokens)
            wanted = passes.send(wanted.run())
    assert rows == [256, 256, 64, 24]
    np.testing.assert_array_equal(end.value.value.logits, read(engine, engine.new_cache(), text)[1])


@pytest.mark.parametrize("last_read", [False, True])
def test_beside_other_rows_a_chunk_is_not_projected(last_read: bool, opened: Open, monkeypatch: Any) -> None:
    """Of a shared pass only the rows that somebody reads go through the vocabulary."""
    engine, text = opened(()), random_text(60)
    expected = read(engine, engine.new_cache(), text)[1][-1], read(engine, engine.new_cache(), text[:21])[1][-1]
    pool, scored = PooledEngine(engine, 4 * engine.spec.capacity), []

    def noting(batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        scored.append(batch.output_rows.tolist())
        return type(engine).score(engine, batch, cache)

    other, cache = pool.new_cache(), pool.new_cache()
    read(pool, other, text[:20])
    monkeypatch.setattr(engine, "score", noting)
    position = np.array([20])
    token = TokenBatch.pad(text[20:21], position, np.ones((1, 1), np.bool_), pool.spec.width_for(1))
    passes = [Pass(pool, token, other), Pass(pool, causal_batch(pool.spec, text[:40], 0), cache, False)]
    outputs = pool.forward(passes)
    cache.commit(range(40))
    rest = [Pass(pool, causal_batch(pool.spec, text[40:], 40), cache, last_read), passes[0]]
    other.truncate(20)
    last = pool.forward(rest)
    assert [len(rows) for rows in scored] == [pool.spec.width_for(1), pool.spec.width_for(1 + last_read)]
    np.testing.assert_allclose(outputs[0].logits[0], expected[1], atol=1e-4)
    np.testing.assert_allclose(last[1].logits[0], expected[1], atol=1e-4)
    if last_read:
        np.testing.assert_allclose(last[0].logits[0], expected[0], atol=1e-4)


def test_a_bundle_says_so_and_older_ones_read_as_they_did(tmp_path: Path) -> None:
    bundle = built(DEMO / "target", DEMO / "draft", tmp_path / "bundle")
    specs = EngineBundle.open(bundle).manifest.engines
    assert all(spec.prompt_widths == ONNXRUNTIME.prompt_widths for spec in specs.values())
    prompts = ["def fibonacci(n):\n" * 30, "class Stack:\n    " * 40]
    texts = greedy_texts(bundle, None, prompts, 40)
    assert greedy_texts(bundle, SpeculativeConfig(), prompts, 40) == texts
    content = json.loads((bundle / MANIFEST).read_text())
    for engine in content["engines"].values():
        del engine["prompt_widths"]
    del content["checksum"]
    (bundle / MANIFEST).write_text(json.dumps(content | {"checksum": checksum(content)}))
    assert EngineBundle.open(bundle).manifest.engines["target"].prompt_widths == ()
    assert greedy_texts(bundle, None, prompts, 40) == texts


def test_only_onnx_runtime_reads_in_wide_passes() -> None:
    pair = DEMO / "target", DEMO / "draft", Path("bundle")
    for backend, target, draft in (
        ("native", (), ()),
        ("onnxruntime", ONNXRUNTIME.prompt_widths, ONNXRUNTIME.prompt_widths),
    ):
        options = BuildOptions(*pair, backend)
        assert (options.prompt_widths_of("target"), options.prompt_widths_of("draft")) == (target, draft)
    mixed = BuildOptions(*pair, "native", draft_backend="onnxruntime")
    assert (mixed.prompt_widths_of("target"), mixed.prompt_widths_of("draft")) == ((), ONNXRUNTIME.prompt_widths)
