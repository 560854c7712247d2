"""Dynamo's front end and some workers on this machine: files for discovery, nothing listens beyond 127.0.0.1.

    python deploy/dynamo/local.py bundles/demo --model models/demo/target --workers 2

prints the address and the workers' process numbers, and ends everything on Ctrl-C. Kill a worker with `kill -9` while
it answers: requests in flight go on at another one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

WORKER = Path(__file__).with_name("worker.py")
LOOPBACK = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
PORTS = range(20_000, 32_000)  # Dynamo 1.6 reads DYN_SYSTEM_PORT into 16 bits with a sign
MIGRATIONS = 3  # of one request, when workers die under it
READY_SECONDS = 60.0
STOP_SECONDS = 5.0
LOG_CHARACTERS = 2000  # of a process's log in an error


class LocalDynamo:
    """A front end over workers of one bundle. A context manager; nothing is left behind."""

    def __init__(self, bundle: Path, model: Path, workers: int = 2, options: Sequence[str] = (), port: int = 0) -> None:
        """model: folder with config.json and the tokenizer's files. options: of each worker. port: the front end's, 0
        for a free one."""
        self.url = f"http://127.0.0.1:{port or free_port()}"
        self.folder = tempfile.TemporaryDirectory(prefix="draftwood-dynamo-")
        self.workers: list[subprocess.Popen[bytes]] = []
        self.metrics: list[str] = []  # of each worker
        self._worker = [str(WORKER), str(bundle), "--model", str(model), "--discovery-backend", "file", *options]
        self._count = workers

    def __enter__(self) -> LocalDynamo:
        try:
            port = self.url.rpartition(":")[2]
            arguments = ["--http-host", "127.0.0.1", "--http-port", port, "--discovery-backend", "file"]
            self.front = self._start(
                "front", ["-m", "dynamo.frontend", *arguments, "--migration-limit", str(MIGRATIONS)]
            )
            for number in range(self._count):
                port = str(free_port())
                self.workers.append(self._start(f"worker-{number}", self._worker, {"DYN_SYSTEM_PORT": port}))
                self.metrics.append(f"http://127.0.0.1:{port}/metrics")
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, name: str, command: Sequence[str], more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        folder = Path(self.folder.name)
        local = dict.fromkeys(LOOPBACK, "127.0.0.1")
        local |= {"DYN_FILE_KV": str(folder / "discovery"), "DYN_SDK_DISABLE_ANSI_LOGGING": "1"}
        with (folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, env=os.environ | local | (more or {})
            )

    def instances(self) -> int:
        """Workers the front end knows, dead ones included until their lease ends."""
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                known = json.load(answer).get("instances", [])
            return sum(each["endpoint"] == "generate" for each in known)
        return 0

    def wait_ready(self) -> None:
        """Until every worker serves. Raises RuntimeError with the end of a log when that does not happen."""
        end = time.monotonic() + READY_SECONDS
        while self.instances() < self._count or not self._listed():
            dead = [process for process in (self.front, *self.workers) if process.poll() is not None]
            if dead or time.monotonic() > end:
                raise RuntimeError(f"Dynamo did not start:\n{self.logs()}")
            time.sleep(0.05)

    def _listed(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
            return bool(json.load(answer)["data"])

    def logs(self) -> str:
        """The ends of all logs."""
        files = sorted(Path(self.folder.name).glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-LOG_CHARACTERS:]}" for file in files)

    def close(self) -> None:
        """End every process, by force where asking does not help."""
        processes = [*self.workers, *([self.front] if hasattr(self, "front") else [])]
        for process in processes:
            process.terminate()
        end = time.monotonic() + STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.folder.cleanup()


def free_port() -> int:
    """Raises RuntimeError when there is none."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and the tokenizer's files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    args, options = parser.parse_known_args()
    threads = ["--threads", str(max(1, (os.cpu_count() or 1) // args.workers))]
    with LocalDynamo(args.bundle, args.model, args.workers, threads + options, args.port) as dynamo:
        numbers = ", ".join(str(worker.pid) for worker in dynamo.workers)
        print(f"{dynamo.url}/v1 over workers {numbers}; logs in {dynamo.folder.name}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
