"""draftwood train-head: trains a SpecDec++ acceptance head for a pair, and shows its loss curve and calibration."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..builder.head.training import HeadResult, HeadTraining
from ..models.bindings import ROLES
from ..models.printable import shell_word
from .bench import read_prompts
from .options import FURTHER, HIDDEN, add_quiet, add_settings, needed_packages, read_options
from .progress import progress
from .streams import say

WORTHWHILE = 1e-3  # nats per token that a head should gain over a constant prediction


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("train-head", help="train a SpecDec++ acceptance head for a draft and its target")
    for role in ROLES:
        text = f"the {role}: Hugging Face folder or .gguf file"
        parser.add_argument(f"--{role}", type=Path, required=True, metavar="PATH", help=text)
    words = 'JSON lines, each with a "prompt" (or "turns")'
    parser.add_argument("--prompts", type=Path, required=True, metavar="F", help=words)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    add_settings(parser, "sizes and training", HeadTraining)
    group = parser.add_argument_group(FURTHER + "form")
    group.add_argument(
        "--untied", dest="tied", action="store_false", default=HIDDEN, help="a matrix for every ResBlock"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with needed_packages("training"):
        options = read_options(args, HeadTraining)  # invalid options are refused before torch is imported
        prompts = read_prompts(args.prompts)
        from ..builder.head.train import train_head
    console = Console(stderr=args.json, quiet=args.quiet)
    with progress(console) as begin:
        result = train_head(options, prompts, begin)
    if args.json:
        print(json.dumps({"output": str(options.output), **result.to_dict()}))
        return 0
    console.print(summary(result))
    say(
        console,
        f"Weighted loss {result.validation[0].loss:.4f} -> {result.loss:.4f}, temperature "
        f"{result.config.temperature:.3f}, {result.examples} + {result.held_out} tokens, "
        f"mean acceptance {result.mean_acceptance:.3f}, {result.seconds:.0f} s",
    )
    if result.calibrated.nll >= result.constant.nll - WORTHWHILE:
        console.print("This head knows little more than the mean: give it more --texts, or --contexts branched")
    console.print(f"Loss curve and reliability: {options.output / 'training.svg'}", markup=False)
    say(
        console,
        f"Next: draftwood build --target {shell_word(options.target)} --draft {shell_word(options.draft)} "
        f"--acceptance-head {shell_word(options.output)} --output BUNDLE",
    )
    return 0


def summary(result: HeadResult) -> Table:
    """The held-out figures, before and after each correction."""
    table = Table("held out", "NLL", "binary KL", "ECE", box=box.SIMPLE, pad_edge=False)
    for name, figures in {"mean acceptance for every token": result.constant, **result.stages()}.items():
        table.add_row(name, f"{figures.nll:.4f}", f"{figures.binary_kl:.4f}", f"{figures.ece:.4f}")
    return table
