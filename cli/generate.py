"""draftwood generate: text from a bundle, live in a terminal, plain in a pipe, one JSON object for programs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from ..models.errors import RequestError
from ..runtime.llm import LLM
from ..runtime.sampling import SamplingParams
from .live import LiveView, PlainView, summary
from .options import add_engines, add_sampling, add_speculation, given, speculative


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help="complete a prompt")
    parser.add_argument("bundle", type=Path)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to complete")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with the text to complete; - reads standard input")
    prompt.add_argument("--chat", metavar="TEXT", help="a user's message, put through the model's chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object: the fields of GenerationResult")
    add_sampling(parser)
    add_speculation(parser)
    add_engines(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = given(args, SamplingParams)
    config = speculative(args)
    text = prompt_text(args)
    with LLM(args.bundle, config, args.threads, args.draft_threads, args.provider) as llm:
        prompt = text if args.chat is None else llm.encode_chat([{"role": "user", "content": args.chat}])
        if args.json:
            print(json.dumps(llm.generate(prompt, params).to_dict()))
            return 0
        console = Console()
        with LiveView(console, text) if console.is_terminal else PlainView() as view:
            for chunk in llm.stream(prompt, params):
                view.show(chunk)
        errors = Console(stderr=True)
        errors.print(summary(chunk.stats), highlight=False)
    return 0


def prompt_text(args: argparse.Namespace) -> str:
    """The prompt of whichever option was used. Raises RequestError when its file cannot be read."""
    if args.prompt_file is None:
        return str(args.prompt if args.chat is None else args.chat)
    try:
        return sys.stdin.read() if args.prompt_file == "-" else Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompt-file {args.prompt_file} cannot be read: {error}") from error
