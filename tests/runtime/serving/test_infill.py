"""Infilling over HTTP: `suffix` of completions, and /infill with the fields of llama.cpp that editors send."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bundling import ROOT
from serving import events_of, served

from draftwood.runtime import LLM, SamplingParams

httpx = pytest.importorskip("httpx", reason="needs httpx")

PREFIX, SUFFIX, MIDDLE = "<unk>", "<s>", "</s>"
TEXTS = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n\nprint(add(1, 2))\n"}
ASKED = {**TEXTS, "n_predict": 12, "temperature": 0, "ignore_eos": True}
ROW = re.compile(r"^\| `(\w+)` \| (works|no effect|refused) \| (.*) ?\|$", re.MULTILINE)
VALUES: dict[str, Any] = {
    **TEXTS,
    "input_extra": [{"filename": "a.py", "text": "x = 1\n", "time": [1, 2]}],
    "lora": [{"id": 0, "scale": 1.0}],
    "n_cmpl": 1,
    "n_indent": 4,
    "n_keep": 5,
    "n_predict": 3,
    "n_probs": 2,
    "prompt": "return",
    "response_fields": ["content"],
    "return_tokens": True,
    "t_max_predict_ms": 100,
    "t_max_prompt_ms": 100,
}


def asked(http: Any, **fields: Any) -> dict[str, Any]:
    answer = http.post("/infill", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


@pytest.fixture(scope="module")
def expected(served_llm: LLM) -> str:
    """What the model writes after the prompt that should be made of the texts."""
    prompt, encode = served_llm.tokenizer.encode(""), served_llm.tokenizer.encode
    for mark, text in ((PREFIX, TEXTS["input_prefix"]), (SUFFIX, TEXTS["input_suffix"]), (MIDDLE, "")):
        prompt += [served_llm.tokenizer.vocabulary()[mark], *encode(text, add_special_tokens=False)]
    return served_llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0].text


def test_the_text_stands_between_prefix_and_suffix(http: Any, expected: str) -> None:
    answer = asked(http)
    assert answer["content"] == expected and answer["stop"] and answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 12
    assert answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == answer["tokens_evaluated"]
    halves = {"input_prefix": TEXTS["input_prefix"][:4], "prompt": TEXTS["input_prefix"][4:]}
    assert asked(http, **halves)["content"] == expected


def test_a_completion_with_a_suffix_is_the_same(http: Any, expected: str) -> None:
    body = {"prompt": TEXTS["input_prefix"], "suffix": TEXTS["input_suffix"], "max_tokens": 12}
    answer = http.post("/v1/completions", json={**body, "temperature": 0, "ignore_eos": True, "n": 2}).json()
    assert [choice["text"] for choice in answer["choices"]] == [expected] * 2


def test_a_stream_has_the_same_text_and_the_timings_at_its_end(http: Any, expected: str) -> None:
    text = http.post("/infill", json={**ASKED, "stream": True}).text
    *chunks, last = events_of(text)
    assert "DONE" not in text and not any(chunk["stop"] for chunk in chunks) and last["stop"]
    assert "".join(chunk["content"] for chunk in (*chunks, last)) == expected
    assert sum(len(chunk["tokens"]) for chunk in (*chunks, last)) == last["timings"]["predicted_n"] == 12


def test_several_texts_are_a_list(http: Any, expected: str) -> None:
    """As llama.vscode asks for them; llama.vim names no model so."""
    answer = http.post("/infill", json={**ASKED, "n_cmpl": 3, "model": ""})
    texts = answer.json()
    assert '"content":"' in answer.text, "llama.vim looks for it without a blank"
    assert [(text["index"], text["content"]) for text in texts] == [(index, expected) for index in range(3)]
    chunks = events_of(http.post("/infill", json={**ASKED, "n_cmpl": 2, "stream": True}).text)
    assert {chunk["index"] for chunk in chunks if chunk["stop"]} == {0, 1}


def test_other_files_are_a_shared_beginning(http: Any) -> None:
    files = [{"filename": "a.py", "text": "value = 1\n" * 20}, {"text": "other = 2\n" * 20}]
    first = asked(http, input_extra=files)
    again = asked(http, input_extra=files, input_prefix="another")
    assert again["tokens_cached"] > 200 > first["tokens_cached"]


def test_fields_of_the_answer_and_a_prompt_that_is_only_read(http: Any) -> None:
    assert asked(http, response_fields=["timings/predicted_n", "stop_type", "nothing/here"]) == {
        "timings/predicted_n": 12,
        "stop_type": "limit",
    }
    only_read = asked(http, n_predict=0, input_prefix="read before it is needed ")
    assert only_read["content"] == "" and only_read["tokens_predicted"] == 0
    later = asked(http, input_prefix="read before it is needed ")
    assert later["tokens_cached"] >= later["tokens_evaluated"] - 1


def test_a_stop_string_is_named(http: Any, expected: str) -> None:
    stop = expected[3:5]
    answer = asked(http, stop=["never written", stop])
    assert answer["content"] == expected[: expected.index(stop)]
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", stop)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/infill", {"n": 2}, "n is not supported"),
    ("/infill", {"n_cmpl": 0}, "n_cmpl"),
    ("/infill", {"best_of": 2}, "texts alone"),
    ("/infill", {"logprobs": 1}, "texts alone"),
    ("/infill", {"suffix": "x"}, "suffix"),
    ("/infill", {"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
    ("/infill", {"n_predict": 3, "max_tokens": 3}, "by another name"),
    ("/infill", {"n_predict": -2}, "n_predict"),
    ("/infill", {"input_extra": [{"filename": "a.py"}]}, "text"),
    ("/infill", {"input_extra": [{"text": "x"}] * 5000}, "input_extra"),
    ("/infill", {"input_prefix": "x" * 100_000}, "tokens"),
    ("/infill", {"input_suffix": "\ud800"}, "surrogate"),
    ("/infill", {"response_fields": ["x"] * 65}, "response_fields"),
    ("/v1/completions", {"prompt": [70, 71], "suffix": "x"}, "suffix"),
    ("/v1/completions", {"prompt": "x", "suffix": "x", "echo": True}, "suffix"),
]


@pytest.mark.parametrize(("path", "fields", "named"), REFUSED)
def test_what_makes_no_sense_is_refused(http: Any, path: str, fields: dict[str, Any], named: str) -> None:
    answer = http.post(path, content=json.dumps(fields), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


def test_a_model_that_does_not_infill_says_so(tiny_bundle: Path) -> None:
    with served(tiny_bundle) as api:
        for path, body in (("/infill", TEXTS), ("/v1/completions", {"prompt": "x", "suffix": "y"})):
            status, text = api.ask(path, dict(body))
            assert status == 400 and "does not infill" in text


def test_every_field_does_what_the_table_says(http: Any) -> None:
    page = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    rows = {name: (what, note) for name, what, note in ROW.findall(page[page.index("## /infill") :])}
    assert rows.keys() == VALUES.keys()
    plain = asked(http)
    for name, (what, note) in rows.items():
        answer = http.post("/infill", json=ASKED | {name: VALUES[name]})
        assert answer.status_code == (400 if what == "refused" else 200), (name, answer.text)
        if what == "no effect":
            assert answer.json()["content"] == plain["content"], name
        for neutral in re.findall(r"`([^`]+)` is accepted", note):
            again = asked(http, **{name: json.loads(neutral)})
            assert again["content"] == plain["content"], name
