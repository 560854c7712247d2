"""Structured outputs on real engines of both CPU backends: greedy text is that of plain decoding, and every text has
the demanded form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundling import built_native

from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig, StructuredOutput

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "counts"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutput(json=ORDER),
    "regex": StructuredOutput(regex="(ab|c){2,12}[0-9]{3}"),
    "choice": StructuredOutput(choice=("possibly", "positively", "no")),
}
CONFIGS = {
    "auto": SpeculativeConfig(budget="fixed"),
    "chain": SpeculativeConfig("chain", budget="fixed"),
    "k-ary": SpeculativeConfig("k-ary", branching=(2, 2, 1), budget="fixed"),
    "topk, gsd": SpeculativeConfig("topk", merge="gsd", merge_ngram=1, max_draft_len=6, budget="fixed"),
    "by cost": SpeculativeConfig(),
    "lookup": SpeculativeConfig("lookup", budget="fixed"),
}


@pytest.fixture(scope="module", params=["onnxruntime", "native"])
def llm(request: pytest.FixtureRequest, tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    if request.param == "native":
        bundle = built_native(tiny_pair, tmp_path_factory.mktemp("native") / "bundle")
    else:
        bundle = request.getfixturevalue("tiny_bundle")
    with LLM(bundle) as llm:
        yield llm


def text_of(llm: LLM, params: SamplingParams, config: SpeculativeConfig | None) -> tuple[str, list[int], str]:
    chunks = list(llm.stream("an order:", params, speculative=config))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return "".join(chunk.text for chunk in chunks), tokens, str(chunks[-1].finish_reason)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_greedy_text_is_that_of_plain_decoding(llm: LLM, form: str, penalty: float) -> None:
    params = SamplingParams(max_tokens=300, temperature=0, structured=FORMS[form], repetition_penalty=penalty)
    expected = text_of(llm, params, None)
    assert has_form(form, expected[0]) and expected[2] == "stop"
    for name, config in CONFIGS.items():
        assert text_of(llm, params, config) == expected, name


@pytest.mark.parametrize("form", FORMS)
def test_sampled_texts_have_the_form(llm: LLM, form: str) -> None:
    for seed, config in enumerate([None, SpeculativeConfig("dyspec"), SpeculativeConfig("dyspec-threshold", "gsd")]):
        params = SamplingParams(max_tokens=300, seed=seed, structured=FORMS[form], logprobs=2)
        text, _, reason = text_of(llm, params, config)
        assert has_form(form, text) and reason == "stop"


def test_requests_of_a_list_have_their_own_states(llm: LLM) -> None:
    params = SamplingParams(max_tokens=300, seed=3, structured=FORMS["json"])
    prompts = ["a", "an order:", "x y z", "a"]
    alone_each = [llm.generate(prompt, params)[0] for prompt in prompts]
    for together, alone in zip(llm.generate(prompts, params), alone_each, strict=True):
        assert has_form("json", together.text)
        assert together.finish_reason == alone.finish_reason == "stop"


def test_log_probabilities_are_over_the_allowed_tokens(llm: LLM) -> None:
    """As in vLLM: the mask comes first. A token without an alternative has probability one."""
    params = SamplingParams(max_tokens=40, temperature=0, structured=FORMS["choice"], logprobs=20)
    result = llm.generate("x", params)[0]
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    drawn = [each[token].logprob for token, each in zip(result.token_ids, result.logprobs, strict=True)]
    assert all(logprob <= 0 for logprob in drawn) and drawn[-1] == pytest.approx(0)
    probability = [sum(one.logprob > -1e9 for one in each.values()) for each in result.logprobs]
    assert 1 in probability and max(probability) > 1


def has_form(name: str, text: str) -> bool:
    form = FORMS[name]
    if form.regex is not None:
        return re.fullmatch(form.regex, text) is not None
    if form.choice:
        return text in form.choice
    content = json.loads(text)
    return (
        list(content) == list(ORDER["properties"])
        and len(content["name"]) <= 6
        and content["size"] in ("small", "large")
        and all(type(item) is int and 0 <= item < 100 for item in content["counts"])
    )
