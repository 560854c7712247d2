"""Command-line options that are fields of a frozen dataclass: type, default and limits stay in the dataclass."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from ..models.errors import ConfigError
from ..runtime.decoding.loop import MAX_RUNNING
from ..runtime.decoding.pace import MAX_PAUSE_MS
from ..runtime.engines.shared.memory import CACHE_SHARE
from ..runtime.request_engines import PREFIX_CACHE_SLOTS
from ..runtime.requests.async_llm import MAX_WAITING
from ..runtime.sampling.params import SamplingParams
from ..runtime.speculation.bounds import AUTO, BUDGETS, KEYS, LOOKUPS, MERGERS, STOPPERS
from ..runtime.speculation.config import GROWERS, SpeculativeConfig
from ..runtime.speculation.verifier import VERIFIERS

THREADS = DRAFT_THREADS = 0  # default threads of the engines; 0 lets the backend choose
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
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"write a whole number, at least 1, not {text!r}")
    return value


def valid_text(text: str) -> str:
    """Text of a command line, in which Python leaves half of a surrogate pair for a byte that it cannot decode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"write text in UTF-8, which {text!r} is not") from error
    return text


def add_field(
    parser: argparse._ActionsContainer,
    kind: type,
    name: str,
    help: str,
    type: Callable[[str], Any],
    default: Any = None,
    **rest: Any,
) -> None:
    """Add an option for a field. The help text names `default`, or else the dataclass's default."""
    default = default or next(field.default for field in fields(kind) if field.name == name)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    suffix = "" if default is None or default == () else f" (default {shown})"
    parser.add_argument(flag(name), type=type, default=argparse.SUPPRESS, help=help + suffix, **rest)


def read_options(args: argparse.Namespace, kind: Callable[..., T]) -> T:
    """Make the dataclass from the given options, with its own defaults for the others."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(args).items() if name in names})


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="only results and errors: no progress, no notes")


def add_sampling(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """Add every field of SamplingParams that a command line can express. defaults: of this command, in words, where
    they are not those of SamplingParams."""
    group = parser.add_argument_group("sampling")
    for name, kind, help in (
        ("max_tokens", int, "most tokens to generate"),
        ("temperature", float, "0 is greedy"),
        ("top_k", int, "keep the k most probable tokens; 0 keeps all"),
        ("top_p", float, "keep the most probable tokens up to this mass"),
        ("min_p", float, "keep tokens at least this probable, relative to the best"),
        ("repetition_penalty", float, "divides the logits of tokens in prompt or output"),
        ("presence_penalty", float, "subtracted from the logits of tokens in the output"),
        ("frequency_penalty", float, "subtracted from the logits per occurrence in the output"),
        ("min_tokens", int, "no end of text before this many tokens"),
        ("seed", int, "the same seed gives the same text"),
        ("logprobs", int, "report this many alternatives per token"),
        ("stop_token_ids", integers, "ids that end the text, separated by commas"),
    ):
        add_field(group, SamplingParams, name, help, kind, defaults.get(name))
    group.add_argument(
        "--stop",
        action="append",
        type=valid_text,
        default=argparse.SUPPRESS,
        help="text that ends the output; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="ignore end-of-text tokens")


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Add every field of SpeculativeConfig, and the switch that turns speculation off."""
    group = parser.add_argument_group("speculation")
    for name, choices, help in (
        ("grow", (AUTO, *GROWERS), "grower: the kind of proposals"),
        ("merge", MERGERS, "whether recurring sequences are merged"),
        ("stop_rule", STOPPERS, "rule that ends a branch before the limits"),
        ("key", KEYS, "estimate of acceptance that DySpec grows by"),
        ("verify", (AUTO, *VERIFIERS), "verifier"),
        ("budget", BUDGETS, "cost: choose sizes up to the limits by measured costs; fixed: always use the limits"),
        ("lookups", LOOKUPS, "whether the default settings also propose what a prompt lookup finds"),
    ):
        add_field(group, SpeculativeConfig, name, help, str, choices=choices)
    for name, kind, help in (
        ("max_draft_len", int, "depth of a proposal in tokens"),
        ("max_total_draft_tokens", int, "tokens of a tree"),
        ("frontier_width", int, "tree nodes that the draft scores in one pass"),
        ("branching", integers, "children per depth of a k-ary tree"),
        ("topology", integers, "parent of each position of a static tree, such as 0,0,1; 0 is the root"),
        ("draft_threshold", float, "least value of a draw (dyspec-threshold)"),
        ("merge_ngram", int, "length of recurring sequences that are merged (gsd)"),
        ("sibling_share", float, "prune tokens less probable than this share of their best sibling (gsd)"),
        ("leaf_share", float, "draft no children of tokens less probable than this (gsd)"),
        ("rejection_threshold", float, "probability of a rejection at which specdec++ stops"),
        ("confidence_threshold", float, "least draft probability of a token that gets children (confidence)"),
        ("entropy_threshold", float, "least bound on acceptance for further drafting (entropy)"),
        ("min_draft_len", int, "tokens that specdec++ proposes in any case"),
        ("lookup_ngram", int, "length of the n-grams of prompt lookup; 0 for no lookup"),
        ("lookup_len", int, "tokens that one lookup proposes"),
    ):
        add_field(group, SpeculativeConfig, name, help, kind)
    group.add_argument("--no-speculation", action="store_true", help="decode plainly, without the draft")


def add_limits(group: argparse._ArgumentGroup) -> None:
    """Add what every server of many requests has: the limits of AsyncLLM."""
    group.add_argument(
        "--max-running", type=int, default=MAX_RUNNING, help=f"requests that run together (default {MAX_RUNNING})"
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=MAX_WAITING,
        help=f"requests that may wait; further ones are refused (default {MAX_WAITING})",
    )
    group.add_argument(
        "--kv-cache-bytes",
        type=int,
        help="lower --max-running to the caches that fit into this memory (default: requests wait until caches fit "
        f"into {CACHE_SHARE:.0%} of the available memory)".replace("%", "%%"),
    )
    group.add_argument(
        "--max-pause-ms",
        type=float,
        default=MAX_PAUSE_MS,
        metavar="MS",
        help="the most time that a running text waits for the prompts of others between two of its chunks, by the "
        f"measured costs of the bundle (default {MAX_PAUSE_MS:g})",
    )
    group.add_argument(
        "--prefix-cache-slots",
        type=int,
        default=PREFIX_CACHE_SLOTS,
        metavar="SLOTS",
        help=f"slots for prompts of ended requests, which others reuse; 0: no reuse (default {PREFIX_CACHE_SLOTS})",
    )
    group.add_argument(
        "--private-weights",
        action="store_true",
        help="copy weights into memory instead of mapping files, so that changes of the bundle do not reach it; not "
        "for TensorRT, which maps none",
    )


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engines on this machine."""
    group = parser.add_argument_group("engines")
    group.add_argument("--threads", type=int, default=THREADS, help="threads of the target; 0 lets the backend choose")
    group.add_argument(
        "--draft-threads", type=int, default=DRAFT_THREADS, help="of the draft; 0: one, or on native the target's"
    )
    group.add_argument("--provider", choices=("cpu", "cuda"), default=PROVIDER, help="the device of ONNX Runtime")


def speculative(args: argparse.Namespace) -> SpeculativeConfig | None:
    """The settings of speculation; None for plain decoding. Raises ConfigError for settings that plain decoding does
    not have."""
    given = [field.name for field in fields(SpeculativeConfig) if field.name in vars(args)]
    given += ["draft_threads"] if args.draft_threads else []
    if args.no_speculation and given:
        raise ConfigError(f"--no-speculation makes {flag(given[0])} useless: leave one of them out")
    return None if args.no_speculation else read_options(args, SpeculativeConfig)


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")
