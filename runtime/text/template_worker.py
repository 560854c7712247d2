"""Renders chat templates. A separate program that `chat_template.py` starts, and kills if it takes too long.

The program reads lines of JSON from its standard input. The first line is the Jinja source. Each further line contains
the variables of one conversation, and is answered by a line {"text"} or {"error"}. The program ends at the end of its
input. It imports only jinja2 and the standard library, so that it starts quickly and a hostile template can reach
little.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 << 20  # limit of this process' address space, if the system supports limits
CPU_SECONDS = 10  # limit per conversation: ends this process even if the parent process cannot
MAX_CHARACTERS = 16 << 20  # of a rendered conversation


def main() -> None:
    """Answer lines until the input ends."""
    # Signals that stop the server go to its whole process group, but the server still finishes accepted requests.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    limit_memory()
    received: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=receive, args=(received,), daemon=True).start()
    answer({"ready": True})
    source: str = json.loads(received.get())
    while True:
        variables = received.get()
        limit_cpu()
        answer(outcome(source, variables))


def receive(received: SimpleQueue[bytes]) -> None:
    """Read lines while a template runs. At the end of the input the process ends at once, also during a template."""
    for line in sys.stdin.buffer:
        received.put(line)
    os._exit(0)


def answer(content: Mapping[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def outcome(source: str, variables: bytes) -> dict[str, str]:
    """The rendered text, or the reason of a failure."""
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


def limit_memory() -> None:
    """Bound the address space, on systems that support such limits."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        for kind, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
            soft, hard = resource.getrlimit(kind)
            bounds = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
            resource.setrlimit(kind, (min([most, *bounds]), hard))


def limit_cpu() -> None:
    """Bound the processor time of the next conversation."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        most = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


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


if __name__ == "__main__":
    main()
