"""ChatTemplate: renders a model's chat template in processes that can be killed.

A template is a program that comes with a model, and a loop in the template may never end. A thread cannot be killed;
a process can, and its memory can be limited (`template_worker.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

from ...models.errors import RequestError
from .worker_pool import WorkerPool

RENDER_SECONDS = 5.0  # time limit of one conversation; usual templates take milliseconds
CROWDED_SECONDS = 1.0  # the same limit while other conversations wait for a process
PROCESSES = 4  # most processes; each starts when it is needed
WORKER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """May be used from several threads. `close` ends the processes; so does the end of the object."""

    def __init__(self, source: str) -> None:
        setting = (json.dumps(source) + "\n").encode()
        self._pool = WorkerPool(WORKER, setting, refusal, PROCESSES, RENDER_SECONDS, CROWDED_SECONDS)

    def render(self, variables: Mapping[str, Any], given_up: Event | None = None) -> str:
        """The text of one conversation.

        given_up: another thread sets it when the text is no longer needed; the process is then ended. Raises
        RequestError if the template refuses the conversation, fails, takes too long, or was given up.
        """
        try:
            line = (json.dumps(dict(variables)) + "\n").encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"a conversation must consist of what JSON can express: {error}") from error
        answer = self._pool.ask(line, given_up)
        if "text" not in answer:
            raise refusal(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End every process. Threads that wait for a process get an error, and so do later calls."""
        self._pool.close()


def refusal(reason: str) -> RequestError:
    return RequestError(f"the chat template cannot write this conversation: {reason}")
