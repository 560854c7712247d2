"""Separates an answer into thoughts, texts and calls of tools, in order, while it arrives. ContentReader finds the
parts; Blocks groups them, for protocols whose answers are lists of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from ...sampling.thought import Thought
from ...text.reasoning import ThoughtPart, ThoughtReader
from ...text.tool_calls import CallPart, ToolCallReader
from .tool_use import ToolUse

Part = ThoughtPart | CallPart | str
THOUGHT, TEXT, CALL = "thought", "text", "call"


class ContentReader:
    """Reads one answer. A thought calls no tools."""

    def __init__(self, thought: ThoughtReader | None, calls: ToolCallReader | None, shows_thought: bool) -> None:
        self._thought, self._calls, self._shows_thought = thought, calls, shows_thought

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str, ends: bool) -> list[Part]:
        """Add text; returns what is certain now. ends: no more text follows."""
        found: list[ThoughtPart | str] = [text] if text else []
        if self._thought is not None:
            found = self._thought.push(text) + (self._thought.finish() if ends else [])
        parts = list[Part]()
        for each in found:
            if isinstance(each, ThoughtPart):
                parts += [each] if self._shows_thought else []
            else:
                parts += [each] if self._calls is None else self._calls.push(each)
        return parts + (self._calls.finish() if ends and self._calls is not None else [])


class ContentForm(NamedTuple):
    """What an answer may consist of beside text."""

    thought: Thought | None = None
    use: ToolUse | None = None
    shows_thought: bool = True

    def reader(self) -> ContentReader:
        thought = None if self.thought is None else ThoughtReader(self.thought.begun)
        return ContentReader(thought, None if self.use is None else self.use.reader(), self.shows_thought)


@dataclass(slots=True)
class Block:
    """One thought, text or call, as far as it was written."""

    kind: str  # THOUGHT, TEXT or CALL
    index: int
    id: str = ""  # of a call, as its name
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the arguments of the call."""
        return "".join(self.pieces)

    @property
    def object(self) -> dict[str, Any]:
        """The arguments, as far as they are JSON: max_tokens may have cut them, or the model wrote others."""
        try:
            content = from_json(self.text, allow_inf_nan=False, allow_partial="trailing-strings")
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}


class Step(NamedTuple):
    """What happens to a block. text: what is added to it."""

    kind: Literal["opened", "added", "closed"]
    block: Block
    text: str = ""


class Blocks:
    """Groups the parts of one answer: neighbouring parts of a kind are one block, and each call is one."""

    def __init__(self, reader: ContentReader) -> None:
        self._reader = reader
        self.blocks = list[Block]()

    def push(self, text: str, ends: bool) -> Iterator[Step]:
        """Add text. Yields what happens in order; at the end of the answer the last block is closed."""
        for part in self._reader.push(text, ends):
            kind = CALL if isinstance(part, CallPart) else THOUGHT if isinstance(part, ThoughtPart) else TEXT
            last = self.blocks[-1] if self.blocks else None
            if last is None or last.kind != kind or (isinstance(part, CallPart) and part.id is not None):
                if last is not None:
                    yield Step("closed", last)
                last = Block(kind, len(self.blocks))
                if isinstance(part, CallPart):
                    last.id, last.name = part.id or "", part.name or ""
                self.blocks.append(last)
                yield Step("opened", last)
            added = part.arguments if isinstance(part, CallPart) else part if isinstance(part, str) else part.text
            if added:
                last.pieces.append(added)
                yield Step("added", last, added)
        if ends and self.blocks:
            yield Step("closed", self.blocks[-1])
