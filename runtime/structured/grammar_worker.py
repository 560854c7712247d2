"""Tries a grammar before a server uses it: a task of `text/worker.py`. The setting is a tokenizer, and a line the form
of a text. A hostile grammar can take minutes or gigabytes to compile; here it meets limits of time and memory.

It imports only llguidance and the standard library. The server compiles with the same functions.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
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
    used. The line has the parts of a form that may be tried alone, with their places, to name the one that is wrong."""
    form, before = json.loads(line), resident_bytes()
    grammar, problem, matcher = attempt(tokenizer, form["kind"], form["text"])
    if problem and form["parts"]:
        parts = ((attempt(tokenizer, form["kind"], part["text"])[1], part) for part in form["parts"])
        problem, wrong = next((each for each in parts if each[0]), (problem, {"place": "", "one_of": ""}))
        place = wrong["place"]
        within = re.search(r"failed to compile JSON schema: (.*)", problem)
        problem = within[1] if within else problem  # not a grammar that the client did not write
        if "coerce_one_of" in problem:
            place, problem = (
                wrong["one_of"] or place,
                "the options may hold together, which is not supported: use anyOf",
            )
        problem = f"{place}: {problem}" if place else problem
    taken = max(0, resident_bytes() - before)
    del matcher  # not before its memory was measured
    return {"error": problem[:500]} if problem else {"text": grammar, "bytes": str(taken)}


def attempt(tokenizer: LLTokenizer, kind: str, text: str) -> tuple[str, str, LLMatcher | None]:
    """A grammar in llguidance's own form, the reason why it cannot be used, empty if it can, and its matcher."""
    try:
        grammar = translate(kind, text)
        matcher = open_matcher(tokenizer, grammar)
        return grammar, matcher.get_error() if matcher.is_error() else first_problem(matcher), matcher
    except MemoryError:
        return "", f"it needs more than {MEMORY_BYTES >> 20} MiB of memory", None
    except Exception as error:  # the library raises several types
        return "", str(error) or type(error).__name__, None


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
    """A grammar in llguidance's own form. kind: "regex", "lark" or "gbnf". Raises ValueError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(gbnf_to_lark(text) if kind == "gbnf" else text)


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
