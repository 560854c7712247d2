"""Run NVIDIA's AIPerf against one server, and read its exports.

AIPerf sends prepared bodies with token ids, so that every server reads the same prompts. The numbers of tokens are
those of the servers' `usage`. The tokenizer is a local folder: AIPerf downloads nothing.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.load.serving.servers import MODEL
from benchmarks.peers.process import PeerError

SETUP = Path(__file__).resolve().parent / "setup" / "aiperf.sh"
SECONDS_TO_RUN = 600
# How often AIPerf checks whether a client may send its next request. Without a rate it polls, which takes a whole core
# from the servers (0.13.0).
LOOKS_PER_SECOND = 500


class MeasuredAnswer(NamedTuple):
    """One measured request. prompt: its index. first_ms: until the first token. per_token_ms: AIPerf's inter-token
    latency, the time from the first chunk to the last divided by the number of tokens after the first."""

    prompt: int
    text: str
    first_ms: float
    per_token_ms: float


class LoadResult(NamedTuple):
    """One run. acceptance_length: tokens per verified proposal, from AIPerf's table "Spec Decode"; None without it."""

    tokens_per_second: float
    answers: list[MeasuredAnswer]
    acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class AIPerf:
    """program: the executable. inputs: a file of `write_inputs` with `num_prompts` prompts. tokenizer: a local
    folder."""

    program: Path
    inputs: Path
    num_prompts: int
    tokenizer: Path

    def version(self) -> str:
        return subprocess.run([self.program, "--version"], capture_output=True, text=True, check=True).stdout.strip()

    def profile(self, url: str, concurrency: int, requests: int, folder: Path) -> LoadResult:
        """Let `concurrency` clients send requests, each the next one when it has its answer. Exports go to `folder`.

        Every prompt is sent equally often, at least `requests` times in all, after an unmeasured warm-up. Raises
        PeerError when AIPerf or one of the requests fails.
        """
        count = self.num_prompts * math.ceil(requests / self.num_prompts)
        warm_up = self.num_prompts * math.ceil(concurrency / self.num_prompts)
        load = ["--concurrency", concurrency, "--request-count", count, "--warmup-request-count", warm_up]
        pace = ["--request-rate", LOOKS_PER_SECOND, "--arrival-pattern", "constant"]
        data = ["--input-file", self.inputs, "--custom-dataset-type", "inputs-json"]
        order = ["--dataset-sampling-strategy", "sequential"]
        endpoint = ["--model", MODEL, "--url", url, "--endpoint-type", "completions", "--streaming"]
        # llama.cpp's server closes a connection after an answer, sometimes after the next request was sent on it.
        connections = ["--connection-reuse-strategy", "never"]
        tokens = ["--tokenizer", self.tokenizer, "--use-server-token-count"]
        export = ["--artifact-dir", folder, "--export-level", "raw", "--no-gpu-telemetry", "--no-server-metrics"]
        screen = ["--ui", "none", "--log-level", "warning"]
        command = [self.program, "profile", *endpoint, *connections, *data, *order, *tokens, *load, *pace]
        command += [*export, *screen]
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "screen.txt"
        run_to_end(list(map(str, command)), log)
        result = read_load(folder)
        if len(result.answers) != count:
            raise PeerError(f"{len(result.answers)} of {count} requests were answered; see {log}")
        return result


def run_to_end(command: list[str], log: Path) -> None:
    """Run AIPerf in the folder of its log. None of its processes survives the call. Raises PeerError when it fails."""
    with (
        log.open("wb") as lines,
        subprocess.Popen(command, stdout=lines, stderr=lines, cwd=log.parent, start_new_session=True) as process,
    ):
        try:
            status = process.wait(SECONDS_TO_RUN)
        except subprocess.TimeoutExpired:
            raise PeerError(f"aiperf did not end within {SECONDS_TO_RUN} s; see {log}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise PeerError(f"aiperf ended with {status}; see {log}")


def find_aiperf(work: Path) -> Path:
    """AIPerf's executable. Raises PeerError that names the script which installs it."""
    program = work / "aiperf" / "venv" / "bin" / "aiperf"
    if not os.access(program, os.X_OK):
        raise PeerError(f"AIPerf is not set up: sh {SETUP} {work}")
    return program


def write_inputs(file: Path, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Write one body of /v1/completions for each prompt: greedy, exactly `max_tokens` long, one session each."""
    body = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    sessions = [
        {"session_id": str(index), "payloads": [streamed | {"prompt": prompt}]} for index, prompt in enumerate(prompts)
    ]
    file.write_text(json.dumps({"data": sessions}), encoding="utf-8")


def read_load(folder: Path) -> LoadResult:
    """Read AIPerf's exports: the summary, and the measurements and answers of every request."""
    summary = json.loads((folder / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    measured = {request_id_of(row): row["metrics"] for row in read_rows(folder / "profile_export.jsonl")}
    answers = []
    for row in read_rows(folder / "profile_export_raw.jsonl"):
        metrics = measured.get(request_id_of(row), {})
        if "inter_token_latency" in metrics:  # a failed request has none
            first, later = (metrics[name]["value"] for name in ("time_to_first_token", "inter_token_latency"))
            answers.append(
                MeasuredAnswer(int(row["metadata"]["conversation_id"]), join_text(row["responses"]), first, later)
            )
    acceptance = summary.get("spec_decode_token_weighted_acceptance_length")
    return LoadResult(summary["output_token_throughput"]["avg"], answers, acceptance and acceptance["avg"])


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of the measured phase; the file has those of the warm-up, too."""
    found = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [row for row in found if row["metadata"]["benchmark_phase"] == "profiling"]


def request_id_of(row: dict[str, Any]) -> str:
    return str(row["metadata"]["x_request_id"])


def join_text(responses: list[dict[str, Any]]) -> str:
    """The text of a stream."""
    packets = [packet["value"] for response in responses for packet in response["packets"] if packet["name"] == "data"]
    chunks = [json.loads(packet) for packet in packets if packet != "[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
