"""Parity: a bundle is only written if each engine's logits equal the torch reference's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..models.errors import BundleError
from ..runtime.engines.base import Engine, TokenBatch
from ..runtime.engines.passes import causal_batch

TOLERANCE = 2e-4  # for fp32, relative to the largest logit if that exceeds 1
HEAD_TOLERANCE = 1e-4  # difference of probabilities
# Factors on TOLERANCE. Rounding to 16 bits changes a number by at most 2^-11 or 2^-8, in dozens of layers. Low-bit
# engines round a row's activations to 8 bits before every matrix; their graphs are first compared exactly.
COARSER = {"fp16": 100.0, "bf16": 800.0, "int8": 500.0, "int4": 500.0}
PROMPT_ROWS, TREE_ROWS = 24, 12


def largest_difference(engine: Engine, reference: Engine, rounding: str | None = None) -> float:
    """Run the same prompt and the same token tree through both engines. rounding: the precision of the engine's
    activations; None means the engine's precision.

    Returns the largest difference of two logits, divided by the largest logit if that exceeds 1. Raises BundleError if
    the result exceeds `TOLERANCE`, or if an acceptance head's output differs by more than `HEAD_TOLERANCE`. Less
    precise engines may differ by more, see `COARSER`.
    """
    coarser = COARSER.get(rounding or engine.spec.precision, 1.0)
    worst = 0.0
    cache, reference_cache = engine.new_cache(), reference.new_cache()
    for batch in batches(engine, np.random.default_rng(0)):
        output, wanted = engine.score(batch, cache), reference.score(batch, reference_cache)
        found, expected = output.logits, wanted.logits
        rows = slice(None) if len(batch.output_rows) == 1 else slice(batch.num_tokens)
        scale = max(1.0, float(np.abs(expected[rows]).max()))
        worst = max(worst, float(np.abs(found[rows] - expected[rows]).max()) / scale)
        if output.acceptance is not None and wanted.acceptance is not None:
            refuse_another_head(output.acceptance[rows], wanted.acceptance[rows], coarser * HEAD_TOLERANCE)
        for each in (cache, reference_cache):
            each.commit(range(batch.num_tokens))
    if not worst <= coarser * TOLERANCE:
        raise BundleError(
            f"the {engine.spec.role} engine differs from the torch reference by {worst:.1e} of its largest logit, "
            f"more than {coarser * TOLERANCE:.0e}: this is a bug of the exporter or the backend, please report the "
            "checkpoint"
        )
    return worst


def refuse_another_head(found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float) -> None:
    """Raises BundleError if the acceptance probabilities of two engines differ."""
    difference = float(np.abs(found - expected).max())
    if not difference <= tolerance:
        raise BundleError(
            f"the acceptance head differs from the torch reference by {difference:.1e}, more than "
            f"{tolerance:.0e}: this is a bug of the exporter or the backend, please report the head"
        )


def batches(engine: Engine, rng: np.random.Generator) -> Iterator[TokenBatch]:
    """The passes of a prompt, and then of a random tree after it."""
    spec = engine.spec
    prompt, rows = min(PROMPT_ROWS, spec.max_width), min(TREE_ROWS, spec.max_width)
    tokens = rng.integers(0, spec.model.vocab_size, prompt + rows)
    yield causal_batch(spec, tokens[:prompt].tolist(), 0)
    mask = np.eye(rows, dtype=np.bool_)
    depths = np.zeros(rows, np.int64)
    for row in range(1, rows):
        parent = int(rng.integers(row))
        mask[row] |= mask[parent]
        depths[row] = depths[parent] + 1
    yield TokenBatch.pad(tokens[prompt:], prompt + depths, mask, spec.width_for(rows))
