"""draftwood: parses arguments, runs one command, turns errors into exit codes (2: bad input, 130: interrupted, 143:
terminated)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from ..models.errors import DraftwoodError
from ..models.printable import printable
from ..runtime.cost import release
from . import bench, build, generate, inspect, profile, serve, train_head, triton
from .termination import termination_unwinds

COMMANDS = (build, inspect, profile, generate, bench, train_head, serve, triton)
BACKENDS = ("onnxruntime", "openvino", "tensorrt", "tensorrt-rtx")  # of other makers


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="draftwood", description="Lossless speculative decoding over compiled engines"
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="and those of the installed backends")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        with termination_unwinds():
            code: int = args.run(args)
    except DraftwoodError as error:
        print(f"draftwood: error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("draftwood: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader went away, as in `draftwood generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


class ShowVersion(argparse.Action):
    """Looked up when it is asked for: every command parses arguments."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        installed = [found for backend in BACKENDS if (found := release(backend)) != backend]
        print(f"draftwood {version('draftwood')} with {', '.join(installed) or 'no backend but its own'}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
