"""Parameters of vLLM and of older OpenAI clients: what each does to the answer, against a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Served, served, with_chat_template

from draftwood.runtime import LLM, SamplingParams

pytest.importorskip("fastapi", reason="needs the [serve] extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
ASKED = {"prompt": "hello", **GREEDY}
USER = {"role": "user", "content": "hello"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if mood is defined %}[{{ mood }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny_bundle, tmp_path_factory.mktemp("parameters"), TEMPLATE)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Served]:
    with served(bundle, "--speculative", "budget=fixed") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with httpx.Client(base_url=server.root, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, None) as llm:
        yield llm


def complete(client: Any, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=ASKED | more)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def text_of(client: Any, **more: Any) -> str:
    return str(complete(client, **more)["choices"][0]["text"])


def chat(client: Any, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **more})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


@pytest.mark.parametrize("speculative", [None, {"grow": "dyspec"}, {"grow": "topk", "merge": "gsd"}])
def test_bans_and_biases_reach_the_sampler(client: Any, llm: LLM, speculative: Any) -> None:
    (free,) = llm.generate("hello", SamplingParams(**GREEDY))  # type: ignore[arg-type]
    word, token = free.text[3:6], free.token_ids[5]
    for changes in (
        {"bad_words": [word, free.text[0]]},
        {"allowed_token_ids": sorted(range(40, 90))},
        {"logit_bias": {str(token): -100.0, "70": 3}},
        {"bad_words": [word], "allowed_token_ids": list(range(30, 200)), "logit_bias": {"71": 2.5}, "seed": 3},
    ):
        values: dict[str, Any] = {**GREEDY, **changes}
        if "logit_bias" in values:
            values["logit_bias"] = {int(name): bias for name, bias in values["logit_bias"].items()}
        (expected,) = llm.generate("hello", SamplingParams(**values))
        assert text_of(client, speculative=speculative, **changes) == expected.text != free.text
        assert word not in expected.text or "bad_words" not in changes


def test_a_stop_string_may_be_kept(client: Any) -> None:
    free = text_of(client)
    stop = free[8:11]
    until = free.index(stop)
    for keep in (False, True):
        answer = complete(client, stop=[stop], include_stop_str_in_output=keep)["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (free[: until + 3 * keep], "stop")


def test_special_tokens_may_be_shown(client: Any, llm: LLM) -> None:
    biased = {"logit_bias": {"2": 100}, "max_tokens": 3}
    assert text_of(client, **biased) == "" and text_of(client, skip_special_tokens=False, **biased) == "</s>" * 3
    ended = {"logit_bias": {"2": 100}, "ignore_eos": False, "skip_special_tokens": False}
    assert text_of(client, **ended) == "" and text_of(client, include_stop_str_in_output=True, **ended) == "</s>"


def test_the_best_of_several_choices_is_returned(client: Any) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 8}
    every = complete(client, n=6, logprobs=0, **drawn)["choices"]
    means = [sum(each["logprobs"]["token_logprobs"]) / 8 for each in every]
    ranked = [every[index]["text"] for index in sorted(range(6), key=lambda index: -means[index])]
    best = complete(client, n=2, best_of=6, **drawn)
    assert [(each["index"], each["text"], each["logprobs"]) for each in best["choices"]] == [
        (0, ranked[0], None),
        (1, ranked[1], None),
    ]
    assert best["usage"]["completion_tokens"] == 48
    assert complete(client, n=2, best_of=2, **drawn)["choices"] == complete(client, n=2, **drawn)["choices"]


def test_the_chat_template_gets_its_variables(client: Any, llm: LLM) -> None:
    asked: dict[str, Any] = {
        "messages": [USER],
        "chat_template_kwargs": {"mood": "merry"},
        "add_generation_prompt": False,
    }
    tokens = client.post("/tokenize", json=asked).json()["tokens"]
    assert llm.tokenizer.decode(tokens, skip_special_tokens=False) == "<user>hello</s>\n[merry]"
    assert chat(client, **asked)["usage"]["prompt_tokens"] == len(tokens)
    assert chat(client, [USER])["usage"]["prompt_tokens"] == len(llm.encode_chat([USER])) != len(tokens)


def generated(llm: LLM, tokens: list[int]) -> str:
    return llm.generate([tokens], SamplingParams(**GREEDY))[0].text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", ["Once upon", "  Once upon ", "a\nb", "", "<", "user", [{"type": "text", "text": "Once upon"}]]
)
def test_the_last_message_may_be_continued(client: Any, llm: LLM, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    settings: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    tokens = client.post("/tokenize", json={"messages": messages, **settings}).json()["tokens"]
    text = content if isinstance(content, str) else content[0]["text"]
    assert llm.tokenizer.decode(tokens, skip_special_tokens=False) == f"<user>hello</s>\n<assistant>{text.strip()}"
    expected = generated(llm, tokens)
    for echo in (False, True):
        answer = chat(client, messages, echo=echo, **settings)
        assert answer["choices"][0]["message"]["content"] == (text if echo else "") + expected
    assert (
        chat(client, [USER], echo=True)["choices"][0]["message"]["content"]
        == chat(client, [USER])["choices"][0]["message"]["content"]
    ), "the last message is not the assistant's"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"bad_words": [""]}, "bad_words"),
    ("completions", {"bad_words": ["x"] * 17}, "bad_words"),
    ("completions", {"allowed_token_ids": []}, "allowed_token_ids"),
    ("completions", {"allowed_token_ids": [0] * 16385}, "allowed_token_ids"),
    ("completions", {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ("completions", {"stream": True, "echo": True, "stream_options": {"include_pieces": True}}, "include_pieces"),
    ("chat/completions", {"messages": [USER] * 4097}, "messages"),
    ("chat/completions", {"messages": [{**USER, "content": [{"type": "text", "text": "a"}] * 4097}]}, "content"),
    ("completions", {"allowed_token_ids": [10**6]}, "allowed_token_ids must be below the vocabulary size"),
    ("completions", {"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ("completions", {"logit_bias": {"-1": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"5": 101}}, "logit_bias"),
    ("completions", {"logit_bias": {"5": 100, "05": -100}}, "token 5 is given twice: send it once"),
    ("completions", {"skip_special_tokens": 0}, "skip_special_tokens"),
    ("completions", {"best_of": 1, "n": 2}, "best_of must be at least n"),
    ("completions", {"best_of": 2, "stream": True}, "best_of cannot be streamed"),
    ("completions", {"best_of": 129}, "best_of"),
    ("completions", {"continue_final_message": True}, "continue_final_message"),
    ("completions", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ("chat/completions", {"best_of": 2}, "best_of"),
    ("chat/completions", {"continue_final_message": True}, "add_generation_prompt"),
    ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs may not hold messages"),
    ("chat/completions", {"chat_template_kwargs": {"chat_template": ""}}, "chat_template_kwargs"),
    ("chat/completions", {"chat_template_kwargs": {"given_up": 1}}, "chat_template_kwargs may not hold given_up"),
    ("chat/completions", {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs may not hold self"),
    ("chat/completions", {"chat_template_kwargs": []}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("path", "changes", "named"), REFUSED)
def test_wrong_values_are_refused_by_name(client: Any, path: str, changes: dict[str, Any], named: str) -> None:
    body = {"messages": [USER]} if path.startswith("chat") else {"prompt": "x"}
    answer = client.post(f"/v1/{path}", json={**body, "max_tokens": 2, **changes})
    assert answer.status_code == 400 and named in answer.json()["error"]["message"], answer.text


def test_a_template_that_changes_the_last_message_cannot_continue_it(tiny_bundle: Path, tmp_path: Path) -> None:
    shouting = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with served(with_chat_template(tiny_bundle, tmp_path, shouting), "--no-speculation") as running:
        body = {"messages": [USER], "add_generation_prompt": False, "continue_final_message": True}
        answer = httpx.post(f"{running.url}/chat/completions", json=body)
        assert answer.status_code == 400 and "does not write the last message" in answer.json()["error"]["message"]


def test_the_responses_api_is_refused_by_the_name_of_the_other(client: Any) -> None:
    answer = client.post("/v1/responses", json={"input": "hello"})
    assert answer.status_code == 404 and "/v1/chat/completions" in answer.json()["error"]["message"]


def test_accepted_tokens_are_counted_by_their_position(server: Served, client: Any) -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

    def counted() -> list[float]:
        text = client.get("/metrics").text
        return [float(value) for value in re.findall(rf'^{re.escape(name)}{{position="\d+"}} (\S+)$', text, re.M)]

    def histogram(answer: dict[str, Any]) -> list[int]:
        found: list[int] = answer["metrics"]["speculative_decoding"]["acceptance_histogram"]
        return found

    before = counted()
    rounds = histogram(complete(client, max_tokens=60))
    added = [sum(rounds[depth + 1 :]) for depth in range(len(rounds))]
    after = counted()
    assert after[0] > (before or [0])[0]
    padded = before + [0.0] * (len(after) - len(before))
    assert [new - old for new, old in zip(after, padded, strict=True)] == added[: len(after)]
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
