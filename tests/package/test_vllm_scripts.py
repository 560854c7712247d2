"""Scripts with the behaviour of vLLM's own examples, written for vLLM but for the import and the model."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from serving import with_chat_template

from draftwood import LLM, SamplingParams

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
    assert len(re.findall(r"^Output:    .{3,}$", said, re.M)) == 4


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
