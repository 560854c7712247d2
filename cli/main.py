"""draftwood: parses arguments, runs one command and turns errors into exit codes (2: bad input, 130: interrupted,
141: nobody reads the output, 143: terminated, 129: its terminal was closed; docs/building.md has all)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..models.errors import ConfigError, DraftwoodError, nearest
from ..models.printable import printable
from ..models.release import own_version
from ..plugins.installation import install
from ..runtime.bundle.costs import release
from ..runtime.engines.backends import BACKENDS
from ..runtime.speculation.config import SpeculativeConfig
from . import bench, build, cache, chat, demo, distill, generate, inspect, profile, serve, train_head, triton
from .options import FURTHER, HIDDEN, folder_or_id
from .streams import abandon, check_output, lenient_errors, unwritten
from .termination import termination_unwinds

COMMANDS = (chat, serve, generate, bench, cache, build, inspect, profile, distill, train_head, triton, demo)
ELSEWHERE = {  # commands of other programs
    "run": "draftwood chat MODEL",
    "pull": "draftwood chat MODEL, which downloads an id of the Hub at its first use",
    "list": "draftwood cache",
    "ls": "draftwood cache",
    "ps": "draftwood cache, for the models that were built, and a server's /metrics for what runs",
    "rm": "draftwood cache --remove NAME",
    "complete": "draftwood generate MODEL --prompt TEXT",
}
OPTIONS = {  # options of other programs
    "-m": "; write the model without -m: draftwood COMMAND MODEL",
    "--model": "; write the model without --model: draftwood COMMAND MODEL",
    "-hf": "; write the id without -hf: draftwood COMMAND org/name",
    "-md": "; write --draft PATH",
    "-ngl": "; leave it out: a bundle says where it runs",
    "-t": "; write --threads N",
    "-np": "; write --max-running N, an option of draftwood serve",
    "-n": "; write --max-tokens N",
    "--chat-template-file": "; put it into the model's folder as chat_template.jinja before the build",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, also where standard error does not take what is written there."""
    with lenient_errors():
        return exit_code(argv)


def exit_code(argv: Sequence[str] | None) -> int:
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
    words = "versions of draftwood and of installed backends"
    parser.add_argument("--version", action=Printed, const=versions, nargs=0, help=words)
    words = "a script that completes commands and options in bash, zsh, tcsh or another shell that shtab knows"
    parser.add_argument("--print-completion", action=PrintCompletion, metavar="SHELL", help=words)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser.parse_args(join_lists(argv) or ["--help"])


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the most similar choice, and whose help leaves further options out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=partial(argparse.HelpFormatter, max_help_position=30))
        every = argparse.ArgumentParser.format_help
        self.add_argument("--help-all", action=Printed, const=every, nargs=0, default=HIDDEN, help="show every option")

    def format_help(self) -> str:
        """The help without the groups of further options."""
        groups = [group for group in self._action_groups if str(group.title).startswith(FURTHER)]
        further = [action for group in groups for action in group._group_actions]
        helps = [action.help for action in further]
        if not self.usage:
            places = " ".join(str(each.metavar or each.dest) for each in self._actions if not each.option_strings)
            self.usage = f"%(prog)s {places} [options]"
        try:
            for action in further:
                action.help = argparse.SUPPRESS
            shown = super().format_help()
        finally:
            for action, text in zip(further, helps, strict=True):
                action.help = text
        return shown + (f"\n--help-all shows {len(further)} further options.\n" if further else "")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Ends the program if an argument is unknown, with this parser's own options as suggestions."""
        names = {each.partition("=")[0] for each in args or ()} - self._option_string_actions.keys()
        if self._subparsers is None and (other := next(iter(names & OPTIONS.keys()), None)):
            self.error(f"there is no option {other}{OPTIONS[other]}")
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            name = next((each for each in rest if each.startswith("-")), "").partition("=")[0]
            long = [option[2:] for option in self._option_string_actions if option.startswith("--")]
            setting = name.lstrip("-").replace("-", "_")
            if "speculative" in long and setting in SpeculativeConfig.__dataclass_fields__:
                near = f"; write --speculative {setting}=..."
            else:
                near = nearest(name.lstrip("-"), long, prefix="--")
            self.error(f"unrecognized arguments: {' '.join(rest)}{near}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        near = nearest(found[1], re.sub(r"['\s]", "", found[2]).split(",")) if found else ""
        if found and found[1] in ELSEWHERE:
            message, near = f"there is no command {found[1]!r}", f"; write {ELSEWHERE[found[1]]}"
        elif found and message.startswith("argument COMMAND") and ("/" in found[1] or found[1].endswith(".gguf")):
            message, near = f"there is no command {found[1]!r}", f"; write draftwood chat {found[1]}"
        line = f"{self.prog}: error: {message}{near} (see {self.prog} --help)"
        self.exit(2, printable(line).replace("\n", "\\n") + "\n")


class Printed(argparse.Action):
    """Prints what `const` makes of the parser, computed only when it is asked for, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(self.const(parser), end="")
        parser.exit()


def join_lists(argv: Sequence[str]) -> list[str]:
    """`--widths -1,4` as `--widths=-1,4`: argparse would take a list that begins with a minus for an option."""
    joined: list[str] = []
    for argument in argv:
        if joined and re.fullmatch(r"--[a-z][a-z-]*", joined[-1]) and re.fullmatch(r"-\d+(,-?\d*)+", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def versions(_: argparse.ArgumentParser) -> str:
    installed = [found for backend in BACKENDS if (found := release(backend)) != backend]
    return f"draftwood {own_version()} with {', '.join(installed)}\n"


class PrintCompletion(argparse.Action):
    """Prints a shell's script that completes commands, options, their choices, and paths. shtab writes it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, *_: Any) -> None:
        try:
            import shtab
        except ModuleNotFoundError as error:
            raise ConfigError(f"--print-completion needs shtab: {install('completion')}") from error
        if shell not in shtab.SUPPORTED_SHELLS:
            choices = ", ".join(shtab.SUPPORTED_SHELLS)
            parser.error(f"argument --print-completion: invalid choice: {shell!r} (choose from {choices})")
        for action in options_of(parser):
            if action.type in (Path, folder_or_id):
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
