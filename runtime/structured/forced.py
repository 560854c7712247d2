"""What the grammar of a text leaves no choice of, as a proposal that costs no pass of a draft.

The grammar forces a run of bytes, which the tokenizer divides into the usual tokens. In JSON blanks are free between
almost any two tokens. There a run goes on with the blanks that the text has had so far, if the same bytes follow
whatever blanks are written. So a run is a guess, which the target verifies by matching, each row with its own mask. To
commit it unseen, or to verify it by masks that its proposal did not have, would bias the text (FVO-Spec, 2605.07698).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .json_guard import BLANKS, VALUE, JsonGuard, Level, State

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_BYTES = 128  # of a run
SHOWING = 64  # tokens at the beginning of a text, and at its end, that show how it writes blanks
DENSE = re.compile(rb'":[^ \t\n]')
LINE, INDENTED = re.compile(rb"[{\[,]\n"), re.compile(rb"[{\[,]\n([ \t]+)[^ \t]")
WIDEST = {b"": b" ", b" ": b" " * 32, b"\t": b"\t" * 16}  # see `grammar_worker.WHITESPACE`; by the first after a line


def forced_run(
    matcher: LLMatcher, tokenizer: LLTokenizer, guard: JsonGuard | None, state: State, written: Sequence[int]
) -> list[int]:
    """The tokens that probably follow. matcher: after the text; it stays there. guard, state: of JSON at this place.
    written: the text's tokens."""
    walker, run, text = matcher.deep_copy(), b"", b""
    if guard is not None:
        shown = [*written[:SHOWING], *written[max(SHOWING, len(written) - SHOWING) :]]
        text = b"".join(guard.tokens.texts[token] for token in shown)
        if not text and guard.begins:
            return []  # the first blank, which nothing shows, is part of the first token
    while len(run) < MOST_BYTES:
        more = bytes(walker.compute_ff_bytes())
        if not more and guard is not None:
            more = beyond_blanks(walker, tokenizer, state, text + run)
        if not more or not follows(walker, tokenizer, more):
            break
        run += more
        if guard is not None:
            after = guard.follow(state, more)
            if after is None:
                break
            state = after
    return list(tokenizer.tokenize_bytes(run))


def beyond_blanks(walker: LLMatcher, tokenizer: LLTokenizer, state: State, text: bytes) -> bytes:
    """Blanks in the way of the text, and what follows them; nothing where that depends on the blanks, or in strings."""
    blanks = text[len(text.rstrip(BLANKS)) :]
    widest = WIDEST[b""] if not blanks else blanks[:1] + WIDEST[blanks[1:2] or b" "]
    if state.kind != VALUE or state.level is None or not widest.startswith(blanks):
        return b""
    probe = walker.deep_copy()
    if not follows(probe, tokenizer, widest[len(blanks) :]) or not (forced := bytes(probe.compute_ff_bytes())):
        return b""
    usual = usual_blanks(text, state.level, forced[:1])
    return usual[len(blanks) :] + forced if usual.startswith(blanks) else b""


def usual_blanks(text: bytes, level: Level, after: bytes) -> bytes:
    """The blanks that `text` would write before the byte `after`, as far as its other blanks show."""
    before = text.rstrip(BLANKS)[-1:]
    if after in (b":", b","):
        return b""
    if before == b":" or not LINE.search(text):
        return b" " if before in (b":", b",") and not DENSE.search(text) else b""
    depth = -(after in (b"}", b"]"))
    around: Level | None = level
    while around is not None:
        depth, around = depth + 1, around.around
    return b"\n" + min(INDENTED.findall(text), key=len, default=b"  ") * depth


def follows(matcher: LLMatcher, tokenizer: LLTokenizer, text: bytes) -> bool:
    """Whether a text may follow; the matcher is then after it."""
    tokens = tokenizer.tokenize_bytes(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and not matcher.is_error()
