"""Every field of OpenAI's and vLLM's endpoints is sent, and docs/parameters.md says what becomes of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from api_fields import ANYTHING, OLDER, ONE_OR_THE_OTHER, OWN, USER, VALUES, VLLM, WITH
from bundling import ROOT

pytest.importorskip("fastapi", reason="needs the [serve] extra")
pytest.importorskip("llguidance", reason="needs the [structured] extra")
openai = pytest.importorskip("openai", reason="needs the openai package")

from draftwood.runtime.serving.openai.bodies import IGNORED, ChatBody, CompletionBody  # noqa: E402 - after the skips

WORKS, NO_EFFECT, REFUSED = "works", "no effect", "refused"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "hello"}}
FIELDS = {CHAT: ChatBody.model_fields, COMPLETIONS: CompletionBody.model_fields}
Table = dict[str, tuple[str, str, str]]  # field -> what becomes of it in a chat and in a completion, and why
ROW = re.compile(r"^\| `(\w+)` \| ([a-z ]+) \| ([a-z ]+) \| (.*) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def table() -> Table:
    rows = ROW.findall((ROOT / "docs" / "parameters.md").read_text(encoding="utf-8"))
    names = [name for name, *_ in rows]
    assert names == sorted(set(names))
    return {name: (chat, completion, note) for name, chat, completion, note in rows}


def openai_fields() -> set[str]:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    names: set[str] = {"stream"}
    for base in (completion_create_params, chat_create_params):
        names |= set(base.CompletionCreateParamsBase.__annotations__)
    return names


def test_the_table_has_every_field(table: Table) -> None:
    supported = {*ChatBody.model_fields, *CompletionBody.model_fields}
    assert table.keys() == openai_fields() | {*VLLM, *OLDER, *OWN} | supported


@pytest.mark.parametrize("path", BODIES)
def test_each_field_is_what_the_table_says(http: Any, table: Table, path: str) -> None:
    wrong = {}
    for name, row in table.items():
        companions = {other: value for other, value in WITH.get(name, {}).items() if other in FIELDS[path]}
        body = {**BODIES[path], "max_tokens": 3, **companions, name: VALUES.get(name, ANYTHING)}
        body.pop(ONE_OR_THE_OTHER.get(name, ""), None)
        if path == COMPLETIONS:  # two fields have other values there
            body[name] = {"logprobs": 1, "add_special_tokens": False}.get(name, body[name])
        answer = http.post(path, json=body)
        if answer.status_code == 200:
            found = WORKS if name in FIELDS[path] else NO_EFFECT
        else:
            error = answer.json()["error"]
            assert answer.status_code == 400 and name in error["message"], (name, answer.text)
            found = REFUSED
        if found != row[path == COMPLETIONS]:
            wrong[name] = (found, answer.text[:200])
    assert not wrong


def test_what_has_no_effect_says_why(table: Table) -> None:
    without = {name for name, row in table.items() if NO_EFFECT in row[:2]}
    assert without == IGNORED | {"spaces_between_special_tokens"}
    assert all(table[name][2].strip() for name in without)


@pytest.mark.parametrize("path", BODIES)
def test_fields_without_effect_change_nothing(http: Any, table: Table, path: str) -> None:
    asked = {**BODIES[path], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    plain = http.post(path, json=asked).json()["choices"]
    everything = {name: VALUES[name] for name, row in table.items() if NO_EFFECT in row[:2]}
    assert http.post(path, json={**asked, **everything}).json()["choices"] == plain


@pytest.mark.parametrize("path", BODIES)
def test_neutral_values_of_refused_fields_are_accepted(http: Any, table: Table, path: str) -> None:
    """The table names them in its notes."""
    body = ChatBody if path == CHAT else CompletionBody
    neutral = {name: values for name, values in body.neutral.items() if name not in body.model_fields}
    for name, values in neutral.items():
        assert table[name][path == COMPLETIONS] in (REFUSED, NO_EFFECT)
        for value in values:
            answer = http.post(path, json={**BODIES[path], "max_tokens": 1, name: value})
            assert answer.status_code == 200, (name, answer.text)
            assert f"`{json.dumps(value)}`" in table[name][2] or NO_EFFECT in table[name][:2], name
