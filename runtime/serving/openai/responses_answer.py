"""The answers of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastapi.responses import Response

from ...text.writer import StreamChunk
from ..http.errors import refusal_of
from .answers import Answer, as_json, event
from .content import CALL, TEXT, Block, Blocks, Step
from .formats import ChatFormat
from .responses_body import ResponsesBody

PREFIXES = {TEXT: "msg", CALL: "fc"}  # of the ids of items; a thought's is "rs"


class ResponseAnswer(Answer):
    """One answer, whole or as events, each with its number."""

    prefix = "resp_"
    keeps = True  # the last event has the whole answer

    def __init__(
        self,
        format: ChatFormat,
        *arguments: Any,
        body: ResponsesBody,
        finished: Callable[[dict[str, Any]], None] | None,
        **options: Any,
    ) -> None:
        """finished: takes the response at its end; None if it is not stored."""
        super().__init__(format, *arguments, **options)
        self._blocks, self._body, self._finished = Blocks(format.content.reader()), body, finished
        self._number = 0

    def opened(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def added(self, index: int, chunk: StreamChunk) -> Iterator[bytes]:
        part = self._begin(index, chunk)
        for step in [*self._blocks.push(part.text, chunk.finish_reason is not None)]:  # which block is last shows then
            yield from self._written(step)

    def ended(self) -> Iterator[bytes]:
        response = self._final()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: Exception) -> Iterator[bytes]:
        refusal = refusal_of(error)
        problem = {"code": refusal.code or "server_error", "message": refusal.message}
        yield self._event("response.failed", response=self._response("failed") | {"error": problem})

    def whole(self) -> Response:
        (choice,) = self.choices
        for _ in self._blocks.push("".join(choice.texts), ends=True):
            pass
        return as_json(self._final())

    def _written(self, step: Step) -> Iterator[bytes]:
        """The events of a step."""
        block, opened = step.block, step.kind == "opened"
        item, kind, name = self._item_id(block), "function_call_arguments", "arguments"
        place: dict[str, Any] = {"item_id": item, "output_index": block.index}
        if block.kind != CALL:
            kind, name = "output_text" if block.kind == TEXT else "reasoning_text", "text"
            place["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == TEXT else {}
        if opened:
            added = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=added)
            if block.kind != CALL:
                yield self._event("response.content_part.added", **place, part=part_of(block) | {"text": ""})
        elif step.kind == "added":
            yield self._event(f"response.{kind}.delta", **place, delta=step.text, **logprobs)
        else:
            named = {"name": block.name} if block.kind == CALL else {}
            yield self._event(f"response.{kind}.done", **place, **{name: block.text}, **named, **logprobs)
            if block.kind != CALL:
                yield self._event("response.content_part.done", **place, part=part_of(block))
            yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _item_id(self, block: Block) -> str:
        return f"{PREFIXES.get(block.kind, 'rs')}_{self.id.removeprefix(self.prefix)}{block.index}"

    def _item(self, block: Block, status: str = "") -> dict[str, Any]:
        """A block as an item of the output. status: by default as the block ended."""
        (choice,) = self.choices
        cut = choice.finish_reason == "length" and block is self._blocks.blocks[-1]
        head = {"id": self._item_id(block), "status": status or ("incomplete" if cut else "completed")}
        content = [] if status else [part_of(block)]
        if block.kind == CALL:
            called = {"call_id": block.id, "name": block.name, "arguments": "" if status else block.text}
            return {**head, "type": "function_call", **called}
        if block.kind == TEXT:
            return {**head, "type": "message", "role": "assistant", "content": content}
        return {**head, "type": "reasoning", "summary": [], "content": content}

    def _final(self) -> dict[str, Any]:
        """The response at its end."""
        cut = self.choices[0].finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        response |= {"output": [self._item(block) for block in self._blocks.blocks], "usage": self._used()}
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._finished is not None:
            self._finished(response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        choice: Any = body.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": self._finished is not None,
            "temperature": body.temperature,
            "text": body.text.model_dump(exclude_none=True, by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _used(self) -> dict[str, Any]:
        used = self.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.choices[0].num_thought},
            "total_tokens": used["total_tokens"],
        }


def part_of(block: Block) -> dict[str, Any]:
    """The content of a text or a thought, as far as it was written."""
    if block.kind == TEXT:
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": block.text}
