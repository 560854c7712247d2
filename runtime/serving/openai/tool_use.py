"""ToolUse: what the tools of a chat request mean for its prompt, for the form of its text, and for its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from ....models.errors import RequestError
from ...sampling.params import SamplingParams
from ...sampling.structured import AnswerWithCalls, StructuredOutput, schema_text
from ...structured.json_guard import ANY_VALUE
from ...text.tokenizer import Tokenizer
from ...text.tool_calls import ToolCallReader
from ...text.tools import HERMES, MAX_TOOLS, ToolFormat, tool_format
from ..body import Strict

ANY_ARGUMENTS = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_TEXT = r"/(.|\n)*/"
NO_CALL = r"/(\s*[^{\s](.|\n)*)?/"  # text that does not begin with a JSON object

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None  # the JSON schema of its arguments, an object; by default it has none
    strict: bool | None = None  # the arguments follow the schema also where the model itself decides to call


class Tool(Strict):
    """OpenAI's tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


@dataclass(frozen=True)
class ToolUse:
    """The tools that may be called."""

    tools: tuple[Function, ...]
    # How the model writes calls. None if it is not known: then calls of its own accord stay text, and demanded ones
    # are in HERMES.
    format: ToolFormat | None
    choice: str  # "auto", "required", or, if `named`, the name of the function to call
    named: bool
    parallel: bool  # whether there may be several calls
    tokens: Mapping[str, int]  # of the format's marks that are added tokens, which a grammar cannot spell
    hidden: bool  # whether a mark's token is special: then its text is shown on demand only

    @property
    def called(self) -> str:
        """The finish_reason of an answer that calls a tool; OpenAI's differs for a named function."""
        return "stop" if self.named else "tool_calls"

    def reader(self) -> ToolCallReader | None:
        """A reader of an answer; None if calls stay text."""
        format = self.format or (HERMES if self._forced else None)
        names = {tool.name for tool in self.tools}
        return None if format is None else ToolCallReader(format, names, self.parallel, self._forced)

    @property
    def _forced(self) -> bool:
        return self.named or self.choice == "required"

    def applied(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a request with these tools. Raises RequestError."""
        if self.hidden:  # the text shows where a call begins
            params = replace(params, skip_special_tokens=False)
        form = self._form(params.structured)
        return params if form is None else replace(params, structured=form)

    def _form(self, form: StructuredOutput | None) -> AnswerWithCalls | None:
        """The form of the answer: calls alone where the choice demands one, because a form is one of texts; else calls
        or the demanded form, or any text with calls if a tool is strict. None for any text, or for the demanded form
        alone. Where the model need not call, tools that are not strict take any arguments."""
        format, forced = self.format or HERMES, self._forced
        if form is not None and form.kind not in ("json", "json_object"):
            raise RequestError("tools go with a response_format only: leave out structured_outputs and guided_…")
        if not forced and (self.format is None or (form is None and not any(tool.strict for tool in self.tools))):
            return None
        opens, closes = (self._literal(mark) for mark in (format.opens, format.closes))
        lines, schemas = list[str](), list[tuple[str, str, str]]()
        several = self.parallel and not self.named and format.opens
        calls = 'call ("\\n" call)*' if several else "call"
        if forced:
            lines.append(f"start: {calls}")
        elif form is not None:
            lines.append(f"start: {calls} | answer")
            schemas.append(("answer", "response_format.json_schema.schema", form.text))
        elif format.opens:
            lazy = "" if format.opens in self.tokens else "[lazy]"
            lines += [f"start: (lead rest_of_call){'*' if several else '?'} tail", "tail: TEXT", f"TEXT: {ANY_TEXT}"]
            lines += [f"lead{lazy}: TEXT {opens}", f'rest_of_call: "\\n" body "\\n" {closes}']
        else:
            lines += ["start: call | tail", "tail: TEXT", f"TEXT: {NO_CALL}"]
        lines.append(f'call: {opens} "\\n" body "\\n" {closes}' if format.opens else "call: body")
        chosen = [index for index, tool in enumerate(self.tools) if not self.named or tool.name == self.choice]
        lines.append("body: " + " | ".join(f"tool_{index}" for index in chosen))
        for index in chosen:
            tool, place = self.tools[index], f"tools[{index}].function.parameters"
            begin = f'{{"name": "{tool.name}", "{format.arguments}": '
            lines.append(f'tool_{index}: {json.dumps(begin)} arguments_{index} "}}"')
            content = arguments_of(tool) if forced or tool.strict else ANY_ARGUMENTS
            schemas.append((f"arguments_{index}", place, schema_text(content, place)))
        begins = ANY_VALUE if form is not None and not forced else b"" if format.opens else b"{"
        rules, marks = "\n".join(lines), format.opens.encode()
        return AnswerWithCalls(rules=rules, schemas=tuple(schemas), begins=begins, opens=marks)

    def _literal(self, mark: str) -> str:
        """A mark in a grammar, as text or as a token."""
        return f"<[{self.tokens[mark]}]>" if mark in self.tokens else json.dumps(mark)


def tool_use(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool, tokenizer: Tokenizer
) -> ToolUse | None:
    """The tools of a request; None if it has none, or forbids their use. Raises RequestError."""
    if not tools:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools: send the tools that may be called")
        return None
    functions = tuple(tool.function for tool in tools)
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"tools: two functions have the name {twice}: rename one of them")
    named = isinstance(choice, NamedTool)
    chosen = choice.function.name if isinstance(choice, NamedTool) else choice or "auto"
    if named and chosen not in names:
        raise RequestError(f"tool_choice: none of the tools is named {chosen:.100}")
    if chosen == "none":
        return None
    for function in functions:
        arguments_of(function)
    format = tool_format(tokenizer.template_for(True))
    found = {mark: tokenizer.added_id(mark) for mark in (format or HERMES)[:2]}
    tokens = {mark: index for mark, index in found.items() if index is not None}
    hidden = not tokenizer.special_token_ids.isdisjoint(tokens.values())
    return ToolUse(functions, format, chosen, named, parallel, tokens, hidden)


def arguments_of(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments. Raises RequestError if it is no schema of an object."""
    content = {"type": "object", **(NO_ARGUMENTS if function.parameters is None else function.parameters)}
    if content["type"] != "object":
        raise RequestError(f"tools: the parameters of {function.name} must be the schema of an object")
    return content
