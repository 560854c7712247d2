"""Whether two checkouts of this project decode a pair equally fast: every method, the same prompts, in turn.

    python -m benchmarks.tools.same_speed --old OLD/.venv/bin/python --new .venv/bin/python --pair build/peers/202m \
        --output benchmarks/results

Each interpreter runs its own checkout's program of benchmarks/peers, which builds its own bundle of the pair. A cell is
a method at a precision on a backend. In every round both programs are started anew, in alternating order, because the
speed of a process depends on where its memory lies: of two processes of the same code one may be 15 % slower until it
ends. Every prompt is decoded by both programs one directly after the other. A round's figure is the old time of all
prompts over the new time; a cell's figure is the median over rounds, with a 95 % bootstrap interval.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

from benchmarks.peers.process import PeerProcess
from benchmarks.peers.protocol import PeerOptions
from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.runtime.text.tokenizer import Tokenizer

CELLS = ("native:fp32", "native:int8", "native:int4", "onnxruntime:fp32")
METHODS = ("plain", "chain:8", "topk:7", "auto")


def start(python: Path, options: PeerOptions) -> PeerProcess:
    """The program of a checkout. python: an interpreter in CHECKOUT/.venv/bin."""
    command = [str(python), "-m", "benchmarks.peers.programs.draftwood", *options.to_arguments()]
    return PeerProcess(command, options.work / "log.txt", python.parents[2])


def compare(old: PeerProcess, new: PeerProcess, method: str, prompts: list[list[int]], max_tokens: int) -> float:
    """Old time over new time, after a text that warms up. Raises RuntimeError when the texts differ."""
    seconds = dict.fromkeys((old, new), 0.0)
    for turn, prompt in enumerate((prompts[0], *prompts)):
        order = (old, new)[:: (-1) ** turn]
        found = {program: program.generate(method, [prompt], max_tokens) for program in order}
        if found[old].texts != found[new].texts:
            raise RuntimeError(f"{method}: the texts differ")
        for program, generation in found.items():
            seconds[program] += generation.seconds if turn else 0
    return seconds[old] / seconds[new]


def median_with_interval(ratios: Sequence[float]) -> dict[str, float]:
    """The median, and its 95 % bootstrap interval."""
    found = bootstrap((np.array(ratios),), np.median, rng=np.random.default_rng(0)).confidence_interval
    named = {"old_over_new": float(np.median(ratios)), "low": float(found.low), "high": float(found.high)}
    return {name: round(value, 3) for name, value in named.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--old", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--new", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--pair", type=Path, required=True, help="folder of benchmarks.tools.pair")
    parser.add_argument("--cells", default=",".join(CELLS), help="BACKEND:PRECISION, ... (default %(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="default %(default)s")
    parser.add_argument("--limit", type=int, default=2, help="prompts (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a text (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    add_output(parser, "same_speed")
    args = parser.parse_args()
    lines = (args.pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[: args.limit]
    with Tokenizer.load(args.pair / "target") as tokenizer:
        prompts = [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]
    rows = []
    for backend, precision in (cell.split(":") for cell in args.cells.split(",")):
        ratios = defaultdict[str, list[float]](list)
        for turn in range(args.rounds):
            opened = {}
            for python in (args.old, args.new)[:: (-1) ** turn]:
                work = python.absolute().parents[2] / "build" / "same_speed"
                options = PeerOptions(args.pair.absolute(), precision, work, args.threads, (3, 8), backend)
                opened[python] = start(python.absolute(), options)
            for method in args.methods.split(","):
                ratios[method].append(compare(opened[args.old], opened[args.new], method, prompts, args.max_tokens))
            for program in opened.values():
                program.close()
        for method, found in ratios.items():
            rows.append({"backend": backend, "precision": precision, "method": method, **median_with_interval(found)})
            print(*rows[-1].values(), flush=True)
    figures = {"pair": args.pair.name, "prompts": len(prompts), "max_tokens": args.max_tokens, "rounds": args.rounds}
    write_results(args.output, args.name, {**figures, "rows": rows})


if __name__ == "__main__":
    main()
