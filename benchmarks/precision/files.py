"""GGUF files as they are: bundle over file, and tokens/s of ours beside llama.cpp's on the same files.

    python -m benchmarks.precision.files FILE.gguf ... --work WORK --output benchmarks/results \\
        --llama-bench llama.cpp=build/peers/llama.cpp/build/bin/llama-bench

Each program decodes greedily after a prompt, and reads a prompt, in turn; medians. llama-bench has its own clock, ours
is timed around the passes. For another instruction set give a llama-bench that was compiled for it, and a compiler in
CC that does not compile for this processor.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.progress import track

from benchmarks.precision.front import DECODED, PROMPT_TOKENS, decode
from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.cli.main import main as draftwood
from draftwood.models.bindings import TARGET
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.engines.passes import prefill

READ = 512  # tokens of the prompt whose reading is timed
Speeds = dict[str, list[float]]  # by "plain" and "prompt": tokens/s of each turn


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for bundles")
    parser.add_argument("--llama-bench", action="append", default=[], metavar="NAME=PATH", help="a peer; repeatable")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    add_output(parser, "precision_files")
    args = parser.parse_args()
    peers = dict(each.split("=", 1) for each in args.llama_bench)
    figures: dict[str, dict[str, object]] = {}
    for file in args.files:
        folder = args.work / file.stem
        if not folder.is_dir() and (failed := build(file, folder)):
            raise SystemExit(failed)
        found: dict[str, Speeds] = defaultdict(lambda: defaultdict(list))
        with ExitStack() as stack:
            bundle = EngineBundle.open(folder)
            engine = bundle.open_engine(TARGET, args.threads)
            stack.callback(engine.close)
            for turn in track(range(args.repeats + 1), file.name):
                for name, speeds in (
                    ("draftwood", own(engine)),
                    *((n, peer(p, file, args.threads)) for n, p in peers.items()),
                ):
                    for kind, speed in speeds.items():
                        if turn:
                            found[name][kind].append(speed)
        size = sum(each.stat().st_size for each in folder.glob("*.weights"))
        medians = {name: {kind: round(median(each), 1) for kind, each in own.items()} for name, own in found.items()}
        figures[file.name] = {"bytes": file.stat().st_size, "weights": size, "tokens_per_second": medians}
        Console().print_json(data=figures[file.name])
        write_results(args.output, args.name, {"threads": args.threads, "files": figures})


def build(file: Path, folder: Path) -> int:
    return draftwood(["build", "--target", str(file), "--draft", "none", "--output", str(folder), "--no-profile"])


def own(engine: Engine) -> dict[str, float]:
    """Tokens/s of the engine's passes."""
    tokens = [1 + index % 1000 for index in range(READ)]
    start = perf_counter()
    prefill(engine, engine.new_cache(), tokens)
    seconds = perf_counter() - start
    return {"plain": decode(engine, tokens[:PROMPT_TOKENS], DECODED).speed, "prompt": READ / seconds}


def peer(program: str, file: Path, threads: int) -> dict[str, float]:
    """The same of a llama-bench."""
    command = [program, "-m", str(file), "-p", str(READ), "-n", str(DECODED), "-t", str(threads)]
    command += ["-r", "1", "-o", "json"]
    tests = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {"prompt" if test["n_prompt"] else "plain": float(test["avg_ts"]) for test in tests}


if __name__ == "__main__":
    main()
