"""OpenAI's Responses API with the real openai client: what it gets is what a chat gives, in items and events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from serving import CITY, USER, Served

openai = pytest.importorskip("openai", reason="needs the openai package")

from starlette.exceptions import HTTPException  # noqa: E402 - after the skip

from draftwood.models.errors import RequestError  # noqa: E402
from draftwood.runtime.serving.openai import responses  # noqa: E402
from draftwood.runtime.serving.openai.responses import StoredResponses  # noqa: E402
from draftwood.runtime.serving.openai.translated import Turns  # noqa: E402

TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
GREEDY: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 24, "temperature": 0}
SCHEMA: Any = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA | {"additionalProperties": False}}}
UNTHINKING = {"logit_bias": {"286": -100}, "ignore_eos": True}
FORCED: dict[str, Any] = {
    **GREEDY,
    "max_output_tokens": 300,
    "tools": TOOLS,
    "tool_choice": {"type": "function", "name": "weather"},
    "extra_body": {"thinking_token_budget": 5, "logit_bias": {"286": 100}},
}


class Place(BaseModel):
    city: Literal["Bern", "Oslo"]


@pytest.fixture(scope="module")
def client(thinker: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=thinker.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def create(client: Any, **fields: Any) -> Any:
    return client.responses.create(**{**GREEDY, "extra_body": UNTHINKING, **fields})


def test_a_response_is_the_answer_of_the_chat_that_it_means(client: Any, post: Any) -> None:
    called = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    items = [
        {"role": "developer", "content": "and brief"},
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
    ]
    meant = [
        {"role": "system", "content": "be kind\nand brief"},
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    response = create(client, input=items, instructions="be kind", metadata={"a": "b"})
    chat = post("/v1/chat/completions", messages=meant, max_tokens=24, temperature=0, **UNTHINKING).json()
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"] and response.usage.output_tokens == 24
    assert (response.instructions, response.metadata) == ("be kind", {"a": "b"})
    formed = create(client, max_output_tokens=200, extra_body={"response_format": JSON, "logit_bias": {"286": -100}})
    assert isinstance(json.loads(formed.output_text), dict)
    ended = create(client, extra_body={"logit_bias": {"2": 100}})
    assert (ended.status, ended.output, ended.incomplete_details) == ("completed", [], None)


def test_a_stream_is_the_response_in_numbered_events(client: Any) -> None:
    whole = client.responses.create(**FORCED)
    thought, called = whole.output
    assert (thought.type, called.type, called.name) == ("reasoning", "function_call", "weather")
    assert json.loads(called.arguments)["city"] in ("Bern", "Oslo") and thought.content[0].text
    assert whole.usage.output_tokens_details.reasoning_tokens == 7
    kinds, numbers, deltas = list[str](), list[int](), ""
    for event in client.responses.create(**FORCED, stream=True):
        numbers.append(event.sequence_number)
        kind = event.type.removeprefix("response.")
        kinds += [kind] if kind not in kinds[-1:] else []
        deltas += event.delta if kind == "function_call_arguments.delta" else ""
    item, done = "output_item.added", ["output_item.done"]
    text = [item, "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", *done]
    call = [item, "function_call_arguments.delta", "function_call_arguments.done", *done]
    assert kinds == ["created", "in_progress", *text, *call, "completed"]
    assert numbers == list(range(len(numbers))) and deltas == called.arguments
    with client.responses.stream(**FORCED) as stream:
        final = stream.get_final_response()
    assert [each.type for each in final.output] == ["reasoning", "function_call"]
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert final.output[0].content == thought.content and final.output[1].arguments == called.arguments
    back = [USER, *(each.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for each in final.output)]
    back.append({"type": "function_call_output", "call_id": final.output[1].call_id, "output": "sunny"})
    assert create(client, input=back, tools=TOOLS, extra_body={}).output


def test_parse_returns_the_pydantic_object(client: Any) -> None:
    options: dict[str, Any] = {**GREEDY, "max_output_tokens": 200, "text_format": Place}
    parsed = client.responses.parse(**options, extra_body={"thinking_token_budget": 3, "logit_bias": {"286": 100}})
    assert isinstance(parsed.output_parsed, Place) and parsed.output[0].type == "reasoning"
    with client.responses.stream(**options, extra_body={"logit_bias": {"286": -100}}) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, Place)
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    free = create(client, text={"format": {"type": "json_object"}}, extra_body={"logit_bias": {"286": -100}})
    assert free.output_text.startswith("{")
    off = create(client, reasoning={"effort": "none"}, extra_body={"logit_bias": {"286": 100}})
    assert [item.type for item in off.output] == ["message"]


def test_a_stored_response_goes_on(client: Any) -> None:
    first = create(client, instructions="be kind")
    second = create(client, input="and?", previous_response_id=first.id)
    assert first.store and second.previous_response_id == first.id
    items = [USER, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "and?"}]
    assert second.output_text == create(client, input=items, store=False).output_text
    again = create(client, input="and?", previous_response_id=first.id, store=False)
    assert again.output_text == second.output_text and not again.store, "the first one is as it was"
    with pytest.raises(openai.BadRequestError, match="is not stored, or no longer"):
        create(client, previous_response_id=again.id)
    create(client), create(client)
    with pytest.raises(openai.BadRequestError, match="is not stored, or no longer"):
        create(client, previous_response_id=first.id)


def test_a_stored_response_is_read_and_deleted(client: Any) -> None:
    first = create(client, metadata={"a": "b"})
    assert client.responses.retrieve(first.id) == first
    *_, last = create(client, stream=True)
    streamed = last.response
    assert client.responses.retrieve(streamed.id) == streamed
    with pytest.raises(openai.BadRequestError, match="a stored response is sent whole"):
        client.get(f"/responses/{first.id}?stream=true", cast_to=object)
    gone_on = create(client, input="and?", previous_response_id=first.id)  # two are kept
    with pytest.raises(openai.NotFoundError, match="is not stored, or no longer"):
        client.responses.retrieve(first.id)
    deleted = client.delete(f"/responses/{gone_on.id}", cast_to=object)
    assert deleted == {"id": gone_on.id, "object": "response", "deleted": True}
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="is not stored, or no longer"):
            call(gone_on.id)
    client.responses.delete(streamed.id)
    with pytest.raises(openai.BadRequestError, match="is not stored, or no longer"):
        create(client, previous_response_id=streamed.id)


def test_without_the_option_nothing_is_stored(http: Any) -> None:
    answer = http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2, "store": True}).json()
    assert answer["store"] is False
    assert http.get(f"/v1/responses/{answer['id']}").json()["error"]["type"] == "invalid_request_error"
    refused = http.post("/v1/responses", json={"input": "x", "previous_response_id": answer["id"]})
    assert refused.status_code == 400 and "--stored-responses" in refused.text


def test_what_is_stored_is_bounded_and_each_clients_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "STORED_CHARACTERS", 1000)
    stored = StoredResponses(5)

    def keep(name: str, size: int) -> None:
        turns = Turns()
        turns.say("user", "x" * size)
        stored.keep("a", turns, {"id": name, "output": []})

    keep("first", 300)
    keep("second", 300)
    assert stored.turns("a", "first").messages == [{"role": "user", "content": [{"type": "text", "text": "x" * 300}]}]
    with pytest.raises(RequestError, match="is not stored"):
        stored.turns("b", "first")
    stranger: Any = SimpleNamespace(state=SimpleNamespace(client="b"), query_params={})
    for what in (stored.send, stored.delete):
        with pytest.raises(HTTPException):
            asyncio.run(what("first", stranger))
    keep("third", 300)
    with pytest.raises(RequestError, match="is not stored"):
        stored.turns("a", "first")
    keep("large", 2000)
    with pytest.raises(RequestError, match="is not stored"):
        stored.turns("a", "large")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role must be"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "'input_image'"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text must be text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
    ({"input": [{"type": 5}]}, "input[0].type must be text"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "the id of an earlier call"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]}, "arguments must be text"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}, USER]}, "arguments"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]: 'web_search'"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "needs name and schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "not: this keyword"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs"),
    ({"background": True}, "background is not supported"),
    ({"conversation": "x"}, "conversation is not supported"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ({"unknown": 1}, "unknown is not supported"),
    ({"max_tokens": 5}, "max_tokens is said by another field, too"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=[named[:40] for _, named in REFUSED])
def test_what_cannot_be_is_refused_by_name(post: Any, fields: dict[str, Any], named: str) -> None:
    for stream in (False, True):
        answer = post("/v1/responses", **{**GREEDY, "stream": stream, **fields})
        assert answer.status_code == 400 and named in answer.json()["error"]["message"], answer.text
