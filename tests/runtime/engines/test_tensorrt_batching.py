"""Requests that share the passes of TensorRT plans, on a stand-in for the package: the graph plans are compiled from
runs on the host. Every request gets the text it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundling import DEMO
from cuda_driver.machine import Machine
from tensorrt_bundles import MAX_LENGTH, WIDTHS, demo_bundles
from together import collect, run, tokens_of

from draftwood.builder.engines.plan import CompileOptions
from draftwood.builder.options import BuildOptions
from draftwood.cli.inspect import describe
from draftwood.models.errors import ConfigError, EngineError
from draftwood.runtime import LLM, AsyncLLM, RequestOutput, SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.backends import cache_precision, slot_bytes
from draftwood.runtime.engines.static.pool import StaticPool
from draftwood.runtime.prompt import Prompt

pytestmark = pytest.mark.usefixtures("no_faults")
MAX_BATCH = 3
PROMPTS: list[Prompt] = [
    "def fibonacci(n):\n",
    "import os\n",
    "class Queue:\n    def __init__(self):\n" * 3,
    "for i in range(10):",
    "x",
]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
TREES = SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=7, max_draft_len=3)
CONFIGS = {
    "plain": None,
    "chain": SpeculativeConfig("chain", budget="fixed", max_draft_len=4),
    "tree": TREES,
    "planned": SpeculativeConfig(),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Iterator[Callable[..., LLM]]:
    """Opens the demo pair, built for so many requests, as TensorRT engines over the stand-in."""
    with demo_bundles(tmp_path_factory.mktemp("bundles"), gpu) as open_llm:
        yield lambda max_batch=MAX_BATCH, config=TREES: open_llm(max_batch, config)


@pytest.fixture(scope="module")
def alone(opened: Callable[..., LLM]) -> list[RequestOutput]:
    """Of each of PROMPTS."""
    with opened(1) as llm:
        return [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_list_of_prompts_shares_passes_and_changes_no_text(
    name: str, opened: Callable[..., LLM], alone: list[RequestOutput], gpu: Machine
) -> None:
    """More prompts than places: the next one begins when one ends."""
    with opened(config=CONFIGS[name]) as llm:
        gpu.ran.clear()
        found = llm.generate(PROMPTS, GREEDY)
        together = gpu.ran["a program"]  # passes of either engine, those of graphs included
        assert [each.token_ids for each in found] == [each.token_ids for each in alone]
        assert [each.prompt_token_ids for each in found] == [each.prompt_token_ids for each in alone]
        for prompt in PROMPTS:
            llm.generate(prompt, GREEDY)
        # Planned proposals follow what passes take, here the simulator's time.
        assert together < (1.0 if name == "planned" else 0.6) * (gpu.ran["a program"] - together)
        if name == "tree":
            assert sum(each.stats.num_accepted_tokens for each in found) > 0


def test_requests_of_a_server_join_and_leave(opened: Callable[..., LLM], alone: list[RequestOutput]) -> None:
    """With settings of their own; one is aborted, and another takes its place."""
    with opened() as llm:

        async def work(served: AsyncLLM) -> list[list[int]]:
            assert served.max_running == MAX_BATCH
            streams = [
                served.generate(prompt, GREEDY, speculative=None if index % 2 else "own", request_id=str(index))
                for index, prompt in enumerate(PROMPTS * 2)
            ]
            served.abort("2")
            return [tokens_of(await collect(stream)) for stream in streams]

        found = run(work, llm)
        expected = [each.token_ids for each in alone] * 2
        assert [tokens for index, tokens in enumerate(found) if index != 2] == expected[:2] + expected[3:]
        assert len(found[2]) < len(expected[2])
        engine: Any = llm.target
        assert isinstance(engine.pool, StaticPool) and len(engine.pool._caches) == 0
        assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected[0]


def test_single_requests_hold_a_place_only_while_they_run(opened: Callable[..., LLM]) -> None:
    with opened() as llm:
        for _ in range(MAX_BATCH + 1):
            llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=3))
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[: MAX_BATCH + 1]]
        for stream in streams[:MAX_BATCH]:
            next(stream)
        with pytest.raises(EngineError, match=r"all 3 sequences .*--max-batch"):
            next(streams[MAX_BATCH])


def test_inspect_counts_the_caches_of_all(opened: Callable[..., LLM]) -> None:
    with opened() as llm:
        engine: Any = llm.target
        spec = engine.spec
        assert spec.max_batch * spec.capacity * slot_bytes(spec) == engine.memory.kv_cache
        slots = f"3 × {MAX_LENGTH + 4 * WIDTHS[-1]}, {engine.memory.kv_cache / 1e6:.1f} MB when full"
        slots += f", in {cache_precision(spec)}"
        table = describe(EngineBundle.open(llm.bundle.folder))
        assert slots in list(table.columns[1].cells)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "onnxruntime"}, r"--max-batch is for .* leave it out"),
        ({"plugin": False}, r"needs our attention kernel, since .* leave out --no-plugin"),
        ({"compute_capability": ("7.5",), "precision": "fp16"}, r"not for SM 7\.5"),
        ({"max_batch": 0}, "at least 1, not 0"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_a_build(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"backend": "tensorrt-rtx", "max_batch": 4}
    with pytest.raises(ConfigError, match=message):
        BuildOptions(DEMO / "target", DEMO / "draft", Path("bundle"), **given | changes)


def test_without_triton_several_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Triton is not installed: pip install .*\[kernel\]'"):
        CompileOptions("tensorrt", "fp16", (1, 4), 64, max_batch=2)
