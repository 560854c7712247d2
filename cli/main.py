"""draftwood: parses arguments, runs one command, turns errors into exit codes (2: bad input, 130: interrupted)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..models.errors import DraftwoodError
from . import bench, build, generate, inspect, profile, serve, train_head, triton

COMMANDS = (build, inspect, profile, generate, bench, train_head, serve, triton)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="draftwood", description="Lossless speculative decoding over compiled engines"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
    except DraftwoodError as error:
        print(f"draftwood: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("draftwood: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader went away, as in `draftwood generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
