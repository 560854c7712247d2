"""Engines of every weight format, and comparisons of their bits: a path scored row by row, and in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from engine_parts import contents
from hypothesis import strategies as st
from numpy.typing import NDArray
from trees import Tree

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.builder.quantization.formats import FORMATS, QuantizedCheckpoint
from draftwood.models.bindings import TARGET, output_names
from draftwood.runtime.engines.backends import BACKENDS, Opening
from draftwood.runtime.engines.base import Engine, EngineSpec, TokenBatch
from draftwood.runtime.engines.passes import prefill

WIDTHS = (2, 4, 8, 16, 32, 64)
PRECISIONS = ("fp32", "int8", "int4")


class Row(NamedTuple):
    """The results of one token of a text: its logits [V], and its keys and values in every layer."""

    logits: NDArray[np.float32]
    cached: NDArray[np.float32]


def held(folder: Path, backend: str, precision: str) -> Checkpoint | QuantizedCheckpoint:
    """The weights an engine holds."""
    form = FORMATS.get((backend, precision))
    return Checkpoint(folder) if form is None else QuantizedCheckpoint(Checkpoint(folder), form)


def open_engine(
    folder: Path, backend: str, precision: str, file: Path, role: str = TARGET, computed: str | None = None
) -> Engine:
    """Export a checkpoint folder to `file` and open it. computed: "fp32" leaves the activations of low-bit matrices
    alone."""
    weights = held(folder, backend, precision)
    export(weights, role, 1024, file, lambda name: None)
    outputs = output_names(role)
    spec = EngineSpec(role, backend, file.name, weights.config, WIDTHS, 1024, computed or precision, outputs)
    return BACKENDS[backend].open(file, spec, Opening())


def one_by_one(engine: Engine, prefix: Sequence[int], tokens: Sequence[int]) -> list[Row]:
    """The tokens after a prefix, each in a pass of its own, as plain decoding scores them."""
    cache = engine.new_cache()
    prefill(engine, cache, prefix)
    rows = []
    for token in tokens:
        batch = Tree((token,), (-1,)).batch(engine.spec, cache.length)
        logits = engine.score(batch, cache).logits[0].copy()
        cache.commit([0])
        rows.append(Row(logits, contents(cache)[:, :, :, -1]))
    return rows


def in_one_pass(engine: Engine, prefix: Sequence[int], tree: Tree, path: Sequence[int], width: int) -> list[Row]:
    """The rows of one path of a tree that is scored in one pass of `width` rows, and committed."""
    cache = engine.new_cache()
    prefill(engine, cache, prefix)
    batch, rows = tree.batch(engine.spec, cache.length), len(tree.tokens)
    wide = TokenBatch.pad(tree.tokens, batch.position_ids[:rows], batch.mask[:rows, :rows], width)
    logits = engine.score(wide, cache).logits.copy()
    cache.commit(path)
    committed = contents(cache)[:, :, :, len(prefix) :]
    return [Row(logits[row], committed[:, :, :, index].copy()) for index, row in enumerate(path)]


def assert_same_bits(found: Sequence[Row], expected: Sequence[Row]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)
        np.testing.assert_array_equal(one.cached, other.cached)


def assert_a_tree_changes_no_bit(engine: Engine, prefix: Sequence[int], tree: Tree, data: st.DataObject) -> None:
    """Of any of its rows, whatever their siblings and the width of the pass, and wherever in it the row and its
    ancestors stand."""
    path = tree.path(data.draw(st.integers(0, len(tree.tokens) - 1)))
    width = data.draw(st.sampled_from([width for width in engine.spec.widths if width >= len(tree.tokens)]))
    expected = one_by_one(engine, prefix, [tree.tokens[row] for row in path])
    assert_same_bits(in_one_pass(engine, prefix, tree, path, width), expected)


def greedy_texts(bundle: Path, config: Any, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Greedy continuations, plain where `config` is None."""
    from draftwood.runtime import LLM, SamplingParams

    with LLM(bundle, config) as llm:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return [list(result.token_ids) for result in llm.generate(list(prompts), params)]
