"""Draftwood and the llama.cpp that is installed here, on any GGUF file: two to five minutes.

    python -m benchmarks.versus MODEL.gguf --draft DRAFT.gguf

Both run as servers, plainly and at their best: a trial tries llama.cpp's draft and n-gram proposals first. Then both
answer the same prompts in turn. It says how fast they are, not how well the model answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.peers.client import Asked
from benchmarks.peers.comparison import Comparison, choose, with_default
from benchmarks.peers.figures import summarise, to_markdown
from benchmarks.peers.program import Conditions, Program, SetupError
from benchmarks.peers.programs import draftwood, llama_cpp
from benchmarks.peers.server import ended_by_sigterm
from benchmarks.peers.texts import OWN, TRIAL, make_batches, read_prompts
from benchmarks.tools.record import describe_machine, make_parser, rows_to_json
from draftwood.models.errors import DraftwoodError, RequestError

KINDS = ("coding", "prose", "source", "editing")
FEW = ("plain", "default", "draft:3", "draft:8 confident", "ngram-mod", "ngram-simple short")  # settings of the trial
TRIAL_PROMPTS, TRIAL_TOKENS, CONTEXT = 2, 32, 2048


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("target", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--draft", type=Path, metavar="DRAFT.gguf", help="a smaller model of the same tokenizer")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="default: the one on the PATH")
    parser.add_argument("--threads", type=int, default=0, help="of both; 0: one per core (default)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        with ended_by_sigterm():
            compare(args)
    except DraftwoodError as error:
        parser.error(str(error))


def compare(args: argparse.Namespace) -> None:
    """Raises RequestError that names the option."""
    found = args.llama_server or shutil.which("llama-server")
    if found is None:
        raise RequestError("llama-server is not on the PATH: install llama.cpp, or name it with --llama-server PATH")
    for file in filter(None, (args.target, args.draft, Path(found))):
        if not file.is_file():
            raise RequestError(f"{file} is no file")
    if not (0 <= args.threads <= 1024 and 2 <= args.max_tokens <= CONTEXT // 2):
        raise RequestError(f"--threads is from 0 to 1024, --max-tokens from 2 to {CONTEXT // 2}")
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="versus-") as work:
        comparison = Comparison(Path(work), lambda line: console.print(line, style="dim", markup=False))
        draft = args.draft and args.draft.resolve()
        threads = args.threads or len(os.sched_getaffinity(0))
        conditions = Conditions(args.target.resolve(), draft, Path(work), threads, 1, CONTEXT, False)
        server = Path(found).resolve()
        programs = (draftwood.make("file", conditions), llama_cpp.make_program("llama.cpp", server, "file", conditions))
        trial = make_batches(read_prompts(OWN, TRIAL_PROMPTS, [TRIAL]), 1)
        entries = []
        for program in map(with_few, programs):
            tried = comparison.find_best(program, trial, Asked(TRIAL_TOKENS, 0))
            entries += with_default(choose(program, tried))
        batches = make_batches(read_prompts(OWN, 1, KINDS), 1)
        rows = summarise(comparison.measure(entries, batches, Asked(args.max_tokens, 0), 2))
        if not rows:
            raise SetupError(f"no server answered: {'; '.join(comparison.failed.values())}")
    if args.json:
        versions = {program.key: program.version for program in programs}
        print(
            json.dumps(
                describe_machine() | {"versions": versions, "failed": comparison.failed, "rows": rows_to_json(rows)},
                indent=2,
            )
        )
    else:
        print(to_markdown([row for row in rows if row.kind == "all"], {}))


def with_few(program: Program) -> Program:
    return replace(program, settings=tuple(setting for setting in program.settings if setting.name in FEW))


if __name__ == "__main__":
    main()
