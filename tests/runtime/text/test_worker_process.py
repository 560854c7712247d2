"""A worker's time limit: an answer that is there counts, however late the caller looks for it."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import pytest
from serving import wait_for

from draftwood.models.errors import RequestError
from draftwood.runtime.text.worker_process import WorkerProcess

TASK = """
import os, time
MEMORY_BYTES, CPU_SECONDS = 2**34, 600

def prepare(setting):
    return setting

def outcome(prepared, line):
    while not os.path.exists(prepared + line.decode().strip()):
        time.sleep(0.01)
    return {"found": line.decode().strip()}
"""


def test_only_an_answer_that_is_not_there_can_be_late(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    worker = WorkerProcess(
        tmp_path / "task.py",
        json.dumps(f"{tmp_path}/").encode() + b"\n",
        lambda reason: RequestError(f"refused: {reason}"),
    )

    def late() -> float:
        (tmp_path / "asked").touch()
        wait_for(lambda: not worker._lines.empty())
        return -1.0

    assert worker.ask(b"asked\n", late, Event()) == {"found": "asked"}
    with pytest.raises(RequestError, match="refused: it did not finish within -1 s"):
        worker.ask(b"missing\n", lambda: -1.0, Event())
    worker.end()
    assert not worker.alive
