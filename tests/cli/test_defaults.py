"""One set of defaults: a conversation, a text, the page and Python begin with the same settings."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from bundling import resigned
from serving import with_chat_template

from draftwood import LLM, BundleError, SamplingParams
from draftwood.cli.main import main
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.serving.http.pages import chat_page

MODEL = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "max_new_tokens": 9}  # what its authors recommend


@pytest.fixture(scope="module")
def silent(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose authors recommend nothing."""
    return with_chat_template(tiny_bundle, tmp_path_factory.mktemp("silent"))


@pytest.fixture(scope="module")
def advised(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = with_chat_template(tiny_bundle, tmp_path_factory.mktemp("advised"))
    (bundle / "generation_config.json").write_text(json.dumps(MODEL))
    return resigned(bundle)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The settings of every text, which ends after a token."""
    seen, sampler = list[SamplingParams](), LLM.sampler

    def noted(self: LLM, params: SamplingParams, *rest: Any) -> Sampler:
        seen.append(params)
        return sampler(self, SamplingParams(max_tokens=1), *rest)

    monkeypatch.setattr(LLM, "sampler", noted)
    return seen


@pytest.mark.parametrize("command", [["generate", "-q", "--prompt", "hello"], ["chat"]])
def test_commands_and_python_begin_with_the_same_settings(
    command: list[str], silent: Path, advised: Path, used: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *options = command
    for bundle in (silent, advised):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        assert main([name, str(bundle), *options]) == 0
        with LLM(bundle) as llm:
            llm.generate("hello")
            llm.chat([{"role": "user", "content": "hello"}])
            next(llm.stream("hello"))
            longest = llm.bundle.manifest.max_length
        first, *others = [(each.temperature, each.top_p, each.top_k) for each in used]
        assert others == [first] * 3
        assert first == ((0.7, 0.95, 0) if bundle == silent else (0.25, 0.5, 7))
        lengths = {each.max_tokens for each in used[1:]}
        assert lengths == {longest if bundle == silent else 9}
        used.clear()


def test_what_a_user_says_replaces_the_model_s_settings(advised: Path, used: list[SamplingParams]) -> None:
    options = ["--temperature", "1", "--max-tokens", "3", "--seed", "5"]
    assert main(["generate", str(advised), "-q", "--prompt", "hello", *options]) == 0
    (params,) = used
    assert (params.temperature, params.max_tokens, params.seed, params.top_p) == (1.0, 3, 5, 0.5)


def test_the_page_begins_with_them(silent: Path, advised: Path) -> None:
    for bundle, value in ((silent, "0.7"), (advised, "0.25")):
        with LLM(bundle) as llm:
            page = bytes(chat_page(llm.get_default_sampling_params()).body).decode()
        assert f'id="temperature" type="number" min="0" max="100" step="any" value="{value}"' in page
        assert "TEMPERATURE" not in page and "MAX_TOKENS" not in page


@pytest.mark.parametrize("content", [{"temperature": -1}, {"top_k": 1.5}])
def test_damaged_settings_of_a_bundle_are_refused(content: dict[str, Any], advised: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(advised, tmp_path / "bundle"))
    (bundle / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(BundleError, match=r"generation_config.json cannot be used"):
        LLM(resigned(bundle))
