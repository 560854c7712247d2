"""A Triton request's tensors and parameters -> what is generated. No server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwood.runtime import ConfigError, RequestError, SamplingParams, SpeculativeConfig, StructuredOutput
from draftwood.runtime.serving.triton.contract import OPTIONAL_INPUTS
from draftwood.runtime.serving.triton.request import (
    MAX_SETTINGS,
    MAX_TEXT_BYTES,
    SPECULATION,
    TritonBody,
    TritonRequest,
    parse_request,
)

OWN = SpeculativeConfig()
DTYPES = {"TYPE_STRING": np.object_, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64}
PROMPT = np.array([[b"hello"]], np.object_)
KNOWN = TritonBody.model_fields.keys() | SPECULATION | TritonBody.neutral.keys() | TritonBody.ignored


def tensors(**settings: Any) -> dict[str, NDArray[Any]]:
    """Input tensors as Triton hands them over."""
    types = {spec.name: DTYPES.get(spec.data_type, np.bool_) for spec in OPTIONAL_INPUTS}
    made = {"text_input": PROMPT}
    for name, value in settings.items():
        items = value if isinstance(value, list) else [value]
        made[name] = np.array([[item.encode() if isinstance(item, str) else item for item in items]], types[name])
    return made


def parsed(
    own: SpeculativeConfig | None = OWN, parameters: dict[str, Any] | None = None, **settings: Any
) -> TritonRequest:
    return parse_request(tensors(**settings), parameters or {}, own)


GREEDY = SamplingParams(temperature=0)
LIMITS: dict[str, Any] = {
    "bad_words": ["x", "y z"], "allowed_token_ids": [3, "4"], "logit_bias": {"3": -1.5, "7": "2"},
    "skip_special_tokens": False, "include_stop_str_in_output": True,
}  # fmt: skip
LIMITED = SamplingParams(
    temperature=0, bad_words=("x", "y z"), allowed_token_ids=(3, 4), logit_bias={3: -1.5, 7: 2.0},
    skip_special_tokens=False, include_stop_str_in_output=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "params"),
    [
        ({}, GREEDY),  # as TensorRT-LLM
        (
            dict(max_tokens=7, min_length=2, temperature=0.7, top_k=40, top_p=0.9, seed=2**63,
                 stop_words=["a", "", "b"], repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=-0.5),
            SamplingParams(max_tokens=7, min_tokens=2, temperature=0.7, top_k=40, top_p=0.9, seed=2**63,
                           stop=("a", "b"), repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=-0.5),
        ),
        ({"temperature": 0.5}, SamplingParams(temperature=0.5)),
        ({"top_k": 5}, SamplingParams(top_k=5)),
        ({"top_p": 0.5}, SamplingParams(top_p=0.5)),
        ({"top_k": 0, "top_p": 0.0}, GREEDY),
        ({"top_p": 0.0, "temperature": 0.8}, GREEDY),
        ({"top_p": 0.0, "top_k": 5, "temperature": 0.8}, SamplingParams(temperature=0.8, top_k=5)),
        ({"top_k": 1, "temperature": 0.5}, SamplingParams(temperature=0, top_k=1)),
        ({"sampling_parameters": '{"max_tokens": 5}'}, SamplingParams(max_tokens=5)),  # vLLM's contract and default
        ({"sampling_parameters": '{"temperature": "0.5", "top_k": -1}'}, SamplingParams(temperature=0.5)),
        (
            {"sampling_parameters": '{"max_tokens": "16", "temperature": "0.3", "ignore_eos": "True", "stop": "x", '
                                    '"stop_token_ids": [3, "4"], "n": 1}'},
            SamplingParams(max_tokens=16, temperature=0.3, ignore_eos=True, stop=("x",), stop_token_ids=(3, 4)),
        ),
        ({"sampling_parameters": json.dumps({**LIMITS, "temperature": 0})}, LIMITED),
        ({"parameters": LIMITS}, LIMITED),
        (
            {"bad_words": ["x", "", "y z"], "parameters": {
                "allowed_token_ids": "3,4", "logit_bias": '{"3": -1.5, "7": 2}', "skip_special_tokens": "false",
                "include_stop_str_in_output": "True"}},
            LIMITED,
        ),
        ({"parameters": {"allowed_token_ids": None, "logit_bias": None}, "bad_words": [""]}, GREEDY),
        ({"end_id": 5}, SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(5,))),
        ({"end_id": -1}, SamplingParams(temperature=0, ignore_eos=True)),
        ({"return_log_probs": True, "return_num_input_tokens": False}, SamplingParams(temperature=0, logprobs=0)),
        ({"max_tokens": 3, "parameters": {"max_tokens": "3"}}, SamplingParams(temperature=0, max_tokens=3)),
        ({"parameters": {"max_tokens": 3.0}}, SamplingParams(temperature=0, max_tokens=3)),
        ({"parameters": dict.fromkeys(("n", "best_of", "beam_width"), "1")}, GREEDY),
        ({"parameters": {"use_beam_search": "False", "logprobs": None, "prompt_logprobs": None, "pad_id": 7}}, GREEDY),
    ],
)  # fmt: skip
def test_settings_become_sampling_params(sent: dict[str, Any], params: SamplingParams) -> None:
    request = parsed(**sent)
    assert request.prompt == "hello" and request.params == params and request.speculative == OWN


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({"response_format": {"type": "text"}, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        ({"structured_outputs": {"json": "{}"}}, StructuredOutput(json="{}")),
        ({"guided_json": {"type": "object"}}, StructuredOutput(json={"type": "object"})),
        ({"guided_regex": "a|b"}, StructuredOutput(regex="a|b")),
        ({"guided_choice": ["1", "2"]}, StructuredOutput(choice=("1", "2"))),
        ({"guided_grammar": "start: /a+/"}, StructuredOutput(grammar="start: /a+/")),
    ],
)
@pytest.mark.parametrize("way", ["parameters", "texts", "sampling_parameters"])
def test_a_form_is_demanded_as_over_http(settings: dict[str, Any], form: StructuredOutput | None, way: str) -> None:
    texts = {name: json.dumps(each) if isinstance(each, dict | list) else each for name, each in settings.items()}
    sent: Any = {"sampling_parameters": json.dumps(settings), "texts": texts, "parameters": settings}[way]
    name = "sampling_parameters" if way == "sampling_parameters" else "parameters"
    assert parsed(**{name: sent}).params.structured == form


def test_a_deadline_a_client_and_a_salt_are_parameters() -> None:
    assert parsed(parameters={"timeout": 250000}).deadline_s == 0.25 and parsed().deadline_s is None
    assert parsed(parameters={"client": "a"}).body.client == parsed(parameters={"user": "a"}).body.client == "a"
    assert parsed(sampling_parameters='{"user": "a"}', parameters={"client": "a"}).body.client == "a"
    assert parsed().body.client is None is parsed().body.cache_salt
    assert parsed(parameters={"cache_salt": "a"}).body.cache_salt == "a"
    assert parsed(sampling_parameters='{"cache_salt": "b"}').body.cache_salt == "b"


def test_a_request_changes_how_the_model_speculates() -> None:
    parameters = {"grow": "k-ary", "branching": "3,1"}
    expected = SpeculativeConfig(grow="k-ary", branching=(3, 1))
    assert parsed(parameters=parameters).speculative == expected
    assert parsed(num_draft_tokens=0).speculative is None
    limited = parsed(num_draft_tokens=3).speculative
    assert limited is not None and (limited.max_total_draft_tokens, limited.max_draft_len) == (3, 3)
    chain = parsed(num_draft_tokens=9, parameters={"grow": "chain"}).speculative
    assert chain is not None and chain.max_draft_len == 9
    assert parsed(own=None).speculative is None
    assert parsed(own=None, num_draft_tokens=2).speculative is not None  # which a model without its draft refuses
    with pytest.raises(ConfigError, match="lossless"):
        parsed(parameters={"grow": "topk", "verify": "block"})


def test_every_input_of_the_contract_is_served_refused_or_without_effect() -> None:
    assert {spec.name for spec in OPTIONAL_INPUTS} - {"sampling_parameters", "min_length", "stop_words"} <= KNOWN


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": -0.5}, "top_p"),
        ({"temperature": 1e-30}, "between 1e-06 and 100"),
        ({"temperature": 3.3e37}, "temperature: Input should be less"),
        ({"bad_words": ["x" * 1001]}, "bad_words"),
        ({"bad_words": ["x" * 4001]}, "bad_words has 4001 bytes and may have 4000"),
        ({"stop_words": [""] * 129}, "stop_words has 129 texts and may have 128"),
        ({"num_draft_tokens": 10**9}, "num_draft_tokens: .* 1024"),
        ({"min_tokens": 2, "min_length": 3}, "given twice"),
        ({"beam_width": 4}, "beam_width"),
        ({"return_context_logits": True}, "return_context_logits"),
        ({"end_id": 5, "parameters": {"guided_regex": "a"}}, "end_id beside a structured output"),
    ]
    + [
        ({"sampling_parameters": text}, named)
        for text, named in [
            ('{"top_p": 0}', "top_p"),
            ("[]", "JSON object"),
            ("{", "not JSON"),
            ('{"temperature": NaN}', "'temperature' holds nan"),
            ('{"n": 1, "n": 1}', "'n' is given twice"),
            ('{"stop": "\\ud800"}', "surrogate"),
            ('{"stop": ' + "[" * 40 + "]" * 40 + "}", "levels deep"),
            ('{"seed": 1' + "0" * 5000 + "}", "thousands of digits"),
            ("[" * 100_000, "not JSON"),
            ('"' + "x" * MAX_TEXT_BYTES + '"', f"may have {MAX_TEXT_BYTES}"),
            ('"' + "x" * MAX_SETTINGS + '"', f"may have {MAX_SETTINGS}: send less"),
            ('{"guided_json": "{"}', "JSON schema"),
            ('{"guided_regex": "a", "structured_outputs": {"regex": "a"}}', "two forms"),
            ('{"structured": {"regex": "a"}}', "'structured' is no setting"),
        ]
    ]
    + [
        ({"parameters": parameters}, named)
        for parameters, named in [
            ({"max_tokens": 1.5}, "max_tokens: .* integer"),
            ({"max_tokens": True}, "max_tokens: .* integer"),
            ({"max_tokens": 2**31}, "max_tokens"),
            ({"max_draft_len": True}, "max_draft_len must be a whole number, not True"),
            ({"max_draft_len": "deep"}, "max_draft_len must be a whole number, not 'deep'"),
            ({"timeout": 10**400}, "timeout"),
            ({"timeout": -1}, "timeout"),
            ({"temperature": "warm"}, "temperature: .* number"),
            ({"seed": "1" * 5000}, "seed"),
            ({"branching": {"2": 1}}, "a list of whole numbers"),
            ({"branching": "2,x"}, "a list of whole numbers"),
            ({"stop": {"x": 1}}, "stop"),
            ({"stop": ["x"] * 129}, "at most 128"),
            ({"stop": [1]}, "stop"),
            ({"grow": "k-ary", "branching": "2," * 1000 + "2"}, "more than 1024"),  # whose tree has no end
            ({"topology": "0," * 2000 + "0"}, "more than 1024"),
            ({"allowed_token_ids": "2,x"}, "allowed_token_ids"),
            ({"num_draft_tokens": -1}, "num_draft_tokens"),
            ({"ignore_eos": "maybe"}, "ignore_eos: .* boolean"),
            ({"grow": 3}, "grow must be text"),
            ({"logit_bias": [3]}, "logit_bias"),
            ({"logit_bias": "{"}, "logit_bias"),
            ({"logit_bias": {"3": 1, "03": -1}}, "token 3 is given twice"),
            ({"logit_bias": {"3": True}}, "logit_bias"),
            ({"response_format": "{"}, "response_format"),
            ({"guided_regex": 3}, "guided_regex"),
            ({"client": ""}, "client"),
            ({"user": ["a"]}, "client"),
            ({"client": "a", "user": "b"}, "client is given twice"),
            ({"max_draft_length": 3}, "did you mean max_draft_len"),
            ({"n": 2}, "'n' is no setting"),
            ({"logprobs": 3}, "'logprobs' is no setting"),
        ]
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=named):
        parsed(**settings)


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ({"text_input": np.array([[b"\xff"]], np.object_)}, "UTF-8"),
        ({"text_input": np.array([[b"two"], [b"prompts"]], np.object_)}, "one request per prompt"),
        ({}, "text_input is missing: send the prompt"),
    ],
)
def test_a_prompt_is_one_text(sent: dict[str, NDArray[Any]], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse_request(sent, {}, OWN)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=5), items, max_size=3),
    max_leaves=4,
)
names = st.sampled_from([*sorted(KNOWN), "nonsense"])


@given(st.dictionaries(names, json_values, max_size=3), st.dictionaries(names, json_values, max_size=3))
def test_whatever_is_sent_is_served_or_refused_clearly(parameters: dict[str, Any], content: dict[str, Any]) -> None:
    try:
        request = parsed(parameters=parameters, sampling_parameters=json.dumps(content))
    except (RequestError, ConfigError) as error:
        assert str(error)
    else:
        assert isinstance(request.params, SamplingParams)
