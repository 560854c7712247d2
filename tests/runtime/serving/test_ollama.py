"""Ollama's API with the real ollama client: what it gets is what a chat or a completion gives, whole or in lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import CITY, USER, Served, served

ollama = pytest.importorskip("ollama", reason="needs the ollama package")

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
GREEDY = {"temperature": 0, "num_predict": 24}
SAMPLED = {"max_tokens": 24, "temperature": 0}  # the same for OpenAI's API
CHAT, GENERATE = "/api/chat", "/api/generate"
CALLED: dict[str, Any] = {"role": "assistant", "content": ""}
CALLED["tool_calls"] = [{"function": {"name": "now", "arguments": {}}}]
TOLD = {"role": "tool", "content": "noon"}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def ending(reason: str) -> Any:
    return {"done": True, "done_reason": reason}


@pytest.fixture(scope="module")
def client(thinker: Served) -> Iterator[Any]:
    with ollama.Client(host=thinker.root, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def coder(api: Served) -> Iterator[Any]:
    """A client of a server whose model infills, and does not think."""
    with ollama.Client(host=api.root, timeout=120) as client:
        yield client


def token(post: Any, text: str) -> str:
    """The id of the token that a text is."""
    (found,) = post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    return str(found)


def chat(client: Any, *messages: dict[str, Any], **fields: Any) -> Any:
    options = GREEDY | fields.pop("options", {})
    return client.chat("tiny", list(messages) or [USER], options=options, **fields)


def test_a_chat_is_the_answer_of_the_chat_that_it_means(client: Any, post: Any) -> None:
    calls: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in ("now", "weather", "now")]
    asked = [
        {"role": "system", "content": "be kind"},
        USER,
        {"role": "assistant", "content": "I look.", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
        {"role": "tool", "content": "noon", "tool_name": "now"},
        {"role": "tool", "content": "night"},
        USER,
    ]
    named = [{"id": f"call_2_{number}", "type": "function", **each} for number, each in enumerate(calls)]
    meant = [dict(message) for message in asked]
    meant[2] = {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": named}
    for place, number in ((3, 1), (4, 0), (5, 2)):
        meant[place]["tool_call_id"] = named[number]["id"]
    answer = chat(client, *asked, think=False)
    unthinking = {"reasoning_effort": "none", **SAMPLED}
    told = post("/v1/chat/completions", messages=meant, **unthinking).json()
    assert answer.message.content == told["choices"][0]["message"]["content"]
    assert answer.prompt_eval_count == told["usage"]["prompt_tokens"]
    assert answer.eval_count == told["usage"]["completion_tokens"]
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, told["choices"][0]["finish_reason"])
    spent = {name: answer[name] for name in DURATIONS}
    assert spent["total_duration"] >= spent["eval_duration"] + spent["prompt_eval_duration"] > 0
    assert spent["total_duration"] < 120e9 and spent["load_duration"] == 0
    begun = {"role": "assistant", "content": "Once upon"}
    goes_on = post("/v1/chat/completions", messages=[USER, begun], continue_final_message=True,
                   add_generation_prompt=False, **unthinking).json()  # fmt: skip
    assert chat(client, USER, begun, think=False).message.content == goes_on["choices"][0]["message"]["content"]


def test_options_are_those_of_a_chat(client: Any, post: Any) -> None:
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "min_p": 0.01, "seed": 5, "stop": ["q"]}
    drawn |= {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    ours = chat(client, think=False, options={**drawn, "num_predict": 20, "repeat_penalty": 1.3, "num_ctx": 99})
    theirs = post("/v1/chat/completions", messages=[USER], reasoning_effort="none", **drawn, max_tokens=20,
                  repetition_penalty=1.3).json()  # fmt: skip
    assert ours.message.content == theirs["choices"][0]["message"]["content"]
    plain = chat(client, think=False, options=drawn)
    assert plain.message.content == chat(client, think=False, options=drawn).message.content != ours.message.content
    short = chat(client, think=False, options={"num_predict": 3, "ignore_eos": True, "speculative": {"grow": "chain"}})
    assert (short.eval_count, short.done_reason) == (3, "length")
    room = chat(client, think=False, options={"num_predict": -1, "ignore_eos": True})
    assert room.eval_count > 24 and room.done_reason == "length"
    ended = chat(client, options={"logit_bias": {"2": 100}})
    assert (ended.message.content, ended.done_reason) == ("", "stop")


def test_a_stream_is_the_answer_in_parts(client: Any) -> None:
    options = {"logit_bias": {"286": 100}, "thinking_token_budget": 5, "ignore_eos": True}
    whole = chat(client, options=options)
    *parts, last = chat(client, options=options, stream=True)
    assert whole.message.thinking and whole.message.content
    for name in ("content", "thinking"):
        assert "".join(getattr(part.message, name) or "" for part in parts) == getattr(whole.message, name)
    assert not any(part.done or part.eval_count for part in parts) and len(parts) > 1
    assert last.message.content == "" and last.done_reason == whole.done_reason == "length"
    assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)


def test_thinking_is_turned_on_and_off(client: Any) -> None:
    options = {"logit_bias": {"286": 100}, "num_predict": 4}
    for think, thinks in ((None, True), (True, True), ("low", True), (False, False)):
        for answer in (
            chat(client, options=options, think=think).message,
            client.generate("tiny", "hello", options=options, think=think),
        ):
            assert bool(answer.thinking) == thinks, think


def test_calls_of_tools_come_whole(client: Any, post: Any) -> None:
    """The form lets the answer be calls or an object; the biases choose a call without arguments, and its end."""
    biases = {token(post, "<"): 100, token(post, "}"): 100, "2": 100}

    def now() -> str:
        """The time."""
        return ""

    asked: dict[str, Any] = {"tools": [now], "format": "json", "think": False}
    asked["options"] = {"logit_bias": biases, "num_predict": 200}
    answer = chat(client, **asked)
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", {})
    assert (answer.message.content, answer.done_reason) == ("", "stop")
    *parts, last = chat(client, stream=True, **asked)
    assert [part.message.tool_calls for part in parts] == [answer.message.tool_calls] and last.done
    result = {"role": "tool", "tool_name": "now", "content": "noon"}
    assert chat(client, USER, answer.message, result, tools=[now]).eval_count
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    before = {**CALLED, "tool_calls": [{**CALLED["tool_calls"][0], "id": None, "type": "function"}]}
    body = {"messages": [USER, before, TOLD], "tools": [strict], "think": False, "format": CITY, "stream": False}
    told = post(CHAT, **body, options={"logit_bias": biases, "temperature": 0}).json()["message"]["tool_calls"]
    assert told[0]["function"]["arguments"]["city"] in ("Bern", "Oslo") and told[0]["id"].startswith("call_")


def test_a_form_is_kept(client: Any) -> None:
    options = {"num_predict": 200}
    for answer in (
        chat(client, format=CITY, think=False, options=options).message.content,
        client.generate("tiny", "hello", format=CITY, raw=True, options={**options, "temperature": 0}).response,
    ):
        assert json.loads(answer)["city"] in ("Bern", "Oslo")
    assert chat(client, format="json", think=False).message.content.startswith("{")
    assert not chat(client, format="", think=False).message.content.startswith("{")


def test_texts_are_chats_or_completions(client: Any, post: Any, coder: Any, http: Any) -> None:
    more = {"reasoning_effort": "none", **SAMPLED}
    told = post("/v1/chat/completions", messages=[{"role": "system", "content": "be kind"}, USER], **more).json()
    answer = client.generate("tiny", "hello", system="be kind", think=False, options=GREEDY)
    assert answer.response == told["choices"][0]["message"]["content"]
    completion = post("/v1/completions", prompt="hello", **SAMPLED).json()["choices"][0]["text"]
    assert client.generate("tiny", "hello", raw=True, options=GREEDY).response == completion != answer.response
    *parts, last = client.generate("tiny", "hello", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == completion and (last.response, last.done) == ("", True)
    middle = http.post("/v1/completions", json={"prompt": "def f(", "suffix": "return", **SAMPLED}).json()
    assert coder.generate("tiny", "def f(", suffix="return", options=GREEDY).response == middle["choices"][0]["text"]
    alone = http.post("/v1/completions", json={"prompt": "", "suffix": "return", **SAMPLED}).json()
    assert coder.generate("tiny", suffix="return", options=GREEDY).response == alone["choices"][0]["text"]


def test_a_model_without_a_chat_template_completes(tiny_bundle: Path) -> None:
    name = ("--served-model-name", "tiny")
    with (
        served(tiny_bundle, "--no-speculation", *name) as running,
        ollama.Client(host=running.root, timeout=120) as client,
    ):
        completion = json.loads(running.ask("/v1/completions", {"prompt": "hello", **SAMPLED})[1])["choices"][0]["text"]
        assert client.generate("tiny", "hello", options=GREEDY).response == completion
        for fields, why in (({"system": "x"}, "no chat template"), ({"suffix": "x"}, "does not infill")):
            with pytest.raises(ollama.ResponseError, match=why):
                client.generate("tiny", "hello", **fields)
        assert client.show("tiny").capabilities == ["completion"]


def test_a_request_for_nothing_only_opens_the_model(client: Any, post: Any) -> None:
    said = {"model": "tiny", **ending("load")}
    for path, content in ((CHAT, {"message": {"role": "assistant", "content": ""}}), (GENERATE, {"response": ""})):
        answer = post(path, model="tiny", keep_alive=0).json()
        assert answer.pop("created_at") and answer == {**said, **content}
    assert client.generate("tiny").done_reason == "load" and client.chat("tiny").message.content == ""
    assert [part.done_reason for part in client.chat("tiny", stream=True)] == ["load"]


def test_models_are_listed_and_described(client: Any, coder: Any, post: Any, thinker: Served) -> None:
    (listed,), (running,) = client.list().models, client.ps().models
    assert listed.model == running.model == running.name == "tiny:latest"
    assert listed.digest == running.digest and listed.size == running.size > 10_000
    assert listed.details.family == "llama" and listed.details.quantization_level == "fp32"
    shown = client.show("tiny:latest")
    assert shown.capabilities == ["completion", "thinking", "tools"] and ".Suffix" not in shown.template
    length = json.loads(thinker.ask("/v1/models")[1])["data"][0]["max_model_len"]
    assert shown.modelinfo["llama.context_length"] == running.context_length == length
    assert shown.parameters == f"num_ctx {length}" and shown.details == listed.details
    infills = coder.show("tiny")
    assert infills.capabilities == ["completion", "tools", "insert"] and ".Suffix" in infills.template
    assert client.chat("tiny:latest", [USER], options=GREEDY).eval_count
    version = json.loads(thinker.ask("/api/version")[1])["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4], "which Copilot wants"
    assert post("/api/show", model="tiny", verbose=True).status_code == 200


def test_a_stream_has_a_line_for_each_object(post: Any) -> None:
    for path, fields, name in ((CHAT, {"messages": [USER]}, "message"), (GENERATE, {"prompt": "hello"}, "response")):
        answer = post(path, model="tiny", options=GREEDY, **fields)
        assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("}\n")
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert {line.keys() >= {"model", "created_at", name, "done"} for line in lines} == {True}
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True] and len(lines) > 2
        whole = post(path, model="tiny", options=GREEDY, stream=False, **fields)
        assert whole.headers["content-type"] == "application/json" and whole.json().keys() == lines[-1].keys()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [USER] * 4097}, "messages"),
    (CHAT, {"messages": [{"role": "x", "content": "x"}]}, "role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content"),
    (CHAT, {"messages": [{**USER, "images": ["aGVsbG8="]}]}, "messages[0].images is not supported"),
    (CHAT, {"messages": [TOLD]}, "messages[0].tool_call_id must be the id of an earlier"),
    (CHAT, {"messages": [USER, CALLED, TOLD, TOLD]}, "messages[3].tool_call_id must be the id of an earlier"),
    (CHAT, {"messages": [USER, CALLED, {**TOLD, "tool_name": "other"}]}, "messages[2].tool_call_id"),
    (CHAT, {"messages": [{**CALLED, "tool_calls": [{}]}, USER]}, "messages[0].tool_calls[0]"),
    (CHAT, {"messages": [{**CALLED, "tool_calls": [{"function": 5, "id": []}]}, TOLD]}, "tool_calls[0] must be a call"),
    (CHAT, {"messages": [{**CALLED, "thinking": 5}, USER], "tools": [{}]}, "tools[0]"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "a b"}}], "messages": [USER]},
        "tools[0].function.name",
    ),
    (CHAT, {"messages": [USER], "tool_choice": "required"}, "tool_choice is not supported"),
    (CHAT, {"messages": [USER], "temperature": 0}, "temperature is not supported"),
    (GENERATE, {"prompt": "x", "images": ["x"]}, "images is not supported"),
    (GENERATE, {"prompt": "x", "template": "x"}, "template is not supported"),
    (GENERATE, {"prompt": "x", "context": [1]}, "context is not supported"),
    (GENERATE, {"prompt": "x", "raw": True, "system": "x"}, "leave system and think out"),
    (GENERATE, {"prompt": "x", "raw": True, "think": True}, "leave system and think out"),
    (GENERATE, {"prompt": "x", "raw": True, "suffix": "x"}, "one of both"),
    (GENERATE, {"prompt": "x", "raw": True, "options": {"thinking_token_budget": 3}}, "options.thinking_token_budget"),
    (GENERATE, {"prompt": "x", "suffix": "x"}, "does not infill"),
    (GENERATE, {"prompt": "x" * 100_000}, "tokens"),
    (GENERATE, {"prompt": "x", "format": "xml"}, "format"),
    (GENERATE, {"prompt": "x", "format": {"not": {}}}, "not: this keyword"),
    (GENERATE, {"prompt": "x", "format": "json", "options": {"structured_outputs": {"regex": "x"}}}, "said twice"),
    (GENERATE, {"prompt": "x", "format": "json", "options": {"response_format": {"type": "json_object"}}}, "two forms"),
    (GENERATE, {"prompt": "x", "think": "maybe"}, "think"),
    (GENERATE, {"prompt": "x", "options": []}, "options"),
    (GENERATE, {"prompt": "x", "options": {"stream": False}}, "options.stream"),
    (GENERATE, {"prompt": "x", "options": {"temperature": -1}}, "options.temperature"),
    (GENERATE, {"prompt": "x", "options": {"num_predict": -3}}, "options.num_predict"),
    (GENERATE, {"prompt": "x", "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    (GENERATE, {"prompt": "x", "options": {"stop": ["x"] * 17}}, "options.stop"),
    (GENERATE, {"prompt": "x", "options": {"unknown": 1}}, "options.unknown is not supported"),
    (GENERATE, {"prompt": "x", "options": {"speculative": {"grow": "topk", "verify": "block"}}}, "not lossless"),
    ("/api/show", {"name": "tiny"}, "name is not supported"),
]


@pytest.mark.parametrize(("path", "body", "named"), REFUSED, ids=[named[:40] for _, _, named in REFUSED])
def test_what_cannot_be_is_refused_by_name(post: Any, path: str, body: dict[str, Any], named: str) -> None:
    answer = post(path, **body)
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
    assert answer.json().keys() == {"error"} and named in answer.json()["error"], answer.text


def test_other_errors_are_the_clients_own(client: Any, post: Any) -> None:
    for ask in (client.chat, client.generate, client.show):
        with pytest.raises(ollama.ResponseError, match="this server has 'tiny'") as error:
            ask("llama3.2")
        assert error.value.status_code == 404
    for change in (client.pull, client.push, client.delete, lambda name: client.create(name, from_="tiny"),
                   lambda name: client.copy(name, "other")):  # fmt: skip
        with pytest.raises(ollama.ResponseError, match="start `draftwood serve`") as error:
            change("tiny")
        assert error.value.status_code == 400
    for embed in (client.embed, client.embeddings):
        with pytest.raises(ollama.ResponseError, match="Embeddings need another server"):
            embed("tiny", "hello")
    missing = post("/api/unheard", model="tiny")
    assert missing.status_code == 404 and "/api/chat" in missing.json()["error"]
