"""Looks at a tokenizer.json before the tokenizers library does.

The library is written in Rust. Its panics reach Python as a BaseException, one panic while a file is opened ends the
whole process, and so does a lack of memory. Therefore known causes are refused here. What a text may cost is either
proved (`is_proved`), or the text is encoded in a process that can be ended. What tokens become is decoded in this
process, for each token of a stream: a decoder whose cost is not proved is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import ceil, inf, prod
from typing import Any, TypeGuard

from ...models.fields import MOST
from .split_patterns import is_linear

MAX_STEPS = 32  # of a normalizer, pre-tokenizer, post-processor or decoder; published ones have 10
MAX_ADDED = 32  # special tokens around a text
MAX_GROWTH = 4  # times as many characters: what the library itself does to the characters of bytes
LONGEST_TOKEN, LONGEST_UNIGRAM = 1024, 128  # characters; published ones have 128, and of unigram models 16
VOCABULARY_BYTES, UNIGRAM_BYTES = 1 << 23, 1 << 22  # of all tokens; of each byte a unigram model makes up to 340
LONGEST_TEXT = 64  # characters of what a step looks for or puts before a text
# The most characters that a step writes for one.
NORMALIZERS = {"Sequence": 1, "NFC": 3, "NFD": 4, "Lowercase": 3, "Strip": 1, "StripAccents": 1, "Prepend": 1}
TEXTUAL = ("ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder")
DECODERS = dict.fromkeys(("Sequence", *TEXTUAL), 1)
# Steps of pre-tokenizers that only cut a text, and those that also write bytes as letters, or blanks.
CUTTERS = ("Sequence", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit", "FixedLength")
WRITERS = ("ByteLevel", "Metaspace")
AROUND = ("Sequence", "ByteLevel", "TemplateProcessing", "RobertaProcessing", "BertProcessing")


def problems(content: Mapping[str, Any]) -> Iterator[str]:
    """A tokenizer's known problems, each with its fix. Lists are refused where one would hide something."""
    model, added = content.get("model"), content.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list) or not all(isinstance(each, dict) for each in added):
        yield "its model, or one of its added tokens, is no object: copy the model's own tokenizer"
        return
    yield from vocabulary_problems(model, added)
    if isinstance(prefix := model.get("continuing_subword_prefix"), str) and prefix:
        merges = model.get("merges")
        for merge in merges if isinstance(merges, list) else ():
            parted = merge.split(" ") if isinstance(merge, str) else merge
            second = parted[-1] if isinstance(parted, list) and parted else None
            if not isinstance(second, str) or not second.startswith(prefix):
                yield (
                    f"the merge {merge!r} continues a word without the prefix {prefix!r}: correct the merge or "
                    "continuing_subword_prefix"
                )
                break
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if sum(1 for _ in parts(content.get(name))) > MAX_STEPS:
            yield f"its {name} has more than {MAX_STEPS} steps: leave out those that change nothing"
    decoders = list(parts(content.get("decoder")))
    for part in decoders:
        if part.get("type") not in (*DECODERS, "Replace"):
            yield f"its decoder has a step {part.get('type')!r}, and {', '.join(DECODERS)} are known: use these"
        if part.get("type") == "Strip" and part.get("stop"):
            yield "its decoder strips characters from the end, at which the library fails for shorter texts: set stop 0"
    if prod(growth(part, DECODERS) for part in decoders) > MAX_GROWTH:
        yield (
            "its decoder rewrites texts by a regular expression, or writes more than "
            f"{MAX_GROWTH} characters for one: replace texts by texts that are hardly longer"
        )
    for part in parts(content.get("pre_tokenizer")):
        if part.get("type") == "FixedLength" and not part.get("length"):
            yield "its pre-tokenizer splits text into pieces of length 0: set another length"
    yield from around_problems(content.get("post_processor"))


def vocabulary_problems(model: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The problems of tokens that are too long, too many, or have ids beyond any model's."""
    found = model.get("vocab")
    if isinstance(found, dict):
        texts, ids = list(found), [*found.values()]
    else:  # of a unigram model: pairs of a text and a score
        texts, ids = unigram_texts(found), []
    texts = [text for text in (*texts, *(entry.get("content") for entry in added)) if isinstance(text, str)]
    ids = [index for index in (*ids, *(entry.get("id") for entry in added)) if isinstance(index, int)]
    yield from text_problems(texts, UNIGRAM_BYTES if isinstance(found, list) else VOCABULARY_BYTES)
    if (last := max(ids, default=0)) >= MOST["vocab_size"]:
        yield f"a token of it has the id {last}, more than any model's: copy the model's own tokenizer"


def unigram_texts(vocabulary: Any) -> list[str]:
    pairs = vocabulary if isinstance(vocabulary, list) else []
    return [pair[0] for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str)]


def text_problems(texts: Sequence[str], most: int = VOCABULARY_BYTES) -> Iterator[str]:
    """The problems of tokens that are too long, or have more than `most` bytes together."""
    if (longest := max(map(len, texts), default=0)) > LONGEST_TOKEN:
        yield f"a token of it has {longest} characters, more than {LONGEST_TOKEN}: copy the model's own tokenizer"
    if (size := len("".join(texts).encode("utf-8", "surrogatepass"))) > most:
        yield f"its tokens have {size} bytes, more than {most}: copy the model's own tokenizer"


def parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """A component and, where it is a sequence, those inside; an empty one for what is no object."""
    waiting = [] if component is None else [component]
    while waiting:
        found = waiting.pop()
        part = found if isinstance(found, dict) else {}
        yield part
        if part.get("type") == "Sequence":
            nested = (part.get(name) for name in ("normalizers", "pretokenizers", "decoders", "processors"))
            waiting += chain.from_iterable(each for each in nested if isinstance(each, list))


def around_problems(post_processor: Any) -> Iterator[str]:
    """The problems of what adds special tokens to a text."""
    added = 0
    for part in parts(post_processor):
        if part.get("type") not in AROUND:
            yield f"its post-processor has a step {part.get('type')!r}, and {', '.join(AROUND)} are known: use these"
        if part.get("type") != "TemplateProcessing":
            continue
        try:
            pieces = [next(iter(piece.items())) for piece in part["single"]]
            texts = [piece["id"] for kind, piece in pieces if kind == "Sequence"]
            around = [piece["id"] for kind, piece in pieces if kind != "Sequence"]
            unknown = next((text for text in around if text not in part["special_tokens"]), None)
            added += sum(len(part["special_tokens"][text]["ids"]) for text in around if unknown is None)
        except (AttributeError, IndexError, KeyError, StopIteration, TypeError):
            yield "its template is damaged: copy the model's own tokenizer"
            continue
        if unknown is not None:
            yield f"its template names the special token {unknown!r}: add it to special_tokens"
        if "B" in texts:
            yield "its template for one text names a second one: leave the sequence B out of `single`"
        if len(texts) > 1:
            yield "its template for one text writes the text more than once: leave one sequence A in `single`"
    if added > MAX_ADDED:
        yield f"its template puts {added} special tokens around a text, more than {MAX_ADDED}: leave some out"


def growth(part: Mapping[str, Any], known: Mapping[str, int]) -> float:
    """The most characters that a step of a normalizer or decoder writes for one; infinity where it is not known, or the
    step may take longer than a time that grows with the text's length. known: of steps other than Replace."""
    kind = part.get("type")
    if kind == "Replace":
        pattern, written = part.get("pattern"), part.get("content")
        if not isinstance(pattern, dict) or not isinstance(written, str):
            return inf
        if is_linear_pattern(pattern.get("Regex")):
            return max(1, len(written))
        found = pattern.get("String")
        return max(1, ceil(len(written) / len(found))) if is_short(found) else inf
    if (kind == "Prepend" and not is_short(part.get("prepend"))) or (kind == "BPEDecoder" and not part.get("suffix")):
        return inf
    return known.get(kind, inf) if isinstance(kind, str) else inf


def is_linear_pattern(pattern: Any) -> bool:
    return isinstance(pattern, str) and len(pattern) < 4096 and is_linear(pattern)


def is_short(text: Any) -> TypeGuard[str]:
    return isinstance(text, str) and 0 < len(text) <= LONGEST_TEXT


def is_proved(content: Mapping[str, Any]) -> bool:
    """Whether the library encodes every text in a time and memory that grow with the text's length, and hardly faster
    than for published tokenizers. `problems` has found none."""
    normalizers, splits = list(parts(content.get("normalizer"))), list(parts(content.get("pre_tokenizer")))
    return (
        prod(growth(part, NORMALIZERS) for part in normalizers) <= MAX_GROWTH
        and all(map(splits_quickly, splits))
        and sum(part.get("type") in WRITERS for part in splits) <= 1
        and merges_quickly(content.get("model"))
    )


def splits_quickly(part: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer's step only cuts a text, or renames bytes or blanks, in a time linear in its length."""
    if part.get("type") != "Split":
        return part.get("type") in (*CUTTERS, *WRITERS)
    pattern = part.get("pattern")
    if not isinstance(pattern, dict):
        return False
    return is_linear_pattern(pattern.get("Regex")) or is_short(pattern.get("String"))


def merges_quickly(model: Any) -> bool:
    """Whether a model finds the tokens of a piece in a time that hardly grows faster than the piece."""
    if not isinstance(model, dict):
        return False
    kind = model.get("type", "BPE" if "merges" in model else None)  # older files do not name it
    if kind == "Unigram":
        return max(map(len, unigram_texts(model.get("vocab"))), default=0) <= LONGEST_UNIGRAM
    around = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    return kind in ("BPE", "WordLevel") and all(not text or is_short(text) for text in around)
