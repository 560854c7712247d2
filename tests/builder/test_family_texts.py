"""Bundles of every family: speculative text is plain text, vocabularies become one, and TensorRT-RTX builds plans."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundling import resigned
from checkpoints import VOCAB_SIZE, edit_weights
from families import CASES, COMPARED, expected_logits, write_family
from lowbit import greedy_texts
from steps import noted, quiet
from transformers import AutoModelForCausalLM

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.head.train import train_head
from draftwood.builder.head.training import HeadTraining
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.cli.inspect import describe
from draftwood.models.errors import BundleError, ConfigError
from draftwood.runtime import SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.passes import prefill
from draftwood.runtime.text.tokenizer import Tokenizer

COMMON = ("Mistral, window", "Qwen2", "Qwen3", "SmolLM3", "Granite", "Phi3, partial rotation")


@pytest.mark.parametrize("backend", [backend for backend, compared in COMPARED.items() if "text" in compared])
@pytest.mark.parametrize(
    "name", [name if name in COMMON else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_speculative_text_is_plain_text(name: str, backend: str, tmp_path: Path) -> None:
    """With a draft of the same family that often agrees, chains and trees."""
    target, draft = write_family(tmp_path / "target", name), write_family(tmp_path / "draft", name, noise=0.1)
    bundle = tmp_path / "bundle"
    options = BuildOptions(target, draft, bundle, backend, "fp32", draft_precision="fp32")
    manifest = build(options, quiet).manifest
    assert manifest.max_length == Checkpoint(target).config.longest
    prompts = ["the cat", "hello world"]
    plain = greedy_texts(bundle, None, prompts, 40)
    for config in (
        SpeculativeConfig("chain", max_draft_len=3, budget="fixed"),
        SpeculativeConfig("topk", max_total_draft_tokens=7, max_draft_len=4, budget="fixed"),
    ):
        assert greedy_texts(bundle, config, prompts, 40) == plain


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_tensorrt_rtx_builds_plans(name: str, tmp_path: Path) -> None:
    """The build compares each role's graph, in the form that TensorRT reads, with the torch reference."""
    if not all(map(importlib.util.find_spec, ("tensorrt_rtx", "polygraphy"))):
        pytest.skip("needs the extra tensorrt-rtx")
    assert COMPARED["tensorrt-rtx"] == ("graph", "plan")
    target, draft = write_family(tmp_path / "target", name), write_family(tmp_path / "draft", name, noise=0.1)
    options = BuildOptions(
        target, draft, tmp_path / "bundle", "tensorrt-rtx", plugin=False, compute_capability=("8.0",)
    )
    manifest = build(options, quiet).manifest
    for role, spec in manifest.engines.items():
        assert spec.plan is not None and spec.plan.layers.kv_cache_update == 4
        assert manifest.parity[role] < 0.05


def with_rows(folder: Path, size: int, tokens: int) -> None:
    """Cut a checkpoint to `size` rows; those beyond `tokens` win wherever they are asked."""

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensors[name] = tensors[name][:size].clone()
        tensors["lm_head.weight"][tokens:] = 40 * tensors["lm_head.weight"][:1]

    edit_weights(folder, cut)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))


@pytest.mark.parametrize("backend", ["onnxruntime", "native"])
@pytest.mark.parametrize(("target_size", "draft_size"), [(300, 320), (320, 300), (VOCAB_SIZE, VOCAB_SIZE + 1)])
def test_rows_beyond_the_smaller_vocabulary_have_no_effect(
    target_size: int, draft_size: int, backend: str, tmp_path: Path
) -> None:
    """The text is that of the target without them."""
    smaller, folders = min(target_size, draft_size), (tmp_path / "target", tmp_path / "draft")
    for folder, size, noise in zip(folders, (target_size, draft_size), (0.0, 0.1), strict=True):
        with_rows(write_family(folder, "Qwen2", noise, vocab_size=320, tie_word_embeddings=False), size, smaller)
    said: list[str] = []
    options = BuildOptions(*folders, tmp_path / "bundle", backend, "fp32", draft_precision="fp32")

    bundle = build(options, noted(said))
    larger, other = ("target", "draft") if target_size > draft_size else ("draft", "target")
    sizes = max(target_size, draft_size), smaller
    assert f"Cutting the {larger}'s vocabulary of {sizes[0]} to the {other}'s {sizes[1]} tokens" in said
    assert {spec.model.vocab_size for spec in bundle.manifest.engines.values()} == {smaller}
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 12)
    engine = bundle.open_engine("target")
    output = prefill(engine, engine.new_cache(), tokens.tolist())
    engine.close()
    expected = expected_logits(folders[0], tokens)[-1]
    assert output is not None
    np.testing.assert_allclose(output.logits[0], expected[:smaller], atol=2e-4, rtol=0)
    plain = greedy_texts(options.output, None, ["the cat"], 24)
    for config in (SpeculativeConfig("chain", max_draft_len=3, budget="fixed"), SpeculativeConfig()):
        assert greedy_texts(options.output, config, ["the cat"], 24) == plain
    prompt = Tokenizer.load(options.output).encode("the cat")
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + plain[0]])).logits[0, len(prompt) - 1 : -1]
    assert logits[:, :smaller].argmax(-1).tolist() == plain[0]
    assert target_size == smaller or (logits.argmax(-1) >= smaller).any()


@pytest.mark.parametrize(
    ("name", "limit", "tokens"),
    [
        ("Mistral, window", "sliding window", 192),
        ("Phi3, longrope", "context before longrope", 192),
        ("Llama", "context", 256),
    ],
)
def test_a_context_longer_than_a_model_computes_is_refused(name: str, limit: str, tokens: int, tmp_path: Path) -> None:
    """With the length that fits; a bundle whose manifest says more is refused, too."""
    folder = write_family(tmp_path / "checkpoint", name)
    options = BuildOptions(folder, folder, tmp_path / "bundle", "onnxruntime")
    with pytest.raises(
        ConfigError, match=f"exceeds the target's {limit} of {tokens} tokens: ask for at most --max-length {tokens}"
    ):
        build(replace(options, max_length=tokens + 1), quiet)
    assert build(replace(options, max_length=tokens), quiet).manifest.max_length == tokens
    resigned(options.output, lambda content: content.update(max_length=tokens + 1))
    with pytest.raises(BundleError, match=f"{limit} is {tokens} tokens|caches have"):
        EngineBundle.open(options.output)


def test_a_head_for_a_family_with_two_vocabularies(tmp_path: Path) -> None:
    """Trained on both models cut to one vocabulary, and the same in the engine: the build compares them."""
    target = write_family(tmp_path / "target", "Granite", vocab_size=300)
    draft = write_family(tmp_path / "draft", "Granite", noise=0.1, vocab_size=320)
    small: dict[str, Any] = {"texts": 4, "max_new_tokens": 8, "batch_size": 2, "epochs": 1}
    train_head(HeadTraining(target, draft, tmp_path / "head", **small), ["the cat", "hello", "x"], quiet)
    options = BuildOptions(target, draft, tmp_path / "bundle", "native", acceptance_head=tmp_path / "head")
    bundle = build(replace(options, precision="fp32", draft_precision="fp32"), quiet)
    assert "acceptance" in bundle.manifest.engines["draft"].outputs
    table = describe(bundle)
    assert table.columns[0]._cells.count("added to LLaMA's layer") == 1
    config = SpeculativeConfig("chain", max_draft_len=4, stop_rule="specdec++", budget="fixed")
    assert greedy_texts(options.output, config, ["the cat"], 16) == greedy_texts(options.output, None, ["the cat"], 16)
