"""A stand-in for AIPerf: it sends requests one after the other, and writes exports in AIPerf's format."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import urllib.request
from pathlib import Path
from typing import Any


def install(folder: Path) -> None:
    """A program that behaves like aiperf's."""
    program = folder / "aiperf"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n')
    program.chmod(0o755)


def lines_of(url: str, payload: Any) -> list[str]:
    """What stands after "data: " in the answer."""
    body = json.dumps(payload).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return [line.decode().strip().removeprefix("data: ") for line in answer if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    for option in ("--url", "--input-file", "--artifact-dir", "--request-count", "--warmup-request-count"):
        parser.add_argument(option)
    args = parser.parse_known_args()[0]
    sessions = json.loads(Path(args.input_file).read_text())["data"]
    phases = ["warmup"] * int(args.warmup_request_count) + ["profiling"] * int(args.request_count)
    measured, raw, lengths = [], [], []
    for number, phase in enumerate(phases):
        session = sessions[number % len(sessions)]
        lines = lines_of(args.url, session["payloads"][0])
        about = {"benchmark_phase": phase, "x_request_id": str(number), "conversation_id": session["session_id"]}
        packets = [{"perf_ns": 0, "packets": [{"name": "data", "value": line}]} for line in lines]
        raw.append({"metadata": about, "responses": packets})
        latencies = {"time_to_first_token": {"value": 10.0}, "inter_token_latency": {"value": 2.0}}
        measured.append({"metadata": about, "metrics": latencies})
        answers = [json.loads(line) for line in lines if line != "[DONE]"]
        drafted = [answer["metrics"]["speculative_decoding"] for answer in answers if "metrics" in answer]
        lengths += [each["mean_acceptance_length"] for each in drafted]
    summary: dict[str, Any] = {"output_token_throughput": {"avg": 100.0}}
    if lengths:
        summary["spec_decode_token_weighted_acceptance_length"] = {"avg": max(lengths)}
    folder = Path(args.artifact_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
    for name, rows in (("profile_export.jsonl", measured), ("profile_export_raw.jsonl", raw)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        print("fake 1.0")
    else:
        main()
