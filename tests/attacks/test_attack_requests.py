"""Hostile bodies against a real server process: each is refused as a request is, cheaply, and nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served, served, with_chat_template

httpx = pytest.importorskip("httpx", reason="needs httpx")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES_API, RESPONSES = "/v1/messages", "/v1/responses"
OLLAMA, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
BY_FIELD = {'"raw"': GENERATE, '"system"': MESSAGES_API, '"options"': OLLAMA, '"messages"': CHAT, '"input"': RESPONSES}
BY_FIELD |= {'"input_prefix"': "/infill"}
SHORT = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hello"}]
MEBIBYTE = 1 << 20
DEEP = 40
TALK = '{"messages": [{"role": "user", "content": "x"}], '
TEXTS = (TALK + '"system', '{"input', '{"input_prefix')  # how a body for another protocol begins


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    bundle = with_chat_template(tiny_bundle, tmp_path_factory.mktemp("attacked"))
    with served(bundle, "--speculative", "budget=fixed") as running:
        yield running
        assert running.idle  # nothing is left running, and others are served
        answer = httpx.post(f"{running.url}/completions", json=SHORT, timeout=120).json()
        assert answer["usage"]["completion_tokens"] == 3
        running.process.terminate()
        assert running.process.wait(120) == 0
        assert running.process.stderr is not None and running.process.stderr.read() == ""  # no trace of anything


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with httpx.Client(base_url=server.root, timeout=120) as client:
        yield client


@pytest.fixture(autouse=True)
def unharmed(server: Served, client: Any) -> Iterator[None]:
    """The server lives, and no attack took memory that its body did not bring."""
    before = peak_bytes(server)
    yield
    assert client.get("/health").status_code == 200
    assert peak_bytes(server) - before < 300 * MEBIBYTE


def peak_bytes(server: Served) -> int:
    """The most memory that the server ever held."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def send(client: Any, path: str, body: str | bytes) -> tuple[int, str]:
    """Status and message of the answer to a body."""
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"] if answer.status_code != 200 else ""  # Ollama's is the message itself
    return answer.status_code, error if isinstance(error, str) else error["message"]


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + closing * depth


@pytest.mark.parametrize("depth", [DEEP, 900, 100_000])
@pytest.mark.parametrize(
    "place",
    [
        "%s",
        '{"prompt": "x", "metadata": %s}',
        '{"prompt": "x", "speculative": %s}',
        '{"prompt": "x", "speculative": {"topology": %s}}',
        '{"prompt": %s}',
        '{"prompt": "x", "tools": %s}',
        '{"prompt": "x", "unknown": %s}',
        '{"input_prefix": "x", "input_extra": %s}',
        '{"messages": %s}',
        '{"messages": [{"role": "user", "content": %s}]}',
        '{"system": %s, "messages": [{"role": "user", "content": "x"}]}',
        '{"input": %s}',
        '{"messages": [{"role": "user", "content": "x"}], "options": %s}',
        '{"prompt": "x", "raw": true, "format": %s}',
    ],
)
def test_json_that_is_too_deep_is_refused_and_leaves_no_trace(client: Any, place: str, depth: int) -> None:
    path = next((path for name, path in BY_FIELD.items() if name in place), COMPLETIONS)
    for deep in (nested("[", "]", depth), nested('{"a": [', "]}", depth).replace("[]", "[1]")):
        status, message = send(client, path, place % deep)
        assert status == 400 and "levels deep" in message and len(message) < 1000


# No proposal is built before its size is known.
PROPOSALS: list[tuple[dict[str, Any], str]] = [
    ({"grow": "k-ary", "branching": [1000, 1000, 1000]}, "branching makes more than 1024"),
    ({"grow": "k-ary", "branching": [2] * 1000}, "branching makes more than 1024"),
    ({"grow": "k-ary", "branching": [1] * 100_000}, "branching has 100000 items"),
    ({"grow": "k-ary", "branching": [10**4000]}, "branching must hold"),
    ({"grow": "static", "topology": [0] * 100_000}, "topology has 100000 items"),
    ({"grow": "static", "topology": list(range(1000))}, "more than max_total_draft_tokens"),
    ({"lookup_ngram": 1, "lookup_len": 10**9}, "lookup_len must be"),
    ({"max_draft_len": -(10**4000)}, "max_draft_len must be at least 1"),
    ({"frontier_width": 1024, "max_draft_len": 1024, "max_total_draft_tokens": 1024}, "widest pass"),
    ({"draft_threshold": 10**400}, "draft_threshold must be in"),
    ({"grow": "x" * 100_000}, "grow must be one of"),
    ({"x" * 100_000: 1}, "SpeculativeConfig has no"),
    ({"self": 1}, "SpeculativeConfig has no 'self'"),
]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        *((json.dumps({**SHORT, "speculative": changes}), named) for changes, named in PROPOSALS),
        ('{"prompt": "x", "seed": 1%s}' % ("0" * 5000), "thousands of digits"),
        ('{"prompt": "x", "seed": 1%s}' % ("0" * 4000), "seed"),
        ('{"prompt": "x", "max_tokens": 1%s}' % ("0" * 30), "max_tokens"),
        ('{"prompt": "x", "top_k": 1%s}' % ("0" * 30), "top_k"),
        ('{"prompt": "x", "temperature": 1%s}' % ("0" * 4000), "temperature"),
        ('{"prompt": "x", "temperature": 1e999}', "temperature"),
        ('{"prompt": "x", "temperature": 1e-46, "n": 8, "logit_bias": {"44": 1}}', "between 1e-06 and 100"),
        ('{"prompt": "x", "logit_bias": {"44": -Infinity}}', "44"),
        ('{"prompt": "x", "metadata": [NaN]}', "no number"),
        ('{"prompt": "x", "n": 1, "n": 2}', "'n' is given twice"),
        ('{"prompt": "x", "speculative": {"grow": "chain", "grow": "topk"}}', "'grow' is given twice"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": "\\udc00x", "echo": true}', "surrogate"),
        ('{"prompt": "x", "user": "\\ud800"}', "surrogate"),
        ('{"prompt": "x", "stop": ["a", "\\ud800"]}', "surrogate"),
        ('{"prompt": "x", "\\ud800": null}', "surrogate"),
        ('{"prompt": "x", "speculative": {"grow": "\\ud800"}}', "surrogate"),
        (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
        ('{"prompt": "x"} {}', "not valid JSON"),
        ('{"prompt": "x", "user": "%s"}' % ("u" * 513), "user"),
        ('{"prompt": "x", "stop": "%s"}' % ("s" * 1001), "stop"),
        (json.dumps({"prompt": "x", "stop_token_ids": [5] * 200_000}), "stop_token_ids"),
        (json.dumps({"prompt": "x", "model": "m" * 200_000}), ""),
        (json.dumps({"prompt": "x", "f" * 200_000: 1}), "not supported"),
        ('{"prompt": "x", "stream": true, "stream_options": {"metadata": {}}}', "metadata"),
        ('{"prompt": "x", "best_of": true}', "best_of"),
        ('{"prompt": "x", "speculative": 0}', "speculative"),
        *((f'{text}": "x", "temperature": 1{"0" * 4000}}}', "temperature") for text in TEXTS),
        *((f'{text}": "x", "seed": 1{"0" * 5000}}}', "thousands of digits") for text in TEXTS),
        *((text + '": "\\ud800"}', "surrogate") for text in (*TEXTS, '{"raw": true, "prompt')),
        (TALK + '"system": "x", "max_tokens": 1%s}' % ("0" * 30), "max_tokens"),
        ('{"input": "x", "max_output_tokens": 1%s}' % ("0" * 30), "max_output_tokens"),
        ('{"input_prefix": "x", "n_predict": 1%s}' % ("0" * 30), "n_predict"),
        ('{"raw": true, "options": {"num_predict": 1%s}}' % ("0" * 30), "options.num_predict"),
        ('{"raw": true, "options": {"num_ctx": 1%s}}' % ("0" * 5000), "thousands of digits"),
        ('{"raw": true, "options": {"temperature": 1e999}}', "temperature"),
        ('{"raw": true, "options": {"seed": 1, "seed": 2}}', "'seed' is given twice"),
        (json.dumps({"raw": True, "options": {"f" * 200_000: 1}}), "not supported"),
        (json.dumps({"raw": True, "model": "m" * 200_000}), ""),
        (json.dumps({"raw": True, "prompt": "x", "format": {"enum": ["x" * 70_000]}}), "characters"),
    ],
)
def test_numbers_names_and_texts_that_are_none(client: Any, body: str | bytes, named: str) -> None:
    path = next((path for name, path in BY_FIELD.items() if name in str(body)), COMPLETIONS)
    status, message = send(client, path, body)
    assert status == (404 if "does not exist" in message else 400) and len(message) < 1000
    assert named in message


LARGEST: list[dict[str, Any]] = [
    {"merge": "gsd", "merge_ngram": 1, "grow": "topk", "frontier_width": 64, "max_draft_len": 2},
    {"merge": "gsd", "merge_ngram": 16, "grow": "topk", "max_total_draft_tokens": 63},
    {"grow": "lookup", "lookup_ngram": 16, "lookup_len": 40, "max_draft_len": 40},
    {"grow": "lookup", "lookup_ngram": 1, "lookup_len": 40},
    {"grow": "dyspec-threshold", "merge": "gsd", "merge_ngram": 1, "draft_threshold": 1e-300},
    {"grow": "static", "topology": list(range(15))},
    {"grow": "k-ary", "branching": [15]},
]
EXTREMES: list[dict[str, Any]] = [
    {"logit_bias": {"44": 100, "45": -100}},
    {"repetition_penalty": 1e6, "presence_penalty": 2, "frequency_penalty": -2},
    {"repetition_penalty": 1e-6, "logit_bias": {"44": -100}},
    {"top_p": 1e-300},
    {"min_p": 1},
    {"top_k": 2**31 - 1, "min_p": 1e-300, "top_p": 0.5},
]


@pytest.mark.parametrize(
    "changes",
    [
        *({"prompt": "abab" * 200, "speculative": {**each, "budget": "fixed"}, "temperature": 1} for each in LARGEST),
        *({**each, "temperature": heat, "n": 8, "logprobs": 20} for each in EXTREMES for heat in (1e-6, 100)),
    ],
)
def test_the_largest_and_smallest_values_that_are_taken_are_served(client: Any, changes: dict[str, Any]) -> None:
    answer = client.post(COMPLETIONS, json={**SHORT, "max_tokens": 12, "seed": 1, **changes})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 12 * changes.get("n", 1)


def test_health_is_answered_while_a_wide_answer_is_written(client: Any, server: Served) -> None:
    body = {**SHORT, "n": 16, "max_tokens": 150, "logprobs": 20, "temperature": 1, "speculative": False}
    probes = rounds = 0
    with ThreadPoolExecutor() as pool, httpx.Client(timeout=120) as prober:
        while probes <= 3 and rounds < 20:  # a probe may take long on a busy machine, but not so often
            answer, probes, rounds = pool.submit(client.post, COMPLETIONS, json=body), 0, rounds + 1
            while not answer.done():
                assert prober.get(f"{server.root}/health").status_code == 200
                probes += 1
    choices = answer.result().json()["choices"]
    assert probes > 3 and len(choices) == 16
    for choice in choices:
        written = choice["logprobs"]
        assert {len(items) for items in written.values()} == {150}
        assert written["text_offset"] == sorted(written["text_offset"]) and written["text_offset"][0] == 0
        assert written["text_offset"][-1] <= len(choice["text"])


FIELDS = """prompt messages n temperature top_k top_p seed stop logit_bias speculative stream stream_options logprobs
max_tokens min_tokens stop_token_ids user echo metadata tools tokens return_token_strs input system thinking text
tool_choice reasoning stop_sequences max_output_tokens previous_response_id store include output_config suffix
input_prefix input_suffix input_extra n_predict response_fields options format think raw keep_alive images template
verbose"""
PATHS = [COMPLETIONS, CHAT, MESSAGES_API, RESPONSES, "/infill", "/tokenize", "/detokenize", OLLAMA, GENERATE, SHOW]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=4), items, max_size=3),
    max_leaves=4,
)
bodies = st.dictionaries(st.sampled_from(FIELDS.split()), values, max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies, st.sampled_from(PATHS))
def test_whatever_a_body_holds_it_is_answered(client: Any, body: dict[str, Any], path: str) -> None:
    chat: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
    wanted: dict[str, dict[str, Any]] = {
        CHAT: chat,
        MESSAGES_API: chat,
        COMPLETIONS: {"prompt": "x", "max_tokens": 2},
        RESPONSES: {"input": "x", "max_output_tokens": 2},
        OLLAMA: {"messages": MESSAGES, "options": {"num_predict": 2}},
        GENERATE: {"prompt": "x", "options": {"num_predict": 2}},
    }
    assert send(client, path, json.dumps(wanted.get(path, {}) | body))[0] in (200, 400)


PARTS: list[Any] = [{"type": "text", "text": ""}] * 4000
CALLS: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}] * 128}
SAID: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": PARTS}] * 5},
    {"messages": [{"role": "user", "content": "x"}] * 4096, "max_tokens": 1},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": PARTS * 10}]}]},
    {"messages": MESSAGES, "system": [{"type": "text", "text": "s" * 100_000}] * 30},
    {"messages": MESSAGES, "tools": [{"name": "f", "input_schema": {}}] * 5000},
    {"messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 10**30}},
    {"input": [{"role": "user", "content": "x"}] * 16_384},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 50_000}]},
    {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 200}] * 10_000}]},
    {"input": "x", "tools": [{"type": "function", "name": "f"}] * 5000},
    {"input": "x", "include": ["x"] * 100_000},
    {"input": "x", "metadata": {str(number): "x" for number in range(100_000)}},
    {"messages": [CALLS, *[{"role": "tool", "content": "", "tool_name": "g"}] * 4000], "options": {"num_predict": 1}},
    {"messages": [CALLS, CALLS, *[{"role": "tool", "content": ""}] * 129], "options": {"num_predict": 1}},
    {"messages": [CALLS] * 129, "options": {"num_predict": 1}},
    {"messages": MESSAGES, "options": {"stop": ["x"] * 100_000}},
    {"messages": [{"role": "user", "content": "x", "images": ["x" * 1000] * 1000}], "options": {"num_predict": 1}},
]


@pytest.mark.parametrize("body", SAID, ids=[f"{next(iter(body))} {number}" for number, body in enumerate(SAID)])
def test_long_conversations_of_other_protocols_are_refused_or_served_soon(client: Any, body: dict[str, Any]) -> None:
    path = RESPONSES if "input" in body else OLLAMA if "options" in body else MESSAGES_API
    status, message = send(client, path, json.dumps(body))
    assert (status == 400 and 0 < len(message) < 1000) or (status == 200 and "reasoning" in str(body)[:100])
