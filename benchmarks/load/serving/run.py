"""Throughput and latency of servers against the number of concurrent requests, measured by NVIDIA's AIPerf.

    python -m benchmarks.load.serving.run --bundle bundles/demo-110m --pair build/peers/demo-110m \
        --prompts models/demo/prompts.jsonl --output benchmarks/results

The servers are `draftwood serve`, plain and speculative, and llama.cpp's server, without and with a draft, over the
same weights. --pair is a folder with the checkpoints of the bundle, `target` and `draft`; without it Draftwood is
alone. All servers run all the time and are measured in turn. Decoding is greedy. Every answer is compared with the text
that LLM.generate writes from the bundle. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from benchmarks.load.serving.aiperf import AIPerf, LoadResult, find_aiperf, write_inputs
from benchmarks.load.serving.figures import ServerKey, ServerRow, summarise, to_markdown
from benchmarks.load.serving.servers import (
    LLAMA_CPP,
    OURS,
    Server,
    draftwood_servers,
    llama_cpp_servers,
    prepare_llama_cpp,
    running,
)
from benchmarks.peers.process import PeerError
from benchmarks.peers.protocol import PeerOptions
from benchmarks.tools.record import add_output, make_parser, rows_to_json, write_results
from draftwood.cli.bench import read_prompts
from draftwood.cli.options import THREADS, integers, positive
from draftwood.models.bindings import TARGET
from draftwood.models.errors import DraftwoodError, RequestError
from draftwood.runtime import LLM, SamplingParams

CONCURRENCY = (1, 2, 4, 8, 16)
WORK = Path("build/peers")


def measure(
    console: Console,
    aiperf: AIPerf,
    servers: dict[Server, str],
    concurrencies: Sequence[int],
    requests: int,
    repeats: int,
    folder: Path,
) -> dict[ServerKey, list[LoadResult]]:
    """Measure every server at every concurrency, in turn. requests: per client. Raises PeerError when a run fails."""
    runs: dict[ServerKey, list[LoadResult]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Measuring", total=repeats * len(concurrencies) * len(servers))
        for repeat in range(repeats):
            for concurrency in concurrencies:
                for server, url in servers.items():
                    exports = folder / f"{server.name} {concurrency} {repeat}".replace(" ", "-")
                    load = aiperf.profile(url, concurrency, requests * concurrency, exports)
                    runs.setdefault(ServerKey(server.peer, server.method, concurrency), []).append(load)
                    progress.advance(task)
    return runs


class Reference(NamedTuple):
    """The prompts and what the bundle generates from them."""

    prompts: list[list[int]]
    # Plain greedy continuations.
    texts: list[str]
    # Tokens of a sequence.
    max_length: int
    # Of the target's weights.
    precision: str


def write_reference(bundle: Path, texts: Sequence[str], max_tokens: int) -> Reference:
    """Generate the reference texts. Raises RequestError for a prompt that leaves no room for `max_tokens` tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    with LLM(bundle, speculative=None) as llm:
        manifest = llm.bundle.manifest
        prompts = [llm.encode(text) for text in texts]
        for number, prompt in enumerate(prompts, start=1):
            if len(prompt) + max_tokens > manifest.max_length:
                raise RequestError(
                    f"prompt {number} has {len(prompt)} tokens and asks for {max_tokens} more, the bundle has room for "
                    f"{manifest.max_length}: give a shorter one or a smaller --max-tokens"
                )
        written = [llm.generate(prompt, params)[0].text for prompt in prompts]
        return Reference(prompts, written, manifest.max_length, manifest.engines[TARGET].precision)


def list_servers(args: argparse.Namespace, known: Reference) -> tuple[list[Server], dict[str, str]]:
    """The servers in the order of their turns, and the versions of peers. Raises PeerError when llama.cpp cannot
    run."""
    at_a_time = max(args.concurrency)
    servers, versions = draftwood_servers(args.bundle.resolve(), at_a_time, args.threads), {}
    if args.pair is not None:
        work = args.work.resolve() / LLAMA_CPP
        threads = args.threads or len(os.sched_getaffinity(0))
        options = PeerOptions(args.pair.resolve(), known.precision, work, threads, args.draft_tokens)
        versions[LLAMA_CPP] = prepare_llama_cpp(options)
        servers += llama_cpp_servers(options, at_a_time, known.max_length)
    return servers, versions


def run(args: argparse.Namespace, console: Console) -> tuple[list[ServerRow], dict[str, str]]:
    """Measure all servers. Returns the rows, and the versions of llama.cpp and AIPerf. AIPerf's exports are kept."""
    program = find_aiperf(args.work.resolve())
    exports = args.work.resolve() / "aiperf" / "exports"
    shutil.rmtree(exports, ignore_errors=True)
    exports.mkdir()
    with console.status("Writing the texts that answers are compared with"):
        known = write_reference(args.bundle, read_prompts(args.prompts)[: args.limit], args.max_tokens)
    servers, versions = list_servers(args, known)
    inputs = exports / "inputs.json"
    write_inputs(inputs, known.prompts, args.max_tokens)
    aiperf = AIPerf(program, inputs, len(known.prompts), args.bundle.resolve())
    with ExitStack() as stack:
        with console.status("Starting the servers"):
            started = {server: stack.enter_context(running(server)) for server in servers}
        runs = measure(console, aiperf, started, args.concurrency, args.requests, args.repeats, exports)
    return summarise(runs, known.texts), versions | {"aiperf": aiperf.version()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="what Draftwood serves")
    parser.add_argument("--pair", type=Path, metavar="DIR", help="target and draft it was built from, for llama.cpp")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--limit", type=positive, default=8, help="use only the first so many prompts (default 8)")
    parser.add_argument("--concurrency", type=integers, default=CONCURRENCY, help="to try (default 1,2,4,8,16)")
    parser.add_argument("--requests", type=positive, default=3, help="of each client (default %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=48, help="of every answer (default %(default)s)")
    parser.add_argument("--repeats", type=positive, default=2, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=THREADS, help="of every target; 0: one per core (default)")
    parser.add_argument("--draft-tokens", type=integers, default=(3,), help="llama.cpp's proposals (default 3)")
    parser.add_argument("--work", type=Path, default=WORK, help="where the environments are (default %(default)s)")
    add_output(parser, "load_serving")
    args = parser.parse_args()
    if min(args.concurrency) < 1 or args.max_tokens < 2:
        parser.error("--concurrency must be at least 1, and --max-tokens 2: the first token has no inter-token latency")
    console, before = Console(), os.getloadavg()
    try:
        rows, versions = run(args, console)
    except (DraftwoodError, PeerError) as error:
        parser.error(str(error))
    print(to_markdown(rows))
    settings = {name: getattr(args, name) for name in ("limit", "requests", "max_tokens", "repeats", "threads")}
    loads = {"load_before": before[0], "load_after": os.getloadavg()[0]}
    found = {"versions": versions, "rows": rows_to_json(rows)}
    figures = {"bundle": args.bundle.resolve().name} | settings | loads | found
    write_results(args.output, args.name, figures)
    if wrong := [f"{row.method} at {row.concurrency}" for row in rows if row.peer == OURS and row.same_text < 1]:
        sys.exit(f"answers differ from what the bundle writes plainly: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
