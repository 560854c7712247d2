"""Tries a grammar before a server uses it: a task of `text/worker.py`. The setting is a tokenizer, and a line the form
of a text. A hostile grammar can take minutes or gigabytes to compile; here it meets limits of time and memory.

It imports only llguidance and the standard library. The server compiles with the same functions.
"""

from __future__ import annotations

import ctypes
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 10
# Between the tokens of JSON: a blank, or a new line with its indentation. Without a bound, a weak model may write
# blanks until max_tokens.
WHITESPACE = r" |\n {0,32}|\n\t{0,16}"


def prepare(setting: dict[str, Any]) -> LLTokenizer:
    return open_tokenizer(setting["tokenizer"], setting["vocab_size"], setting["eos"])


def outcome(tokenizer: LLTokenizer, line: bytes) -> dict[str, str]:
    """{"text": the grammar in llguidance's own form, "bytes": the memory that it takes}, or the reason why it cannot be
    used."""
    form, before = json.loads(line), resident_bytes()
    try:
        grammar = translate(form["kind"], form["text"])
        matcher = open_matcher(tokenizer, grammar)
        problem = matcher.get_error() if matcher.is_error() else first_problem(matcher)
    except MemoryError:
        problem = f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"
    except Exception as error:  # the library raises several types
        problem = str(error) or type(error).__name__
    return {"error": problem[:500]} if problem else {"text": grammar, "bytes": str(max(0, resident_bytes() - before))}


def resident_bytes() -> int:
    """The memory of this process, without what its allocator keeps for later; 0 where the system does not tell it."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def open_tokenizer(tokenizer: str, vocab_size: int, eos: list[int]) -> LLTokenizer:
    """tokenizer: content of tokenizer.json."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos or None)


def translate(kind: str, text: str) -> str:
    """The grammar of a StructuredOutput in llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if kind in ("json", "json_object"):
        defaults: Any = {"whitespace_pattern": WHITESPACE}
        return LLMatcher.grammar_from_json_schema(text, defaults=defaults, overrides={"lenient": False})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
    return grammar_from("grammar", text)


def open_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a grammar; it may be in its error state."""
    from llguidance import LLMatcher, LLParserLimits

    # Below the library's defaults: they bound the time of a mask, and the memory of a grammar (up to 2 kB per state),
    # which requests with the same grammar share.
    limits = LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=30_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def first_problem(matcher: LLMatcher) -> str:
    """Why no text can begin; empty if one can."""
    matcher.compute_bitmask()
    problem = matcher.get_error() if matcher.is_error() else ""
    return "no text has this form" if "NoExtension" in problem else problem
