"""longest_token: the most characters of a text for which one token can stand, if the tokenizer has such a bound."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as TokenizerJson
from tokenizers import models, pre_tokenizers

from . import tokenizer_check

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # SentencePiece's tokens of single bytes


def longest_token(backend: TokenizerJson) -> int | None:
    """Number of characters of the longest token. None for a tokenizer that may drop characters or turn any number of
    characters into one token, because a long text may then have few tokens.

    In tokenizers of raw text (LLaMA-1/2) a token stands for its characters, or for one byte of a character. In
    tokenizers of bytes written as letters (LLaMA-3) a token stands for one byte per letter, and every character has at
    least one byte.
    """
    normalized, split = list(parts(backend.normalizer)), list(parts(backend.pre_tokenizer))
    added = backend.get_added_tokens_decoder().values()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    certain = (
        all(map(keeps_length, normalized))
        and all(map(keeps_all, split))
        and not any(token.lstrip or token.rstrip for token in added)  # such tokens remove the space beside them
        and knows_every_character(backend.model, vocabulary, any(part["type"] == "ByteLevel" for part in split))
    )
    return max(map(len, vocabulary)) if certain else None


def parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """The single components of a normalizer, pre-tokenizer or decoder, in the form of tokenizer.json."""
    found = tokenizer_check.parts(None if component is None else json.loads(component.__getstate__()))
    return (part for part in found if part["type"] != "Sequence")


def keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether the normalizer never shortens a text."""
    replaced = normalizer.get("pattern", {}).get("String")
    longer = replaced is not None and len(replaced) <= len(normalizer["content"])
    return normalizer["type"] == "Prepend" or (normalizer["type"] == "Replace" and longer)


def keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether the pre-tokenizer's pieces are the whole text."""
    kept = pre_tokenizer["type"] in ("ByteLevel", "Metaspace", "Digits")
    return kept or (pre_tokenizer["type"] == "Split" and pre_tokenizer["behavior"] != "Removed")


def knows_every_character(model: models.Model, vocabulary: Mapping[str, int], bytes_as_letters: bool) -> bool:
    """Whether every character becomes at least one token. Else many may become one "unknown" token, or none."""
    if not isinstance(model, models.BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True  # one "unknown" token for each character
    if bytes_as_letters:
        return vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return bool(model.byte_fallback) and vocabulary.keys() >= set(BYTES)
