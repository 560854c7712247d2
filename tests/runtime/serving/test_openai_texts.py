"""What clients get is what LLM.generate gives, whole or in parts, and each parameter does to it what it says."""

from __future__ import annotations

import random
import re
from codecs import getincrementaldecoder
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from serving import Served, events_of, wait_for

from draftwood.runtime import LLM, RequestOutput, SamplingParams, SpeculativeConfig

httpx = pytest.importorskip("httpx", reason="needs httpx")
openai = pytest.importorskip("openai", reason="needs the openai package")

EXTRA = {"ignore_eos": True}
USER: dict[str, Any] = {"role": "user", "content": "hello"}
MESSAGES: list[Any] = [{"role": "system", "content": "be kind"}, USER]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 900, **EXTRA}
Complete = Callable[..., dict[str, Any]]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_models_are_listed_and_the_model_may_be_left_out(client: Any, http: Any, complete: Complete) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    assert complete()["model"] == complete(messages=MESSAGES)["model"] == "tiny"
    assert complete()["choices"] == complete(model="tiny")["choices"]


def some_request(number: int) -> dict[str, Any]:
    """A request with settings of its own: SamplingParams' names, and the same text every time."""
    draw = random.Random(number)
    settings: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "seed": number}
    settings["temperature"] = draw.choice([0.0, 0.7, 1.0])
    settings["top_k"] = 4  # with all candidates, one draw in ten thousand falls upon a rounding edge
    for name, values in (
        ("top_p", [0.5, 0.9]),
        ("min_p", [0.05]),
        ("repetition_penalty", [1.2]),
        ("presence_penalty", [0.5]),
        ("frequency_penalty", [-0.5]),
        ("min_tokens", [1, settings["max_tokens"]]),
        ("stop", ["e", ["a", "zz"]]),
        ("ignore_eos", [True]),
        ("stop_token_ids", [(40, 41)]),
        ("bad_words", [("e", " t")]),
        ("allowed_token_ids", [tuple(range(30, 200))]),
        ("logit_bias", [{70: 3.0, 71: -100.0}]),
    ):
        if draw.random() < 0.4:
            settings[name] = draw.choice(values)
    return settings


def check_accounts(answer: dict[str, Any], results: list[RequestOutput]) -> None:
    """Usage and metrics are those of the results; aiperf refuses metrics that do not add up."""
    usage, metrics = answer["usage"], answer["metrics"]["speculative_decoding"]
    assert usage["prompt_tokens"] == len(results[0].prompt_token_ids)
    assert usage["completion_tokens"] == sum(len(result.token_ids) for result in results)
    histogram, accepted = metrics["acceptance_histogram"], metrics["num_accepted_draft_tokens"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1
    assert sum(histogram) == metrics["num_spec_steps"] == sum(result.stats.num_drafts for result in results)
    assert sum(j * rounds for j, rounds in enumerate(histogram)) == accepted <= metrics["num_draft_tokens"]
    assert accepted == sum(result.stats.num_accepted_tokens for result in results)
    if all(result.finish_reason == "length" for result in results):  # a stop cuts tokens that were accepted
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == accepted
        assert accepted + details["rejected_prediction_tokens"] == metrics["num_draft_tokens"]


def test_a_crowd_gets_what_each_would_get_alone(api: Served, served_llm: LLM) -> None:
    """Eight clients at a time, each with requests of every kind, some taken back, some refused. Each setting reaches
    the sampler, choice i is drawn with seed + i, and greedy texts are the same however tokens are proposed."""
    hows: list[dict[str, Any]] = [{}, {"speculative": False}, {"speculative": {"grow": "dyspec"}}]
    hows.append({"speculative": {"grow": "topk", "merge": "gsd"}})

    def visit(number: int) -> list[tuple[list[str], dict[str, Any]]]:
        answers = []
        with httpx.Client(base_url=api.url, timeout=120) as client:
            with client.stream("POST", "/completions", json={**LONG, "stream": True}) as cancelled:
                next(cancelled.iter_lines())
            refused = client.post("/completions", json={"prompt": "x", "max_tokens": 1, "min_tokens": 2})
            assert refused.status_code == 400 and "min_tokens" in refused.text
            for index, (n, stream) in enumerate(((1, True), (2, False), (2, True))):
                body = {**some_request(number + index), "prompt": f"prompt {number}", "n": n, "stream": stream}
                body |= {"stream_options": {"include_usage": True}} if stream else {}
                body |= hows[number // 3 % 4] if body["temperature"] == 0 else {}
                answer = client.post("/completions", json=body)
                chunks = events_of(answer.text) if stream else [answer.json()]
                texts = [""] * n
                for choice in (choice for chunk in chunks for choice in chunk["choices"]):
                    texts[choice["index"]] += choice["text"]
                answers.append((texts, {} if "speculative" in body else chunks[-1]))
        return answers

    numbers = range(0, 48, 3)
    with ThreadPoolExecutor(8) as threads:
        visits = list(threads.map(visit, numbers))
    for number, answers in zip(numbers, visits, strict=True):
        for index, (texts, last) in enumerate(answers):
            params = SamplingParams(**some_request(number + index))
            choices = [replace(params, seed=number + index + choice) for choice in range(len(texts))]
            expected = [served_llm.generate(f"prompt {number}", choice)[0] for choice in choices]
            assert texts == [result.text for result in expected], params
            if last:
                check_accounts(last, expected)
    wait_for(lambda: api.idle)


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_is_the_answer_in_parts(client: Any, chat: bool) -> None:
    create = client.chat.completions.create if chat else client.completions.create
    options: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": "hello"}
    options |= {"model": "tiny", "max_tokens": 30, "seed": 3, "n": 2, "extra_body": EXTRA}
    texts, reasons, last = ["", ""], [None, None], None
    whole = create(**options)
    expected = [choice.message.content if chat else choice.text for choice in whole.choices]
    for chunk in create(stream=True, stream_options={"include_usage": True}, **options):
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content or "") if chat else choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert (chunk.usage is None) == bool(chunk.choices)
        last = chunk
    assert last is not None and last.metrics == whole.metrics and last.usage.total_tokens == whole.usage.total_tokens
    assert texts == expected and texts[0] != texts[1] and reasons == ["length", "length"]


def test_a_stream_may_count_on_every_chunk(http: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 12, "temperature": 0, **EXTRA, "stream": True}

    def chunks(**options: bool) -> list[Any]:
        return events_of(http.post("/v1/completions", json={**body, "stream_options": options}).text)

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(include_usage=True, continuous_usage_stats=True)]
    assert counts == sorted(counts) and counts[0] < counts[-2] == counts[-1] == 12
    assert not any("usage" in chunk for chunk in chunks(continuous_usage_stats=True)), "as in vLLM"


def test_several_prompts_are_answered_in_order(complete: Complete, served_llm: LLM) -> None:
    answer = complete(prompt=["one", "two"], echo=True)
    results = served_llm.generate(["one", "two"], GREEDY)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["text"] for choice in answer["choices"]] == ["one" + results[0].text, "two" + results[1].text]


def test_a_conversation_goes_through_the_chat_template(complete: Complete, http: Any, served_llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    for messages, same in ((MESSAGES, MESSAGES), (parts, [{"role": "user", "content": "one\ntwo"}])):
        answer = complete(messages=messages, max_tokens=None, max_completion_tokens=24)
        (expected,) = served_llm.chat(same, GREEDY)
        assert text_of(answer) == expected.text
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    asked = {"messages": [USER], "chat_template_kwargs": {"mood": "merry"}, "add_generation_prompt": False}
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    assert served_llm.tokenizer.decode(tokens, skip_special_tokens=False) == "<user>hello</s>\n[merry]"
    assert complete(**asked)["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    "content", ["Once upon", "  Once upon ", "a\nb", "", "<", "user", [{"type": "text", "text": "Once upon"}]]
)
def test_the_last_message_may_be_continued(complete: Complete, http: Any, served_llm: LLM, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    settings: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    tokens = http.post("/tokenize", json={"messages": messages, **settings}).json()["tokens"]
    text = content if isinstance(content, str) else content[0]["text"]
    decoded = served_llm.tokenizer.decode(tokens, skip_special_tokens=False)
    assert decoded == f"<user>hello</s>\n<assistant>{text.strip()}"
    expected = served_llm.generate([tokens], GREEDY)[0].text
    for echo in (False, True):
        answer = complete(messages=messages, echo=echo, logprobs=True, **settings)
        assert text_of(answer) == (text if echo else "") + expected
        assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == 24
    own = text_of(complete(messages=[USER], echo=True))
    assert own == text_of(complete(messages=[USER])), "the last message is not the assistant's"


def test_a_stop_string_ends_the_text_and_may_be_kept(complete: Complete) -> None:
    free = text_of(complete())
    stop = free[8:11]
    for stops in (stop, ["never there", stop]):
        for keep in (False, True):
            choice = complete(stop=stops, include_stop_str_in_output=keep)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (free[: free.index(stop) + 3 * keep], "stop")


def test_special_tokens_may_be_shown(complete: Complete) -> None:
    biased: dict[str, Any] = {"logit_bias": {"2": 100}, "max_tokens": 3}
    assert text_of(complete(**biased)) == ""
    assert text_of(complete(skip_special_tokens=False, **biased)) == "</s>" * 3
    ended = {"logit_bias": {"2": 100}, "ignore_eos": False, "skip_special_tokens": False}
    assert text_of(complete(**ended)) == ""
    assert text_of(complete(include_stop_str_in_output=True, **ended)) == "</s>"


def test_each_setting_has_its_effect(complete: Complete, served_llm: LLM) -> None:
    (free,) = served_llm.generate("hello", GREEDY)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    changes: list[dict[str, Any]] = [{"bad_words": (free.text[3:6], free.text[0])}, penalties]
    changes += [{"allowed_token_ids": tuple(range(40, 90))}, {"logit_bias": {free.token_ids[5]: -100.0, 70: 3.0}}]
    for each in changes:
        (expected,) = served_llm.generate("hello", replace(GREEDY, **each))
        assert text_of(complete(**each)) == expected.text != free.text


def test_speculation_can_be_chosen_per_request(complete: Complete) -> None:
    texts, drafted = set(), []
    for how in ({"grow": "chain", "max_draft_len": 3}, {"grow": "topk", "merge": "gsd"}, False, None):
        answer = complete(speculative=how)
        texts.add(text_of(answer))
        drafted.append(answer.get("metrics", {}).get("speculative_decoding", {}).get("num_spec_tokens"))
        assert ("completion_tokens_details" in answer["usage"]) == bool(how)
    assert len(texts) == 1 and drafted == [3, SpeculativeConfig("topk").max_tokens, None, None]


def test_a_seed_of_minus_one_is_none(complete: Complete) -> None:
    assert len({text_of(complete(seed=-1, temperature=1.5)) for _ in range(5)}) > 1


def test_the_best_of_several_choices_is_returned(complete: Complete) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 8}
    every = complete(n=6, logprobs=0, **drawn)["choices"]
    means = [sum(each["logprobs"]["token_logprobs"]) / 8 for each in every]
    ranked = [every[index]["text"] for index in sorted(range(6), key=lambda index: -means[index])]
    best = complete(n=2, best_of=6, **drawn)
    found = [(each["index"], each["text"], each["logprobs"]) for each in best["choices"]]
    assert found == [(0, ranked[0], None), (1, ranked[1], None)] and best["usage"]["completion_tokens"] == 48
    assert complete(n=2, best_of=2, **drawn)["choices"] == complete(n=2, **drawn)["choices"]


def test_logprobs_have_the_shape_of_each_api(client: Any, served_llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, seed=2, logprobs=3, ignore_eos=True)
    chunks = list(served_llm.stream("hello", params))
    old = client.completions.create(model="tiny", prompt="hello", max_tokens=9, seed=2, logprobs=3, extra_body=EXTRA)
    written = old.choices[0].logprobs
    expected = [item.logprob for chunk in chunks for item in chunk.logprobs]
    assert written.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert all(len(top) == 3 for top in written.top_logprobs)
    decoder = getincrementaldecoder("utf-8")("replace")  # this model writes many bytes that are no character
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    lengths = [len(decoder.decode(served_llm.tokenizer.bytes_of(token) or b"")) for token in tokens]
    assert written.text_offset == [sum(lengths[:index]) for index in range(len(lengths))]
    prompt = served_llm.encode_chat(MESSAGES)
    expected = [item.logprob for chunk in served_llm.stream(prompt, params) for item in chunk.logprobs]
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, "seed": 2, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**options, extra_body=EXTRA).choices
    whole = choice.logprobs.content
    stream = client.chat.completions.create(**options, stream=True, extra_body=EXTRA)
    parts = [item for chunk in stream for each in chunk.choices if each.logprobs for item in each.logprobs.content]
    assert [item.logprob for item in whole] == pytest.approx(expected, abs=1e-4)
    assert [(item.token, item.bytes) for item in parts] == [(item.token, item.bytes) for item in whole]
    # Rows stand elsewhere in the shared cache each time, so sums may round differently.
    assert [item.logprob for item in parts] == pytest.approx([item.logprob for item in whole], abs=1e-4)
    assert all(len(item.top_logprobs) == 3 for item in whole)
    assert b"".join(bytes(item.bytes) for item in whole).decode(errors="replace") == choice.message.content


def test_accepted_tokens_are_counted_by_their_position(api: Served, http: Any, complete: Complete) -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

    def counted() -> list[float]:
        text = http.get("/metrics").text
        return [float(value) for value in re.findall(rf'^{re.escape(name)}{{position="\d+"}} (\S+)$', text, re.M)]

    before, drafted = counted(), api.metric("vllm:spec_decode_num_draft_tokens_total")
    metrics = complete(max_tokens=60)["metrics"]["speculative_decoding"]
    rounds, after = metrics["acceptance_histogram"], counted()
    added = [sum(rounds[depth + 1 :]) for depth in range(len(rounds))]
    assert after[0] > (before or [0])[0]
    padded = before + [0.0] * (len(after) - len(before))
    assert [new - old for new, old in zip(after, padded, strict=True)] == added[: len(after)]
    assert api.metric("vllm:spec_decode_num_draft_tokens_total") == drafted + metrics["num_draft_tokens"] > drafted
    samples = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'[a-z_:]+(\{[a-z_]+="[^"]*"\})? [0-9.e+-]+', line) for line in samples), samples
    assert api.metric("vllm:num_requests_running") == api.metric("vllm:num_requests_waiting") == 0
