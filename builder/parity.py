"""Parity: the exported engine gives the torch reference's logits, or there is no bundle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..models.errors import BundleError
from ..runtime.engines.base import Engine, TokenBatch, causal_batch

TOLERANCE = 2e-4  # fp32, as a share of the largest logit beyond 1
PROMPT_ROWS, TREE_ROWS = 24, 12


def largest_difference(engine: Engine, reference: Engine, seed: int = 0) -> float:
    """Run the same prompt and the same token tree through both engines.

    Returns the largest difference of two logits, divided by the largest logit where that is beyond 1. Raises
    BundleError when it exceeds `TOLERANCE`.
    """
    worst = 0.0
    cache, reference_cache = engine.new_cache(), reference.new_cache()
    for batch in batches(engine, np.random.default_rng(seed)):
        found = engine.forward(batch, cache).logits
        expected = reference.forward(batch, reference_cache).logits
        rows = slice(None) if len(batch.output_rows) == 1 else slice(batch.num_tokens)
        scale = max(1.0, float(np.abs(expected[rows]).max()))
        worst = max(worst, float(np.abs(found[rows] - expected[rows]).max()) / scale)
        for each in (cache, reference_cache):
            each.commit(range(batch.num_tokens))
    if not worst <= TOLERANCE:
        raise BundleError(
            f"the {engine.spec.role} engine differs from the torch reference by {worst:.1e} of its largest logit, more "
            f"than {TOLERANCE:.0e}: this is a bug of the exporter or the backend, please report the checkpoint"
        )
    return worst


def batches(engine: Engine, rng: np.random.Generator) -> Iterator[TokenBatch]:
    """A prompt, then a random tree behind it."""
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
    yield TokenBatch.padded(tokens[prompt:], prompt + depths, mask, spec.width_for(rows))
