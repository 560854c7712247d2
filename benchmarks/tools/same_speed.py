"""Whether two checkouts of this project decode equally fast: every setting, the same prompts, in turn, over HTTP.

    python -m benchmarks.tools.same_speed --old OLD/.venv/bin/python --new .venv/bin/python \
        --models build/real/qwen2.5-coder-0.5b.gguf --output benchmarks/results

Each interpreter serves what its own checkout builds of a GGUF file or folder, or a bundle as it is. In every round both
servers are started anew, in alternating order, because the speed of a process depends on where its memory lies: of two
processes of the same code one may be 15 % slower until it ends. Every prompt is decoded by both one directly after the
other. A round's figure is the old time of all prompts over the new time; a row's figure is the median over rounds, with
a 95 % bootstrap interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from benchmarks.peers.client import Asked, ask
from benchmarks.peers.server import Server
from benchmarks.peers.texts import OWN, Prompt, read_prompts
from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.named import parse

METHODS = ("plain", "chain:8", "topk:7", "auto")


def start(python: Path, model: str, threads: int, log: Path) -> Server:
    """The server of a checkout. python: an interpreter in CHECKOUT/.venv/bin."""
    command = [python, "-m", "draftwood", "serve", model, "--threads", threads, "--prefix-cache-slots", 0]
    return Server([*map(str, command), "--served-model-name", "model"], log)


def fields_of(method: str) -> dict[str, Any]:
    """Of a request."""
    config, usual = parse(method), asdict(SpeculativeConfig())
    own = config and {name: value for name, value in asdict(config).items() if value != usual[name]}
    return {"speculative": False if own is None else own}


def compare(old: Server, new: Server, method: str, prompts: Sequence[Prompt], max_tokens: int) -> float:
    """Old time over new time, after a text that warms up. Raises RuntimeError when the texts differ."""
    seconds = dict.fromkeys((old, new), 0.0)
    for turn, prompt in enumerate((prompts[0], *prompts)):
        order = (old, new)[:: (-1) ** turn]
        found = {server: ask(server.url, "model", prompt, Asked(max_tokens, 0), fields_of(method)) for server in order}
        if found[old].text != found[new].text:
            raise RuntimeError(f"{method}: the texts differ")
        for server, answer in found.items():
            seconds[server] += answer.seconds if turn else 0
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
    parser.add_argument("--models", nargs="+", required=True, help="GGUF files, folders or bundles")
    parser.add_argument("--methods", default=",".join(METHODS), help="default %(default)s")
    parser.add_argument("--prompts", type=Path, default=OWN, help="JSON lines (default: those of benchmarks/peers)")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each kind (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a text (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    add_output(parser, "same_speed")
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, args.limit)
    rows = []
    for model in args.models:
        ratios = defaultdict[str, list[float]](list)
        for turn in range(args.rounds):
            with ExitStack() as stack:
                opened: dict[Path, Server] = {}
                for python in (args.old, args.new)[:: (-1) ** turn]:
                    server = start(python.absolute(), model, args.threads, args.output / "same_speed.log")
                    opened[python] = stack.enter_context(server)
                for method in args.methods.split(","):
                    servers = opened[args.old], opened[args.new]
                    ratios[method].append(compare(*servers, method, prompts, args.max_tokens))
        for method, found in ratios.items():
            rows.append({"model": Path(model).name, "method": method, **median_with_interval(found)})
            print(*rows[-1].values(), flush=True)
    figures = {"prompts": len(prompts), "max_tokens": args.max_tokens, "rounds": args.rounds}
    write_results(args.output, args.name, {**figures, "rows": rows})


if __name__ == "__main__":
    main()
