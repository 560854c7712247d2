"""The Dynamo worker against a stand-in for Dynamo's interface: what it takes, sends, refuses and ends."""

from __future__ import annotations

import asyncio
import importlib.util
import os
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
    errors = {name: type(name, (Exception,), {}) for name in ("EngineShutdown", "InvalidArgument", "Unknown")}
    for module in (
        stand_in("dynamo"),
        stand_in("dynamo.common"),
        backend,
        stand_in("dynamo.common.backend.health_check", build_health_check_payload=lambda begin: {"token_ids": [begin]}),
        stand_in("dynamo.common.backend.run", run=None),
        stand_in("dynamo.llm"),
        stand_in("dynamo.llm.exceptions", **errors),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for limit in ("DYN_ENGINE_REQUEST_LIMIT", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT"):
        monkeypatch.setenv(limit, "0")  # the worker sets them where they are not
        monkeypatch.delenv(limit)
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
        expected = llm.generate("hello", SamplingParams(max_tokens=12, temperature=0))[0]
    prompt = expected.prompt_token_ids
    for sent in (prompt, prompt[1:]):  # with the begin of text, and without it, as plain completions come
        chunks = asyncio.run(tokens(sent))
        assert [token for chunk in chunks for token in chunk["token_ids"]] == expected.token_ids
        assert chunks[-1]["finish_reason"] == expected.finish_reason
        assert not any("completion_usage" in chunk for chunk in chunks), "the front end counts, across migrations"
        assert not any("finish_reason" in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize(("tokens", "aborted", "reason"), [(500, True, "cancelled"), (40, False, "length")])
def test_an_aborted_request_ends_and_cleanup_finishes_what_was_accepted(
    worker: Any, tiny_bundle: Path, tokens: int, aborted: bool, reason: str
) -> None:
    async def last() -> dict[str, Any]:
        engine = await started(worker, tiny_bundle)
        request = {"token_ids": [1, 5], "stop_conditions": {"max_tokens": tokens, "ignore_eos": True}}
        stream = engine.generate(request, Context())
        chunks = [await anext(stream)]
        if aborted:
            await engine.abort(Context())
        ending = asyncio.create_task(engine.cleanup())
        chunks += [chunk async for chunk in stream]
        await ending
        assert (sum(len(chunk["token_ids"]) for chunk in chunks) == tokens) != aborted
        return dict(chunks[-1])

    assert asyncio.run(last())["finish_reason"] == reason


def test_errors_say_whose_fault_they_are(worker: Any, tiny_bundle: Path) -> None:
    async def refuses() -> None:
        engine = await started(worker, tiny_bundle)
        assert os.environ["DYN_ENGINE_REQUEST_LIMIT"] == "66"
        assert (await engine.health_check_payload())["token_ids"] == engine._engine.llm.tokenizer.encode("")
        for error, named, request in (
            ("InvalidArgument", "best_of", {"token_ids": [1], "sampling_options": {"best_of": 2}}),
            ("InvalidArgument", "--max-length", {"token_ids": [1] * 5000}),
            ("EngineShutdown", "stopping", {"token_ids": [1]}),
        ):
            if error == "EngineShutdown":
                await engine._engine.drain()
            with pytest.raises(getattr(sys.modules["dynamo.llm.exceptions"], error), match=named):
                await anext(engine.generate(request, Context()))
        await engine.cleanup()

    asyncio.run(refuses())


def test_health_is_checked_with_a_token_where_nothing_begins_a_text(worker: Any) -> None:
    engine = worker.DraftwoodEngine(None)
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    engine._engine = SimpleNamespace(llm=SimpleNamespace(tokenizer=tokenizer))
    assert asyncio.run(engine.health_check_payload()) == {"token_ids": [ord("a")]}


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
