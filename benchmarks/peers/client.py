"""A client of OpenAI's endpoints, as a user's: streams, one connection for each request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from time import perf_counter
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from benchmarks.peers.server import ServerError
from benchmarks.peers.texts import Prompt

SECONDS_TO_ANSWER = 600


class Asked(NamedTuple):
    """What is asked of every prompt."""

    max_tokens: int  # of each answer
    temperature: float


class Answer(NamedTuple):
    """To all turns of a prompt."""

    text: str
    tokens: int
    # From the request to the last chunk, and to the first one with a text; None if all came in one chunk.
    seconds: float
    first: float | None
    # Proposed and accepted tokens; None if the server does not tell.
    drafted: int | None
    accepted: int | None


class Batch(NamedTuple):
    """Answers that were written at the same time."""

    answers: list[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


def ask_all(url: str, model: str, prompts: Sequence[Prompt], asked: Asked, extra: dict[str, Any]) -> Batch:
    """Ask for all prompts at the same time. Raises ServerError when one is not answered."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        start = perf_counter()
        answers = list(clients.map(lambda prompt: ask(url, model, prompt, asked, extra), prompts))
        return Batch(answers, perf_counter() - start)


def ask(url: str, model: str, prompt: Prompt, asked: Asked, extra: dict[str, Any]) -> Answer:
    """Ask for one prompt; turns of a conversation one after the other. Raises ServerError with the server's message."""
    common = {"model": model, "max_tokens": asked.max_tokens, "temperature": asked.temperature, **extra}
    if asked.temperature:  # alone: servers have different defaults of the rest
        common |= {"top_p": 1, "top_k": 0, "min_p": 0}
    if prompt.raw:
        return stream(f"{url}/v1/completions", common | {"prompt": prompt.turns[0]})
    messages, answers = list[dict[str, str]](), list[Answer]()
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        answers.append(stream(f"{url}/v1/chat/completions", common | {"messages": messages}))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return join(answers)


def join(answers: Sequence[Answer]) -> Answer:
    """The turns of a conversation as one answer."""
    return Answer(
        "\n".join(each.text for each in answers),
        sum(each.tokens for each in answers),
        sum(each.seconds for each in answers),
        answers[0].first,
        add(each.drafted for each in answers),
        add(each.accepted for each in answers),
    )


def add(values: Iterator[int | None]) -> int | None:
    """The sum of all that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def stream(address: str, body: dict[str, Any]) -> Answer:
    text, first, last = list[str](), None, dict[str, Any]()
    start = perf_counter()
    for chunk in chunks(address, body | {"stream": True, "stream_options": {"include_usage": True}}):
        last |= {name: chunk[name] for name in ("usage", "timings", "metrics") if chunk.get(name)}
        for choice in chunk.get("choices") or ():
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            text.append(piece)
            first = first or (perf_counter() - start if piece else None)
    seconds = perf_counter() - start
    tokens = last.get("usage", {}).get("completion_tokens", 0)
    if not tokens:
        raise ServerError(f"no tokens in the answer to {address}")
    alone = sum(map(bool, text)) < 2 < tokens
    return Answer("".join(text), tokens, seconds, None if alone else first, *count(last))


def chunks(address: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    with opened(address, body) as answer:
        for line in answer:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                chunk: dict[str, Any] = json.loads(data)
                if "error" in chunk:
                    raise ServerError(str(chunk["error"]))
                yield chunk


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """One request without a stream. Raises ServerError with the server's message."""
    with opened(address, body) as answer:
        content: dict[str, Any] = json.load(answer)
        return content


@contextmanager
def opened(address: str, body: dict[str, Any]) -> Iterator[HTTPResponse]:
    """The answer to one request. Raises ServerError for every way in which it fails."""
    request = Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=SECONDS_TO_ANSWER) as answer:
            yield answer
    except HTTPError as error:
        raise ServerError(error.read().decode(errors="replace")[:500]) from error
    except (OSError, HTTPException, ValueError) as error:
        raise ServerError(f"{type(error).__name__}: {error}") from error


def count(last: dict[str, Any]) -> tuple[int | None, int | None]:
    """Proposed and accepted tokens, as Draftwood and vLLM, or as llama.cpp tell them."""
    if speculative := last.get("metrics", {}).get("speculative_decoding"):
        return speculative["num_draft_tokens"], speculative["num_accepted_draft_tokens"]
    timings = last.get("timings", {})
    return timings.get("draft_n"), timings.get("draft_n_accepted")
