"""A soak test: many kinds of clients use a real server for a long time; its texts and its memory are checked.

Visitors (clients) do one action after the other: they request texts, whole and as streams, disconnect, send incomplete
requests or none, read slowly, and open many connections. Every deterministic text (greedy or seeded) is compared with
the text that this process computes alone. The program prints and writes a result. Its exit code is 1 if a text was
wrong, an answer was a server error, memory or descriptors grew, or the server ended.

    python tests/support/soak.py --seconds 3600 --output build/soak.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import date
from pathlib import Path
from subprocess import TimeoutExpired
from threading import Thread
from typing import IO, Any, NamedTuple

from bundling import DEMO
from serving import served, wait_for
from soak_visitors import Record, Texts, Visitor
from steps import quiet

from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build

CLIENTS = 8
GROWTH_BYTES = 48 << 20  # from the first third on; what is kept per request would be more within the hour
WORKERS = min(32, (os.cpu_count() or 1) + 4)  # asyncio's worker threads, which start when they are needed


class Size(NamedTuple):
    """The size of a process: resident bytes, open files, threads."""

    resident: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        return cls(pages * 4096, len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))


def native_demo(bundle: Path) -> Path:
    build(BuildOptions(DEMO / "target", DEMO / "draft", bundle, backend="native"), quiet)
    return bundle


def soak(bundle: Path, seconds: float, clients: int = CLIENTS, every: float = 60) -> dict[str, Any]:
    """Run `clients` visitors for `seconds`, and measure the server's size `every` so many seconds. Returns the
    result."""
    texts, record, sizes, logged = Texts.of(bundle), Record(), list[tuple[float, Size]](), Counter[str]()
    with served(bundle, "--max-running", "4", "--served-model-name", "bundle") as server:

        def drain(stream: IO[str]) -> None:  # a full pipe would hold the server up
            for line in stream:
                logged["bytes"] += len(line)

        for stream in (server.process.stdout, server.process.stderr):
            assert stream is not None
            Thread(target=drain, args=(stream,), daemon=True).start()
        begin = time.monotonic()
        with ThreadPoolExecutor(clients) as threads:
            visits = [
                threads.submit(Visitor(server, texts, record, number).visit, begin + seconds)
                for number in range(clients)
            ]
            while not all(visit.done() for visit in visits) and server.process.poll() is None:
                sizes.append((round(time.monotonic() - begin, 1), Size.of(server.process.pid)))
                wait(visits, timeout=every)
            for visit in visits:
                visit.result()
        if server.process.poll() is None:
            try:
                wait_for(lambda: server.idle, 120)
            except (AssertionError, OSError) as error:
                record.complain(f"the server never became idle: {error!r}")
            time.sleep(1)  # connections are closed a moment after their last answer
            sizes.append((round(time.monotonic() - begin, 1), Size.of(server.process.pid)))
            server.process.terminate()
        try:
            code: int | None = server.process.wait(60)
        except TimeoutExpired:
            code = None
    if code != 0:
        record.complain(f"the server ended with {code}")
    settled, last = sizes[len(sizes) // 3][1], sizes[-1][1]
    growth = last.resident - settled.resident
    if growth > GROWTH_BYTES or last.files > settled.files + 200 or last.threads > settled.threads + WORKERS:
        record.complain(f"the server grew from {settled} to {last}")
    return {
        "date": date.today().isoformat(),
        "seconds": round(sizes[-1][0]),
        "visits": dict(sorted(record.done.items())),
        "answers": {str(status): count for status, count in sorted(record.answers.items())},
        "texts_compared": record.compared,
        "texts_wrong": record.wrong_texts,
        "resident_growth_mib": round(growth / 2**20, 1),
        "log_bytes": logged["bytes"],
        "exit_code": code,
        "complaints": len(record.wrong),
        "first_complaints": record.wrong[:20],
        "sizes": [
            {
                "second": at,
                "resident_mib": round(size.resident / 2**20, 1),
                "files": size.files,
                "threads": size.threads,
            }
            for at, size in sizes
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        result = soak(
            native_demo(Path(folder) / "bundle"), options.seconds, options.clients, every=min(60, options.seconds / 6)
        )
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return 1 if result["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
