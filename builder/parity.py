"""Parity: a bundle is only written if each engine's logits equal the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..models.bindings import INTEGERS
from ..models.errors import BundleError
from ..runtime.engines.base import Engine, EngineSpec, TokenBatch
from ..runtime.engines.cache import joined_states
from ..runtime.engines.passes import causal_batch

TOLERANCE = 2e-4  # for fp32, relative to the largest logit if that exceeds 1
HEAD_TOLERANCE = 1e-4  # difference of probabilities
# Factors on TOLERANCE. Rounding to 16 bits changes a number by at most 2^-11 or 2^-8, in dozens of layers. Low-bit
# engines round a row's activations to 8 bits before every matrix; their graphs are first compared exactly. Gemma 3 270M
# differs by .14 here, and by .004 nats in the likelihood of a real text. What a cache rounds is added.
COARSER = {"fp16": 100.0, "bf16": 800.0, **dict.fromkeys(INTEGERS, 1000.0)}
PROMPT_ROWS, TREE_ROWS = 24, 12


class Rows(NamedTuple):
    """Rows of one pass without a cache. tokens, positions: int64 [R]. mask: bool [R, R], what each row attends to.
    states: float32 [R, state_inputs], of a draft that reads them."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_]
    states: NDArray[np.float32] | None = None


class Scored(NamedTuple):
    """What a model says of rows. logits: float32 [R, V]. acceptance: float32 [R], of a draft with SpecDec++'s head.
    states: float32 [R, state_size], if it returns any."""

    logits: NDArray[np.float32]
    acceptance: NDArray[np.float32] | None
    states: NDArray[np.float32] | None = None


def largest_difference(engine: Engine, reference: Scored, rounding: str | None = None) -> float:
    """Run a prompt and a token tree through an engine. reference: what the reference says of `rows_of` the engine's
    spec. rounding: the precision of the engine's activations; None means the engine's precision. Returns the largest
    difference of two logits, or states, divided by the largest logit if that exceeds 1. Raises BundleError if it
    exceeds `TOLERANCE`, or an acceptance head's `HEAD_TOLERANCE`, times `COARSER`, and for a logit of either that is
    NaN or infinite."""
    rounded = (rounding or engine.spec.precision, engine.spec.cache_precision)
    coarser = sum(COARSER.get(precision, 0.0) for precision in rounded) or 1.0
    worst, first = 0.0, 0
    cache = engine.new_cache()
    for batch in batches(engine.spec):
        output = engine.score(batch, cache)
        end = first + batch.num_tokens
        rows = slice(end - 1, end) if len(batch.output_rows) == 1 else slice(first, end)
        found, expected = output.logits[: rows.stop - rows.start], reference.logits[rows]
        refuse_no_numbers(found, expected, engine.spec)
        worst = max(worst, difference(found, expected))
        if output.states is not None and reference.states is not None:
            worst = max(worst, difference(output.states, reference.states[first:end]))
        if output.acceptance is not None and reference.acceptance is not None:
            accepted = output.acceptance[: rows.stop - rows.start]
            refuse_another_head(accepted, reference.acceptance[rows], coarser * HEAD_TOLERANCE)
        cache.commit(range(batch.num_tokens))
        first = end
    if not worst <= coarser * TOLERANCE:
        raise BundleError(
            f"the {engine.spec.role} engine differs from the reference by {worst:.1e} of its largest logit, "
            f"more than {coarser * TOLERANCE:.0e}: this is a bug of the exporter or the backend, please report the "
            "checkpoint"
        )
    return worst


def difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The largest one of two numbers, divided by the largest number if that exceeds 1."""
    return float(np.abs(found - expected).max()) / max(1.0, float(np.abs(expected).max()))


def refuse_no_numbers(found: NDArray[np.float32], expected: NDArray[np.float32], spec: EngineSpec) -> None:
    """Raises BundleError if logits [rows, V] of the engine or of the reference are NaN or infinite."""
    if not np.isfinite(expected).all():
        raise BundleError(
            f"the {spec.role} computes logits that are NaN or infinite even in fp32: its weights are damaged or too "
            "large"
        )
    if not np.isfinite(found).all():
        raise BundleError(
            f"the {spec.role} computes logits that are NaN or infinite in {spec.precision}: its weights or activations "
            "are too large for this type; build it with --precision bf16 or fp32"
        )


def refuse_another_head(found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float) -> None:
    """Raises BundleError if the acceptance probabilities of two engines differ."""
    difference = float(np.abs(found - expected).max())
    if not difference <= tolerance:
        raise BundleError(
            f"the acceptance head differs from the reference by {difference:.1e}, more than "
            f"{tolerance:.0e}: this is a bug of the exporter or the backend, please report the head"
        )


def batches(spec: EngineSpec) -> Iterator[TokenBatch]:
    """The passes of a prompt, and then of a random tree after it."""
    rng = np.random.default_rng(0)
    prompt, rows = min(PROMPT_ROWS, spec.max_width), min(TREE_ROWS, spec.max_width)
    tokens, shows = rng.integers(0, spec.model.vocab_size, prompt + rows), spec.model.state_size > 0
    states = random_states(spec, prompt + rows, rng)
    first, second = (None, None) if states is None else (states[:prompt], states[prompt:])
    yield causal_batch(spec, tokens[:prompt].tolist(), 0, states=first, states_read=shows)
    mask = np.eye(rows, dtype=np.bool_)
    depths = np.zeros(rows, np.int64)
    for row in range(1, rows):
        parent = int(rng.integers(row))
        mask[row] |= mask[parent]
        depths[row] = depths[parent] + 1
    width = spec.width_for(rows)
    yield TokenBatch.pad(tokens[prompt:], prompt + depths, mask, width, states=second, states_read=shows)


def random_states(spec: EngineSpec, rows: int, rng: np.random.Generator) -> NDArray[np.float32] | None:
    """States [rows, state_inputs] for a draft that reads them: of every third row its own, of others the target's."""
    if spec.model.reads is None:
        return None
    states, own = rng.normal(size=(rows, spec.model.state_inputs)).astype(np.float32), spec.model.reads.inputs
    states[::3, :own] = 0
    states[1::3, own:] = states[2::3, own:] = 0
    return states


def rows_of(spec: EngineSpec) -> Rows:
    """The rows of these passes as one pass without a cache: those of a later pass attend to all earlier ones."""
    passes = list(batches(spec))
    counts = [batch.num_tokens for batch in passes]
    mask = np.zeros((sum(counts), sum(counts)), np.bool_)
    first = 0
    for batch, count in zip(passes, counts, strict=True):
        mask[first : first + count, :first] = True
        mask[first : first + count, first : first + count] = batch.mask[:count, :count]
        first += count
    tokens = np.concatenate([batch.token_ids[:count] for batch, count in zip(passes, counts, strict=True)])
    positions = np.concatenate([batch.position_ids[:count] for batch, count in zip(passes, counts, strict=True)])
    return Rows(tokens, positions, mask, joined_states(passes))
