"""draftwood: parses arguments, runs one command and turns errors into exit codes (2: bad input, 130: interrupted,
141: nobody reads the output, 143: terminated, 129: its terminal was closed; docs/building.md has all)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..models.errors import ConfigError, DraftwoodError, nearest
from ..models.printable import printable
from ..models.release import own_version
from ..runtime.bundle.costs import release
from ..runtime.engines.backends import BACKENDS
from . import bench, build, chat, demo, distill, generate, inspect, profile, serve, train_head, triton
from .streams import abandon, check_output, lenient_errors, unwritten
from .termination import termination_unwinds

COMMANDS = (build, inspect, profile, generate, chat, bench, distill, train_head, serve, triton, demo)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, also where standard error does not take what is written there."""
    with lenient_errors():
        return exit_code(argv)


def exit_code(argv: Sequence[str] | None) -> int:
    """Run one command; returns its exit code."""
    try:
        check_output()
        return run_command(sys.argv[1:] if argv is None else argv)
    except DraftwoodError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("draftwood: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `draftwood generate ... | head`
        abandon(sys.stdout)
        return 141
    except (OSError, UnicodeEncodeError) as error:
        refusal = unwritten(error)
        if refusal is None:
            raise
        abandon(sys.stdout)
        return refuse(refusal)


def run_command(argv: Sequence[str]) -> int:
    """Run one command and write all of its output. Raises whatever the command raises, and BrokenPipeError or OSError
    if standard output does not take the output."""
    try:
        args = arguments(argv)
        with termination_unwinds():
            code: int = args.run(args)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # Rich ends the program so
            raise ended.__context__ from None
        sys.stdout.flush()  # of --help and --version
        raise
    sys.stdout.flush()
    return code


def refuse(error: DraftwoodError) -> int:
    """Say what is wrong; returns the exit code."""
    print(f"draftwood: error: {printable(str(error))}", file=sys.stderr)
    return 2


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; `run` is the function of the command. Ends the program if they are wrong."""
    parser = Parser(prog="draftwood", description="Lossless speculative decoding over compiled engines")
    parser.add_argument(
        "--version", action=ShowVersion, nargs=0, help="versions of draftwood and of installed backends"
    )
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        metavar="SHELL",
        help="a script that completes commands and options in bash, zsh, tcsh or another shell that shtab knows",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser.parse_args(join_lists(argv))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that suggests the most similar choice; used for the commands, too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Ends the program if an argument is unknown, with this parser's own options as suggestions."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            name = next((each for each in rest if each.startswith("-")), "").partition("=")[0]
            long = (option[2:] for option in self._option_string_actions if option.startswith("--"))
            near = nearest(name.lstrip("-"), long, prefix="--")
            self.error(f"unrecognized arguments: {' '.join(rest)}{near}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        near = nearest(found[1], re.sub(r"['\s]", "", found[2]).split(",")) if found else ""
        line = f"{self.prog}: error: {message}{near} (see {self.prog} --help)"
        self.exit(2, printable(line).replace("\n", "\\n") + "\n")


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
        print(f"draftwood {own_version()} with {', '.join(installed)}")
        parser.exit()


class PrintCompletion(argparse.Action):
    """Prints a shell's script that completes commands, options, their choices, and paths. shtab writes it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, *_: Any) -> None:
        try:
            import shtab
        except ModuleNotFoundError as error:
            raise ConfigError("--print-completion needs shtab: pip install 'draftwood[completion]'") from error
        if shell not in shtab.SUPPORTED_SHELLS:
            choices = ", ".join(shtab.SUPPORTED_SHELLS)
            parser.error(f"argument --print-completion: invalid choice: {shell!r} (choose from {choices})")
        for action in options_of(parser):
            if action.type in (Path, build.folder_or_id):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell))
        parser.exit()


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser, and those of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options_of(command)


if __name__ == "__main__":
    sys.exit(main())
