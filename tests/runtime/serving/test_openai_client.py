"""The OpenAI client against a real server: what it gets is what LLM.generate gives."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Served, served, with_chat_template

from draftwood.runtime import LLM, RequestOutput, SamplingParams, SpeculativeConfig

pytest.importorskip("fastapi", reason="needs the [serve] extra")
openai = pytest.importorskip("openai", reason="needs the openai package")

MODEL = "tiny"
EXTRA = {"ignore_eos": True}
MESSAGES: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny_bundle, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Served]:
    with served(bundle, "--speculative", "budget=fixed") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, SpeculativeConfig(budget="fixed")) as llm:
        yield llm


def check_accounts(answer: Any, results: list[RequestOutput]) -> None:
    """Usage and metrics are those of the results; aiperf refuses metrics that do not add up."""
    assert answer.usage.prompt_tokens == len(results[0].prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(result.token_ids) for result in results)
    metrics = answer.metrics["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1
    assert sum(histogram) == metrics["num_spec_steps"] == sum(result.stats.num_drafts for result in results)
    assert sum(j * rounds for j, rounds in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert metrics["num_accepted_draft_tokens"] == sum(result.stats.num_accepted_tokens for result in results)
    assert metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"] > 0


def test_models_are_listed(client: Any, bundle: Path) -> None:
    assert [model.id for model in client.models.list()] == [MODEL] == [bundle.name]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_completion_is_what_the_llm_writes(client: Any, llm: LLM, temperature: float) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=30, temperature=temperature, seed=7, extra_body=EXTRA
    )
    expected = llm.generate("hello", SamplingParams(max_tokens=30, temperature=temperature, seed=7, ignore_eos=True))[0]
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "length")
    check_accounts(answer, [expected])


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_is_the_answer_in_parts(client: Any, chat: bool) -> None:
    options = {"model": MODEL, "max_tokens": 30, "seed": 3, "n": 2, "extra_body": EXTRA}
    texts, reasons, last = ["", ""], [None, None], None
    if chat:
        whole = client.chat.completions.create(messages=MESSAGES, **options)
        expected = [choice.message.content for choice in whole.choices]
        stream = client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
        )
    else:
        whole = client.completions.create(prompt="hello", **options)
        expected = [choice.text for choice in whole.choices]
        stream = client.completions.create(
            prompt="hello", stream=True, stream_options={"include_usage": True}, **options
        )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content or "") if chat else choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert (chunk.usage is None) == bool(chunk.choices)
        last = chunk
    assert last is not None and last.metrics == whole.metrics and last.usage.total_tokens == whole.usage.total_tokens
    assert texts == expected and texts[0] != texts[1] and reasons == ["length", "length"]


def test_choices_are_seeded_one_after_the_other(client: Any, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=[[1, 5, 9]], max_tokens=20, seed=5, n=3, extra_body=EXTRA)
    results = [llm.generate([1, 5, 9], SamplingParams(max_tokens=20, seed=5 + i, ignore_eos=True))[0] for i in range(3)]
    assert [choice.text for choice in answer.choices] == [result.text for result in results]
    check_accounts(answer, results)


def test_several_prompts_are_answered_in_order(client: Any, llm: LLM) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["one", "two"], max_tokens=12, temperature=0, echo=True, extra_body=EXTRA
    )
    results = llm.generate(["one", "two"], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == ["one" + results[0].text, "two" + results[1].text]


def test_a_conversation_goes_through_the_chat_template(client: Any, llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    for messages, same in ((MESSAGES, MESSAGES), (parts, [{"role": "user", "content": "one\ntwo"}])):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=20, temperature=0, extra_body=EXTRA
        )
        expected = llm.chat(same, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))[0]
        assert answer.choices[0].message.content == expected.text
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_a_stop_string_ends_the_text(client: Any, llm: LLM) -> None:
    free = llm.generate("hello", SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))[0].text
    for stop in (free[10:12], ["never there", free[10:12]]):
        answer = client.completions.create(
            model=MODEL, prompt="hello", max_tokens=24, temperature=0, stop=stop, extra_body=EXTRA
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (free[: free.index(free[10:12])], "stop")


def test_logprobs_have_the_shape_of_each_api(client: Any, llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, seed=2, logprobs=3, ignore_eos=True)
    expected = [item.logprob for chunk in llm.stream("hello", params) for item in chunk.logprobs]
    old = client.completions.create(model=MODEL, prompt="hello", max_tokens=9, seed=2, logprobs=3, extra_body=EXTRA)
    written = old.choices[0].logprobs
    assert written.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert all(len(top) == 3 for top in written.top_logprobs)
    tokens = [token for chunk in llm.stream("hello", params) for token in chunk.token_ids]
    decoder = getincrementaldecoder("utf-8")("replace")  # this model writes many bytes that are no character
    lengths = [len(decoder.decode(llm.tokenizer.bytes_of(token) or b"")) for token in tokens]
    assert written.text_offset == [sum(lengths[:index]) for index in range(len(lengths))]
    prompt = llm.encode_chat(MESSAGES)
    expected = [item.logprob for chunk in llm.stream(prompt, params) for item in chunk.logprobs]
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 9, "seed": 2, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**options, extra_body=EXTRA).choices[0].logprobs.content
    stream = client.chat.completions.create(**options, stream=True, extra_body=EXTRA)
    parts = [
        item for chunk in stream for choice in chunk.choices if choice.logprobs for item in choice.logprobs.content
    ]
    assert [item.logprob for item in whole] == pytest.approx(expected, abs=1e-4)
    assert [(item.token, item.bytes) for item in parts] == [(item.token, item.bytes) for item in whole]
    # Rows stand elsewhere in the shared cache each time, so sums may round differently.
    assert [item.logprob for item in parts] == pytest.approx([item.logprob for item in whole], abs=1e-4)
    for item in whole:
        assert len(item.top_logprobs) == 3
    message = client.chat.completions.create(**options, extra_body=EXTRA).choices[0].message
    assert b"".join(bytes(item.bytes) for item in whole).decode(errors="replace") == message.content


def test_speculation_can_be_chosen_per_request(client: Any) -> None:
    texts, drafted = set(), []
    for how in ({"grow": "chain", "max_draft_len": 3}, {"grow": "topk", "merge": "gsd"}, False, None):
        answer = client.completions.create(
            model=MODEL, prompt="hello", max_tokens=20, temperature=0, extra_body={**EXTRA, "speculative": how}
        )
        texts.add(answer.choices[0].text)
        metrics = getattr(answer, "metrics", None)
        drafted.append(metrics and metrics["speculative_decoding"]["num_spec_tokens"])
    assert len(texts) == 1 and drafted == [3, SpeculativeConfig("topk").max_tokens, None, None]


def test_the_extras_of_vllm_reach_the_sampler(client: Any, llm: LLM) -> None:
    extra: dict[str, Any] = {"top_k": 4, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 8}
    extra["stop_token_ids"] = [40, 41]
    options: dict[str, Any] = {"max_tokens": 20, "seed": 1, "top_p": 0.9}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    answer = client.completions.create(model=MODEL, prompt="hello", **options, extra_body=extra)
    expected = llm.generate("hello", SamplingParams(**options, **{**extra, "stop_token_ids": (40, 41)}))[0]
    assert answer.choices[0].text == expected.text and answer.usage.completion_tokens == len(expected.token_ids)


def test_a_biased_token_is_chosen(client: Any, llm: LLM) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=5, temperature=0, logit_bias={"44": 100}, extra_body=EXTRA
    )
    assert answer.choices[0].text == llm.tokenizer.decode([44] * 5)


@pytest.mark.parametrize(
    ("options", "status", "named"),
    [
        ({"model": "gpt-4"}, 404, "'tiny'"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 400, "tools"),
        ({"response_format": {"type": "structural_tag"}}, 400, "response_format"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 129}, 400, "n: "),
        ({"n": 100}, 400, "100 choices"),
        ({"top_logprobs": 3}, 400, "logprobs to be true"),
        ({"stop": ""}, 400, "stop"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias must be below the vocabulary size"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "shorten it"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]},
            400,
            "content[0]",
        ),
        ({"extra_body": {"guided_decoding_backend": "x"}}, 400, "guided_decoding_backend is not supported"),
        ({"extra_body": {"speculative": {"grow": "topk", "verify": "block"}}}, 400, "not lossless"),
        ({"extra_body": {"speculative": {"max_total_draft_tokens": 500}}}, 400, "widest pass"),
        ({"extra_body": {"speculative": {"key": "head"}}}, 400, "acceptance head"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused_by_name(
    client: Any, options: dict[str, Any], status: int, named: str, stream: bool
) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, **options}
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**request, stream=stream)
    assert refused.value.status_code == status and named in refused.value.body["message"]
    assert set(refused.value.body) == {"message", "type", "param", "code"}


def test_null_and_what_asks_for_nothing_is_accepted(client: Any) -> None:
    nothing = {"tools": [], "response_format": {"type": "text"}, "user": "me", "store": False, "metadata": {"a": "b"}}
    nulls = dict.fromkeys(("temperature", "stop", "logit_bias", "max_completion_tokens", "top_p", "seed", "unheard_of"))
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, extra_body={**nothing, **nulls, **EXTRA}
    )
    assert answer.usage.completion_tokens == 3


def test_without_a_chat_template_a_conversation_is_refused(tiny_bundle: Path) -> None:
    with served(tiny_bundle, "--served-model-name", "plain", "--no-speculation") as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="plain", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="without its draft"):
            client.completions.create(model="plain", prompt="x", extra_body={"speculative": {}})
        client.completions.create(model="plain", prompt="x", max_tokens=3)
        client.close()
