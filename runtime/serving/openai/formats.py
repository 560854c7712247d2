"""The formats of a choice in the two OpenAI APIs: texts, log-probabilities and calls of tools, whole or in chunks.

Log-probabilities are iterators, see `json_text.pieces`: a token with its alternatives takes a kilobyte as text and
several as objects, and an answer may have 100,000 tokens. has_prompts: whether a choice holds its prompt_logprobs; else
the answer does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...decoding.chunk import TokenLogprob
from ...text.reasoning import ThoughtPart
from ...text.result import finite
from ...text.token_texts import Offsets, TokenTexts
from ...text.tool_calls import CallPart
from .content import ContentForm, ContentReader
from .content import Part as ContentPart

THOUGHTS = ("reasoning_content", "reasoning")  # DeepSeek's and llama.cpp's name, and vLLM's


class Part(NamedTuple):
    """A part of a choice's text, or all of it."""

    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    offsets: Offsets
    prompt: Iterator[Any] | None = None  # vLLM's `prompt_logprobs`, if the request wants them


class CompletionFormat:
    """/v1/completions."""

    prefix, whole_object, chunk_object, has_prompts = "cmpl-", "text_completion", "text_completion", True

    def __init__(self, texts: TokenTexts, logprobs: bool) -> None:
        """logprobs: whether the request asked for log-probabilities."""
        self._texts, self._logprobs = texts, logprobs

    def opening(self, index: int) -> None:
        """There is no chunk before the first text."""

    def chunk(self, index: int, part: Part) -> dict[str, Any]:
        """A part of the choice."""
        logprobs = self._written(part.logprobs, part.offsets) if self._logprobs else None
        return {"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": part.finish_reason}

    def whole(self, index: int, part: Part) -> dict[str, Any]:
        written = self.chunk(index, part)
        return written if part.prompt is None else written | {"prompt_logprobs": part.prompt}

    def _written(self, logprobs: Sequence[TokenLogprob], offsets: Offsets) -> dict[str, Iterator[Any]]:
        return {
            "tokens": (self._texts.text(item.token_id) for item in logprobs),
            "token_logprobs": (finite(item.logprob) for item in logprobs),
            "top_logprobs": (None if math.isnan(item.logprob) else self._by_text(item.top) for item in logprobs),
            "text_offset": offsets.next(item.token_id for item in logprobs),
        }

    def _by_text(self, top: Mapping[int, float]) -> dict[str, float | None]:
        """Alternatives by text. As in OpenAI's API, only the more probable of two tokens with the same text is
        shown."""
        shown: dict[str, float | None] = {}
        for token, logprob in top.items():
            shown.setdefault(self._texts.text(token), finite(logprob))
        return shown


class ChatFormat:
    """/v1/chat/completions."""

    prefix, whole_object, chunk_object, has_prompts = "chatcmpl-", "chat.completion", "chat.completion.chunk", False

    def __init__(self, texts: TokenTexts, logprobs: bool, content: ContentForm = ContentForm()) -> None:  # noqa: B008
        """logprobs: whether the request asked for log-probabilities. content: what the answer may consist of."""
        self._texts, self._logprobs, self.content = texts, logprobs, content
        self._readers: dict[int, ContentReader] = {}  # by choice

    def opening(self, index: int) -> dict[str, Any]:
        """The choice's first chunk, before any text."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, part: Part) -> dict[str, Any] | None:
        """A part of the choice; None if there is nothing to send yet."""
        thought, text, calls, part = self._read(index, part)
        if not (thought or text or calls or part.logprobs or part.finish_reason):
            return None
        delta: dict[str, Any] = dict.fromkeys(THOUGHTS, thought) if thought else {}
        if text or (part.finish_reason is None and not calls and not thought):
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls.items()]
        return {"index": index, "delta": delta, **self._rest(part)}

    def whole(self, index: int, part: Part) -> dict[str, Any]:
        thought, text, calls, part = self._read(index, part)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thought:
            message |= dict.fromkeys(THOUGHTS, thought)
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls.values())}
        return {"index": index, "message": message, **self._rest(part)}

    def _read(self, index: int, part: Part) -> tuple[str, str, dict[int, dict[str, Any]], Part]:
        """The thought and the text of a part, its calls by their numbers, and the part with the finish_reason of a
        call."""
        if index not in self._readers:
            self._readers[index] = self.content.reader()
        reader, use = self._readers[index], self.content.use
        found = reader.push(part.text, part.finish_reason is not None)
        if use is not None and reader.num_calls and part.finish_reason == "stop":
            part = part._replace(finish_reason=use.called)
        thought = "".join(each.text for each in found if isinstance(each, ThoughtPart))
        return thought, "".join(each for each in found if isinstance(each, str)), joined(found), part

    def _rest(self, part: Part) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": map(self._with_alternatives, part.logprobs), "refusal": None}
        return {"logprobs": logprobs, "finish_reason": part.finish_reason}

    def _with_alternatives(self, item: TokenLogprob) -> dict[str, Any]:
        alternatives = [self._token(token, value) for token, value in item.top.items()]
        return {**self._token(item.token_id, item.logprob), "top_logprobs": alternatives}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": finite(logprob), "bytes": self._texts.bytes(token)}


def joined(found: Sequence[ContentPart]) -> dict[int, dict[str, Any]]:
    """The parts of calls in OpenAI's form, by the numbers of the calls; the parts of one call are one."""
    calls: dict[int, dict[str, Any]] = {}
    for part in found:
        if isinstance(part, CallPart):
            call = calls.setdefault(part.number, {"function": {"arguments": ""}})
            if part.id is not None:
                call |= {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
            call["function"]["arguments"] += part.arguments
    return calls


AnswerFormat = CompletionFormat | ChatFormat
