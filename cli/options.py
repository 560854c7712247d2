"""Command-line options that are fields of a frozen dataclass: type, default and limits stay in the dataclass."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from ..models.bindings import ROLES
from ..runtime.sampling.sampler import SamplingParams
from ..runtime.speculation.config import AUTO, BUDGETS, GROWERS, KEYS, MERGERS, STOPPERS, VERIFIERS, SpeculativeConfig

THREADS = DRAFT_THREADS = 0  # of the engines, where nothing else is said; 0 lets the backend choose
PROVIDER = "cpu"
T = TypeVar("T")


def integers(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)."""
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"write whole numbers separated by commas, such as 1,2,4, not {text!r}"
        ) from error


def positive(text: str) -> int:
    """A whole number from 1 on."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"write a whole number, at least 1, not {text!r}")
    return value


def add_field(
    parser: argparse._ActionsContainer, kind: type, name: str, help: str, type: Callable[[str], Any], **rest: Any
) -> None:
    """One option for one field; the help text names the dataclass's own default."""
    default = next(field.default for field in fields(kind) if field.name == name)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    suffix = "" if default is None or default == () else f" (default {shown})"
    flag = "--" + name.replace("_", "-")
    parser.add_argument(flag, type=type, default=argparse.SUPPRESS, help=help + suffix, **rest)


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """The two models, for commands that read checkpoints."""
    for role in ROLES:
        text = f"the {role}: its Hugging Face folder, or its .gguf file"
        parser.add_argument(f"--{role}", type=Path, required=True, metavar="PATH", help=text)


def given(args: argparse.Namespace, kind: Callable[..., T]) -> T:
    """The dataclass made of the options that were typed, and its own defaults for the rest."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(args).items() if name in names})


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Every field of SamplingParams a command line can express."""
    group = parser.add_argument_group("sampling")
    for name, kind, help in (
        ("max_tokens", int, "tokens to generate at most"),
        ("temperature", float, "0 is greedy"),
        ("top_k", int, "keep the k most probable tokens; 0 keeps all"),
        ("top_p", float, "keep the most probable tokens up to this mass"),
        ("min_p", float, "keep tokens at least this probable, relative to the best"),
        ("repetition_penalty", float, "divides the logits of tokens seen in prompt or output"),
        ("presence_penalty", float, "subtracted from tokens seen in the output"),
        ("frequency_penalty", float, "subtracted per occurrence in the output"),
        ("min_tokens", int, "no end of text before this many tokens"),
        ("seed", int, "the same seed gives the same text"),
        ("logprobs", int, "report this many alternatives per token"),
        ("stop_token_ids", integers, "ids that end the text, separated by commas"),
    ):
        add_field(group, SamplingParams, name, help, kind)
    group.add_argument(
        "--stop", action="append", default=argparse.SUPPRESS, help="text that ends the output; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on after end of text")


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Every field of SpeculativeConfig, and the switch that turns speculation off."""
    group = parser.add_argument_group("speculation")
    for name, choices, help in (
        ("grow", (AUTO, *GROWERS), "shape of a proposal"),
        ("merge", MERGERS, "whether recurring sequences are merged"),
        ("stop_rule", STOPPERS, "when a branch ends before the limits"),
        ("key", KEYS, "whose estimate of acceptance DySpec grows by"),
        ("verify", (AUTO, *VERIFIERS), "how the target accepts"),
        ("budget", BUDGETS, "cost: the measured costs choose below the limits; fixed: always up to them"),
    ):
        add_field(group, SpeculativeConfig, name, help, str, choices=choices)
    for name, kind, help in (
        ("max_draft_len", int, "depth of a proposal in tokens"),
        ("max_total_draft_tokens", int, "tokens of a tree"),
        ("frontier_width", int, "tree nodes the draft scores in one pass"),
        ("branching", integers, "children per depth of a k-ary tree"),
        ("topology", integers, "parent of each position of a static tree"),
        ("draft_threshold", float, "smallest value worth a draw (dyspec-threshold)"),
        ("merge_ngram", int, "length of a sequence that is merged when it recurs (gsd)"),
        ("sibling_share", float, "prune tokens less probable than this share of their best sibling (gsd)"),
        ("leaf_share", float, "draft no further below tokens less probable than this (gsd)"),
        ("rejection_threshold", float, "probability of a rejection at which specdec++ stops"),
        ("confidence_threshold", float, "least draft probability of a token to go on behind (confidence)"),
        ("entropy_threshold", float, "least bound on acceptance to go on with (entropy)"),
        ("min_draft_len", int, "tokens specdec++ proposes in any case"),
        ("lookup_ngram", int, "propose what followed the last occurrence of so many tokens; 0 does not"),
        ("lookup_len", int, "tokens such a lookup proposes"),
    ):
        add_field(group, SpeculativeConfig, name, help, kind)
    group.add_argument("--no-speculation", action="store_true", help="decode plainly, without the draft")


def add_engines(parser: argparse.ArgumentParser) -> None:
    """How the engines run on this machine."""
    group = parser.add_argument_group("engines")
    group.add_argument("--threads", type=int, default=THREADS, help="of the target; 0 lets the backend choose")
    group.add_argument(
        "--draft-threads", type=int, default=DRAFT_THREADS, help="of the draft; 0 takes one, natively the target's"
    )
    group.add_argument("--provider", choices=("cpu", "cuda"), default=PROVIDER, help="where ONNX Runtime computes")


def speculative(args: argparse.Namespace) -> SpeculativeConfig | None:
    """The chosen way to speculate; None for plain decoding."""
    return None if args.no_speculation else given(args, SpeculativeConfig)
