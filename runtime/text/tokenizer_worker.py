"""Encodes texts with a tokenizer of unproved cost: a task of `worker.py`. The setting is the content of tokenizer.json,
and a line a text, with whether special tokens are added, or null to try the tokenizer. Here it meets limits of time and
memory. It imports only tokenizers and the standard library. A tokenizer of proved cost is tried by the same function,
in the caller's process.
"""

from __future__ import annotations

import json
import os
from functools import cache
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as TokenizerJson

MEMORY_BYTES = 2 << 30
CPU_SECONDS = 30
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


def outcome(content: str, line: bytes) -> dict[str, str]:
    """{"ids": the tokens, separated by blanks}, {} after a trial, or {"error": the reason of a failure}."""
    try:
        backend, asked = opened(content), json.loads(line)
        if asked is None:
            problem = first_problem(backend)
            return {} if problem is None else {"error": problem}
        text, special = asked
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=special)
        return {"ids": " ".join(map(str, encoding.ids))}
    except BaseException as error:
        if not is_failure(error):
            raise
        return {"error": str(error)[:1000] or type(error).__name__}


@cache
def opened(content: str) -> TokenizerJson:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    return backend


def first_problem(backend: TokenizerJson) -> str | None:
    """Try texts of all kinds, and tokens for PROBE_SECONDS, by the clock between them. Returns where it panics."""
    end = monotonic() + PROBE_SECONDS
    ids = sorted(backend.get_vocab(with_added_tokens=True).values())
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    tried: Any = None
    try:
        for token in backend.get_added_tokens_decoder().values():
            tried = token.content
            if token.normalized and backend.normalizer is not None and not backend.normalizer.normalize_str(tried):
                return f"its normalizer removes all of the added token {tried!r}: set normalized to false"
        for tried in (*TEXTS, *added):
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
        part = "correct its normalizer, post-processor or decoder"
        return f"the tokenizers library fails at {tried!r} ({error}): {part}"
    return None


def attempt(backend: TokenizerJson, text: str) -> None:
    """Encode a text with and without special tokens. Ordinary errors are the text's, and ignored; panics are not."""
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
