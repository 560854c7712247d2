"""Calls of tools in an answer: found in whatever pieces the answer arrives; everything else stays text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.runtime.text.tool_calls import ToolCallReader
from draftwood.runtime.text.tools import HERMES, LLAMA, ToolFormat, call_text

Read = tuple[str, list[tuple[str, str]]]  # the text, and name and arguments of each call
TWO = '<tool_call>{"name":"g","arguments":{}}</tool_call>\n<tool_call>\n{"name": "f", "arguments": {"x":[1,{"y":2}]}}'
SAMPLES: list[tuple[ToolFormat, str, Read | None]] = [
    (HERMES, "hello <b> world  ", ("hello <b> world  ", [])),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>', ("", [("f", '{"a": "}\\"{"}')])),
    (HERMES, f"Sure.\n{TWO}\n</tool_call>\n", ("Sure.", [("g", "{}"), ("f", '{"x":[1,{"y":2}]}')])),
    (HERMES, f"{TWO}\n</tool_call>\n\nDone. ", ("Done. ", [("g", "{}"), ("f", '{"x":[1,{"y":2}]}')])),
    (
        HERMES,  # SmolLM2's list
        '<tool_call>[{"name": "f", "arguments": {}}, {"name":"g","arguments":{"k":1}}]</tool_call>',
        ("", [("f", "{}"), ("g", '{"k":1}')]),
    ),
    (HERMES, '<tool_call>{"name": "f", "parameters": {}}</tool_call>', ("", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
    *(
        (HERMES, f'{{}}<tool_call>\n{{"name": "f"{cut}', ("{}", [("f", "")]))  # its name is complete
        for cut in ("", ",", ', "argum', ', "arguments": ')
    ),
    (LLAMA, '{"name": "f", "param', ("", [("f", "")])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}\n{"type": "function", "name": "g"',
        ("", [("f", "{}"), ("g", "")]),
    ),
    (HERMES, '<tool_call>{"name": "f', None),
    (HERMES, '<tool_call>{"name": "h"', None),
    (HERMES, '<tool_call>{"name": "f"}', None),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}} and so on', ("and so on", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "h", "arguments": {}}</tool_call>', None),
    (HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', None),
    (HERMES, "<tool_call>f(x=1)</tool_call> ", None),
    (HERMES, '<tool_call>{"na', None),
    (HERMES, "a <tool_ca", None),
    (HERMES, '{"name": "f", "arguments": {}}', None),
    (LLAMA, '{"name": "f", "parameters": {"a":1}}', ("", [("f", '{"a":1}')])),
    (LLAMA, ' {"type": "function", "name": "f", "parameters": {}}', ("", [("f", "{}")])),
    (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ("", [("f", "{}"), ("g", "{}")])),
    (LLAMA, '{"a": 1}', None),
    (LLAMA, 'I call {"name": "f", "parameters": {}}', None),
    (LLAMA, '{"name": "zz", "parameters": {}}', None),
    (LLAMA, "[1, 2]\n", None),
    (LLAMA, '{"name": "' + 2000 * "f", None),
]


def read(format: ToolFormat, text: str, cuts: list[int], parallel: bool = True, demanded: bool = False) -> Read:
    reader = ToolCallReader(format, ("f", "g"), parallel, demanded)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = [part for start, end in pairwise(places) for part in reader.push(text[start:end])] + reader.finish()
    calls: list[tuple[str, str]] = []
    for part in found:
        if not isinstance(part, str):
            if part.name is not None:
                assert part.number == len(calls) and part.id is not None and part.id.startswith("call_")
                calls.append((part.name, ""))
            calls[part.number] = (calls[part.number][0], calls[part.number][1] + part.arguments)
    return "".join(part for part in found if isinstance(part, str)), calls


@pytest.mark.parametrize(("format", "text", "expected"), SAMPLES)
@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 130), max_size=20))
def test_a_call_is_found_however_the_text_is_cut(
    format: ToolFormat, text: str, expected: Read | None, cuts: list[int]
) -> None:
    assert read(format, text, cuts) == (expected or (text, []))


@given(
    before=st.text("ab<{ \n", max_size=8),
    arguments=st.dictionaries(
        st.text(max_size=3), st.recursive(st.integers() | st.text('"\\{}[]ab'), st.lists), max_size=3
    ),
    cuts=st.lists(st.integers(0, 200), max_size=9),
)
def test_any_arguments_come_back(before: str, arguments: dict[str, object], cuts: list[int]) -> None:
    text = before + call_text({"name": "g", "arguments": arguments})
    content, calls = read(HERMES, text, cuts)
    assert content == before.rstrip() and [(name, json.loads(text)) for name, text in calls] == [("g", arguments)]


@given(
    text=st.text('<>tool_cal/{}"name:f,argumets[]; \n\\', max_size=60), cuts=st.lists(st.integers(0, 60), max_size=9)
)
def test_any_text_is_read_the_same_in_pieces(text: str, cuts: list[int]) -> None:
    for format in (HERMES, LLAMA):
        assert read(format, text, cuts) == read(format, text, [])


def test_text_before_a_call_is_not_held_back() -> None:
    reader = ToolCallReader(HERMES, ("f",), True)
    assert reader.push("Let me look. <tool") == ["Let me look."]
    assert reader.push("s> ") == [" <tools>"]
    name, arguments = reader.push('<tool_call>\n{"name": "f", "arguments": {"a": ')
    assert not isinstance(name, str) and not isinstance(arguments, str)
    assert (name.name, name.arguments, arguments.name, arguments.arguments) == ("f", "", None, '{"a": ')
    assert [part.arguments for part in reader.push("1") if not isinstance(part, str)] == ["1"]


def test_calls_after_the_first_are_left_out_where_one_is_allowed() -> None:
    assert read(HERMES, f"{TWO}\n</tool_call>", [], parallel=False) == ("", [("g", "{}")])


@pytest.mark.parametrize(("format", "key"), [(HERMES, "arguments"), (LLAMA, "parameters")])
def test_demanded_calls_leave_no_markup_wherever_they_are_cut(format: ToolFormat, key: str) -> None:
    call = f'{format.opens}\n{{"name": "f", "{key}": {{"a": 1}}}}\n{format.closes}'.strip()
    text = f"{call}\n{call}" if format.opens else call
    for length in range(len(text) + 1):
        content, calls = read(format, text[:length], [length // 2], demanded=True)
        assert content == "" and len(calls) == text[:length].count('"f"')


class Counted(str):
    """A text that counts the characters that slices and sums of it copy."""

    copied = 0

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        return self._copy(super().__getitem__(place)) if isinstance(place, slice) else super().__getitem__(place)

    def __add__(self, other: str) -> str:
        return self._copy(str(self) + other)

    def __radd__(self, other: str) -> str:
        return self._copy(other + str(self))

    def _copy(self, text: str) -> str:
        type(self).copied += len(text)
        return type(self)(text)


@pytest.mark.parametrize("begun", ["<tool_call>", '<tool_call>{"name":"f","arguments":{}}'])
def test_a_whole_text_is_copied_a_few_times_however_many_calls_it_holds(begun: str) -> None:
    """A client can force any number of marks or calls by allowed_token_ids; a copy of the rest after each would take
    quadratic time."""

    class Piece(Counted):
        pass

    text = (begun + "x" * 200) * 300
    parts = ToolCallReader(HERMES, ("f",), True).push(Piece(text))
    assert sum(len(part) for part in parts if isinstance(part, str)) >= 300 * 200
    assert len(text) <= Piece.copied < 5 * len(text)
