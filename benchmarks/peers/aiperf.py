"""NVIDIA's AIPerf against a running server, kind by kind of the prompts: latencies, throughput, and what the server's
own counters say of speculation.

    draftwood serve build/real/qwen2.5-coder-1.5b.gguf --served-model-name model --prefix-cache-slots 0
    python -m benchmarks.peers.aiperf http://127.0.0.1:8000 --tokenizer BUNDLE --prompts qualitative.jsonl \
        --at-a-time 1,4,16 --output benchmarks/results

`sh benchmarks/peers/setup/aiperf.sh` installs it. The first turn of every prompt is sent. The numbers of tokens are
those of the server's `usage`; the tokenizer is a local folder, and AIPerf downloads nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.texts import OWN, Prompt, read_prompts
from benchmarks.tools.listing import Line, make_markdown, ratio
from benchmarks.tools.record import add_output, make_parser, rows_to_json, write_results
from draftwood.cli.options import integers, positive
from draftwood.models.errors import DraftwoodError, RequestError

SECONDS_TO_RUN = 1800
# How often AIPerf checks whether a client may send its next request. Without a rate it polls, which takes a whole core
# from the server (0.13.0).
LOOKS_PER_SECOND = 500
COLUMNS = ("tokens/s", "first token ms, p50 p99", "per token ms, p50 p99", "tokens per proposal")


class Load(NamedTuple):
    """One run. Latencies are p50 and p99. acceptance_length: tokens per verified proposal, from the server's counters;
    None where it has none."""

    kind: str
    at_a_time: int
    tokens_per_second: float
    first_ms: tuple[float, float]
    per_token_ms: tuple[float, float]
    acceptance_length: float | None


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("url", help="of a server that runs")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="a bundle or Hugging Face folder")
    parser.add_argument("--model", default="model", help="the model's name on the server (default %(default)s)")
    parser.add_argument("--prompts", type=Path, default=OWN, help="JSON lines in SPEED-Bench's form (default: ours)")
    parser.add_argument("--limit", type=positive, default=16, help="prompts of each kind (default %(default)s)")
    parser.add_argument("--at-a-time", type=integers, default=(1,), metavar="NUMBERS", help="clients (default 1)")
    parser.add_argument("--max-tokens", type=positive, default=64, help="of an answer (default %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="where AIPerf is (default %(default)s)")
    add_output(parser, "aiperf")
    args = parser.parse_args()
    try:
        program = find_aiperf(args.work)
        prompts = [prompt for prompt in read_prompts(args.prompts, args.limit) if not prompt.raw]
        if not prompts:
            raise RequestError(f"{args.prompts} has texts to continue alone, and AIPerf is given conversations")
        loads = list[Load]()
        for kind in dict.fromkeys(prompt.kind for prompt in prompts):
            own = [prompt for prompt in prompts if prompt.kind == kind]
            for number in args.at_a_time:
                folder = args.work.resolve() / "aiperf" / "exports" / f"{kind}-{number}"
                folder.mkdir(parents=True, exist_ok=True)
                write_inputs(folder / "inputs.json", own, args.model, args.max_tokens)
                command = make_command(program, args, folder, number, len(own))
                run_to_end(command, folder / "screen.txt")
                loads.append(read_load(folder, kind, number))
    except DraftwoodError as error:
        parser.error(str(error))
    print(to_markdown(loads))
    given = {"prompts": args.prompts.name, "limit": args.limit, "max_tokens": args.max_tokens}
    write_results(args.output, args.name, given | {"rows": rows_to_json(loads)})


def find_aiperf(work: Path) -> Path:
    """Raises RequestError that names the script which installs it."""
    program = work.resolve() / "aiperf" / "venv" / "bin" / "aiperf"
    if not os.access(program, os.X_OK):
        raise RequestError(f"AIPerf is not set up: sh benchmarks/peers/setup/aiperf.sh {work}")
    return program


def write_inputs(file: Path, prompts: Sequence[Prompt], model: str, max_tokens: int) -> None:
    """A body of /v1/chat/completions for each prompt, greedy, one session each."""
    common = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    common["stream_options"] = {"include_usage": True}
    bodies = [common | {"messages": [{"role": "user", "content": prompt.turns[0]}]} for prompt in prompts]
    sessions = [{"session_id": str(number), "payloads": [body]} for number, body in enumerate(bodies)]
    file.write_text(json.dumps({"data": sessions}), encoding="utf-8")


def make_command(program: Path, args: Any, folder: Path, at_a_time: int, prompts: int) -> list[str]:
    """`at_a_time` clients, each with its next request when it has its answer. Every prompt is sent equally often, after
    a warm-up that does not count."""
    rounds = -(-at_a_time // prompts)
    load = ["--concurrency", at_a_time, "--request-count", prompts * rounds, "--warmup-request-count", at_a_time]
    pace = ["--request-rate", LOOKS_PER_SECOND, "--arrival-pattern", "constant"]
    data = ["--input-file", folder / "inputs.json", "--custom-dataset-type", "inputs-json"]
    order = ["--dataset-sampling-strategy", "sequential"]
    endpoint = ["--model", args.model, "--url", args.url, "--endpoint-type", "chat", "--streaming"]
    # llama.cpp's server closes a connection after an answer, sometimes after the next request was sent on it.
    connections = ["--connection-reuse-strategy", "never"]
    tokens = ["--tokenizer", args.tokenizer.resolve(), "--use-server-token-count"]
    export = ["--artifact-dir", folder, "--no-gpu-telemetry", "--no-server-metrics"]
    command = [program, "profile", *endpoint, *connections, *data, *order, *tokens, *load, *pace, *export]
    return [*map(str, command), "--ui", "none", "--log-level", "warning"]


def run_to_end(command: list[str], log: Path) -> None:
    """None of AIPerf's processes survives the call. Raises RequestError when it fails."""
    with (
        log.open("wb") as lines,
        subprocess.Popen(command, stdout=lines, stderr=lines, cwd=log.parent, start_new_session=True) as process,
    ):
        try:
            status = process.wait(SECONDS_TO_RUN)
        except subprocess.TimeoutExpired:
            raise RequestError(f"aiperf did not end within {SECONDS_TO_RUN} s; see {log}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise RequestError(f"aiperf ended with {status}; see {log}")


def read_load(folder: Path, kind: str, at_a_time: int) -> Load:
    """From AIPerf's summary. Raises RequestError when a request failed."""
    summary = json.loads((folder / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    if failed := (summary.get("error_request_count") or {}).get("avg"):
        raise RequestError(f"{failed:.0f} requests failed; see {folder}")
    first, later = (summary[name] for name in ("time_to_first_token", "inter_token_latency"))
    acceptance = summary.get("spec_decode_token_weighted_acceptance_length")
    return Load(
        kind,
        at_a_time,
        summary["output_token_throughput"]["avg"],
        (first["p50"], first["p99"]),
        (later["p50"], later["p99"]),
        acceptance and acceptance["avg"],
    )


def to_markdown(loads: Sequence[Load]) -> str:
    groups: dict[str, list[Line]] = {}
    for load in loads:
        pairs = (f"{low:.1f}, {high:.1f}" for low, high in (load.first_ms, load.per_token_ms))
        cells = [f"{load.tokens_per_second:.1f}", *pairs, ratio(load.acceptance_length)]
        groups.setdefault(load.kind, []).append(Line("", f"{load.at_a_time} at a time", cells, False))
    return make_markdown(COLUMNS, groups)


if __name__ == "__main__":
    main()
