"""TokenChunk: the tokens that one round adds to a request's output, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Engine, KVCache, Pass, TokenBatch
from ..engines.passes import Passes
from ..sampling.sampler import Sampler, largest, log_softmax

STOP = "stop"  # the last token ends the text and is not part of it
COMPLETE = "complete"  # the structured output is complete; the last token is part of the text
LENGTH = "length"
# Rows of a pass over a prompt whose log-probabilities are wanted: each takes the host up to 3 ms, and others wait.
SCORED_ROWS = 16


class TokenLogprob(NamedTuple):
    """The natural log-probability of a token under the target's unprocessed distribution, with a structured output over
    the allowed tokens alone. top: those of the most probable tokens, by token id."""

    token_id: int
    logprob: float
    top: dict[int, float]


class TokenChunk(NamedTuple):
    """The tokens of one round: `num_drafted` accepted ones, then one of the target's, unless the end of the text cut
    the round. finish_reason: None while more chunks follow, else STOP, COMPLETE or LENGTH. prompt_logprobs: of every
    token of the prompt, None for the first one; only in the first chunk, and only if the request wants them."""

    token_ids: list[int]
    num_drafted: int
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    prompt_logprobs: list[TokenLogprob | None] | None = None


def output_logprobs(
    logits: NDArray[np.float32], rows: Sequence[int], tokens: Sequence[int], sampler: Sampler
) -> list[TokenLogprob]:
    """Log-probabilities of the tokens that a text keeps of a round, if the request wants them. logits [R, V]: the
    target's; rows: the accepted ones, each of which predicts the next token."""
    count = sampler.params.logprobs
    if count is None:
        return []
    predicting = (0, *rows)[: len(tokens)]
    allowed = (sampler.processing.constrain(logits[row], tokens[:index]) for index, row in enumerate(predicting))
    return [logprob_of(scores, token, count) for scores, token in zip(allowed, tokens, strict=True)]


def read_prompt(engine: Engine, cache: KVCache, prompt: Sequence[int], count: int) -> Passes[list[TokenLogprob | None]]:
    """Append a prompt without its last token to an empty cache. Returns the log-probability of each token, None for the
    first, with `count` alternatives. Rows of other texts are not reused, because their logits are not kept."""
    found: list[TokenLogprob | None] = [None]
    while (start := len(found) - 1) < len(prompt) - 1:
        chunk = prompt[start : min(start + SCORED_ROWS, start + engine.spec.max_width, len(prompt) - 1)]
        rows = len(chunk)
        positions, mask = np.arange(start, start + rows), np.tri(rows, dtype=np.bool_)
        batch = TokenBatch.pad(chunk, positions, mask, engine.spec.width_for(rows))
        output = yield Pass(engine, batch, cache)
        following = prompt[start + 1 : start + 1 + rows]
        found += [logprob_of(output.logits[row], token, count) for row, token in enumerate(following)]
        cache.commit(range(rows))
    return found


def logprob_of(logits: NDArray[np.floating[Any]], token: int, count: int) -> TokenLogprob:
    """A token's log-probability under logits [V], with `count` alternatives."""
    scores = log_softmax(logits)
    best = largest(scores, count).tolist()
    return TokenLogprob(token, float(scores[token]), {index: float(scores[index]) for index in best})
