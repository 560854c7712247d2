"""The public face: its names, what importing it costs, the shapes of prompts and results that vLLM's users know, and
scripts that were written for vLLM."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from serving import with_chat_template

import draftwood
import draftwood.runtime
from draftwood import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    Logprob,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from draftwood.models.release import own_version

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(model=with_chat_template(tiny_bundle, tmp_path_factory.mktemp("chat"))) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def test_the_face_has_the_names_of_the_runtime_and_a_version() -> None:
    assert sorted(draftwood.__all__) == sorted([*draftwood.runtime.__all__, "__version__"])
    assert all(getattr(draftwood, name) is getattr(draftwood.runtime, name) for name in draftwood.runtime.__all__)
    assert draftwood.__version__ == version("draftwood")
    assert set(draftwood.__all__) <= set(dir(draftwood))
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        draftwood.LLMs  # noqa: B018


def test_importing_the_face_loads_nothing_of_the_runtime() -> None:
    code = "import sys, draftwood; print([m for m in sys.modules if m.startswith(('draftwood.', 'numpy', 'rich'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_python_m_draftwood_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "draftwood", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"draftwood {version('draftwood')} with ")


def test_one_prompt_in_any_form_gives_one_result(llm: LLM) -> None:
    ids = llm.encode("hello")
    plain: list[Any] = ["hello", {"prompt": "hello"}, ["hello"], ("hello",)]
    encoded: list[Any] = [ids, tuple(ids), {"prompt_token_ids": ids}]
    text, *others = (llm.generate(prompt, sampling_params=GREEDY) for prompt in plain + encoded)
    (output,) = text
    (completion,) = output.outputs
    assert isinstance(output, RequestOutput) and isinstance(completion, CompletionOutput)
    assert (output.prompt, output.prompt_token_ids) == ("hello", ids)
    assert (completion.index, completion.finish_reason, len(completion.token_ids)) == (0, "length", 12)
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert completion.logprobs is None and completion.cumulative_logprob is None
    assert all(tokens(other) == tokens(text) for other in others)
    assert [other[0].prompt for other in others] == ["hello"] * 3 + [None] * 3


def test_prompts_of_all_forms_stand_in_one_list(llm: LLM) -> None:
    mixed: list[Any] = ["one", {"prompt": "two"}, [5, 6, 7], TokensPrompt(prompt_token_ids=[8, 9]), (3, 4)]
    outputs = llm.generate(mixed, GREEDY)
    assert [output.prompt for output in outputs] == ["one", "two", None, None, None]
    assert [output.prompt_token_ids for output in outputs[2:]] == [[5, 6, 7], [8, 9], [3, 4]]
    assert tokens(outputs) == [tokens(llm.generate(prompt, GREEDY))[0] for prompt in mixed]
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 5))


@pytest.mark.parametrize(
    "prompt",
    [{}, {"text": "x"}, {"prompt": [1]}, {"prompt_token_ids": "x"}, {"prompt": "x", "prompt_token_ids": [1]}],
)
def test_a_mapping_that_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    for given in (prompt, ["fine", prompt]):
        with pytest.raises(RequestError, match="a prompt is"):
            llm.generate(given)


def test_each_prompt_may_have_its_own_settings(llm: LLM) -> None:
    settings = [GREEDY, SEEDED, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)]
    outputs = llm.generate(["one", "one", "one"], settings)
    alone = [llm.generate("one", each)[0] for each in settings]
    assert tokens(outputs) == tokens(alone)
    assert [output.logprobs is None for output in outputs] == [True, True, False]
    with pytest.raises(RequestError, match="there are 2 prompts and 3 sampling_params"):
        llm.generate(["one", "two"], settings)
    with pytest.raises(RequestError, match="sampling_params must be"):
        llm.generate("one", {"temperature": 0})  # type: ignore[arg-type]


def test_n_texts_of_a_prompt_have_consecutive_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
    first, second = llm.generate(["one", "two"], [params, GREEDY])
    assert [each.index for each in first.outputs] == [0, 1, 2] and len(second.outputs) == 1
    alone = [SamplingParams(seed=7 + index, max_tokens=12, ignore_eos=True) for index in range(3)]
    assert tokens([first])[0] == [llm.generate("one", each)[0].token_ids for each in alone]
    assert len({tuple(each.token_ids) for each in first.outputs}) == 3
    drawn = llm.generate("one", SamplingParams(n=4, max_tokens=12, ignore_eos=True))[0].outputs
    assert len({tuple(each.token_ids) for each in drawn}) > 1
    rounds: list[Any] = []
    observed = llm.generate("one", params, observe=rounds.append)
    assert tokens(observed) == tokens([first]) and rounds


def test_n_is_bounded_and_a_stream_has_one_text(llm: LLM, tiny_bundle: Path) -> None:
    for n in (0, 1025, True, 1.5):
        with pytest.raises(RequestError, match="n must be"):
            SamplingParams(n=n)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="seed must be"):
        llm.generate("one", SamplingParams(n=2, seed=2**64 - 1))
    with pytest.raises(RequestError, match="a stream has one text"):
        llm.stream("one", SamplingParams(n=2))
    with AsyncLLM(tiny_bundle) as served, pytest.raises(RequestError, match="a stream has one text"):
        served.generate("one", SamplingParams(n=2))


def test_log_probabilities_are_by_token_with_rank_and_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, logprobs=2)
    (completion,) = llm.generate("hello", params)[0].outputs
    reported = [item for chunk in llm.stream("hello", params) for item in chunk.logprobs]
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    assert completion.cumulative_logprob == pytest.approx(sum(item.logprob for item in reported), abs=1e-3)
    ranks = set()
    for token, logprobs, item in zip(completion.token_ids, completion.logprobs, reported, strict=True):
        assert next(iter(logprobs)) == token and set(logprobs) == {token, *item.top}
        assert logprobs[token].decoded_token == llm.token_text(token)
        best = sorted((each for each in logprobs.values() if each.rank is not None), key=lambda each: -each.logprob)
        assert [each.rank for each in best] == [1, 2]
        ranks.add(logprobs[token].rank)
    assert None in ranks and ranks <= {None, 1, 2}
    greedy = llm.generate("hello", SamplingParams(max_tokens=3, temperature=0, logprobs=0))[0].logprobs
    assert greedy is not None and all(
        isinstance(each, Logprob) for logprobs in greedy for each in logprobs.values() if len(logprobs) == 1
    )


def test_a_result_is_json_ready(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(max_tokens=3, temperature=0, logprobs=1, ignore_eos=True))
    content = json.loads(json.dumps(output.to_dict()))
    assert content["prompt_token_ids"] == output.prompt_token_ids and content["text"] == output.text
    chosen = content["logprobs"][0][str(output.token_ids[0])]
    assert chosen["rank"] == 1 and chosen["decoded_token"] == llm.token_text(output.token_ids[0])


def test_a_conversation_gives_a_list_as_conversations_do(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, sampling_params=GREEDY)
    assert one.prompt == "<user>hi\n<assistant>" and one.prompt_token_ids == llm.encode_chat(messages)
    two = llm.chat([messages, [{"role": "user", "content": "no"}]], [GREEDY, SEEDED])
    assert two[0].token_ids == one.token_ids and two[1].prompt == "<user>no\n<assistant>"


def test_progress_is_shown_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = llm.generate(["one", "two"], GREEDY)
    assert capsys.readouterr() == ("", "")
    for prompts in (["one", "two"], ["one"]):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=True)
        out, err = capsys.readouterr()
        assert out == "" and "100%" in err
    assert outputs[0].token_ids == quiet[0].token_ids


def test_a_checkout_that_is_not_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU check builds bundles in any Python."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    assert own_version() == version("draftwood")
    monkeypatch.setattr("draftwood.models.release.version", missing)
    assert own_version() == "0+checkout"


SCRIPTS = Path(__file__).parent / "vllm_scripts"


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny_bundle, tmp_path_factory.mktemp("chat"))


@pytest.fixture
def said(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: object) -> str:
    """What the script of the test's parameter prints."""
    name = request.param  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "argv", [name, str(bundle)])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("said", ["basic.py"], indirect=True)
def test_a_list_of_prompts(said: str) -> None:
    prompts = re.findall(r"^Prompt:    '(.*)'$", said, re.M)
    assert prompts[0] == "Hello, my name is" and len(prompts) == 4
    assert len(re.findall(r"^Output:    .{2,}$", said, re.M)) == 4


@pytest.mark.parametrize("said", ["chat.py"], indirect=True)
def test_one_conversation_and_many(said: str, bundle: Path) -> None:
    texts = re.findall(r"^Generated text: (.*)$", said, re.M)
    assert len(texts) == 11 and len(set(texts)) == 1
    assert said.count("Prompt: '<system>You are a helpful assistant\\n<user>Hello") == 11
    messages = [{"role": "user", "content": "Hello"}]
    with LLM(bundle) as llm:
        (other,) = llm.chat(messages, SamplingParams(max_tokens=8, temperature=0))
    assert repr(other.outputs[0].text) not in texts


@pytest.mark.parametrize("said", ["prefix_caching.py"], indirect=True)
def test_prompts_with_a_common_beginning(said: str) -> None:
    assert "Generated answers are the same: True" in said
    assert len(set(re.findall(r"Generated text: (.*)$", said, re.M))) == 4
