"""I1: at temperature 0 every configuration gives plain decoding's text, token for token, on real engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bundling import DEMO, built
from checkpoints import SHAPES, write_checkpoint, write_tokenizer
from transformers import LlamaForCausalLM

from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig

PROPOSALS = {
    "auto": SpeculativeConfig(max_draft_len=5),
    "chain": SpeculativeConfig("chain", max_draft_len=4),
    "chain, confidence": SpeculativeConfig("chain", stop_rule="confidence", max_draft_len=8),
    "k-ary": SpeculativeConfig("k-ary", branching=(2, 2, 1), max_total_draft_tokens=10),
    "topk 8": SpeculativeConfig("topk", max_total_draft_tokens=8, max_draft_len=3),
    "topk 32": SpeculativeConfig("topk", max_total_draft_tokens=32, max_draft_len=8, frontier_width=8),
    "topk, entropy": SpeculativeConfig("topk", stop_rule="entropy", entropy_threshold=0.2),
    "topk, gsd": SpeculativeConfig("topk", merge="gsd", max_total_draft_tokens=24, max_draft_len=6),
    "dyspec": SpeculativeConfig("dyspec", max_total_draft_tokens=16),
}
# A model this small decodes plainly where costs decide; here every round shall propose.
CONFIGS = {name: replace(config, budget="fixed") for name, config in PROPOSALS.items()} | {
    "by cost": SpeculativeConfig(),
    "lookup": SpeculativeConfig("lookup", lookup_ngram=2),
}
PENALISED = SamplingParams(
    max_tokens=60, temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_tokens=50
)
GREEDY = SamplingParams(max_tokens=120, temperature=0)
PROMPTS = ["def fibonacci(n):\n", "class Stack:\n    ", "import os\n\n", "The quick brown fox"]


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], pytest.param(PROMPTS[1:], marks=pytest.mark.full)], ids=len)
def test_the_demo_pair(demo_bundle: Path, params: SamplingParams, prompts: list[str]) -> None:
    by_head = SpeculativeConfig("topk", stop_rule="specdec++", max_draft_len=8, budget="fixed")
    check(demo_bundle, prompts, params, CONFIGS | {"topk, specdec++": by_head})


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_a_third_party_checkpoint(stories_bundle: Path, params: SamplingParams) -> None:
    check(stories_bundle, ["", "Once upon a time", "Lily and Tom"], params)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_checkpoints_of_every_shape(shape: str, tmp_path: Path) -> None:
    for role, seed in (("target", 0), ("draft", 1)):
        write_checkpoint(tmp_path / role, shape, seed=seed)
        write_tokenizer(tmp_path / role)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    check(built(tmp_path / "target", tmp_path / "draft", tmp_path / "bundle"), ["hello", "x"], params)
    # A draft that is the target itself: whole proposals are accepted, all the time.
    check(built(tmp_path / "target", tmp_path / "target", tmp_path / "twin"), ["hello", "x"], params)


def check(
    bundle: Path, prompts: list[str], params: SamplingParams, configs: dict[str, SpeculativeConfig] = CONFIGS
) -> None:
    with LLM(bundle, None) as plain:
        expected = [result.token_ids for result in plain.generate(list(prompts), params)]
    for name, config in configs.items():
        with LLM(bundle, config) as llm:
            results = llm.generate(list(prompts), params)
        assert [result.token_ids for result in results] == expected, name
        assert config.budget == "cost" or all(result.stats.num_drafts > 0 for result in results)


def test_the_authors_published_text(stories: Path, stories_bundle: Path) -> None:
    """200 steps from the begin-of-text token alone, as llama2.c's own test expects them."""
    expected = (stories / "expected_greedy_200.txt").read_text()
    for config in (None, SpeculativeConfig()):
        with LLM(stories_bundle, config) as llm:
            text = llm.generate("", SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))[0].text
        assert text.strip() == expected.strip()


def test_plain_decoding_is_transformers_decoding(demo_bundle: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    with LLM(demo_bundle, None) as llm:
        for prompt in PROMPTS[:2]:
            result = llm.generate(prompt, SamplingParams(max_tokens=48, temperature=0))[0]
            with torch.no_grad():  # each token is the best one after those before it, so all are greedy decoding's
                logits = model(torch.tensor([[*result.prompt_token_ids, *result.token_ids]])).logits[0]
            assert result.token_ids == logits[len(result.prompt_token_ids) - 1 : -1].argmax(-1).tolist()
