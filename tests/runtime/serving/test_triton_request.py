"""A Triton request's tensors and parameters -> what is generated; a chunk -> a response's tensors. No server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwood.runtime import (
    ConfigError,
    EngineError,
    RequestError,
    SamplingParams,
    SpecDecodeStats,
    SpeculativeConfig,
    StreamChunk,
)
from draftwood.runtime.decoding.chunk import TokenLogprob
from draftwood.runtime.requests.async_llm import DeadlineError, QueueFullError, ShutdownError
from draftwood.runtime.sampling.params import MAX_ALLOWED_TOKENS, MAX_BIASES
from draftwood.runtime.serving.triton.contract import OPTIONAL_INPUTS
from draftwood.runtime.serving.triton.metrics import REASONS
from draftwood.runtime.serving.triton.model import CancelledError, classify
from draftwood.runtime.serving.triton.request import (
    CONVERTERS,
    MAX_SETTINGS,
    MAX_TEXT_BYTES,
    NEUTRAL,
    WITHOUT_EFFECT,
    TritonRequest,
    parse_request,
)
from draftwood.runtime.serving.triton.response import ResponseWriter

OWN = SpeculativeConfig()
DTYPES = {"TYPE_STRING": np.object_, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64}


def tensors(**settings: Any) -> dict[str, NDArray[Any]]:
    """Input tensors as Triton hands them over."""
    types = {spec.name: DTYPES.get(spec.data_type, np.bool_) for spec in OPTIONAL_INPUTS}
    made = {"text_input": np.array([[b"hello"]], np.object_)}
    for name, value in settings.items():
        items = [
            item.encode() if isinstance(item, str) else item for item in (value if isinstance(value, list) else [value])
        ]
        made[name] = np.array([items], types[name])
    return made


def parsed(
    own: SpeculativeConfig | None = OWN, parameters: dict[str, Any] | None = None, **settings: Any
) -> TritonRequest:
    return parse_request(tensors(**settings), parameters or {}, own)


def test_a_prompt_alone_is_decoded_greedily_as_tensorrt_llm_does() -> None:
    request = parsed()
    assert request.prompt == "hello" and request.params == SamplingParams(temperature=0)
    assert request.speculative == OWN
    assert not (request.stream or request.exclude_input_in_output or request.returns)


def test_tensors_become_sampling_params() -> None:
    request = parsed(
        max_tokens=7, min_length=2, temperature=0.7, top_k=40, top_p=0.9, seed=2**63, stop_words=["a", "", "b"],
        repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=-0.5,
    )  # fmt: skip
    assert request.params == SamplingParams(
        max_tokens=7, min_tokens=2, temperature=0.7, top_k=40, top_p=0.9, seed=2**63, stop=("a", "b"),
        repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=-0.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({"temperature": 0.5}, 0.5),
        ({"top_k": 5}, 1),
        ({"top_p": 0.5}, 1),
        ({"top_k": 0, "top_p": 0.0}, 0),
        ({"top_p": 0.0, "temperature": 0.8}, 0),
        ({"top_p": 0.0, "top_k": 5, "temperature": 0.8}, 0.8),
        ({"top_k": 1, "temperature": 0.5}, 0),
        ({"sampling_parameters": '{"max_tokens": 5}'}, 1),  # vLLM's contract, vLLM's default
        ({"sampling_parameters": '{"temperature": "0.5", "top_k": -1}'}, 0.5),
    ],
)
def test_who_asks_for_sampling_gets_it(settings: dict[str, Any], temperature: float) -> None:
    params = parsed(**settings).params
    assert params.temperature == temperature
    assert params.top_k >= 0 and params.top_p > 0


def test_limits_of_tokens_and_of_texts_come_in_every_way() -> None:
    expected = SamplingParams(
        temperature=0, bad_words=("x", "y z"), allowed_token_ids=(3, 4), logit_bias={3: -1.5, 7: 2.0},
        skip_special_tokens=False, include_stop_str_in_output=True,
    )  # fmt: skip
    words, flags = ["x", "y z"], {"skip_special_tokens": False, "include_stop_str_in_output": True}
    content = {**flags, "bad_words": words, "allowed_token_ids": [3, "4"], "logit_bias": {"3": -1.5, "7": "2"}}
    assert parsed(sampling_parameters=json.dumps({**content, "temperature": 0})).params == expected
    assert parsed(parameters=content).params == expected
    texts = {"allowed_token_ids": "3,4", "logit_bias": '{"3": -1.5, "7": 2}', "skip_special_tokens": "false"}
    more = {"include_stop_str_in_output": "True"}
    assert parsed(bad_words=["x", "", "y z"], parameters=texts | more).params == expected
    assert parsed(parameters={"allowed_token_ids": None, "logit_bias": None}, bad_words=[""]) == parsed()


def test_vllms_json_may_hold_numbers_as_text() -> None:
    content = {
        "max_tokens": "16",
        "temperature": "0.3",
        "ignore_eos": "True",
        "stop": "x",
        "stop_token_ids": [3, "4"],
        "n": 1,
    }
    assert parsed(sampling_parameters=json.dumps(content)).params == SamplingParams(
        max_tokens=16, temperature=0.3, ignore_eos=True, stop=("x",), stop_token_ids=(3, 4)
    )


def test_end_id_replaces_the_models_own() -> None:
    assert parsed(end_id=5).params == SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(5,))
    assert parsed(end_id=-1).params == SamplingParams(temperature=0, ignore_eos=True)
    with pytest.raises(RequestError, match="end_id beside a structured output"):  # it was about ignore_eos
        parsed(end_id=5, parameters={"guided_regex": "a"})


def test_a_deadline_is_a_parameter_where_the_protocol_has_none() -> None:
    assert parsed(parameters={"timeout": 250000}).deadline_s == 0.25
    assert parsed().deadline_s is None


def test_whose_request_it_is_may_be_said_in_two_words() -> None:
    assert parsed(parameters={"client": "a"}).client == parsed(parameters={"user": "a"}).client == "a"
    assert parsed(sampling_parameters='{"user": "a"}', parameters={"client": "a"}).client == "a"
    assert parsed().client is None


def test_log_probabilities_are_asked_for_by_a_flag() -> None:
    request = parsed(return_log_probs=True, return_num_input_tokens=False)
    assert request.params.logprobs == 0 and request.returns == {"return_log_probs"}


def test_a_request_changes_how_the_model_speculates() -> None:
    parameters = {"grow": "k-ary", "branching": "3,1", "lookup_len": 2}
    expected = SpeculativeConfig(grow="k-ary", branching=(3, 1), lookup_len=2)
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


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_served_is_taken_only_where_it_asks_for_nothing(name: str) -> None:
    for neutral in NEUTRAL[name]:
        assert parsed(parameters={name: neutral}) == parsed()
        assert parsed(parameters={name: str(neutral)}) == parsed()
    with pytest.raises(RequestError, match=name):
        parsed(parameters={name: "7"})


def test_every_input_of_the_contract_is_served_refused_or_without_effect() -> None:
    names = {spec.name for spec in OPTIONAL_INPUTS} - {"sampling_parameters", "min_length", "stop_words"}
    assert names <= CONVERTERS.keys() | NEUTRAL.keys() | WITHOUT_EFFECT


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": -0.5}, "top_p"),
        ({"sampling_parameters": '{"top_p": 0}'}, "top_p"),
        ({"bad_words": ["x" * 1001]}, "bad_words"),
        ({"bad_words": ["x" * 4001]}, "bad_words has 4001 bytes and may have 4000"),
        ({"stop_words": [""] * 129}, "stop_words has 129 texts and may have 128"),
        ({"sampling_parameters": "[]"}, "JSON object"),
        ({"sampling_parameters": "{"}, "not JSON"),
        ({"sampling_parameters": '{"temperature": NaN}'}, "'temperature' holds nan"),
        ({"sampling_parameters": '{"n": 1, "n": 1}'}, "'n' is given twice"),
        ({"sampling_parameters": '{"stop": "\\ud800"}'}, "surrogate"),
        ({"sampling_parameters": '{"stop": ' + "[" * 40 + "]" * 40 + "}"}, "levels deep"),
        ({"sampling_parameters": '{"seed": 1' + "0" * 5000 + "}"}, "thousands of digits"),
        ({"temperature": 1e-30}, "between 1e-06 and 100"),
        ({"temperature": 3.3e37}, "between 1e-06 and 100"),
        ({"sampling_parameters": "[" * 100_000}, "not JSON"),
        ({"sampling_parameters": '"' + "x" * MAX_TEXT_BYTES + '"'}, f"may have {MAX_TEXT_BYTES}"),
        ({"sampling_parameters": '"' + "x" * MAX_SETTINGS + '"'}, f"may have {MAX_SETTINGS}: send less"),
        ({"num_draft_tokens": 10**9}, "more than 1024"),
        ({"sampling_parameters": '{"max_tokens": 3}', "max_tokens": 4}, "given twice"),
        ({"sampling_parameters": '{"guided_json": "{"}'}, "JSON schema"),
        ({"sampling_parameters": '{"guided_regex": "a", "structured_outputs": {"regex": "a"}}'}, "two forms"),
        ({"sampling_parameters": '{"structured": {"regex": "a"}}'}, "'structured' is no setting"),
        ({"min_tokens": 2, "min_length": 3}, "given twice"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parsed(**settings)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"max_tokens": 1.5}, "an integer"),
        ({"max_tokens": True}, "an integer"),
        ({"max_tokens": 2**31}, "max_tokens must be"),
        ({"max_draft_len": True}, "max_draft_len must be an integer, not True"),
        ({"draft_threshold": True}, "draft_threshold must be a number"),
        ({"timeout": 10**400}, "timeout must be an integer"),
        ({"timeout": -1}, "timeout must be an integer of microseconds, at least 0, not -1"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"seed": "1" * 5000}, "seed must be an integer"),
        ({"branching": {"2": 1}}, "a list of integers"),
        ({"stop": {"x": 1}}, "a list of texts"),
        ({"stop": ["x"] * 129}, "at most 128"),
        ({"grow": "k-ary", "branching": [1000, 1000, 1000]}, "more than 1024"),
        ({"topology": "0," * 2000 + "0"}, "more than 1024"),
        ({"topology": "0," * MAX_ALLOWED_TOKENS + "0"}, f"at most {MAX_ALLOWED_TOKENS}"),
        ({"allowed_token_ids": [0] * (MAX_ALLOWED_TOKENS + 1)}, f"integers .at most {MAX_ALLOWED_TOKENS}"),
        ({"lookup_ngram": 17}, "lookup_ngram must be at least 0 and not more than 16"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0"),
        ({"ignore_eos": "maybe"}, "true or false"),
        ({"temperature": None}, "a number"),
        ({"grow": 3}, "text"),
        ({"bad_words": [1]}, "bad_words must be text or a list of texts"),
        ({"allowed_token_ids": "2,x"}, "allowed_token_ids must be null or a list of integers"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": [3]}, "logit_bias must be null or an object"),
        ({"logit_bias": "{"}, "logit_bias must be null or an object"),
        ({"logit_bias": {"3": 1, "03": -1}}, "each token once"),
        ({"logit_bias": {"x": 1}}, "logit_bias must be null or an object"),
        ({"logit_bias": {"3": True}}, "logit_bias must be null or an object"),
        ({"logit_bias": {"3": 101}}, "logit_bias of token 3"),
        ({"logit_bias": {f"x{token}": 0 for token in range(1025)}}, f"at most {MAX_BIASES}"),
        ({"skip_special_tokens": "maybe"}, "true or false"),
        ({"response_format": "{"}, "response_format must be null, or an object or its JSON text"),
        ({"structured_outputs": [1]}, "structured_outputs must be null, or an object"),
        ({"guided_choice": [1]}, "guided_choice must be null, or a list of texts"),
        ({"guided_regex": 3}, "guided_regex must be null or text"),
        ({"client": ""}, "text that is not empty"),
        ({"user": ["a"]}, "client must be text"),
        ({"stop": [1]}, "a list of texts"),
        ({"branching": "2,x"}, "a list of integers"),
        ({"max_draft_length": 3}, "did you mean max_draft_len"),
        ({"grow": "k-ary", "branching": "2," * 1000 + "2"}, "more than 1024"),  # whose tree has no end
        ({"grow": "chain", "max_draft_len": 10**9}, "more than 1024"),
    ],
)
def test_parameters_of_a_wrong_type_are_refused(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parsed(parameters=parameters)


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.array([[b"\xff"]], np.object_), "UTF-8"),
        (np.array([[b"two"], [b"prompts"]], np.object_), "one request per prompt"),
    ],
)
def test_a_prompt_is_one_text(array: NDArray[Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse_request({"text_input": array}, {}, OWN)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=5), items, max_size=3),
    max_leaves=4,
)
names = st.sampled_from([*CONVERTERS, *NEUTRAL, *sorted(WITHOUT_EFFECT), "nonsense"])


@given(st.dictionaries(names, json_values, max_size=3), st.dictionaries(names, json_values, max_size=3))
def test_whatever_is_sent_is_served_or_refused_clearly(parameters: dict[str, Any], content: dict[str, Any]) -> None:
    try:
        request = parsed(parameters=parameters, sampling_parameters=json.dumps(content))
    except (RequestError, ConfigError) as error:
        assert str(error)
    else:
        assert isinstance(request.params, SamplingParams)


def chunk(text: str, tokens: list[int], reason: str | None = None) -> StreamChunk:
    logprobs = [TokenLogprob(token, -0.5, {}) for token in tokens]
    stats = SpecDecodeStats(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=2)
    return StreamChunk(text, tokens, [], logprobs, reason, stats)


CHUNKS = [chunk("ab", [1, 2]), chunk("", [3]), chunk("cé", [4, 5, 6], "stop")]
FLAGS: dict[str, Any] = {
    f"return_{name}": True
    for name in ("num_output_tokens", "num_input_tokens", "log_probs", "finish_reason", "perf_metrics")
}


def test_a_stream_is_one_response_per_chunk() -> None:
    writer = ResponseWriter(parsed(stream=True, **FLAGS), 9)
    first, second, last = (writer.write(item) for item in CHUNKS)
    assert first is not None and second is not None and last is not None
    assert [item["text_output"].tolist() for item in (first, second, last)] == [[[b"ab"]], [[b""]], [["cé".encode()]]]
    assert [item["num_output_tokens"].tolist() for item in (first, second, last)] == [[[2]], [[1]], [[3]]]
    assert last["output_log_probs"].shape == (1, 1, 3) and last["cum_log_probs"].tolist() == [[-3.0]]
    assert "finish_reason" not in first and last["finish_reason"].tolist() == [[b"stop"]]
    assert "acceptance_rate" not in second and last["acceptance_rate"].tolist() == [[0.25]]
    assert last["num_input_tokens"].tolist() == [[9]]


def test_a_whole_text_is_one_response_that_begins_with_the_prompt() -> None:
    writer = ResponseWriter(parsed(**FLAGS), 9)
    assert writer.write(CHUNKS[0]) is None and writer.write(CHUNKS[1]) is None
    last = writer.write(CHUNKS[2])
    assert last is not None and last["text_output"].tolist() == [["helloabcé".encode()]]
    assert last["num_output_tokens"].tolist() == [[6]] and last["output_log_probs"].shape == (1, 1, 6)


def test_a_response_holds_what_was_asked_for() -> None:
    answer = ResponseWriter(parsed(stream=True), 9).write(CHUNKS[2])
    assert answer is not None and set(answer) == {"text_output", "sequence_index", "batch_index"}


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (RequestError("x"), "INVALID_ARG", "refused"),
        (ConfigError("x"), "INVALID_ARG", "refused"),
        (QueueFullError("x"), "UNAVAILABLE", "refused"),
        (ShutdownError("x"), "UNAVAILABLE", "refused"),
        (CancelledError("x"), "CANCELLED", "abort"),
        (DeadlineError("x"), "CANCELLED", "deadline"),
        (EngineError("x"), "INTERNAL", "error"),  # a pass that failed is nothing the client can change
        (RuntimeError("x"), "INTERNAL", "error"),
    ],
)
def test_errors_have_tritons_codes(error: Exception, code: str, reason: str) -> None:
    assert classify(error) == (code, reason) and reason in REASONS
