"""A stand-in for AIPerf: it sends requests one after the other, and writes exports in AIPerf's format."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

FIRST_MS, PER_TOKEN_MS = 10.0, 2.0  # whatever was measured, so that a test can compare


class Sent(NamedTuple):
    """One request. lines: what stood behind "data: "; None when the request failed."""

    phase: str
    prompt: str
    lines: list[str] | None


def install(folder: Path) -> Path:
    """A program that behaves like aiperf's."""
    program = folder / "aiperf"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n')
    program.chmod(0o755)
    return program


def export(folder: Path, sent: Iterable[Sent]) -> None:
    """AIPerf's files. The first token takes FIRST_MS more with every request of a phase."""
    folder.mkdir(parents=True, exist_ok=True)
    measured, raw, drafted = [], [], []
    for number, request in enumerate(sent):
        phase = {"benchmark_phase": request.phase, "x_request_id": str(number), "conversation_id": request.prompt}
        lines = request.lines or []
        packets = [{"perf_ns": 0, "packets": [{"name": "data", "value": line}]} for line in lines]
        raw.append({"metadata": phase, "responses": packets})
        first = FIRST_MS * (1 + number)
        latencies = {"time_to_first_token": {"value": first}, "inter_token_latency": {"value": PER_TOKEN_MS}}
        measured.append({"metadata": phase, "metrics": latencies if lines else {}})
        answers = [json.loads(line) for line in lines if line != "[DONE]"]
        drafted += [answer["metrics"]["speculative_decoding"] for answer in answers if "metrics" in answer]
    summary: dict[str, Any] = {"output_token_throughput": {"avg": 100.0}}
    if drafted:
        length = max(acceptance["mean_acceptance_length"] for acceptance in drafted)
        summary["spec_decode_token_weighted_acceptance_length"] = {"avg": length}
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
    for name, rows in (("profile_export.jsonl", measured), ("profile_export_raw.jsonl", raw)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    for option in ("--url", "--input-file", "--artifact-dir", "--request-count", "--warmup-request-count"):
        parser.add_argument(option)
    args = parser.parse_known_args()[0]
    sessions = json.loads(Path(args.input_file).read_text())["data"]
    phases = ["warmup"] * int(args.warmup_request_count) + ["profiling"] * int(args.request_count)
    sent = []
    for number, phase in enumerate(phases):
        session = sessions[number % len(sessions)]
        body = json.dumps(session["payloads"][0]).encode()
        request = urllib.request.Request(f"{args.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            lines = [line.decode().strip().removeprefix("data: ") for line in answer]
        sent.append(Sent(phase, session["session_id"], [line for line in lines if line]))
    export(Path(args.artifact_dir), sent)


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        print("fake 1.0")
    else:
        main()
