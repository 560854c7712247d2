"""Programs at their best on the same GGUF files, over HTTP, in turn, in one run on one machine.

    python -m benchmarks.peers.run build/real/qwen2.5-coder-1.5b.gguf --draft build/real/qwen2.5-coder-0.5b.gguf \
        --output benchmarks/results

A trial on other prompts finds the best setting of each program with lookups and without; --work keeps what it found.
Then every prompt goes to all programs in turn: plain, and at their best. A program that cannot run is named and left
out. Each needs `sh benchmarks/peers/setup/NAME.sh`. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers.client import Asked
from benchmarks.peers.comparison import Comparison, Entry, Tried, choose, with_default
from benchmarks.peers.divergence import measure_divergences
from benchmarks.peers.figures import summarise, to_markdown
from benchmarks.peers.program import MANY, Conditions, Program, SetupError
from benchmarks.peers.programs import make_program
from benchmarks.peers.server import ended_by_sigterm
from benchmarks.peers.texts import OWN, TRIAL, make_batches, read_prompts
from benchmarks.tools.record import add_output, make_parser, rows_to_json, write_results
from draftwood.models.errors import DraftwoodError, RequestError

PROGRAMS = "draftwood/file,llama.cpp/file,ik_llama.cpp/file,openvino-genai/file,vllm/bf16,transformers/bf16"
TRIAL_PROMPTS, TRIAL_TOKENS = 3, 48
WORK = Path("build/peers")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("target", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--draft", type=Path, metavar="DRAFT.gguf", help="of the same tokenizer")
    parser.add_argument(
        "--programs", default=PROGRAMS, help="NAME/PRECISION, separated by commas (default %(default)s)"
    )
    parser.add_argument("--prompts", type=Path, default=OWN, help="JSON lines in SPEED-Bench's form (default: ours)")
    parser.add_argument("--kinds", default="", help="categories of prompts, separated by commas (default: all)")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each kind (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default %(default)s")
    parser.add_argument("--at-a-time", type=int, default=1, help="texts (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="default %(default)s; 0: only the trial")
    parser.add_argument("--threads", type=int, default=2, help="of every program (default %(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a text (default %(default)s)")
    parser.add_argument("--avx2", action="store_true", help="restrict every program to AVX2")
    parser.add_argument("--divergence", action="store_true", help="also KL(weights of the file in fp32 || program)")
    parser.add_argument("--work", type=Path, default=WORK, help="where programs are installed (default %(default)s)")
    add_output(parser, "peers_<model>")
    args = parser.parse_args()
    try:
        check(args)
        with ended_by_sigterm():
            run(args, Console(stderr=True))
    except DraftwoodError as error:
        parser.error(str(error))


def check(args: argparse.Namespace) -> None:
    """Raises RequestError that names the option."""
    bounds = {"limit": (1, 10_000), "max_tokens": (2, 4096), "at_a_time": (1, MANY), "repeats": (0, 100)}
    for name, (least, most) in (bounds | {"threads": (1, 1024), "context": (64, 1 << 20)}).items():
        if not least <= getattr(args, name) <= most:
            raise RequestError(f"--{name.replace('_', '-')} must be from {least} to {most}")
    if not 0 <= args.temperature <= 2:
        raise RequestError("--temperature must be from 0 to 2")
    for file in (args.target, args.draft):
        if file is not None and not file.is_file():
            raise RequestError(f"{file} is no file: python -m benchmarks.tools.real_pair fetches a pair")


def run(args: argparse.Namespace, console: Console) -> None:
    work, before = args.work.resolve(), os.getloadavg()[0]
    draft = args.draft and args.draft.resolve()
    conditions = Conditions(args.target.resolve(), draft, work, args.threads, args.at_a_time, args.context, args.avx2)
    kinds = [kind for kind in args.kinds.split(",") if kind]
    batches = make_batches(read_prompts(args.prompts, args.limit, kinds), args.at_a_time)
    asked = Asked(args.max_tokens, args.temperature)
    comparison = Comparison(work / "logs", lambda line: console.print(line, style="dim", markup=False, highlight=False))
    programs = make_programs(args.programs.split(","), conditions, comparison)
    trials = Trials(work / "trials.json", args)
    entries = list[Entry]()
    for program in programs:
        entries += with_default(choose(program, trials.of(program, conditions, comparison)))
    turns = comparison.measure(entries, batches, asked, args.repeats) if args.repeats else []
    rows = summarise(turns)
    divergences = measure_divergences(programs, conditions, comparison) if args.divergence else {}
    kept = {"divergence": divergences, "trial": trials.as_json(programs)}
    print(to_markdown(rows, divergences) if rows else json.dumps(kept, indent=2))
    given = {
        name: getattr(args, name)
        for name in ("max_tokens", "temperature", "at_a_time", "repeats", "threads", "avx2", "limit")
    }
    figures: dict[str, Any] = {
        "target": args.target.name,
        "draft": args.draft and args.draft.name,
        "prompts": args.prompts.name,
        **given,
        "load_before": before,
        "load_after": os.getloadavg()[0],
        "versions": {program.key: program.version for program in programs},
        "failed": comparison.failed,
        **kept,
        "rows": rows_to_json(rows),
    }
    if rows:
        write_results(args.output, args.name.replace("<model>", args.target.stem), figures)


def make_programs(keys: Sequence[str], conditions: Conditions, comparison: Comparison) -> list[Program]:
    """Those that are installed; the others are named. Raises RequestError when none is left."""
    found = list[Program]()
    for key in dict.fromkeys(keys):
        try:
            program = make_program(key, conditions)
        except SetupError as error:
            comparison.leave_out(key, error)
            continue
        if program.at_a_time < conditions.at_a_time:
            comparison.leave_out(key, SetupError(f"it writes {program.at_a_time} texts at a time"))
            continue
        found.append(program)
    if not found:
        raise RequestError(f"no program is installed: {'; '.join(comparison.failed.values())}")
    return found


class Trials:
    """The trials of earlier runs under the same conditions, in a file; a program that has none gets its own."""

    def __init__(self, file: Path, args: argparse.Namespace) -> None:
        self._file, self._asked = file, Asked(min(TRIAL_TOKENS, args.max_tokens), args.temperature)
        draft = args.draft.stem if args.draft else "no draft"
        self._of = (
            f"{args.target.stem}, {draft}, {args.at_a_time} at a time, T={args.temperature}, {args.threads} threads"
        )
        self._of += ", AVX2" if args.avx2 else ""

    def of(self, program: Program, conditions: Conditions, comparison: Comparison) -> list[Tried]:
        if self._key(program) not in self._load():
            # Texts at the same time begin differently, so that no program reads one of them for another.
            prompts = [
                prompt._replace(turns=(f"{number}. {prompt.turns[0]}",))
                for number in range(1, conditions.at_a_time + 1)
                for prompt in read_prompts(OWN, TRIAL_PROMPTS, [TRIAL])
            ]
            batches = make_batches(prompts, conditions.at_a_time)[: max(1, TRIAL_PROMPTS // conditions.at_a_time)]
            tried = comparison.find_best(program, batches, self._asked)
            if not any(each.speed for each in tried if each.setting == program.plain):
                return tried
            found = {self._key(program): {each.setting.name: each.speed or each.error for each in tried}}
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._load() | found, indent=2) + "\n", encoding="utf-8")
        return self._read(program)

    def as_json(self, programs: Sequence[Program]) -> dict[str, Any]:
        known = self._load()
        return {program.key: known.get(self._key(program)) for program in programs}

    def _load(self) -> dict[str, dict[str, Any]]:
        known: dict[str, dict[str, Any]] = json.loads(self._file.read_text("utf-8")) if self._file.is_file() else {}
        return known

    def _key(self, program: Program) -> str:
        return f"{program.key}, {program.version}: {self._of}"

    def _read(self, program: Program) -> list[Tried]:
        known = self._load()[self._key(program)]
        single = [setting for setting in program.settings if setting.name in known]
        mixed = [mixture for mixture in program.mixtures() if mixture.name in known]
        return [
            Tried(each, known[each.name] if isinstance(known[each.name], float) else None) for each in (*single, *mixed)
        ]


if __name__ == "__main__":
    main()
