"""TokenChunk: the tokens that one round adds to a text."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """A token under the target's unprocessed distribution, natural logarithm, with the most probable alternatives."""

    token_id: int
    logprob: float
    top: dict[int, float]


class TokenChunk(NamedTuple):
    """Tokens one round added. The first `num_drafted` came from the draft, the last one is the target's own, unless the
    round was cut short. finish_reason: None while more follows, else "stop" or "length"."""

    token_ids: list[int]
    num_drafted: int
    logprobs: list[TokenLogprob]
    finish_reason: str | None
