"""Compare peers on the same weights: same prompts and lengths, in turn, in one run on one machine.

    python -m benchmarks.peers.run --pair build/peers/202m --output benchmarks/results

--pair is a folder with `target`, `draft` (Hugging Face folders, or links to such) and `prompts.jsonl`. If the output
vocabulary of `draft` is trimmed, `draft-full` is the same draft with all outputs, which all peers but Draftwood load.
Every peer needs an environment: `sh benchmarks/peers/setup/NAME.sh` makes it once. A peer that cannot run is named and
left out. Decoding is greedy. The precisions run one after the other, so that only programs of one are in memory, and
the results are written after each. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers.comparison import Comparison
from benchmarks.peers.figures import MethodKey, MethodRun, summarise
from benchmarks.peers.process import PROGRAMS, Entry, PeerError, parse_entries
from benchmarks.peers.protocol import FULL_DRAFT, MANY, PeerOptions
from benchmarks.peers.report import to_markdown
from benchmarks.peers.settings import Setting, encode_chats, encode_whole, make_settings
from benchmarks.tools.record import add_output, make_parser, rows_to_json, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.cli.bench import read_prompts
from draftwood.cli.options import integers
from draftwood.models.errors import DraftwoodError, RequestError
from draftwood.runtime.text.tokenizer import Tokenizer

PRECISIONS = ("fp32", "int8", "int4")
WORK = Path("build/peers")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pair", type=Path, required=True, metavar="DIR", help="folder with target and draft")
    parser.add_argument("--prompts", type=Path, help="JSON lines (default prompts.jsonl of the pair)")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each length (default 4)")
    lengths = "prompts in the model's chat template with so many tokens, each length by itself; default: as they are"
    parser.add_argument("--prompt-tokens", type=integers, default=(), metavar="LENGTHS", help=lengths)
    whole = "each prompt as a message of a user in the model's chat template, at its own length"
    parser.add_argument("--chat", action="store_true", help=whole)
    together = "texts at the same time, with prompts of the first length, or of --chat (default 1)"
    parser.add_argument("--at-a-time", type=integers, default=(1,), metavar="NUMBERS", help=together)
    parser.add_argument(
        "--peers", type=split_names, default=",".join(PROGRAMS), help="separated by commas (default %(default)s)"
    )
    parser.add_argument(
        "--precisions", type=split_names, default=",".join(PRECISIONS), help="of the weights (default %(default)s)"
    )
    parser.add_argument("--draft-tokens", type=integers, default=(3,), help="lengths of a chain (default 3)")
    named = "besides plain, separated by commas: auto,chain:3,draft:3 (default: all)"
    parser.add_argument("--methods", type=split_names, default=[], help=named)
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per text (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs that count (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every peer (default %(default)s)")
    parser.add_argument("--work", type=Path, default=WORK, help="where the environments are (default %(default)s)")
    add_output(parser, "peers_<pair>")
    args = parser.parse_args()
    for name in ("limit", "max_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if not all(1 <= number <= MANY for number in args.at_a_time):
        parser.error(f"--at-a-time must be from 1 to {MANY}")
    if args.chat and args.prompt_tokens:
        parser.error("--chat leaves prompts at their own lengths: leave --prompt-tokens out")
    if max(args.at_a_time) > 1 and not (args.chat or args.prompt_tokens):
        parser.error("--at-a-time needs --prompt-tokens or --chat")
    try:
        chosen = parse_entries(args.peers, args.precisions)
        texts = read_pair_prompts(args.pair, args.prompts or args.pair / "prompts.jsonl")
    except DraftwoodError as error:
        parser.error(str(error))
    comparison, before = Comparison(Console()), os.getloadavg()
    runs: dict[MethodKey, list[MethodRun]] = {}
    settings: list[Setting] = []
    for group in group_by_precision(chosen, args.precisions):
        try:
            for entry in group:
                folders = (args.pair.resolve(), entry.precision, args.work.resolve() / entry.peer)
                comparison.load(entry, PeerOptions(*folders, args.threads, args.draft_tokens, entry.variant))
            settings = settings or choose_settings(args, texts, comparison)
            for setting in settings:
                runs |= comparison.measure(setting, args.methods, args.max_tokens, args.repeats)
        except (DraftwoodError, PeerError) as error:
            parser.error(str(error))
        finally:
            comparison.close()
        if runs:  # what a run that is ended later has measured
            write_comparison(args, comparison, settings, runs, before[0])
    if not runs:
        parser.error("no peer could run: see above, and the log each names")
    print(to_markdown(summarise(runs)))


def choose_settings(args: argparse.Namespace, texts: Sequence[str], comparison: Comparison) -> list[Setting]:
    """The settings of a run. Raises RequestError when the prompts do not suffice, PeerError when no program answers."""
    with Tokenizer.load(args.pair / "target") as tokenizer:
        if args.chat:
            candidates = {"questions": encode_whole(tokenizer, texts)}
        elif args.prompt_tokens:
            lengths = dict.fromkeys(args.prompt_tokens)
            candidates = {f"prompts of {each:,} tokens": encode_chats(tokenizer, texts, each) for each in lengths}
        else:
            return [Setting("", [[tokenizer.encode(text)] for text in texts[: args.limit]])]
        ends = set(Checkpoint(args.pair / "target").eos_token_ids())
        return make_settings(
            candidates,
            args.at_a_time,
            args.limit,
            lambda prompt: not ends.intersection(comparison.write_plainly(prompt, args.max_tokens)),
        )


def write_comparison(
    args: argparse.Namespace,
    comparison: Comparison,
    settings: Sequence[Setting],
    runs: dict[MethodKey, list[MethodRun]],
    load: float,
) -> None:
    """load: of the machine before the run."""
    rows = summarise(runs)
    names = ("max_tokens", "repeats", "threads", "draft_tokens", "methods", "prompt_tokens", "chat", "at_a_time")
    given = {name: getattr(args, name) for name in names} | {"full_draft": (args.pair / FULL_DRAFT).is_dir()}
    loads = {"load_before": load, "load_after": os.getloadavg()[0]}
    figures: dict[str, Any] = {"pair": args.pair.name, "prompts": len(settings[0].batches)} | given | loads
    found = {"versions": comparison.versions, "failed": comparison.failed, "rows": rows_to_json(rows)}
    write_results(args.output, args.name.replace("<pair>", args.pair.name), figures | found)


def split_names(text: str) -> list[str]:
    return text.split(",")


def group_by_precision(chosen: Iterable[Entry], precisions: Sequence[str]) -> list[list[Entry]]:
    """Groups in the order of `precisions`, without empty ones."""
    groups = ([entry for entry in chosen if entry.precision == precision] for precision in precisions)
    return [group for group in groups if group]


def read_pair_prompts(pair: Path, file: Path) -> list[str]:
    """The texts of prompts. Raises RequestError that names the fix."""
    for role in ("target", "draft"):
        if not (pair / role / "config.json").is_file():
            raise RequestError(
                f"{pair} has no checkpoint named {role}: python -m benchmarks.tools.pair writes such a folder"
            )
    return read_prompts(file)


if __name__ == "__main__":
    main()
