"""Peers next to each other on the same weights: same prompts and lengths, in turn, in one run on one machine.

    PYTHONPATH=benchmarks python -m peers.run --pair build/peers/202m --output benchmarks/results/peers_202m.json

--pair is a folder with `target`, `draft` (Hugging Face folders, or links to such) and `prompts.jsonl`. Every peer needs
its environment, made once by `sh benchmarks/peers/setup/NAME.sh`; a peer that cannot run is named and left out. Greedy
decoding. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from machine import write
from rich.console import Console
from rich.progress import Progress

from draftwood.cli.bench import read_prompts
from draftwood.cli.options import integers
from draftwood.models.errors import DraftwoodError, RequestError
from draftwood.runtime.tokenizer import Tokenizer
from peers.figures import Key, Run, summarise, to_json
from peers.plot import draw
from peers.process import PROGRAMS, Entry, PeerError, PeerProcess, command_for, entries, used_by_all
from peers.protocol import PLAIN, Options
from peers.report import table

PRECISIONS = ("fp32", "int8", "int4")
WORK = Path("build/peers")
WIDTH = 110  # of the table where the output is no terminal
REST = 0.2  # seconds; some peers' idle threads spin for a while and would take cores from the next


class Comparison:
    """Programs that answer in turn. failed: what was left out, and the peer's own words on it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._programs: dict[Entry, PeerProcess] = {}
        self._methods: list[tuple[Entry, str]] = []
        self.failed: dict[str, str] = {}

    @property
    def versions(self) -> dict[str, str]:
        return {entry.name: program.version for entry, program in self._programs.items()}

    def load(self, entry: Entry, options: Options) -> None:
        """Start a program, which converts the pair first if it never did."""
        log = options.work / "log.txt"
        with self._console.status(f"Loading {entry.name} at {entry.precision}, converting the first time"):
            try:
                program = PeerProcess(command_for(entry, options), log)
            except PeerError as error:
                self._leave_out(entry, "", error)
                return
        self._programs[entry] = program
        self._methods += [(entry, method) for method in program.methods]

    def measure(self, prompts: Sequence[list[int]], max_tokens: int, repeats: int) -> dict[Key, list[Run]]:
        """Every method on every prompt, `repeats` times behind a first time that is not kept."""
        runs: dict[Key, list[Run]] = {}
        with Progress(console=self._console, transient=True) as progress:
            task = progress.add_task("Measuring", total=(repeats + 1) * len(prompts) * len(self._methods))
            for repeat in range(repeats + 1):
                for index, prompt in enumerate(prompts):
                    for entry, method in list(self._methods):
                        progress.advance(task)
                        try:
                            run = self._run(entry, method, prompt, max_tokens, index, repeat)
                        except PeerError as error:
                            self._drop(entry, method, error)
                            continue
                        if repeat:
                            runs.setdefault(Key(entry.precision, entry.name, method), []).append(run)
        kept = {Key(entry.precision, entry.name, method) for entry, method in self._methods}
        return {key: own for key, own in runs.items() if key in kept}

    def close(self) -> None:
        for program in self._programs.values():
            program.close()

    def _run(self, entry: Entry, method: str, prompt: list[int], max_tokens: int, index: int, repeat: int) -> Run:
        program = self._programs[entry]
        sleep(REST)
        start, own, everyone = perf_counter(), program.processor_seconds(), used_by_all()
        generation = program.generate(method, prompt, max_tokens)
        own, everyone = program.processor_seconds() - own, used_by_all() - everyone
        return Run(index, repeat, generation, max(0.0, everyone - own) / (perf_counter() - start))

    def _drop(self, entry: Entry, method: str, error: PeerError) -> None:
        """Without its plain decoding, nothing of an entry can be compared."""
        self._leave_out(entry, method, error)
        self._methods = [
            (other, name) for other, name in self._methods if other != entry or (method != PLAIN and name != method)
        ]

    def _leave_out(self, entry: Entry, method: str, error: PeerError) -> None:
        name = " ".join(filter(None, (entry.name, entry.precision, method)))
        self.failed[name] = str(error)
        self._console.print(f"Left out: {name}: {error}", style="yellow", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, metavar="DIR", help="folder with target and draft")
    parser.add_argument("--prompts", type=Path, help="JSON lines (default prompts.jsonl of the pair)")
    parser.add_argument("--limit", type=int, default=4, help="use only the first so many prompts (default 4)")
    parser.add_argument("--peers", default=",".join(PROGRAMS), help="separated by commas (default %(default)s)")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="of the weights (default %(default)s)")
    parser.add_argument("--draft-tokens", type=integers, default=(3, 5), help="lengths to try (default 3,5)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per text (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs that count (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every peer (default %(default)s)")
    parser.add_argument("--work", type=Path, default=WORK, help="where the environments are (default %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="JSON", help="figures; a plot is put beside them")
    args = parser.parse_args()
    for name in ("limit", "max_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    try:
        chosen = entries(args.peers.split(","), args.precisions.split(","))
        prompts = read(args.pair, args.prompts or args.pair / "prompts.jsonl", args.limit)
    except DraftwoodError as error:
        parser.error(str(error))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    comparison, before = Comparison(console), os.getloadavg()
    try:
        for entry in chosen:
            work = args.work.resolve() / entry.peer
            pair = args.pair.resolve()
            comparison.load(entry, Options(pair, entry.precision, work, args.threads, args.draft_tokens, entry.variant))
        runs = comparison.measure(prompts, args.max_tokens, args.repeats)
    finally:
        comparison.close()
    if not runs:
        parser.error("no peer could run: see above, and the log each names")
    rows = summarise(runs)
    console.print(table(rows))
    settings = {name: getattr(args, name) for name in ("max_tokens", "repeats", "threads")}
    loads = {"load_before": before[0], "load_after": os.getloadavg()[0]}
    figures: dict[str, Any] = {"pair": args.pair.name, "prompts": len(prompts)} | settings | loads
    found = {"versions": comparison.versions, "failed": comparison.failed, "rows": to_json(rows)}
    write(args.output.parent, args.output.stem, figures | found)
    draw(rows, args.output.with_suffix(".svg"))


def read(pair: Path, file: Path, limit: int) -> list[list[int]]:
    """The prompts as token ids. Raises RequestError that names the fix."""
    for role in ("target", "draft"):
        if not (pair / role / "config.json").is_file():
            raise RequestError(f"{pair} has no checkpoint named {role}: benchmarks/pair.py writes such a folder")
    tokenizer = Tokenizer.load(pair / "target")
    return [tokenizer.encode(text) for text in read_prompts(file)[:limit]]


if __name__ == "__main__":
    main()
