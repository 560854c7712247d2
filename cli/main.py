"""draftwood: parses arguments, runs one command and turns errors into exit codes (2: bad input, 130: interrupted, 143:
terminated)."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any, NoReturn

from ..models.errors import DraftwoodError
from ..models.printable import printable
from ..runtime.bundle.costs import release
from ..runtime.engines.backends import BACKENDS
from . import bench, build, chat, distill, generate, inspect, profile, serve, train_head, triton
from .termination import termination_unwinds

COMMANDS = (build, inspect, profile, generate, chat, bench, distill, train_head, serve, triton)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = Parser(prog="draftwood", description="Lossless speculative decoding over compiled engines")
    parser.add_argument(
        "--version", action=ShowVersion, nargs=0, help="versions of draftwood and of installed backends"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    args = parser.parse_args(join_lists(sys.argv[1:] if argv is None else argv))
    try:
        with termination_unwinds():
            code: int = args.run(args)
    except DraftwoodError as error:
        print(f"draftwood: error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("draftwood: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `draftwood generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the most similar choice; used for the commands, too."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        choices = re.sub(r"['\s]", "", found[2]).split(",") if found else []
        near = get_close_matches(found[1], choices, 1) if found else []
        super().error(printable(message + "".join(f"; did you mean {name}?" for name in near)))


def join_lists(argv: Sequence[str]) -> list[str]:
    """`--topology -1,0` as `--topology=-1,0`: argparse would take a list that begins with a minus for an option."""
    joined: list[str] = []
    for argument in argv:
        if joined and re.fullmatch(r"--[a-z][a-z-]*", joined[-1]) and re.fullmatch(r"-\d+(,-?\d*)+", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


class ShowVersion(argparse.Action):
    """Looks up the versions only when they are printed, because every command parses arguments."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        installed = [found for backend in BACKENDS if (found := release(backend)) != backend]
        print(f"draftwood {version('draftwood')} with {', '.join(installed)}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
