"""Converts the tokenizer of a GGUF file into tokenizer.json, with its settings and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerJson

from ....models.errors import CheckpointError, shown
from ....models.fields import MOST
from ....runtime.text.split_patterns import (
    CASED,
    DEEPSEEK_HAN,
    DEEPSEEK_MARKS,
    DEEPSEEK_WORD,
    ENGLISH,
    HAN,
    MARKS,
    SPACES,
    WORD,
)
from ....runtime.text.tokenizer import DEFAULT, INFILL, SETTINGS, TOKENIZER, Tokenizer
from ....runtime.text.tokenizer_check import text_problems
from ....runtime.text.tokenizer_worker import is_failure
from ...sentencepiece import CONTROL, USER_DEFINED, Piece, Pieces, put_around, tokenizer_of
from ...tokenizer import MAX_TEMPLATES, write_templates
from .header import AGAIN, Metadata

PREFIX = "tokenizer.ggml."
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # kinds of tokenizers
NORMAL, UNKNOWN, UNUSED = 1, 2, 5  # token types; the others as SentencePiece's
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
SPECIAL |= {name: name.removesuffix("_token") for name in INFILL}
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where a file does not name them
ENDS = ("eos", "eot", "eom")
END_NAMES = {  # control tokens that end a turn or a text: those of llama.cpp's list that families here have
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|return|>"),
    *("</s>", "<EOT>", "[EOS]", "[EOT]", "<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
}
MAX_TEMPLATE = 1 << 20  # characters
REST = rf"{MARKS}[\r\n]*|{SPACES}"
CASED_REST = rf"{MARKS}[\r\n/]*|{SPACES}"


def write_tokenizer(metadata: Metadata, destination: Path) -> Tokenizer:
    """Write a file's tokenizer into a folder, and open it there. Raises CheckpointError naming the fix."""
    settings: dict[str, str] = {}
    tokens = texts(metadata, "tokens")
    for name, key in SPECIAL.items():
        index = special_id(metadata, key, len(tokens))
        if index is not None:
            settings[name] = tokens[index]
    try:
        tokenizer = tokenizer_in(metadata)
        tokenizer.save(str(destination / TOKENIZER))
        (destination / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if templates := templates_in(metadata):
            write_templates(templates, destination)
        return Tokenizer.load(destination)
    except BaseException as error:  # the library raises nothing more specific, and it may panic
        if isinstance(error, CheckpointError | OSError) or not is_failure(error):
            raise
        raise CheckpointError(f"the tokenizer of {metadata.file} cannot be used: {error}; {AGAIN}") from error


def templates_in(metadata: Metadata) -> dict[str, str]:
    """The chat templates by name. Raises CheckpointError."""
    names = metadata.get("tokenizer.chat_templates", list) or []
    if len(names) > MAX_TEMPLATES:
        raise CheckpointError(f"{metadata.file}: it has {len(names)} chat templates; {AGAIN}")
    keys = {DEFAULT: "tokenizer.chat_template"} | {str(name): f"tokenizer.chat_template.{name}" for name in names}
    found = {name: text for name, key in keys.items() if (text := metadata.get(key, str)) is not None}
    if large := [len(text) for text in found.values() if len(text) > MAX_TEMPLATE]:
        raise CheckpointError(f"{metadata.file}: its chat template has {large[0]} characters; {AGAIN}")
    return found


def tokenizer_in(metadata: Metadata) -> TokenizerJson:
    """Build the tokenizer that the metadata describes. Raises CheckpointError and the tokenizers library's errors."""
    tokens, kinds = texts(metadata, "tokens"), token_kinds(metadata)
    count = len(tokens)
    while count > 1 and kinds[count - 1] in (UNUSED, UNKNOWN) and tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1  # rows of the embedding that belong to no token of the model's own tokenizer
    tokens, kinds = tokens[:count], kinds[:count]
    for problem in text_problems(tokens):
        raise CheckpointError(f"{metadata.file}: its tokenizer cannot be used: {problem}")
    if len(set(tokens)) < count:
        raise CheckpointError(f"{metadata.file}: its vocabulary has a token twice; {AGAIN}")
    kind = metadata.need(f"{PREFIX}model", str)
    if kind == BYTE_LEVEL:
        tokenizer, adds_bos = byte_level(metadata, tokens)
    elif kind == SENTENCEPIECE:
        tokenizer, adds_bos = sentencepiece(metadata, tokens, kinds), True
    else:
        raise CheckpointError(
            f"{metadata.file}: tokenizers of the kind {shown(kind)} are not supported; {BYTE_LEVEL!r} and "
            f"{SENTENCEPIECE!r} are: use the model's Hugging Face folder"
        )
    added = [(text, each) for text, each in zip(tokens, kinds, strict=True) if each in (CONTROL, USER_DEFINED)]
    # Together: each call takes a time that grows with the number of all.
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=each == CONTROL) for text, each in added])
    around: dict[str, str | None] = {}
    for key, default in (("bos", adds_bos), ("eos", False)):
        wanted = metadata.get(f"{PREFIX}add_{key}_token", bool)
        index = special_id(metadata, key, count) if (default if wanted is None else wanted) else None
        around[key] = None if index is None else tokens[index]
    put_around(tokenizer, around["bos"], around["eos"])
    return tokenizer


def byte_level(metadata: Metadata, tokens: list[str]) -> tuple[TokenizerJson, bool]:
    """A byte-level BPE tokenizer, and whether texts begin with BOS by default. Raises CheckpointError."""
    name = metadata.get(f"{PREFIX}pre", str)
    split = SPLITS.get(name or "")
    if split is None:
        says = "does not say how it splits texts" if name is None else f"splits texts as {shown(name)} does"
        raise CheckpointError(
            f"{metadata.file}: its tokenizer {says}, and {', '.join(sorted(SPLITS))} are known; {AGAIN}, or use the "
            "model's Hugging Face folder"
        )
    pairs = [merge.partition(" ") for merge in texts(metadata, "merges")]
    if not all(first and second for first, _, second in pairs):
        raise CheckpointError(f"{metadata.file}: a merge of its tokenizer is no pair; {AGAIN}")
    vocabulary = {text: index for index, text in enumerate(tokens)}
    tokenizer = TokenizerJson(
        models.BPE(vocabulary, [(first, second) for first, _, second in pairs], ignore_merges=split.whole)
    )
    split.apply(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.bos


def sentencepiece(metadata: Metadata, tokens: list[str], kinds: list[int]) -> TokenizerJson:
    """A SentencePiece BPE tokenizer, whose merges follow from its tokens' scores. Raises CheckpointError."""
    if metadata.get(f"{PREFIX}precompiled_charsmap", np.ndarray) is not None:
        raise CheckpointError(
            f"{metadata.file}: its tokenizer rewrites characters by a table, which is not supported: use the model's "
            "Hugging Face folder"
        )
    scores = metadata.need(f"{PREFIX}scores", np.ndarray)
    if len(scores) < len(tokens) or not np.isfinite(scores).all():
        raise CheckpointError(f"{metadata.file}: its tokenizer lacks scores, or has some that are no numbers; {AGAIN}")
    prefix = metadata.get(f"{PREFIX}add_space_prefix", bool)
    unknown = special_id(metadata, "unknown", len(tokens)) or 0
    pieces = [Piece(*each) for each in zip(tokens, scores.tolist(), kinds, strict=False)]
    strip = metadata.get(f"{PREFIX}remove_extra_whitespaces", bool)
    return tokenizer_of(Pieces(pieces, unknown, prefix=prefix is None or prefix, strip=bool(strip)))


def ends_of_text(metadata: Metadata) -> tuple[int, ...]:
    """Ids that end a text: those with keys in GGUF, and control tokens of END_NAMES. Raises CheckpointError."""
    tokens = texts(metadata, "tokens")
    listed = (special_id(metadata, key, len(tokens)) for key in ENDS)
    kinds = token_kinds(metadata)
    named = (index for index, text in enumerate(tokens) if text in END_NAMES and kinds[index] == CONTROL)
    return tuple(sorted({index for index in (*listed, *named) if index is not None}))


def special_id(metadata: Metadata, key: str, count: int) -> int | None:
    """The id of a special token; None when the file has none. Raises CheckpointError for an id of `count` or more."""
    index = metadata.get(f"{PREFIX}{key}_token_id", int)
    if index is None and metadata.get(f"{PREFIX}model", str) == SENTENCEPIECE:
        default = SENTENCEPIECE_IDS.get(key)
        return default if default is not None and default < count else None
    if index is not None and not 0 <= index < count:
        raise CheckpointError(
            f"{metadata.file}: {PREFIX}{key}_token_id is {index}, and there are {count} tokens; {AGAIN}"
        )
    return index


def texts(metadata: Metadata, key: str) -> list[str]:
    """A list of strings in the tokenizer's metadata. Raises CheckpointError when it is too long, or lists no tokens."""
    found = metadata.need(PREFIX + key, list)
    if not found and key == "tokens":
        raise CheckpointError(f"{metadata.file}: its tokenizer holds no tokens; {AGAIN}")
    if len(found) > MOST["vocab_size"]:
        raise CheckpointError(f"{metadata.file}: its tokenizer has {len(found)} {key}, too many for any model")
    return found


def token_kinds(metadata: Metadata) -> list[int]:
    """The type of each token; NORMAL when the file has no types. Raises CheckpointError."""
    count = len(texts(metadata, "tokens"))
    found = metadata.get(f"{PREFIX}token_type", np.ndarray)
    if found is None:
        return [NORMAL] * count
    if len(found) < count or found.dtype.kind not in "iu":
        raise CheckpointError(f"{metadata.file}: its tokenizer has {len(found)} types for {count} tokens; {AGAIN}")
    kinds: list[int] = found[:count].tolist()
    return kinds


class Split(NamedTuple):
    patterns: tuple[str, ...] = ()  # each regular expression splits the pieces of the one before
    digits: bool = False  # then each digit becomes a piece
    gpt2: bool = False  # GPT-2's pattern splits last
    nfc: bool = False  # characters are composed first (Unicode NFC)
    whole: bool = False  # a piece that is a token is used without merges
    bos: bool = False  # a text begins with BOS unless the file says otherwise

    def apply(self, tokenizer: TokenizerJson) -> None:
        if self.nfc:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps += [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


GPT2 = Split(gpt2=True)
CODE = Split(digits=True, gpt2=True)
LLAMA3 = Split((rf"{ENGLISH}|{WORD}|\p{{N}}{{1,3}}|{REST}",), whole=True, bos=True)
QWEN2 = Split((rf"{ENGLISH}|{WORD}|\p{{N}}|{REST}",), nfc=True)
GPT4O = Split((rf"{CASED % (f'{ENGLISH}?', f'{ENGLISH}?')}|\p{{N}}{{1,3}}|{CASED_REST}",))
SPLITS = {
    **dict.fromkeys(("gpt-2", "mellum", "gigachat", "a.x-4.0", "trillion", "granite-docling", "phi-2"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), CODE),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), LLAMA3._replace(whole=False, bos=False)),
    **dict.fromkeys(("qwen2", "kormo", "f2llmv2", "megrez"), QWEN2),
    "deepseek-r1-qwen": QWEN2._replace(nfc=False),
    "tekken": Split((rf"{CASED % ('', '')}|\p{{N}}|{CASED_REST}",), whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie"), GPT4O),
    "seed-coder": Split(
        (rf"{ENGLISH}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN), digits=True),
    "deepseek-v3": Split(
        (
            r"\p{N}{1,3}",
            DEEPSEEK_HAN,
            rf"{DEEPSEEK_MARKS}|{DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
        ),
    ),
}
