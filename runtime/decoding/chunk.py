"""TokenChunk: the tokens that one round adds to a request's output."""

from __future__ import annotations

from typing import NamedTuple

STOP = "stop"  # the last token ends the text and is not part of it
COMPLETE = "complete"  # the structured output is complete; the last token is part of the text
LENGTH = "length"


class TokenLogprob(NamedTuple):
    """The natural log-probability of a token under the target's unprocessed distribution, or, with a structured output,
    under this distribution over the allowed tokens alone. top: the log-probabilities of the most probable tokens, by
    token id."""

    token_id: int
    logprob: float
    top: dict[int, float]


class TokenChunk(NamedTuple):
    """The tokens of one round. The first `num_drafted` come from the accepted proposal. The last token comes from the
    target, unless the end of the text cut the round. finish_reason: None while more chunks follow, else STOP,
    COMPLETE or LENGTH. prompt_logprobs: of every token of the prompt, None for the first one; only in the first chunk,
    and only if the request wants them."""

    token_ids: list[int]
    num_drafted: int
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    prompt_logprobs: list[TokenLogprob | None] | None = None
