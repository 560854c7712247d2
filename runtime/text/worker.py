"""The program of a WorkerProcess. Its argument is a task: a Python file with `outcome`, perhaps `prepare`, MEMORY_BYTES
(limit of this process' address space, if the system supports limits), and CPU_SECONDS (limit for one line: it ends
this process even if the parent process cannot).

The program reads lines of JSON from its standard input. The first line goes to `prepare`, and the answer is {"ready"}.
Each further line goes to `outcome(prepared, line)`, which returns the answer, a line of JSON. The program ends at the
end of its input.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any


def main() -> None:
    # Signals that stop the server go to its whole process group, but the server still finishes accepted requests.
    for ignored in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(ignored, signal.SIG_IGN)
    task = runpy.run_path(sys.argv[1])
    limit_memory(task["MEMORY_BYTES"])
    received: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=receive, args=(received,), daemon=True).start()
    setting = json.loads(received.get())
    prepared = task["prepare"](setting) if "prepare" in task else setting
    answer({"ready": True})
    while True:
        line = received.get()
        limit_cpu(task["CPU_SECONDS"])
        answer(task["outcome"](prepared, line))


def receive(received: SimpleQueue[bytes]) -> None:
    """Read lines while the task works. At the end of the input the process ends at once, also during work, and when a
    line cannot be read: memory may be short, and the parent process would wait for the answer."""
    try:
        for line in sys.stdin.buffer:
            received.put(line)
    finally:
        os._exit(0)


def answer(content: Mapping[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def limit_memory(most_bytes: int) -> None:
    """Bound the address space, on systems that support such limits."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        for kind, most in ((resource.RLIMIT_AS, most_bytes), (resource.RLIMIT_CORE, 0)):
            soft, hard = resource.getrlimit(kind)
            bounds = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
            resource.setrlimit(kind, (min([most, *bounds]), hard))


def limit_cpu(seconds: int) -> None:
    """Bound the processor time of the next line."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        most = int(used.ru_utime + used.ru_stime) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
