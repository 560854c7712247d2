"""draftwood train-head: trains a SpecDec++ acceptance head for a pair, and shows its loss curve and calibration."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..models.bindings import ROLES
from ..models.errors import EngineError
from ..models.printable import shell_word
from ..plugins.installation import install
from .bench import read_prompts
from .options import FURTHER, add_quiet, read_options
from .progress import progress

if TYPE_CHECKING:
    from ..builder.head.training import HeadResult


WORTHWHILE = 1e-3  # nats per token that a head should gain over a constant prediction


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("train-head", help="train a SpecDec++ acceptance head for a draft and its target")
    hidden = argparse.SUPPRESS  # the defaults are those of HeadTraining
    for role in ROLES:
        text = f"the {role}: Hugging Face folder or .gguf file"
        parser.add_argument(f"--{role}", type=Path, required=True, metavar="PATH", help=text)
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="F", help='JSON lines, each with a "prompt" (or "turns")'
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    further = parser.add_argument_group(FURTHER + "sizes and training")
    for name, kind, help in (
        ("layers", int, "ResBlocks of the head (default 3)"),
        ("reject-weight", float, "weight of a rejection in the loss (default 6)"),
        ("mixing-ratio", float, "share of the target's tokens in training texts (default 0.15)"),
        ("texts", int, "texts the target writes, prompts taken in turn (default 320)"),
        ("max-new-tokens", int, "tokens of a text (default 128)"),
        ("max-prompt-tokens", int, "longer prompts lose their beginning (default 128)"),
        ("temperature", float, "at which the target writes (default 1)"),
        ("batch-size", int, "texts written at a time (default 32)"),
        ("epochs", int, "times the head sees every example (default 16)"),
        ("learning-rate", float, "at its highest (default 0.002)"),
        ("held-out", float, "share of the prompts kept for calibration (default 0.2)"),
        ("seed", int, "the same seed gives the same head (default 0)"),
        ("threads", int, "of torch; 0 (default) chooses by the target's size"),
    ):
        further.add_argument(f"--{name}", type=kind, default=hidden, help=help)
    further.add_argument(
        "--contexts",
        default=hidden,
        help="texts that the draft reads in training: mixed (default, as published), or branched, which branch off the "
        "target's texts",
    )
    further.add_argument(
        "--untied", dest="tied", action="store_false", default=hidden, help="every ResBlock has its own matrix"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Imported here, so that the other commands need neither torch nor onnx.
    try:
        from ..builder.head.training import HeadTraining

        options = read_options(args, HeadTraining)  # invalid options are refused before torch is imported
        prompts = read_prompts(args.prompts)
        from ..builder.head.train import train_head
    except ModuleNotFoundError as error:
        raise EngineError(f"training needs {error.name}: {install('build', 'cpu')}") from error

    console = Console(stderr=args.json, quiet=args.quiet)
    with progress(console) as begin:
        result = train_head(options, prompts, begin)
    if args.json:
        print(json.dumps({"output": str(options.output), **result.to_dict()}))
        return 0
    console.print(summary(result))
    console.print(
        f"Weighted loss {result.validation[0].loss:.4f} -> {result.loss:.4f}, temperature "
        f"{result.config.temperature:.3f}, {result.examples} + {result.held_out} tokens, "
        f"mean acceptance {result.mean_acceptance:.3f}, {result.seconds:.0f} s",
        markup=False,
        highlight=False,
    )
    if result.calibrated.nll >= result.constant.nll - WORTHWHILE:
        console.print("This head knows little more than the mean: give it more --texts, or --contexts branched")
    console.print(f"Loss curve and reliability: {options.output / 'training.svg'}", markup=False)
    console.print(
        f"Next: draftwood build --target {shell_word(options.target)} --draft {shell_word(options.draft)} "
        f"--acceptance-head {shell_word(options.output)} --output BUNDLE",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def summary(result: HeadResult) -> Table:
    """The held-out figures, before and after each correction."""
    table = Table("held out", "NLL", "binary KL", "ECE", box=box.SIMPLE, pad_edge=False)
    for name, figures in {"mean acceptance for every token": result.constant, **result.stages()}.items():
        table.add_row(name, f"{figures.nll:.4f}", f"{figures.binary_kl:.4f}", f"{figures.ece:.4f}")
    return table
