"""Renders chat templates: a program of its own, which `chat_template.py` starts, and ends when it takes too long.

It reads lines of JSON from its standard input. The first one is the Jinja source; each further one holds the variables
of one conversation, and is answered by a line {"text"} or {"error"}. The program ends with its input. It imports jinja2
and the standard library and nothing of this package, so that it starts quickly and a template finds little to reach.
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

MEMORY_BYTES = 512 << 20  # address space of this process, where the system can limit it
CPU_SECONDS = 10  # of one conversation: ends this process also when the one that started it cannot
MAX_CHARACTERS = 16 << 20  # of a rendered conversation


def main() -> None:
    """Answer lines until the input ends."""
    # Whoever stops the server stops it with its whole process group, but accepted requests are still finished.
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
    """Take lines in while a template runs: at the end of the input the process ends, whatever it is doing."""
    for line in sys.stdin.buffer:
        received.put(line)
    os._exit(0)


def answer(content: Mapping[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def outcome(source: str, variables: bytes) -> dict[str, str]:
    """The text, or why there is none."""
    try:
        return {"text": rendered(source, json.loads(variables))}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # a foreign program: any of Python's own errors may come out of it
        return {"error": str(error)[:1000] or type(error).__name__}


def rendered(source: str, variables: Mapping[str, Any]) -> str:
    """The template's text. Raises whatever the template does."""
    pieces, length = [], 0
    for piece in compiled(source).generate(variables):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise ValueError(f"it writes more than {MAX_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


@cache
def compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def limit_memory() -> None:
    """Bound the address space; systems that do not know such limits are left without."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        for kind, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
            soft, hard = resource.getrlimit(kind)
            bounds = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
            resource.setrlimit(kind, (min([most, *bounds]), hard))


def limit_cpu() -> None:
    """Bound the processor time of what follows."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        most = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def environment() -> ImmutableSandboxedEnvironment:
    """What chat templates may use: the helpers transformers gives them, and nothing of Python's."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


class Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it only has to be readable."""

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
    """transformers' filter of this name: no HTML escapes, unlike Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
