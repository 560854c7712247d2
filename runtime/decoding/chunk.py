"""TokenChunk: the tokens that one round adds to a request's output."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """The natural log-probability of a token under the target's unprocessed distribution. top: the log-probabilities of
    the most probable tokens, by token id."""

    token_id: int
    logprob: float
    top: dict[int, float]


class TokenChunk(NamedTuple):
    """The tokens of one round. The first `num_drafted` come from the accepted proposal. The last token comes from the
    target, unless the end of the text cut the round. finish_reason: None while more chunks follow, else "stop" or
    "length"."""

    token_ids: list[int]
    num_drafted: int
    logprobs: list[TokenLogprob]
    finish_reason: str | None
