"""Passes as generators ask for them: decoding yields the passes it needs and gets their outputs sent, so that one loop
(`decoding/loop.py`) can run the passes of several requests together."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import numpy as np

from .base import Engine, EngineSpec, ForwardOutput, KVCache, Pass, TokenBatch

T = TypeVar("T")
Passes = Generator[Pass, ForwardOutput, T]  # answered with each pass's output; returns T
Steps = Generator[Pass | T, ForwardOutput | None, None]  # passes, answered with their outputs, and results on the way


def forward(engine: Engine, batch: TokenBatch, cache: KVCache) -> Passes[ForwardOutput]:
    """One pass."""
    return (yield Pass(engine, batch, cache))


def causal_batch(spec: EngineSpec, token_ids: Sequence[int], start: int, ranking_only: bool = False) -> TokenBatch:
    """A chunk of committed text that begins at position `start`; only its last row's logits are wanted."""
    rows = len(token_ids)
    mask = np.tri(rows, dtype=np.bool_)
    positions = np.arange(start, start + rows)
    return TokenBatch.pad(token_ids, positions, mask, spec.width_for(rows), True, ranking_only)


def prefill_passes(
    engine: Engine, cache: KVCache, token_ids: Sequence[int], ranking_only: bool = False, output_read: bool = True
) -> Passes[ForwardOutput | None]:
    """Append committed text in chunks; returns the last row's output. None for empty text, and where the loop knew
    that nobody reads the output."""
    output, end = None, 0
    while end < len(token_ids):
        chunk = token_ids[end : end + engine.chunk_size(len(token_ids) - end)]
        end += len(chunk)
        batch = causal_batch(engine.spec, chunk, cache.length, ranking_only)
        output = yield Pass(engine, batch, cache, output_read and end == len(token_ids))
        cache.commit(range(len(chunk)))
    return output


def prefill(engine: Engine, cache: KVCache, token_ids: Sequence[int]) -> ForwardOutput | None:
    """The same for a text that is nobody's request: every pass is run at once."""
    return run(prefill_passes(engine, cache, token_ids))


def run(passes: Passes[T]) -> T:
    """What the passes return, each run as soon as it is asked for."""
    try:
        wanted = next(passes)
        while True:
            wanted = passes.send(wanted.run())
    except StopIteration as end:
        result: T = end.value
        return result
