"""TokenizerProcess: encodes texts in processes that can be killed, for tokenizers whose cost is not proved.

Such a tokenizer may need a time or memory without bound for a text: by a regular expression that goes back any number
of times, or by steps that each write a hundred characters for one (`tokenizer_check.is_proved`).
"""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

from ...models.errors import RequestError
from . import tokenizer_worker
from .worker_pool import WorkerPool

ENCODE_SECONDS = 20.0  # time limit of one text: four million characters take ten
CROWDED_SECONDS = 2.0  # the same limit while other texts wait for a process
PROCESSES = 2  # most processes; each starts when it is needed
WORKER = Path(tokenizer_worker.__file__)


class TokenizerProcess:
    """May be used from several threads. `close` ends the processes; so does the end of the object."""

    def __init__(self, content: str) -> None:
        """content: of tokenizer.json."""
        setting = (json.dumps(content) + "\n").encode()
        self._pool = WorkerPool(WORKER, setting, RequestError, PROCESSES, ENCODE_SECONDS, CROWDED_SECONDS)

    def first_problem(self) -> str | None:
        """See tokenizer_worker.first_problem. Raises RequestError where the tokenizer exceeds its limits."""
        return self._pool.ask(b"null\n").get("error")

    def encode(self, text: str, add_special_tokens: bool, given_up: Event | None = None) -> list[int]:
        """Token ids of a text. given_up: see ChatTemplate.render. Raises RequestError, with nothing but the reason, if
        the tokenizer fails, exceeds its limits, or was given up."""
        answer = self._pool.ask((json.dumps([text, add_special_tokens]) + "\n").encode(), given_up)
        if "ids" not in answer:
            raise RequestError(answer["error"])
        return [int(index) for index in answer["ids"].split()]

    def close(self) -> None:
        """End every process. Threads that wait for a process get an error, and so do later calls."""
        self._pool.close()
