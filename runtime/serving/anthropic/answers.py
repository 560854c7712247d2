"""The answers of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi.responses import Response

from ...text.writer import StreamChunk
from ..http.errors import refusal_of
from ..openai.answers import Answer, as_json, event
from ..openai.content import CALL, TEXT, THOUGHT, Block, Blocks, Step
from ..openai.formats import ChatFormat

# What a block is called, its field of text, and how more of it is named.
NAMES = {TEXT: ("text", "text", "text_delta"), THOUGHT: ("thinking", "thinking", "thinking_delta")}


class MessageAnswer(Answer):
    """One answer, whole or as events."""

    prefix = "msg_"
    opens = False  # the first event says how much of the prompt was in the cache

    def __init__(self, format: ChatFormat, *arguments: Any, **options: Any) -> None:
        super().__init__(format, *arguments, **options)
        self._blocks = Blocks(format.content.reader())
        self._begun = False

    def added(self, index: int, chunk: StreamChunk) -> Iterator[bytes]:
        part = self._begin(index, chunk)
        if not self._begun:
            self._begun = True
            yield named({"type": "message_start", "message": self._message([])})
        for step in self._blocks.push(part.text, chunk.finish_reason is not None):
            yield named(written(step))
            if step.kind == "closed" and step.block.kind != CALL:
                step.block.pieces.clear()

    def ended(self) -> Iterator[bytes]:
        yield named({"type": "message_delta", "delta": self._end(), "usage": self._used()})
        yield named({"type": "message_stop"})

    def failed(self, error: Exception) -> Iterator[bytes]:
        yield b"event: error\ndata: " + refusal_of(error).as_message + b"\n\n"

    def whole(self) -> Response:
        (choice,) = self.choices
        for _ in self._blocks.push("".join(choice.texts), ends=True):
            pass
        return as_json(self._message([whole(block) for block in self._blocks.blocks]) | self._end())

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**head, "stop_reason": None, "stop_sequence": None, "usage": self._used()}

    def _end(self) -> dict[str, Any]:
        """Why the message ends."""
        (choice,) = self.choices
        calls = any(block.kind == CALL for block in self._blocks.blocks)
        reason = "stop_sequence" if choice.stopped is not None else "tool_use" if calls else "end_turn"
        reason = "max_tokens" if choice.finish_reason == "length" else reason
        return {"stop_reason": reason, "stop_sequence": choice.stopped}

    def _used(self) -> dict[str, Any]:
        used = self.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        counts = {"input_tokens": used["prompt_tokens"] - cached, "output_tokens": used["completion_tokens"]}
        thinking = {"output_tokens_details": {"thinking_tokens": self.choices[0].num_thought}} if self.thinks else {}
        return {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0, **thinking}


def named(content: Mapping[str, Any]) -> bytes:
    """An event that has its type as name."""
    return event(content, str(content["type"]))


def written(step: Step) -> dict[str, Any]:
    """The event of a step."""
    block, index = step.block, step.block.index
    if step.kind == "opened":
        return {"type": "content_block_start", "index": index, "content_block": whole(block)}
    if step.kind == "closed":
        return {"type": "content_block_stop", "index": index}
    if block.kind == CALL:
        delta = {"type": "input_json_delta", "partial_json": step.text}
    else:
        _, name, kind = NAMES[block.kind]
        delta = {"type": kind, name: step.text}
    return {"type": "content_block_delta", "index": index, "delta": delta}


def whole(block: Block) -> dict[str, Any]:
    """A block as far as it was written."""
    if block.kind == CALL:
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.object}
    kind, name, _ = NAMES[block.kind]
    content = {"type": kind, name: block.text}
    return content | {"signature": ""} if block.kind == THOUGHT else content  # nobody checks who wrote it
