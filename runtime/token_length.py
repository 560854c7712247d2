"""longest_token: the most characters of a text that one token can stand for, where a tokenizer leaves no doubt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as TokenizerJson
from tokenizers import models, pre_tokenizers

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # SentencePiece's tokens of single bytes


def longest_token(backend: TokenizerJson) -> int | None:
    """Characters of the longest token; None for a tokenizer that may drop characters, or make one token of any number
    of them: then a text of any length may have few tokens.

    Over raw text (LLaMA-1/2) a token stands for its characters, or for one byte of a character. Over bytes written as
    letters (LLaMA-3) it stands for as many bytes as it has letters, and no character has less than one.
    """
    normalized, split = list(parts(backend.normalizer)), list(parts(backend.pre_tokenizer))
    added = backend.get_added_tokens_decoder().values()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    certain = (
        all(map(keeps_length, normalized))
        and all(map(keeps_all, split))
        and not any(token.lstrip or token.rstrip for token in added)  # they swallow the space beside them
        and knows_every_character(backend.model, vocabulary, any(part["type"] == "ByteLevel" for part in split))
    )
    return max(map(len, vocabulary)) if certain else None


def parts(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, each as tokenizer.json has it."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop(0)
        if part["type"] == "Sequence":
            steps = (part.get(name, ()) for name in ("normalizers", "pretokenizers", "decoders"))
            waiting = [*chain.from_iterable(steps), *waiting]
        else:
            yield part


def keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether a text has at least as many characters after it as before."""
    replaced = normalizer.get("pattern", {}).get("String")
    longer = replaced is not None and len(replaced) <= len(normalizer["content"])
    return normalizer["type"] == "Prepend" or (normalizer["type"] == "Replace" and longer)


def keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether what it splits a text into is the whole text."""
    kept = pre_tokenizer["type"] in ("ByteLevel", "Metaspace", "Digits")
    return kept or (pre_tokenizer["type"] == "Split" and pre_tokenizer["behavior"] != "Removed")


def knows_every_character(model: models.Model, vocabulary: Mapping[str, int], bytes_as_letters: bool) -> bool:
    """Whether every character has tokens of its own, rather than one "unknown" for any number of them, or none."""
    if not isinstance(model, models.BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True  # an "unknown" for each
    if bytes_as_letters:
        return vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return bool(model.byte_fallback) and vocabulary.keys() >= set(BYTES)
