"""Write docs/options.md, the reference of every option and of the Python API, from the code: argparse's parsers, the
dataclasses of settings, the public classes and the bodies of HTTP requests. The site's build runs it; the page is not
stored, so it cannot be out of date."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from draftwood import LLM, AsyncLLM, SamplingParams, SpeculativeConfig, runtime
from draftwood.cli.main import COMMANDS
from draftwood.runtime.serving.http.reference import kind, shown
from draftwood.runtime.serving.openai.bodies import ChatBody, CompletionBody

REFERENCES = "#/components/schemas/{model}"


def page() -> str:
    return "\n".join(parts()) + "\n"


def parts() -> Iterator[str]:
    yield "# Options and Python API\n\nThis page is written from the code when the site is built."
    yield "`draftwood COMMAND --help` shows the same options on your machine, and a server's `/docs` shows the"
    yield "fields of its requests.\n"
    yield "## The command line\n"
    commands = parsers()
    for name, parser in commands.items():
        yield f"### draftwood {name}\n"
        yield f"    {' '.join(parser.format_usage().removeprefix('usage: ').split())}\n"
        for group in parser._action_groups:
            actions = [action for action in group._group_actions if action.help != "show this help message and exit"]
            if actions:
                yield f"**{group.title}**\n"
                rows = ((code(", ".join(a.option_strings) or a.dest), expanded(parser, a)) for a in actions)
                yield from table(("option", "meaning"), rows)
    yield "## Settings in Python\n"
    helps = {action.dest: expanded(commands["generate"], action) for action in commands["generate"]._actions}
    for settings in (SamplingParams, SpeculativeConfig):
        yield f"### {settings.__name__}\n"
        rows = (
            (code(field.name), code(str(field.type)), code(repr(field.default)), helps.get(field.name, ""))
            for field in fields(settings)
            if field.default is not MISSING
        )
        yield from table(("field", "type", "default", "on the command line"), rows)
        yield described(settings)
    for opened in (LLM, AsyncLLM):
        yield f"### {opened.__name__}\n"
        parameters = [each for each in inspect.signature(opened).parameters.values() if each.default is not each.empty]
        yield from table(
            ("argument", "type", "default"),
            ((code(each.name), code(str(each.annotation)), code(shown_default(each.default))) for each in parameters),
        )
        yield described(opened.__init__)
        yield from members(opened)
    yield "## Other public classes\n\n`from draftwood import NAME`.\n"
    for name in sorted(set(runtime.__all__) - {"SamplingParams", "SpeculativeConfig", "LLM", "AsyncLLM"}):
        yield f"### {name}\n"
        yield described(getattr(runtime, name))
        yield from members(getattr(runtime, name))
    yield "## Fields of HTTP requests\n"
    _, definitions = models_json_schema(
        [(CompletionBody, "validation"), (ChatBody, "validation")], ref_template=REFERENCES
    )
    document = {"components": {"schemas": definitions["$defs"]}}
    for body, path in ((CompletionBody, "/v1/completions"), (ChatBody, "/v1/chat/completions")):
        yield f"### POST {path}\n"
        rows = (
            (code(name), kind(document, field), code(shown(field.get("default"))), field.get("description", ""))
            for name, field in definitions["$defs"][body.__name__]["properties"].items()
        )
        yield from table(("field", "type", "default", "meaning"), rows)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command by its name."""
    commands = argparse.ArgumentParser(prog="draftwood").add_subparsers()
    for command in COMMANDS:
        command.add_parser(commands)
    return dict(commands.choices)


def expanded(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help text of an option, with its choices."""
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return text + (f": {', '.join(map(str, action.choices))}" if action.choices else "")


def described(thing: Any) -> str:
    """A docstring as paragraphs."""
    return "\n\n".join(cell(" ".join(each.split())) for each in (inspect.getdoc(thing) or "").split("\n\n")) + "\n"


def members(cls: type) -> Iterator[str]:
    """What a class has of its own and of the classes of this project: fields, properties and methods."""
    own = [base for base in reversed(cls.__mro__) if base.__module__.startswith("draftwood")]
    found = {name: value for base in own for name, value in vars(base).items() if not name.startswith("_")}
    found |= {name: None for base in own for name in vars(base).get("__annotations__", ()) if not name.startswith("_")}
    rows = [
        (code(name + signature(value)), " ".join((inspect.getdoc(value) or "").split()) if value is not None else "")
        for name, value in found.items()
        if value is None or inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod, property))
    ]
    if rows:
        yield from table(("member", "meaning"), rows)


def signature(value: object) -> str:
    """The parameters of a method, without types; nothing for fields and properties."""
    if value is None or isinstance(value, property):
        return ""
    parameters = inspect.signature(getattr(value, "__func__", value)).parameters.values()
    names = (each.name + ("" if each.default is each.empty else "=…") for each in parameters)
    return f"({', '.join(name for name in names if name not in ('self', 'cls'))})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = tuple(head)
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(cell, row))} |"
    yield ""


def cell(text: str) -> str:
    """A text that Markdown shows as it is, in a table, too. What stands between backquotes stays code."""
    pieces = text.replace("|", "\\|").split("`")
    return "`".join(piece if index % 2 else re.sub(r"([*_<[])", r"\\\1", piece) for index, piece in enumerate(pieces))


def shown_default(value: Any) -> str:
    """A default value; settings that are all defaults themselves by the name of their class."""
    return f"{type(value).__name__}()" if is_dataclass(value) and value == type(value)() else repr(value)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    print(page(), end="")
