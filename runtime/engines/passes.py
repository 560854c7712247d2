"""Generators that request passes. Decoding code yields each pass that it needs and receives the pass's output through
`send`. The caller runs the passes, so one scheduler (`decoding/scheduler.py`) can join the passes of several requests.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..sampling.softmax import SoftmaxSettings
from .base import Engine, EngineSpec, ForwardOutput, KVCache, Pass, TokenBatch, causal_mask
from .rounds import Work

PENDING = 8  # committed tokens that a draft reads as part of a round, at most: more are a text that is only read
T = TypeVar("T")
Passes = Generator[Pass, ForwardOutput, T]  # yields a pass, receives its output; returns T
Works = Generator[Work, Any, T]  # the same, also with rounds and their outcomes
Steps = Generator[Work | T, Any, None]  # yields such a work and receives its result, or a T and None


def causal_batch(
    spec: EngineSpec,
    token_ids: Sequence[int],
    start: int,
    ranking_only: bool = False,
    settings: SoftmaxSettings | None = None,
    states: NDArray[np.float32] | None = None,
    states_read: bool = False,
) -> TokenBatch:
    """A batch for a chunk of committed text that begins at position `start`. Its only output row is the last token.
    settings: of the softmax of this row. states, states_read: see TokenBatch."""
    rows, every = len(token_ids), () if settings is None else (settings,)
    mask, width, positions = causal_mask(rows), spec.width_for(rows), np.arange(start, start + rows)
    return TokenBatch.pad(token_ids, positions, mask, width, True, ranking_only, every, states, states_read)


def prefill_passes(
    engine: Engine,
    cache: KVCache,
    token_ids: Sequence[int],
    ranking_only: bool = False,
    output_read: bool = True,
    settings: SoftmaxSettings | None = None,
    states: NDArray[np.float32] | None = None,
) -> Passes[ForwardOutput | None]:
    """Append committed text to a cache in chunks. Returns the last pass's output, with the last token's row; None for
    empty text, and perhaps if `output_read` is False. settings: of the softmax of that row. states: see TokenBatch."""
    output, end, of_prompt = None, 0, len(token_ids) > PENDING
    while end < len(token_ids):
        chunk = token_ids[end : end + engine.spec.chunk_size(len(token_ids) - end)]
        given = None if states is None else states[end : end + len(chunk)]
        end += len(chunk)
        batch = causal_batch(engine.spec, chunk, cache.length, ranking_only, settings, given)
        last, after = end == len(token_ids), token_ids[end : len(token_ids) - output_read]
        output = yield Pass(engine, batch, cache, output_read and last, of_prompt, after)
        cache.commit(range(len(chunk)))
    return output


def prefill(engine: Engine, cache: KVCache, token_ids: Sequence[int]) -> ForwardOutput | None:
    """The same without a loop: each pass is run as soon as it is requested."""
    return run(prefill_passes(engine, cache, token_ids))


def run(passes: Passes[T]) -> T:
    """Run each pass as soon as the generator requests it; returns the generator's result."""
    try:
        work = next(passes)
        while True:
            work = passes.send(work.run())
    except StopIteration as end:
        result: T = end.value
        return result
