"""A stand-in for AIPerf: it sends requests one after the other, and writes a summary in AIPerf's format."""

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


def answered(url: str, payload: Any) -> bool:
    body = json.dumps(payload).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return b"[DONE]" in answer.read()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    for option in ("--url", "--input-file", "--artifact-dir", "--request-count", "--warmup-request-count"):
        parser.add_argument(option)
    args = parser.parse_known_args()[0]
    sessions = json.loads(Path(args.input_file).read_text())["data"]
    numbers = range(int(args.warmup_request_count) + int(args.request_count))
    wrong = sum(not answered(args.url, sessions[number % len(sessions)]["payloads"][0]) for number in numbers)
    summary = {
        "output_token_throughput": {"avg": 100.0},
        "time_to_first_token": {"p50": 10.0, "p99": 20.0},
        "inter_token_latency": {"p50": 2.0, "p99": 3.0},
        "spec_decode_token_weighted_acceptance_length": {"avg": 2.5},
        "error_request_count": {"avg": wrong},
    }
    (Path(args.artifact_dir) / "profile_export_aiperf.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main()
