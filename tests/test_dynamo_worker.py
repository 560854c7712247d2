"""The Dynamo worker against a stand-in for Dynamo's interface: what it takes, sends, refuses and ends."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from bundling import ROOT

from draftwood.runtime import LLM, RequestError, SamplingParams

GREEDY = {"temperature": 0.0, "seed": None, "n": 1, "guided_decoding": None}


class Context:
    """Dynamo's handle of a request."""

    def id(self) -> str:
        return "one"


def stand_in(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """deploy/dynamo/worker.py, loaded. Its own module of Dynamo's is replaced by one that records what it is given."""
    engine = type("LLMEngine", (), {})
    records: dict[str, Callable[..., Any]] = dict.fromkeys(("LlmRegistration", "WorkerConfig"), SimpleNamespace)
    backend = stand_in(
        "dynamo.common.backend",
        LLMEngine=engine,
        EngineConfig=lambda model, name, llm: SimpleNamespace(model=model, served_model_name=name, llm=llm),
        GenerateChunk=dict,
        GenerateRequest=dict,
        **records,
    )
    for module in (
        stand_in("dynamo"),
        stand_in("dynamo.common"),
        backend,
        stand_in("dynamo.common.backend.run", run=None),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("draftwood_dynamo_worker", ROOT / "deploy" / "dynamo" / "worker.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def started(worker: Any, bundle: Path) -> Any:
    engine, config = await worker.DraftwoodEngine.from_args(
        [str(bundle), "--model", "checkpoint", "--max-running", "2"]
    )
    assert config.model_name == "checkpoint" and config.endpoint_types == "completions"
    registration = await engine.start(1)
    assert registration.llm.max_num_seqs == 2 and registration.served_model_name == "draftwood"
    return engine


def test_chunks_are_the_rounds_of_the_llm(worker: Any, tiny_bundle: Path) -> None:
    async def tokens(prompt: list[int]) -> list[dict[str, Any]]:
        engine = await started(worker, tiny_bundle)
        request = {"token_ids": prompt, "sampling_options": GREEDY, "stop_conditions": {"max_tokens": 12, "stop": []}}
        chunks = [chunk async for chunk in engine.generate(request, Context())]
        await engine.cleanup()
        await engine.cleanup()  # Dynamo may ask twice
        return chunks

    with LLM(tiny_bundle) as llm:
        expected = llm.generate("hello", SamplingParams(max_tokens=12, temperature=0))
    prompt = expected.prompt_token_ids
    for sent in (prompt, prompt[1:]):  # with the begin of text, and without it, as plain completions come
        chunks = asyncio.run(tokens(sent))
        assert [token for chunk in chunks for token in chunk["token_ids"]] == expected.token_ids
        assert chunks[-1]["finish_reason"] == expected.finish_reason
        usage = chunks[-1]["completion_usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(expected.token_ids))
        assert not any("finish_reason" in chunk for chunk in chunks[:-1])


def test_an_aborted_request_ends_and_frees_the_engine(worker: Any, tiny_bundle: Path) -> None:
    async def last_chunk() -> dict[str, Any]:
        engine = await started(worker, tiny_bundle)
        request = {"token_ids": [1, 5], "stop_conditions": {"max_tokens": 500, "ignore_eos": True}}
        chunks = []
        async for chunk in engine.generate(request, Context()):
            chunks.append(chunk)
            await engine.abort(Context())
        await engine.cleanup()
        assert len(chunks) < 500
        return dict(chunks[-1])

    assert asyncio.run(last_chunk())["finish_reason"] == "cancelled"


def test_settings_are_taken_or_refused(worker: Any) -> None:
    request = {
        "sampling_options": {"temperature": 0.0, "top_k": 4, "n": 1, "guided_decoding": None, "use_beam_search": False},
        "stop_conditions": {"max_tokens": 3, "stop_token_ids_hidden": [2], "stop_token_ids": [7], "ignore_eos": False},
    }
    expected = SamplingParams(temperature=0, top_k=4, max_tokens=3, stop_token_ids=(7, 2))
    assert worker.sampling_params(request) == expected
    for name, value in (("n", 2), ("guided_decoding", {"regex": "x"}), ("best_of", 3)):
        with pytest.raises(RequestError, match=name):
            worker.sampling_params({"sampling_options": {name: value}})
