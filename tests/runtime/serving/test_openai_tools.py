"""Tools over HTTP with the real openai client: forced calls follow their schemas, with and without speculation, and are
streamed as OpenAI streams them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from serving import Served, served, with_chat_template

openai = pytest.importorskip("openai", reason="needs the openai package")
httpx = pytest.importorskip("httpx", reason="needs the httpx package")

USER: dict[str, Any] = {"role": "user", "content": "the weather?"}
MESSAGES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}"
)
NAMES = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"  # the context is short
TEMPLATES = {
    "hermes": NAMES + "{% if tools %}in <tool_call> tags\n{% endif %}" + MESSAGES,
    "llama": NAMES + "{% if tools %}Environment: ipython\n{% endif %}" + MESSAGES,
    "unknown": NAMES + MESSAGES,
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}",
}


OF_KINDS = partial(pytest.mark.parametrize, "kind", scope="module")
HERMES, BOTH = OF_KINDS(["hermes"]), OF_KINDS(["hermes", "llama"])
EVERY = OF_KINDS(["hermes", "llama", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("unknown", "plain"))])
FIXED = ("--speculative", "budget=fixed")


class Weather(BaseModel):
    city: Literal["Bern", "Oslo"]
    days: int = Field(ge=1, le=9)


class Place(BaseModel):
    """A nested model, whose schema has references."""

    where: Weather
    exact: bool


TOOLS = [openai.pydantic_function_tool(Weather, name="weather"), openai.pydantic_function_tool(Place, name="place")]
NOW = {"type": "function", "function": {"name": "now"}}
LOOSE = [
    {"type": "function", "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
    for tool in TOOLS
]


def arguments_of(call: Any) -> BaseModel:
    model: type[BaseModel] = Weather if call.function.name == "weather" else Place
    return model.model_validate_json(call.function.arguments)


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory, kind: str) -> Iterator[Served]:
    with served(with_chat_template(tiny_bundle, tmp_path_factory.mktemp("tools"), TEMPLATES[kind]), *FIXED) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def tools_of(kind: str) -> list[Any]:
    """One tool for the template that gets its description in words, because the context is short."""
    return TOOLS[:1] if kind == "plain" else TOOLS


def ask(client: Any, messages: list[dict[str, Any]] | None = None, **more: Any) -> Any:
    options = {"max_tokens": 200, "seed": 3, "tools": TOOLS} | more
    return client.chat.completions.create(model="tiny", messages=messages or [USER], **options)


@EVERY
@pytest.mark.parametrize("speculative", [False, {"grow": "dyspec"}, {"grow": "topk", "merge": "gsd"}])
def test_a_required_call_follows_a_schema(client: Any, kind: str, speculative: Any) -> None:
    options: dict[str, Any] = {"tools": tools_of(kind), "tool_choice": "required", "parallel_tool_calls": False}
    answer = ask(client, extra_body={"speculative": speculative}, **options)
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.id.startswith("call_") and arguments_of(call)
    greedy = [ask(client, temperature=0, extra_body={"speculative": how}, **options) for how in (False, speculative)]
    calls = [each.choices[0].message.tool_calls[0].function for each in greedy]
    assert calls[0] == calls[1]


@BOTH
def test_a_named_function_is_called_with_exact_numbers(client: Any, kind: str) -> None:
    schema = {"properties": {"id": {"enum": [1098765432109876543]}}, "required": ["id"], "additionalProperties": False}
    tools = [*TOOLS, {"type": "function", "function": {"name": "close", "parameters": schema}}]
    for name in ("weather", "close"):
        named = {"type": "function", "function": {"name": name}}
        answer = ask(client, tools=tools, tool_choice=named, n=2, extra_body={"speculative": {"grow": "dyspec"}})
        for choice in answer.choices:
            (call,) = choice.message.tool_calls
            assert (call.function.name, choice.finish_reason) == (name, "stop")
            arguments = call.function.arguments
            assert arguments_of(call) if name == "weather" else arguments.count("1098765432109876543") == 1


@HERMES
def test_a_tool_that_cannot_be_enforced_is_named_where_it_must_be(client: Any, kind: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "odd", "parameters": schema}}]
    assert ask(client, tools=tools, max_tokens=3).choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.function\.parameters\.properties\.x\.uniqueItems: "):
        ask(client, tools=tools, tool_choice="required")


@BOTH
def test_a_demanded_call_that_is_cut_leaves_no_markup(client: Any, kind: str) -> None:
    for length in (1, 4, 9, 30):
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            message = ask(client, tool_choice=choice, max_tokens=length).choices[0].message
            assert not message.content
            chunks = ask(client, tool_choice=choice, max_tokens=length, stream=True)
            assert not any(chunk.choices[0].delta.content for chunk in chunks)


@HERMES
def test_an_explanation_shows_the_call_of_the_answer(server: Served, client: Any, kind: str) -> None:
    (call,) = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    body = {"messages": [USER], "max_tokens": 200, "seed": 3, "tools": TOOLS, "parallel_tool_calls": False}
    address = f"{server.root}/v1/chat/completions/explain"
    answer = httpx.post(address, json=body | {"tool_choice": "required"}, timeout=60)
    assert answer.status_code == 200
    (shown,) = re.findall(r'<p class="text"><span class="prompt">(.*?)</span>(.*?)</p>', answer.text, re.DOTALL)
    written = unescape("".join(re.findall(r"<a [^>]*>(.*?)</a>", shown[1], re.DOTALL)))
    assert "weather place" in unescape(shown[0])
    assert written.startswith("<tool_call>") and call.function.arguments in written
    named = {"type": "function", "function": {"name": "unknown"}}
    refused = httpx.post(address, json=body | {"tool_choice": named}, timeout=60)
    assert refused.status_code == 400 and "unknown" in refused.json()["error"]["message"]


@BOTH
def test_a_stream_holds_the_calls_of_the_whole_answer(client: Any, kind: str) -> None:
    options: dict[str, Any] = {"tool_choice": "required", "n": 2, "max_tokens": 150, "logprobs": True}
    whole = ask(client, **options)
    calls: list[dict[int, list[str]]] = [{}, {}]
    reasons, contents, pieces = ["", ""], ["", ""], 0
    for chunk in ask(client, stream=True, **options):
        for choice in chunk.choices:
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            contents[choice.index] += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls[choice.index].setdefault(part.index, [])
                assert (
                    (part.id is not None) == (part.type is not None) == (part.function.name is not None) == (not call)
                )
                call += [part.function.name, part.function.arguments] if not call else [part.function.arguments]
                pieces += 1
    for choice, streamed in zip(whole.choices, calls, strict=True):
        expected = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        assert [[call[0], "".join(call[1:])] for _, call in sorted(streamed.items())] == expected
    assert reasons == [choice.finish_reason for choice in whole.choices] and pieces > 6
    assert contents == [choice.message.content or "" for choice in whole.choices]


@BOTH
def test_the_model_chooses_between_a_call_and_a_form(server: Served, client: Any, kind: str) -> None:
    """In "auto" with a response_format; a bias makes this model choose."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [["a"], "b"]}}}
    opening = {"hermes": "<", "llama": "{"}[kind]
    tokens = {text: token_id(server, text) for text in (opening, "[")}
    called = ask(client, tools=LOOSE, response_format=form, logit_bias={tokens[opening]: 100})
    assert called.choices[0].finish_reason in ("tool_calls", "length") and called.choices[0].message.tool_calls
    answered = ask(client, tools=LOOSE, response_format=form, logit_bias={tokens["["]: 100})
    assert answered.choices[0].finish_reason == "stop" and json.loads(answered.choices[0].message.content) == ["a"]
    assert answered.choices[0].message.tool_calls is None


def token_id(server: Served, text: str) -> str:
    tokens = httpx.post(f"{server.root}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    (token,) = tokens
    return str(token)


@EVERY
def test_without_a_call_the_answer_is_text(client: Any, kind: str) -> None:
    """What these tools change is the prompt; with "none" not even that."""
    plain = ask(client, tools=openai.NOT_GIVEN, max_tokens=20)
    for tools in (LOOSE[:1], TOOLS[:1], [NOW]):
        answer = ask(client, tools=tools, max_tokens=20)
        assert answer.choices[0].message.tool_calls is None and answer.choices[0].message.content
        assert answer.usage.prompt_tokens > plain.usage.prompt_tokens
        forbidden = ask(client, tools=tools, tool_choice="none", max_tokens=20)
        assert forbidden.usage.prompt_tokens == plain.usage.prompt_tokens
        assert forbidden.choices[0].message.content == plain.choices[0].message.content


@HERMES
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # openai's client about its own message
def test_answers_go_back_as_the_client_returns_them(client: Any, kind: str) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 200, "seed": 1}
    demanded: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.parse(**options, **demanded).choices[0].message
    with client.chat.completions.stream(**options, **demanded) as stream:
        (final,) = stream.get_final_completion().choices[0].message.tool_calls
    assert final.function.parsed_arguments == called.tool_calls[0].function.parsed_arguments
    with client.chat.completions.stream(**options, response_format=Weather) as stream:
        answered = stream.get_final_completion().choices[0].message
    assert answered.parsed and called.tool_calls[0].function.parsed_arguments
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, **demanded, stream=True)]
    parts = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    for part in parts[1:]:
        parts[0].function.arguments += part.function.arguments
    collected = {"role": "assistant", "content": None, "tool_calls": [parts[0].model_dump()]}
    assert parts[0].index == 0
    result = {"role": "tool", "content": "sunny"}
    for back in (
        [answered, USER],
        [called, {**result, "tool_call_id": called.tool_calls[0].id}],
        [collected, {**result, "tool_call_id": parts[0].id}],
    ):
        answer = client.chat.completions.create(**{**options, "messages": [USER, *back], "max_tokens": 2})
        assert answer.choices[0].finish_reason in ("stop", "length")
