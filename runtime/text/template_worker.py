"""Renders chat templates: a task of `worker.py`, set up with the Jinja source; a line has the variables of one
conversation. Imports only jinja2 and the standard library: it starts quickly, and a hostile template reaches little."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 << 20
CPU_SECONDS = 10
MAX_CHARACTERS = 16 << 20  # of a rendered conversation


def outcome(source: str, variables: bytes) -> dict[str, str]:
    """The rendered text, or the reason of a failure. The first conversation compiles the template."""
    try:
        return {"text": render(source, json.loads(variables))}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # a template may raise any of Python's errors
        return {"error": str(error)[:1000] or type(error).__name__}


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The rendered text. Raises every error of the template."""
    pieces, length = [], 0
    for piece in compile_template(source).generate(variables):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise ValueError(f"it writes more than {MAX_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


@cache
def compile_template(source: str) -> jinja2.Template:
    return environment().from_string(source)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment of chat templates: transformers' helpers, and no access to Python."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


class Generation(Extension):
    """`{% generation %}` marks the assistant's text for training. It is accepted here and has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter of this name. Unlike Jinja's own, it writes no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
