"""ChatTemplate: renders a model's chat template in processes that can be killed.

A template is a program that comes with a model, and a loop in the template may never end. A thread cannot be killed;
a process can, and its memory can be limited (`template_worker.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

from ...models.errors import RequestError
from .workers import Task, WorkerPool

PROCESSES = 4


def refusal(reason: str) -> RequestError:
    return RequestError(f"the chat template cannot write this conversation: {reason}")


# Usual templates take milliseconds for a conversation.
TASK = Task(Path(__file__).with_name("template_worker.py"), PROCESSES, 5.0, 1.0, refusal)


class ChatTemplate:
    """May be used from several threads. `close` ends the processes; so does the end of the object."""

    def __init__(self, source: str) -> None:
        self._pool = WorkerPool(TASK, source)
        self.close = self._pool.close

    def render(self, variables: Mapping[str, Any], given_up: Event | None = None) -> str:
        """The text of one conversation. given_up: see WorkerPool.ask.

        Raises RequestError if the template refuses the conversation, fails, takes too long, or was given up.
        """
        try:
            answer = self._pool.ask(dict(variables), given_up)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"a conversation must consist of what JSON can express: {error}") from error
        if "text" not in answer:
            raise refusal(answer["error"])
        return answer["text"]
