"""Prepared: what takes time between the settings of a request and its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .structured.grammars import Grammar


class Prepared(NamedTuple):
    """Of the choices of one call. grammar: that of `SamplingParams.structured`; None without one. bad_words: the token
    sequences of `SamplingParams.bad_words`, see `token_sequences`."""

    grammar: Grammar | None
    bad_words: Sequence[Sequence[int]]
