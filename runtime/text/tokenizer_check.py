"""Refuses a tokenizer.json at which the tokenizers library fails, before the tokenizer serves a request.

The library is written in Rust. Its panics reach Python as a BaseException, and one panic while a file is opened ends
the whole process. Therefore the file is searched for known causes of panics, and every token is tried for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

from tokenizers import Tokenizer as TokenizerJson

from ...models.errors import BundleError
from ...models.plain_files import MOST_TOKENIZER, read_object

PROBE_SECONDS = 2.0  # time limit for all tokens and texts; 128,000 tokens take a third of a second
PROBE_TOKENS = 64  # number of tokens that are decoded together; each is also decoded alone
PLANES = (range(1, 0xD800), range(0xE000, 0x20000))  # Unicode's characters without the rare planes and the private ones
# Characters of all kinds: letters, combining marks, numbers, spaces, controls, and characters that JSON escapes.
TEXTS = (
    "",
    "a",
    "The quick brown fox, 12345!",
    "".join(map(chr, range(32, 127))),
    "".join(map(chr, range(32))),
    " \t\n  \r\n x ",
    "naïve é e\u0301 Ω я ب क 漢字 ｆｕｌｌ ﬁ ½ \u00a0\u200b\u2028\ufeff",
    "\U0001f642\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea",
    "▁<s></s><unk>[UNK]<0x0A>",
)


def check_file(file: Path) -> None:
    """Refuse a tokenizer.json that the library does not survive opening. Raises BundleError."""
    try:
        content = read_object(file, MOST_TOKENIZER)
    except (OSError, ValueError) as error:
        raise BundleError(f"{file} is not a readable tokenizer ({error}): rebuild the bundle") from error
    for problem in problems(content):
        raise BundleError(f"{file} cannot be used: {problem}; then rebuild the bundle")


def problems(content: Mapping[str, Any]) -> Iterator[str]:
    """The known problems of a tokenizer's JSON, each with its fix. The library refuses JSON of an unknown form."""
    model = content.get("model")
    if isinstance(model, dict) and isinstance(prefix := model.get("continuing_subword_prefix"), str) and prefix:
        for merge in model.get("merges") or ():
            second = merge.split(" ")[-1] if isinstance(merge, str) else merge[-1] if merge else None
            if not isinstance(second, str) or not second.startswith(prefix):
                yield (
                    f"the merge {merge!r} continues a word without the prefix {prefix!r}: correct the merge or "
                    "continuing_subword_prefix"
                )
                break
    for part in parts(content.get("decoder"), "decoders"):
        if part.get("type") == "Strip" and part.get("stop"):
            yield "its decoder strips characters from the end, at which the library fails for shorter texts: set stop 0"
    for part in parts(content.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "FixedLength" and not part.get("length"):
            yield "its pre-tokenizer splits text into pieces of length 0: set another length"
    yield from template_problems(content.get("post_processor"))


def parts(component: Any, nested: str) -> Iterator[Mapping[str, Any]]:
    """The single components of a component, also those inside nested sequences."""
    waiting = [component]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part[nested] if isinstance(part.get(nested), list) else []


def template_problems(post_processor: Any) -> Iterator[str]:
    """The problems of the templates that add special tokens to a text."""
    for part in parts(post_processor, "processors"):
        pieces, known = part.get("single"), part.get("special_tokens")
        if part.get("type") != "TemplateProcessing" or not isinstance(pieces, list) or not isinstance(known, dict):
            continue
        for piece in filter(lambda piece: isinstance(piece, dict), pieces):
            special, sequence = piece.get("SpecialToken"), piece.get("Sequence")
            if isinstance(special, dict) and special.get("id") not in known:
                yield f"its template names the special token {special.get('id')!r}: add it to special_tokens"
            if isinstance(sequence, dict) and sequence.get("id") != "A":
                yield "its template for one text names a second one: leave the sequence B out of `single`"


def check_tokenizer(backend: TokenizerJson, file: Path) -> None:
    """Try texts of all kinds, and as many tokens as PROBE_SECONDS allow. Raises BundleError if the library panics."""
    end = monotonic() + PROBE_SECONDS
    ids = sorted(backend.get_vocab(with_added_tokens=True).values())
    tried: Any = None
    try:
        for token in backend.get_added_tokens_decoder().values():
            tried = token.content
            if token.normalized and backend.normalizer is not None and not backend.normalizer.normalize_str(tried):
                raise BundleError(
                    f"{file} cannot be used: its normalizer removes all of the added token {tried!r}: set normalized "
                    "to false; then rebuild the bundle"
                )
        for tried in (*TEXTS, *(token.content for token in backend.get_added_tokens_decoder().values())):
            attempt(backend, tried)
            if monotonic() > end:
                break
        if backend.normalizer is not None and "Precompiled" in repr(backend.normalizer):
            for plane in PLANES:  # a damaged table fails only at certain characters
                tried = f"one of the characters U+{plane.start:04X} to U+{plane.stop - 1:04X}"
                backend.normalizer.normalize_str(" ".join(map(chr, plane)))
        together = (ids[first : first + PROBE_TOKENS] for first in range(0, len(ids), PROBE_TOKENS))
        for tried in chain([[]], together, ([token] for token in ids)):
            backend.decode(tried, skip_special_tokens=False)
            if monotonic() > end:
                break
    except BaseException as error:
        if not is_panic(error):
            raise
        raise BundleError(
            f"{file} cannot be used: the tokenizers library fails at {tried!r} ({error}): correct its normalizer, "
            "post-processor or decoder; then rebuild the bundle"
        ) from error


def attempt(backend: TokenizerJson, text: str) -> None:
    """Encode a text with and without special tokens. Ordinary errors are ignored: they are errors of the text. Panics
    are not."""
    for special in (True, False):
        try:
            backend.encode(text, add_special_tokens=special)
        except Exception:
            return


def is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked; pyo3 does not export the type."""
    return type(error).__module__ == "pyo3_runtime" and type(error).__name__ == "PanicException"


def is_failure(error: BaseException) -> bool:
    """Whether an error comes from the library, not from a signal or a lack of memory."""
    return is_panic(error) or (isinstance(error, Exception) and not isinstance(error, MemoryError))
