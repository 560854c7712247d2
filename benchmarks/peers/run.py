"""Compare peers on the same weights: same prompts and lengths, in turn, in one run on one machine.

    python -m benchmarks.peers.run --pair build/peers/202m --output benchmarks/results

--pair is a folder with `target`, `draft` (Hugging Face folders, or links to such) and `prompts.jsonl`. Every peer needs
an environment: `sh benchmarks/peers/setup/NAME.sh` makes it once. A peer that cannot run is named and left out.
Decoding is greedy. The precisions run one after the other, so that only programs of one are in memory. See
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.peers.figures import MethodKey, MethodRun, choose_fastest, measure_speeds, summarise
from benchmarks.peers.plot import draw
from benchmarks.peers.process import (
    PROGRAMS,
    Entry,
    PeerError,
    PeerProcess,
    make_command,
    parse_entries,
    remove_entries,
)
from benchmarks.peers.protocol import PLAIN, PeerOptions
from benchmarks.peers.report import make_table
from benchmarks.tools.processor import read_busy_seconds
from benchmarks.tools.record import add_output, rows_to_json, write_results
from draftwood.cli.bench import read_prompts
from draftwood.cli.options import integers
from draftwood.models.errors import DraftwoodError, RequestError
from draftwood.runtime.tokenizer import Tokenizer

PRECISIONS = ("fp32", "int8", "int4")
WORK = Path("build/peers")
WARM_UP = 8  # tokens
WIDTH = 110  # of the table where the output is no terminal
REST = 0.2  # seconds; some peers' idle threads spin for a while and would take cores from the next


class Comparison:
    """Programs that answer in turn.

    versions: of all loaded programs. tried: tokens per second of every method in the trial. failed: the peer's message
    for everything that was left out.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._programs: dict[Entry, PeerProcess] = {}
        self._methods: list[tuple[Entry, str]] = []
        self.versions: dict[str, str] = {}
        self.tried: dict[MethodKey, float] = {}
        self.failed: dict[str, str] = {}

    def load(self, entry: Entry, options: PeerOptions) -> None:
        """Start a program. It converts the pair if no earlier run did."""
        log = options.work / "log.txt"
        with self._console.status(f"Loading {entry.name} at {entry.precision}, converting the first time"):
            try:
                program = PeerProcess(make_command(entry, options), log)
            except PeerError as error:
                self._leave_out(entry, "", error)
                return
        self._programs[entry], self.versions[entry.name] = program, program.version
        self._methods += [(entry, method) for method in program.methods]

    def measure(
        self, prompts: Sequence[list[int]], max_tokens: int, repeats: int, candidates: int
    ) -> dict[MethodKey, list[MethodRun]]:
        """Run every method once as a trial, then the fastest `candidates` of each entry `repeats` times.

        Runs of the trial do not count: they would favour the methods that they selected.
        """
        self._run_all("Warming up", prompts[:1], min(WARM_UP, max_tokens), 1)
        trial = self._run_all("Trying", prompts, max_tokens, 1)
        self.tried |= measure_speeds(trial)
        kept = choose_fastest(trial, candidates)
        self._methods = [(entry, method) for entry, method in self._methods if make_key(entry, method) in kept]
        return self._run_all("Measuring", prompts, max_tokens, repeats)

    def close(self) -> None:
        """End all loaded programs. Others may be loaded then."""
        for program in self._programs.values():
            program.close()
        self._programs, self._methods = {}, []

    def _run_all(
        self, title: str, prompts: Sequence[list[int]], max_tokens: int, repeats: int
    ) -> dict[MethodKey, list[MethodRun]]:
        """Run every method on every prompt, `repeats` times. Returns the runs of the methods that never failed."""
        runs: dict[MethodKey, list[MethodRun]] = {}
        with Progress(console=self._console, transient=True) as progress:
            task = progress.add_task(title, total=repeats * len(prompts) * len(self._methods))
            for repeat in range(repeats):
                for index, prompt in enumerate(prompts):
                    for entry, method in list(self._methods):
                        progress.advance(task)
                        try:
                            run = self._run(entry, method, prompt, max_tokens, index, repeat)
                        except PeerError as error:
                            self._drop(entry, method, error)
                            continue
                        runs.setdefault(make_key(entry, method), []).append(run)
        kept = {make_key(entry, method) for entry, method in self._methods}
        return {key: own for key, own in runs.items() if key in kept}

    def _run(self, entry: Entry, method: str, prompt: list[int], max_tokens: int, index: int, repeat: int) -> MethodRun:
        program = self._programs[entry]
        sleep(REST)
        start, own, everyone = perf_counter(), program.processor_seconds(), read_busy_seconds()
        generation = program.generate(method, prompt, max_tokens)
        own, everyone = program.processor_seconds() - own, read_busy_seconds() - everyone
        return MethodRun(index, repeat, generation, max(0.0, everyone - own) / (perf_counter() - start))

    def _drop(self, entry: Entry, method: str, error: PeerError) -> None:
        """Leave out a method; with a plain method the whole entry, which nothing could be compared with."""
        self._leave_out(entry, method, error)
        self._methods = [
            (other, name) for other, name in self._methods if other != entry or (method != PLAIN and name != method)
        ]

    def _leave_out(self, entry: Entry, method: str, error: PeerError) -> None:
        name = " ".join(filter(None, (entry.name, entry.precision, method)))
        self.failed[name] = str(error)
        self._console.print(f"Left out: {name}: {error}", style="yellow", markup=False)


def make_key(entry: Entry, method: str) -> MethodKey:
    return MethodKey(entry.precision, entry.name, method)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, metavar="DIR", help="folder with target and draft")
    parser.add_argument("--prompts", type=Path, help="JSON lines (default prompts.jsonl of the pair)")
    parser.add_argument("--limit", type=int, default=4, help="use only the first so many prompts (default 4)")
    parser.add_argument(
        "--peers", type=split_names, default=",".join(PROGRAMS), help="separated by commas (default %(default)s)"
    )
    parser.add_argument(
        "--precisions", type=split_names, default=",".join(PRECISIONS), help="of the weights (default %(default)s)"
    )
    left_out = "entries that do not fit, as NAME:PRECISION, separated by commas"
    parser.add_argument("--leave-out", type=split_names, default=[], metavar="ENTRIES", help=left_out)
    parser.add_argument("--draft-tokens", type=integers, default=(2, 3, 5, 8), help="lengths to try (default 2,3,5,8)")
    kept = "fastest methods of each entry in a trial that are measured, besides those without a length (default 2)"
    parser.add_argument("--candidates", type=int, default=2, help=kept)
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per text (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs that count (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every peer (default %(default)s)")
    parser.add_argument("--work", type=Path, default=WORK, help="where the environments are (default %(default)s)")
    add_output(parser, "peers_<pair>")
    args = parser.parse_args()
    for name in ("limit", "candidates", "max_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    try:
        chosen = remove_entries(parse_entries(args.peers, args.precisions), args.leave_out)
        prompts = read_pair_prompts(args.pair, args.prompts or args.pair / "prompts.jsonl", args.limit)
    except DraftwoodError as error:
        parser.error(str(error))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    comparison, before = Comparison(console), os.getloadavg()
    runs: dict[MethodKey, list[MethodRun]] = {}
    for group in group_by_precision(chosen, args.precisions):
        try:
            for entry in group:
                folders = (args.pair.resolve(), entry.precision, args.work.resolve() / entry.peer)
                comparison.load(entry, PeerOptions(*folders, args.threads, args.draft_tokens, entry.variant))
            runs |= comparison.measure(prompts, args.max_tokens, args.repeats, args.candidates)
        finally:
            comparison.close()
    if not runs:
        parser.error("no peer could run: see above, and the log each names")
    rows = summarise(runs)
    console.print(make_table(rows))
    settings = {name: getattr(args, name) for name in ("max_tokens", "repeats", "threads", "draft_tokens", "leave_out")}
    loads = {"load_before": before[0], "load_after": os.getloadavg()[0]}
    figures: dict[str, Any] = {"pair": args.pair.name, "prompts": len(prompts)} | settings | loads
    tried = [{**key._asdict(), "tokens_per_second": round(speed, 1)} for key, speed in comparison.tried.items()]
    found = {"versions": comparison.versions, "failed": comparison.failed, "tried": tried, "rows": rows_to_json(rows)}
    name = args.name.replace("<pair>", args.pair.name)
    draw(rows, write_results(args.output, name, figures | found).with_suffix(".svg"))


def split_names(text: str) -> list[str]:
    return text.split(",")


def group_by_precision(chosen: Iterable[Entry], precisions: Sequence[str]) -> list[list[Entry]]:
    """Groups in the order of `precisions`, without empty ones."""
    groups = ([entry for entry in chosen if entry.precision == precision] for precision in precisions)
    return [group for group in groups if group]


def read_pair_prompts(pair: Path, file: Path, limit: int) -> list[list[int]]:
    """The prompts as token ids. Raises RequestError that names the fix."""
    for role in ("target", "draft"):
        if not (pair / role / "config.json").is_file():
            raise RequestError(
                f"{pair} has no checkpoint named {role}: python -m benchmarks.tools.pair writes such a folder"
            )
    tokenizer = Tokenizer.load(pair / "target")
    return [tokenizer.encode(text) for text in read_prompts(file)[:limit]]


if __name__ == "__main__":
    main()
