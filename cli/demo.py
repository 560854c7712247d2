"""draftwood demo: builds the demo pair, which the package contains, generates with it and compares configurations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..models import errors

PAIR = Path(errors.__file__).with_name("demo")
PROMPTS = (
    "class ThreadPool(object):\n    def submit(self, fn, *args, **kwargs):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
)
GENERATION = ("--temperature", "0.7", "--max-tokens", "110", "--seed", "6")
COMPARISON = ("--configs", "plain,chain:4,auto", "--max-tokens", "64", "--limit", "4", "--repeats", "2")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("demo", help="build a small pair that comes with draftwood, and try it")
    parser.add_argument(
        "--output", type=Path, default=Path("bundles/demo"), metavar="BUNDLE", help="its folder (default bundles/demo)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .main import main  # imported here, because it lists this command

    bundle = str(args.output)
    roles = ("--target", str(PAIR / "target"), "--draft", str(PAIR / "draft"), "--acceptance-head", str(PAIR / "head"))
    steps: list[tuple[str, ...]] = (
        [] if (args.output / "manifest.json").is_file() else [("build", *roles, "--output", bundle)]
    )
    steps += [("generate", bundle, "--prompt", prompt, *GENERATION) for prompt in PROMPTS]
    steps += [("bench", bundle, "--prompts", str(PAIR / "prompts.jsonl"), *COMPARISON, "--temperature", "0")]
    return next((code for code in map(main, steps) if code), 0)
