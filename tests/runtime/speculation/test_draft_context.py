"""A draft with a limited context reads the last tokens of a text alone, and nothing else changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundling import DEMO, built, resigned
from enumeration import PROMPT, decoded, pair, total_variation
from fakes import FakeEngine, random_model

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.errors import BundleError, CheckpointError
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts

VOCAB = 12
COSTS = CostModel(  # speculation pays
    PassCosts((1, 64), (0, 64), ((1.0, 1.1), (1.0, 1.1))),
    PassCosts((1, 64), (0, 64), ((0.01, 0.011), (0.01, 0.011))),
    HostCosts(0.0, 0.0, 0.0),
    HostCosts(0.0, 0.0, 0.0),
    {},
)


def limited(draft: FakeEngine, context: int) -> FakeEngine:
    draft.spec = replace(draft.spec, model=replace(draft.spec.model, draft_context=context))
    return draft


@pytest.mark.parametrize("context", [2, 3])
@pytest.mark.parametrize(
    "config",
    [
        SpeculativeConfig("chain", max_draft_len=2, budget="fixed"),
        SpeculativeConfig("dyspec", max_total_draft_tokens=3, max_draft_len=2, budget="fixed"),
        SpeculativeConfig("dyspec-threshold", merge="gsd", max_total_draft_tokens=3, max_draft_len=2, budget="fixed"),
        SpeculativeConfig(max_draft_len=2, max_total_draft_tokens=3),
    ],
    ids=["chain", "tree", "merged", "by cost"],
)
def test_every_random_outcome_keeps_its_probability(config: SpeculativeConfig, context: int) -> None:
    params, (target, draft) = SamplingParams(max_tokens=4), pair(0, 2)
    plain = decoded(target, None, None, params)
    assert total_variation(decoded(target, limited(draft, context), config, params, COSTS), plain) < 1e-12


@pytest.mark.parametrize("prompt", [[*PROMPT], [1 + index % 9 for index in range(70)]], ids=len)
@pytest.mark.parametrize("budget", ["fixed", "cost"])
def test_the_draft_attends_to_the_last_tokens_alone(prompt: list[int], budget: str) -> None:
    """What it attends to is the end of the text and a path of the proposal, never longer than its context and these;
    and where the text is shorter, all of it."""
    truth, seen = random_model(0, VOCAB), set[tuple[int, ...]]()

    def watched(context: tuple[int, ...]) -> Any:
        seen.add(context)
        return truth(context[-1:])

    target = FakeEngine(lambda context: truth(context[-1:]), VOCAB)
    draft, limit, depth = limited(FakeEngine(watched, VOCAB, "draft"), 16), 16, 3
    config = SpeculativeConfig("chain", max_draft_len=depth, budget=budget)
    decoder = SpeculativeDecoder(target, draft, config, 4096, (), COSTS)
    sampler, stats = Sampler(SamplingParams(max_tokens=60, temperature=0), prompt, (), VOCAB), SpecDecodeStats()
    for _ in decoder.generate(prompt, sampler, seeded_streams(0), stats):
        pass
    text = [*prompt, *sampler.output]
    assert stats.num_accepted_tokens > 20, "both say the same of a text's end"
    ends = range(1, len(text) + 1)
    places = {tuple(text[start:end]) for end in ends for start in range(max(0, end - limit - depth), end)}
    assert seen <= places and max(map(len, seen)) > limit // 2
    assert min(map(len, seen)) >= min(limit // 2, len(prompt)) - 1, "all but the root are read before it"


@pytest.mark.parametrize("backend", ["native", "onnxruntime"])
def test_greedy_texts_stay_those_of_plain_decoding(backend: str, tmp_path: Path) -> None:
    """On real engines, alone and several at a time, which share rows of their caches."""
    draft = with_context(tmp_path / "draft", 16)
    bundle = tmp_path / "bundle"
    build(BuildOptions(DEMO / "target", draft, bundle, backend), lambda step: lambda: None)
    assert EngineBundle.open(bundle).manifest.engines["draft"].model.draft_context == 16
    params = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
    prompts = ["def fibonacci(n):\n    if n < 2:\n        return n\n", "import os\n", "import os\n\n\ndef main():\n"]
    config = SpeculativeConfig("topk", max_total_draft_tokens=7, max_draft_len=4, budget="fixed")
    with LLM(bundle, speculative=None) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(bundle, speculative=config) as llm:
        alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert alone == plain and together == plain


def with_context(folder: Path, context: Any, source: str = "draft") -> Path:
    folder.mkdir(parents=True)
    for file in (DEMO / source).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"draft_context": context}))
    return folder


@pytest.mark.parametrize("context", [0, -1, 15, 1 << 40, "512", True, 16.0])
def test_a_context_that_is_none_is_refused(context: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="draft_context must be"):
        Checkpoint(with_context(tmp_path / "draft", context))


def test_a_target_reads_the_whole_text(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="remove draft_context"):
        built(with_context(tmp_path / "target", 16, "target"), DEMO / "draft", tmp_path / "bundle")


@pytest.mark.parametrize(("role", "context"), [("target", 512), ("draft", 0), ("draft", -3), ("draft", 15)])
def test_a_manifest_with_another_context_is_refused(role: str, context: int, tiny_bundle: Path, tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["engines"][role]["model"]["draft_context"] = context

    EngineBundle.open(tiny_bundle).copy_to(tmp_path / "bundle")
    resigned(tmp_path / "bundle", change)
    with pytest.raises(BundleError, match=f"the {role}'s draft_context is {context}"):
        EngineBundle.open(tmp_path / "bundle")


def test_the_draft_costs_no_more_behind_long_texts() -> None:
    """A draft that would be too slow after 8,000 tokens pays if it reads the last 512 of them alone."""
    costs = replace(COSTS, draft=PassCosts((1, 64), (0, 512), ((0.001, 0.002), (0.05, 0.06))))
    config = SpeculativeConfig("chain", max_draft_len=4)
    depths = {}
    for context in (None, 512):
        controller = config.controller(costs, (1, 8, 64), True, draft_context=context)
        assert controller is not None
        depths[context] = [controller.plan(length, 50).depth for length in (64, 8000)]
    assert depths[None][0] == depths[512][0] > 0
    assert depths[None][1] == 0 < depths[512][1]
