"""Log-probabilities of prompts: those of transformers' model of the same weights, in Python and over HTTP, also by the
very requests that lm-eval's `local-completions` sends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import events_of

from draftwood.runtime import LLM, SamplingParams

TEXT = "The cat sat on the mat, naïve as it was; then it slept for 30 hours."
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def reference(tiny_pair: Path) -> Any:
    """The logarithms of the probabilities of transformers' model: token ids [N] -> float32 [N, V]."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_pair / "target", dtype=torch.float32)

    def log_probabilities(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return log_probabilities


@pytest.mark.parametrize("tokens", [1, 2, 3, 40, 200])
def test_a_prompts_tokens_have_the_models_log_probabilities(served_llm: LLM, reference: Any, tokens: int) -> None:
    """Shorter than a pass, and several passes long."""
    prompt = (served_llm.encode(TEXT) * 4)[:tokens]
    (output,) = served_llm.generate(prompt, SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=4))
    found = output.prompt_logprobs
    expected = reference(prompt)
    assert found is not None and len(found) == tokens and found[0] is None
    for position, item in enumerate(found[1:], 1):
        assert item is not None and next(iter(item)) == prompt[position]
        logprob = item[prompt[position]].logprob
        assert logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)
        best = sorted((each.rank, -each.logprob, token) for token, each in item.items() if each.rank is not None)
        assert [token for _, _, token in best] == expected[position - 1].topk(4).indices.tolist()
        assert [rank for rank, _, _ in best] == [1, 2, 3, 4] and best == sorted(best, key=lambda each: each[1])


def test_asking_for_them_changes_no_token_and_a_prompt_alone_can_be_read(served_llm: LLM) -> None:
    for temperature in (0.0, 1.0):
        plain = SamplingParams(max_tokens=20, temperature=temperature, seed=5, ignore_eos=True)
        texts = [served_llm.generate(TEXT, replace(plain, prompt_logprobs=asked))[0] for asked in (None, 0)]
        assert texts[0].token_ids == texts[1].token_ids and texts[0].prompt_logprobs is None
        json.dumps(texts[1].to_dict(), allow_nan=False)
    for result in served_llm.generate([TEXT, TEXT[:20]], SamplingParams(max_tokens=0, prompt_logprobs=1)):
        assert (result.text, result.token_ids, result.finish_reason) == ("", [], "length")
        assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(result.prompt_token_ids)
        assert result.stats.num_drafts == result.stats.target_passes == 0


def test_lm_eval_gets_the_likelihoods_of_the_hugging_face_model(http: Any, served_llm: LLM, reference: Any) -> None:
    """As lm-eval 0.4 asks a completions API for the likelihood of continuations, and reads its answer."""
    context = served_llm.encode("Question: what does the cat do? Answer:")
    texts = (" it sleeps", " it barks", " 30 hours", " naïve 🙂")
    endings = [served_llm.tokenizer.encode(text, False) for text in texts]
    best = reference(context)[-1].argmax().item()
    endings.append([best, reference([*context, best])[-1].argmax().item()])
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = http.post("/v1/completions", json={**asked, "prompt": [[*context, *ending] for ending in endings]})
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    for choice, ending in zip(choices, endings, strict=True):
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        rows = reference([*context, *ending])[len(context) - 1 : -1]
        assert sum(values) == pytest.approx(sum(float(rows[i, token]) for i, token in enumerate(ending)), abs=1e-3)
        assert greedy == (rows.argmax(-1).tolist() == ending) == (ending is endings[-1])


def test_an_echo_has_the_log_probabilities_of_prompt_and_output(http: Any, served_llm: LLM) -> None:
    text = TEXT.replace("ï", "i")
    body = {"prompt": text, "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True, "ignore_eos": True, "n": 2}
    prompt = served_llm.encode(text)
    answer = http.post("/v1/completions", json=body).json()
    for choice in answer["choices"]:
        written = choice["logprobs"]
        assert choice["text"].startswith(text) and "".join(written["tokens"][: len(prompt)]) == "<s>" + text
        assert {len(values) for values in written.values()} == {len(prompt) + 5}
        assert written["token_logprobs"][0] is written["top_logprobs"][0] is None
        assert all(len(top) == 2 for top in written["top_logprobs"][1:])
        shown = written["tokens"][1:]  # <s> is not in the text
        starts = [0, *(sum(map(len, shown[:index])) for index in range(len(prompt)))]
        assert written["text_offset"][: len(starts)] == starts and starts[-1] == len(text)
    parts = [
        event["choices"][0] for event in events_of(http.post("/v1/completions", json={**body, "stream": True}).text)
    ]
    first = [part for part in parts if part["index"] == 0]
    assert "".join(part["text"] for part in first) == answer["choices"][0]["text"]
    values = [value for part in first for value in part["logprobs"]["token_logprobs"]]
    assert values[0] is None
    assert values[1:] == pytest.approx(answer["choices"][0]["logprobs"]["token_logprobs"][1:], abs=1e-4)


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_a_prompt_alone_is_echoed(http: Any, served_llm: LLM, logprobs: int | None) -> None:
    prompts = [served_llm.encode(TEXT), [1, 70, 71]]
    body = {"prompt": prompts, "max_tokens": 0, "logprobs": logprobs, "echo": True}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == list(map(served_llm.tokenizer.decode, prompts))
    assert answer["usage"]["completion_tokens"] == 0
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert choice["finish_reason"] == "length"
        assert (choice["logprobs"] is None) == (logprobs is None)
        assert logprobs is None or len(choice["logprobs"]["tokens"]) == len(prompt)
    del body["echo"]
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == ""


def test_vllms_prompt_logprobs(http: Any, served_llm: LLM) -> None:
    prompt = served_llm.encode(TEXT)
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 3}).json()
    (expected,) = served_llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=3))
    found = answer["choices"][0]["prompt_logprobs"]
    assert expected.prompt_logprobs is not None and len(found) == len(prompt) and found[0] is None
    for entries, known in zip(found[1:], expected.prompt_logprobs[1:], strict=True):
        assert known is not None and entries.keys() == {str(token) for token in known}
        for token, entry in known.items():
            assert entries[str(token)]["rank"] == entry.rank
            assert entries[str(token)]["logprob"] == pytest.approx(entry.logprob, abs=1e-4)
    chat = {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 0}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == len(served_llm.encode_chat(MESSAGES))
    assert "prompt_logprobs" not in http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()


def test_a_read_prompt_helps_the_next_one(http: Any) -> None:
    """Its rows are kept like any prompt's, but a prompt whose log-probabilities are asked for is read itself."""
    cached = []
    for asked in (0, 0, None):
        body = {"prompt": TEXT[::-1] * 3, "max_tokens": 2, "prompt_logprobs": asked}
        usage = http.post("/v1/completions", json=body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0] and cached[2] > 0
