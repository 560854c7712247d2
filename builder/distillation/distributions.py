"""The target's distributions beside its text: for each token the K most probable ones, taken from the passes that
write the text.

To record them costs a partial sort of each row of logits. To score finished texts again would cost a second pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...runtime.decoding.chunk import TokenChunk
from ...runtime.engines.base import Pass
from ...runtime.engines.passes import Steps
from ...runtime.sampling.softmax import Softmax
from .shards import id_type

COLUMNS = 32  # K
SHARE = 1e-5  # tokens below this share of the most probable one's probability count as tail


class TopTokens(NamedTuple):
    """A distribution at temperature 1. ids: unsigned [K], best first. logprobs: float16 [K], -inf where there are fewer
    tokens. tail: the probability of all other tokens."""

    ids: NDArray[np.unsignedinteger[Any]]
    logprobs: NDArray[np.float16]
    tail: float


class TopSelector:
    """Selects the K most probable tokens of rows of logits."""

    def __init__(self, softmax: Softmax, vocab_size: int, columns: int) -> None:
        """softmax: the engine's. columns: K."""
        self._softmax, self._columns = softmax, columns
        self._buffer = np.empty(vocab_size, softmax.dtype)
        self._type = id_type(vocab_size)

    def select(self, logits: NDArray[np.float32]) -> TopTokens:
        """logits: [V]. Raises EngineError when one is NaN or infinite."""
        total = self._softmax.weights(logits, 1.0, self._buffer).total
        found, weights = self._softmax.likely(logits, 1.0, SHARE)
        if len(found) > self._columns:  # a partial sort: a flat distribution has thousands of likely tokens
            best = np.argpartition(weights, -self._columns)[-self._columns :]
            found, weights = found[best], weights[best]
        order = np.argsort(-weights, kind="stable")
        probs = weights[order] / total
        ids = np.zeros(self._columns, self._type)
        logprobs = np.full(self._columns, -np.inf, np.float16)
        ids[: len(order)] = found[order]
        logprobs[: len(order)] = np.minimum(np.log(probs), 0)
        return TopTokens(ids, logprobs, min(1.0, max(0.0, 1 - float(probs.sum()))))


def recorded(
    steps: Steps[TokenChunk],
    select: Callable[[NDArray[np.float32]], TopTokens],
    rows: list[TopTokens],
) -> Steps[TokenChunk]:
    """The steps of plain decoding. Each pass that decides a token adds to `rows`."""
    try:
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            answer = yield step
            if isinstance(step, Pass) and step.output_read and answer is not None:
                rows.append(select(answer.logits[0]))  # now: the next pass overwrites the logits
    finally:
        steps.close()
