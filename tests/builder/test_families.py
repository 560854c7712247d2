"""Every family on every backend against transformers, with the same bits in any company, and in bundles. The table in
docs/models.md says what is compared."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from bundling import ROOT, resigned
from checkpoints import VOCAB_SIZE, edit_weights
from families import CAPACITY, CASES, COMPARED, WIDTHS, expected_logits, opened, rope, write_family
from lowbit import greedy_texts, in_one_pass, one_by_one
from native_parts import held, kernels, open_native, spec_of
from numpy.typing import NDArray
from steps import noted, quiet
from transformers import AutoModelForCausalLM
from trees import Tree

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.head.train import train_head
from draftwood.builder.head.training import HeadTraining
from draftwood.builder.options import BuildOptions
from draftwood.builder.parity import Rows, largest_difference, rows_of
from draftwood.builder.pipeline import build
from draftwood.builder.reference import score_rows
from draftwood.cli.inspect import describe
from draftwood.models.bindings import TARGET
from draftwood.models.errors import BundleError, ConfigError
from draftwood.models.families import FAMILIES, Variant
from draftwood.models.llama import Llama
from draftwood.plugins.native.library import NativeLibrary
from draftwood.runtime import SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.base import Runner
from draftwood.runtime.engines.native import engine as native
from draftwood.runtime.engines.passes import prefill
from draftwood.runtime.text.tokenizer import Tokenizer

TOKENS = 48
# A branch that ends, one that goes on, and leaves.
PARENTS = (-1, 0, 0, 1, 3, 2, 4, -1, 5, 8, 9, 7)


class Written:
    """A checkpoint folder, some tokens and what transformers predicts after each of them, [T, V]."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = write_family(folder, name)
        self.tokens: NDArray[np.int64] = np.random.default_rng(0).integers(0, VOCAB_SIZE, TOKENS)
        self.expected = expected_logits(self.folder, self.tokens)
        self.checkpoint = Checkpoint(self.folder)


@pytest.fixture(scope="module", params=CASES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("family") / "checkpoint", request.param)


@pytest.mark.parametrize("backend", [backend for backend, compared in COMPARED.items() if "logits" in compared])
def test_logits_are_transformers(backend: str, written: Written, tmp_path: Path) -> None:
    """Of every row of a text: a prompt after which the rest is a chain of one pass."""
    if backend == "reference":  # which has no cache: all of it is one pass
        rows = Rows(written.tokens, np.arange(TOKENS), np.tri(TOKENS, dtype=np.bool_))
        found = score_rows(written.checkpoint.tensor, written.checkpoint.config, rows).logits
        np.testing.assert_allclose(found, written.expected, atol=2e-4, rtol=0)
        return
    engine, tokens = opened(backend, written.checkpoint, tmp_path), written.tokens.tolist()
    cache, prompt = engine.new_cache(), TOKENS - WIDTHS[-1]
    prefill(engine, cache, tokens[:prompt])
    chain = Tree(tuple(tokens[prompt:]), tuple(range(-1, WIDTHS[-1] - 1)))
    found = engine.score(chain.batch(engine.spec, prompt), cache).logits[: WIDTHS[-1]].copy()
    engine.close()
    np.testing.assert_allclose(found, written.expected[prompt:], atol=2e-4, rtol=0)
    assert np.ptp(written.expected) > 5


def test_a_family_is_no_llama(written: Written) -> None:
    """What it adds to a layer counts: without that, the same weights predict other tokens."""
    config = written.checkpoint.config
    if config.variant.differences and not config.variant.output_norms:  # without which tensors would have no place
        model = Llama(replace(config, variant=Variant()), TOKENS)
        weights = {name: written.checkpoint.tensor(name) for name in model.state_dict()}
        model.load_state_dict({name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()})
        with torch.no_grad():
            ignored = model.full(torch.from_numpy(written.tokens)[None]).logits[0].numpy()
        assert np.abs(ignored - written.expected).max() > 0.1


def test_a_row_has_the_same_bits_in_any_company(written: Written, tmp_path: Path) -> None:
    """Of the native engine, in every width that a tree fits."""
    assert "bits" in COMPARED["native"]
    engine, tokens = opened("native", written.checkpoint, tmp_path), written.tokens.tolist()
    assert_a_branch_changes_no_bit(engine, tokens[:20], tokens[20 : 20 + len(PARENTS)])
    engine.close()


def assert_a_branch_changes_no_bit(engine: Runner, prefix: list[int], tokens: list[int]) -> None:
    """Of three rows of a tree, nor the width of the pass."""
    tree = Tree(tuple(tokens), PARENTS)
    for row in (6, 10, 11):
        path = tree.path(row)
        alone = one_by_one(engine, prefix, [tree.tokens[each] for each in path])
        for width in (16, 32):
            for one, other in zip(in_one_pass(engine, prefix, tree, path, width), alone, strict=True):
                np.testing.assert_array_equal(one.logits, other.logits)
                np.testing.assert_array_equal(one.cached, other.cached)


@pytest.mark.parametrize("march", ["-march=x86-64-v3", "-march=x86-64"])
@pytest.mark.parametrize("name", ["Qwen3", "Granite", "Phi3, partial rotation", "Gemma3"])
def test_lesser_processors_compute_them_too(name: str, march: str, tmp_path: Path) -> None:
    written = Written(tmp_path / "checkpoint", name)
    with patch.object(native, "open_kernels", lambda: NativeLibrary(kernels(march))):
        engine = opened("native", written.checkpoint, tmp_path)
    output = prefill(engine, engine.new_cache(), written.tokens.tolist())
    assert output is not None
    np.testing.assert_allclose(output.logits[0], written.expected[-1], atol=2e-4, rtol=0)
    assert_a_branch_changes_no_bit(engine, written.tokens[:20].tolist(), written.tokens[20:32].tolist())
    engine.close()


@pytest.mark.parametrize("name", ["Phi3, longrope", "Llama, dynamic"])
def test_a_context_ends_where_transformers_begins_to_differ(name: str, tmp_path: Path) -> None:
    """Up to the longest context tables that never change are what it computes; one token more, and they are not."""
    checkpoint = Checkpoint(write_family(tmp_path, name))
    longest = checkpoint.config.longest
    model = Llama(checkpoint.config, longest + 1)
    model.load_state_dict({each: torch.from_numpy(np.array(checkpoint.tensor(each))) for each in model.state_dict()})
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, longest + 1)
    for length in (longest, longest + 1):
        with torch.no_grad():
            found = model.full(torch.from_numpy(tokens[None, :length])).logits[0, -1].numpy()
        difference = np.abs(found - expected_logits(tmp_path, tokens[:length])[-1]).max()
        assert difference < 2e-4 if length == longest else difference > 1e-3


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "SmolLM3", "Granite", "Phi3, partial rotation", "Gemma3"])
def test_rounded_matrices_of_the_native_engine(name: str, precision: str, tmp_path: Path) -> None:
    """What numpy computes on the weights that the engine holds, and the same bits in any company."""
    sizes = {"hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
    rotated = rope("default", partial_rotary_factor=0.5) if name.startswith("Phi3") else {}
    weights = held(write_family(tmp_path / "checkpoint", name, **sizes, **rotated), precision)
    spec = spec_of(weights, TARGET, precision, WIDTHS, CAPACITY)
    engine, reference = (
        open_native(weights, spec, tmp_path),
        score_rows(weights.tensor, weights.config, rows_of(spec)),
    )
    assert largest_difference(engine, reference) < (0.03 if precision == "bf16" else 0.1)
    assert_a_branch_changes_no_bit(engine, list(range(3, 23)), list(range(40, 40 + len(PARENTS))))
    engine.close()


def test_the_table_says_what_was_compared() -> None:
    page = ROOT / "docs" / "models.md"
    found = [", ".join(compared) for compared in COMPARED.values()]
    assert table_of(page, "family") == {"family": [*COMPARED], "each of these": found}
    (names,) = re.findall(r"^Compared: (.*?)\.\n", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert names.replace("\n", " ").split("; ") == list(CASES)


def test_the_documents_list_the_architectures() -> None:
    rows = table_of(ROOT / "docs" / "models.md", "architecture")
    del rows["architecture"]
    assert list(rows) == list(FAMILIES)


def table_of(file: Path, title: str) -> dict[str, list[str]]:
    """The table of a page whose first column has this title: its cells by the first one of each row."""
    lines = file.read_text(encoding="utf-8").split("\n")
    first = next(index for index, line in enumerate(lines) if line.startswith(f"| {title} |"))
    rows: dict[str, list[str]] = {}
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        if not re.fullmatch("-+", name):
            rows[name] = cells
    return rows


COMMON = ("Mistral, window", "Qwen2", "Qwen3", "SmolLM3", "Granite", "Phi3, partial rotation", "Gemma3")


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
    """The build compares each role's graph, in the form that TensorRT reads, with the reference."""
    if not all(map(importlib.util.find_spec, ("tensorrt_rtx", "polygraphy"))):
        pytest.skip("needs the extra tensorrt-rtx")
    assert COMPARED["tensorrt-rtx"] == ("graph", "plan")
    target, draft = write_family(tmp_path / "target", name), write_family(tmp_path / "draft", name, noise=0.1)
    options = BuildOptions(
        target, draft, tmp_path / "bundle", "tensorrt-rtx", plugin=False, compute_capability=("8.0",)
    )
    manifest = build(options, quiet).manifest
    for role, spec in manifest.engines.items():
        assert spec.plan is not None and spec.plan.layers.kv_cache_update == 2 * spec.model.num_layers
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
