"""Writes the form that a request demands in a notation of llguidance."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ...models.errors import RequestError
from ..sampling.structured import AnswerWithCalls, StructuredOutput
from .json_guard import ANY_VALUE
from .schema_rules import SPACE, schema_rules

RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")
# What stands in quotes or brackets, a comment, a token reference.
GBNF_PART = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#.*|!?<[^>\n]*>')
GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


class Json(NamedTuple):
    """Where a text is JSON, and how long its numbers may be; see JsonGuard."""

    begins: bytes
    opens: bytes
    digits: int


class WrittenForm(NamedTuple):
    """A form for `grammar_worker.outcome`."""

    kind: str
    text: str
    parts: list[dict[str, str]]
    json: Json | None  # None for a text that is no JSON


def written_form(form: StructuredOutput) -> WrittenForm:
    """Raises RequestError for a schema or a grammar that is not supported."""
    if isinstance(form, AnswerWithCalls):
        return with_schemas(form.rules.splitlines(), form.schemas, form.begins, form.opens)
    if form.kind in ("json", "json_object"):
        return with_schemas([], (("start", "", form.text),), ANY_VALUE, b"")
    if form.kind == "choice":
        return WrittenForm("lark", "start: " + " | ".join(map(json.dumps, form.choice)), [], None)
    if form.kind == "grammar" and RULE.search(form.text):
        return WrittenForm("gbnf", GBNF_PART.sub(plain_part, form.text), [], None)
    return WrittenForm("lark" if form.kind == "grammar" else form.kind, form.text, [], None)


def with_schemas(
    lines: list[str], schemas: tuple[tuple[str, str, str], ...], begins: bytes, opens: bytes
) -> WrittenForm:
    """Rules with those of schemas: the name of a rule, the place and the text of each."""
    head, parts, digits = ["%llguidance {}", SPACE], list[dict[str, str]](), 0
    lines = head + lines
    for rule, place, text in schemas:
        rules = schema_rules(json.loads(text), rule, place)
        lines += rules.lines
        digits = max(digits, rules.digits)
        alone = [*head, *rules.lines, *([] if rule == "start" else [f"start: {rule}"])]
        parts.append({"place": place, "text": "\n".join(alone), "one_of": rules.doubtful})
    return WrittenForm("lark", "\n".join(lines), parts, Json(begins, opens, digits))


def plain_part(part: re.Match[str]) -> str:
    """A part of a grammar in GBNF without the escapes that llguidance's translator misreads. Raises RequestError for a
    token reference."""
    if part[0][0] in "!<":
        raise RequestError(
            f"the structured output cannot be used: {part[0]:.60} refers to a token, which GBNF here cannot: write the "
            "grammar in Lark's notation, where <[28]> and <name> are tokens"
        )
    return part[0] if part[0].startswith("#") else GBNF_ESCAPE.sub(plain_character, part[0])


def plain_character(escape: re.Match[str]) -> str:
    r"""The character of an escape, as itself or, in ASCII, as \xXX. Other escapes stay."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise RequestError(f"the structured output cannot be used: {escape[0]} is no character: correct the grammar")
    return f"\\x{code:02x}" if code < 128 else chr(code)
