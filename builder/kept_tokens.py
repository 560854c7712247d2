"""Which tokens a trimmed draft predicts: the most frequent ones (FR-Spec, arXiv 2502.14856), of a text or by rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.errors import ConfigError
from ..models.fields import MOST
from ..models.plain_files import lines_of, read_plain
from ..runtime.text.tokenizer import Tokenizer
from .distillation.state import GIVEN, WrittenText

MAX_TEXT = 64 << 20  # bytes: some 15 million tokens, which take about a minute
PIECE = 1 << 16  # characters that are tokenized at a time: the tokenizers library takes 256 bytes for each
# Of a pass of the target, what a draft's projection takes by default. Qwen2.5-Coder-0.5B beside 1.5B keeps 65,536
# tokens, which costs 1 point of acceptance and saves 15 % of its pass. A quarter as many cost 6.6 points and save 24 %.
SHARE = 1 / 30
FEWEST = 1 << 14  # tokens that are kept by default
LINES = (".jsonl", ".ndjson")  # endings of files of JSON lines


def affordable(target_bits: int, row_bits: int, vocab_size: int) -> int | None:
    """How many tokens a draft keeps by default; None for all, which also hold where hardly any would be left out.
    target_bits: that a pass of the target reads. row_bits: of a token's row in the draft's projection."""
    count = max(FEWEST, int(SHARE * target_bits / row_bits) // 1024 * 1024)
    count = min(count, MOST["draft_vocab_size"])
    return count if count <= vocab_size * 3 // 4 else None


def most_frequent(
    tokenizer: Tokenizer, count: int, vocab_size: int, text: Path | None, always: Iterable[int]
) -> NDArray[np.int64]:
    """The `count` tokens to keep of `vocab_size`, int64, ascending.

    Special tokens and those in `always`, which end a text, are kept in any case. The others follow by their frequency
    in `text`. Tokens of one frequency, and all tokens where there is no text, follow in the order of their ids, single
    ASCII characters first: a BPE vocabulary lists its tokens in the order of their merges, the most frequent first.
    Raises ConfigError for a count that the vocabulary does not have, or that leaves no room for the special tokens.
    """
    most = min(MOST["draft_vocab_size"], vocab_size - 1)
    if count > most:
        raise ConfigError(
            f"--draft-vocabulary {count} is too many: of the {vocab_size} tokens of the draft at most {most} can be "
            "kept; ask for fewer, or leave it out to keep all"
        )
    frequency = np.zeros(vocab_size, np.int64) if text is None else frequencies(tokenizer, vocab_size, text)
    has_token, is_character = np.zeros((2, vocab_size), np.bool_)
    for token, index in tokenizer.vocabulary().items():
        if index < vocab_size:
            has_token[index], is_character[index] = True, is_ascii_character(token)
    order = np.lexsort((~is_character, -frequency, ~has_token))
    return kept_tokens(order, count, {*tokenizer.special_token_ids, *always}, "--draft-vocabulary")


def kept_tokens(order: NDArray[np.int64], size: int, always: Iterable[int], option: str) -> NDArray[np.int64]:
    """The ids of the first `size` tokens in an order, ascending, those in `always` first. option: that asks for the
    size. Raises ConfigError where `size` has no room for others."""
    special = np.intersect1d(order, np.fromiter(always, np.int64))
    if len(special) >= size:
        raise ConfigError(
            f"{option} {size} leaves no room for other tokens beside the {len(special)} special ones: ask for at least "
            f"{len(special) + 1}"
        )
    others = order[~np.isin(order, special)][: size - len(special)]
    return np.sort(np.concatenate((special, others)))


def is_ascii_character(token: str) -> bool:
    """Whether a token is a character of ASCII, alone or after a space. SentencePiece lists its characters last."""
    bare = token.lstrip("\u2581\u0120")  # how SentencePiece and byte-level BPE write a space
    return len(token) <= 2 and len(bare) <= 1 and bare.isascii()


def frequencies(tokenizer: Tokenizer, vocab_size: int, file: Path) -> NDArray[np.int64]:
    """How often each token occurs in a file of text, or in the strings of a file of JSON lines, int64 [V]. Raises
    ConfigError where the file cannot be read."""
    try:
        content = read_plain(file, MAX_TEXT).decode("utf-8-sig")
        texts = strings_of_lines(content) if file.suffix.lower() in LINES else iter([content])
        counts = np.zeros(vocab_size, np.int64)
        for piece in pieces(texts):
            ids = np.array(tokenizer.encode(piece, add_special_tokens=False), np.int64)
            counts += np.bincount(ids[ids < vocab_size], minlength=vocab_size)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--draft-vocabulary-text {file} cannot be read: {error}") from error
    if not counts.any():
        raise ConfigError(f"--draft-vocabulary-text {file} holds no text: name one like those that will be written")
    return counts


def strings_of_lines(content: str) -> Iterator[str]:
    """Every string in a file of JSON lines, but no names of fields."""
    for number, line in lines_of(content):
        try:
            yield from strings_of(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON ({error})") from error


def strings_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_of(item)


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """The texts in parts of whole lines, as far as lines are short enough."""
    for text in texts:
        start = 0
        while start < len(text):
            end = start + PIECE
            if end < len(text):
                end = text.rfind("\n", start, end) + 1 or end
            yield text[start:end]
            start = end


def expected_counts(texts: Iterable[WrittenText], vocab_size: int) -> NDArray[np.float64]:
    """How often the target writes each token [V]: the sum of its recorded probabilities, which is less noisy than the
    counts of written tokens, and above 0 for tokens that were probable but not drawn."""
    counts = np.zeros(vocab_size)
    for text in texts:
        own = text.kinds != GIVEN
        weights = np.exp(text.logprobs[own].astype(np.float64))
        counts += np.bincount(text.ids[own].ravel().astype(np.int64), weights.ravel(), vocab_size)
    return counts


def offsets(kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """`d2t` [N] of a trimmed draft: the target's id of output i is i + d2t[i]."""
    return kept - np.arange(len(kept))
