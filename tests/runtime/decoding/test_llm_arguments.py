"""Arguments of LLM and AsyncLLM that have the wrong type: an error that names them, before anything is opened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood.runtime import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams, SpeculativeConfig

ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle)


@pytest.mark.parametrize("prompt", [None, 1, 1.5, b"ab", bytearray(b"ab"), memoryview(b"ab"), object(), [b"ab"]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    """Bytes would otherwise be read as token ids."""
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids, not"):
        llm.generate(prompt, ONE)


@pytest.mark.parametrize("given", [5, None, 1.5, b"abc", np.array(5), {"prompt": "x"}, {"prompt_token_ids": [1]}, "x"])
def test_what_a_mapping_holds_is_checked_like_a_prompt(llm: LLM, given: Any) -> None:
    prompt: Any = {"prompt_token_ids": given}
    for call in (llm.generate, llm.stream, llm.encode):
        with pytest.raises(RequestError, match=r'a prompt is {"prompt": text} or {"prompt_token_ids": token ids}, not'):
            call(prompt)
    with AsyncLLM(llm) as served:
        for reading in (served.encode(prompt), asynchronous(served, ONE, prompt)):
            with pytest.raises(RequestError, match="a prompt is"):
                asyncio.run(reading)


def test_token_ids_are_a_list_of_any_kind(llm: LLM) -> None:
    for given in ((1, 2), np.array([1, 2]), {"prompt_token_ids": np.array([1, 2])}):
        assert llm.encode(given) == [1, 2]  # type: ignore[arg-type]
    with AsyncLLM(llm) as served:
        assert asyncio.run(served.encode(number for number in (1, 2))) == [1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"max_tokens": 4}, "greedy", 4, [ONE, ONE]])
def test_settings_of_a_stream_are_checked_like_those_of_a_call(llm: LLM, given: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match="sampling_params"):
            call("hello", given)
    with AsyncLLM(llm) as served, pytest.raises(RequestError, match="sampling_params"):
        asyncio.run(asynchronous(served, given))


async def asynchronous(served: AsyncLLM, given: Any, prompt: Any = "hello") -> None:
    served.generate(prompt, given)


def test_no_settings_of_a_stream_are_the_defaults(llm: LLM) -> None:
    chunks = llm.stream("hello", None)
    assert next(chunks).token_ids


@pytest.mark.parametrize("given", ["auto", {"grow": "chain"}, False, SpeculativeConfig])
def test_speculation_is_a_config_or_none(tiny_bundle: Path, llm: LLM, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"speculative must be a SpeculativeConfig, not .*or None for plain decoding"):
        LLM(tiny_bundle, given)
    with pytest.raises(ConfigError, match="speculative must be a SpeculativeConfig"):
        llm.stream("hello", ONE, speculative=given)


@pytest.mark.parametrize("given", ["2", True, 1.5])
def test_threads_are_a_whole_number(tiny_bundle: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match="threads of the target must be 0"):
        LLM(tiny_bundle, threads=given)
    with pytest.raises(ConfigError, match="threads of the draft must be 0"):
        LLM(tiny_bundle, draft_threads=given)
