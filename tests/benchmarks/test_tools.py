"""The tools of benchmarks run: methods compared, pairs made and inflated, questions taken, results listed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from bundling import DEMO, ROOT
from checkpoints import SHAPES, VOCAB_SIZE, write_checkpoint, write_tokenizer
from families import write_family
from transformers import LlamaForCausalLM

from benchmarks.papers.methods import BUDGETS, RANKS, PairBenchmark, make_configurations, summarise
from benchmarks.tools import demo_pair, inflate
from benchmarks.tools.inflate import InflatedShape, Inflation
from benchmarks.tools.pair import SIZES, Agreement, write_pair
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.cli.bench import read_prompts
from draftwood.models.errors import CheckpointError, ConfigError
from draftwood.models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.fit import refuse_too_large
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts


def test_a_comparison_of_methods_counts_what_happened(tiny_bundle: Path) -> None:
    bundle = EngineBundle.open(tiny_bundle)
    for budget in BUDGETS:
        for config in make_configurations(budget, [0.6, 0.2, 0.1], head=False).values():
            refuse_too_large(config, bundle)
    passes, host = PassCosts((1,), (64,), ((1.0,),)), HostCosts(0, 0, 0)
    costs = CostModel(passes, passes, host, host, {})
    bench = PairBenchmark(bundle, [[1, 5, 9], [1, 7]], max_tokens=6)
    acceptance = bench.acceptance_by_rank(1.0)
    assert len(acceptance) == RANKS and 0 <= sum(acceptance) <= 1
    for config in make_configurations(8, acceptance, head=False).values():
        texts = bench.run(config, 0.6)
        assert [text.num_tokens for text in texts] == [6, 6]
        row = summarise(texts, ["code", "prose"], costs)
        assert 1 <= row["tokens_per_target_pass"] <= 6 and row["verification_rate"] <= 1
        assert row["tokens_per_target_pass_by_kind"] == {
            kind: round(6 / text.target_passes, 3) for kind, text in zip(("code", "prose"), texts, strict=True)
        }
        # Every pass costs a second: the measured ratio of both models is 1.
        expected = 12 / sum(text.target_passes + text.draft_passes for text in texts)
        assert row["modelled_speed_up"]["measured"] == round(expected, 3)


def test_questions_are_taken_from_each_file_at_equal_distances(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text("".join(json.dumps({"prompt": f"p{line}"}) + "\n" for line in range(9)))
    second.write_text("".join(json.dumps({"turns": [f"t{line}", "then"]}) + "\n" for line in range(4)))
    command = (sys.executable, "-m", "benchmarks.tools.questions", first, second)
    subprocess.run([*map(str, command), "--num", "2", "--output", str(tmp_path / "x")], cwd=ROOT, check=True)
    assert read_prompts(tmp_path / "x") == ["p0", "t0", "p4", "t2"]


def test_the_index_lists_every_script_and_every_result() -> None:
    folder = ROOT / "benchmarks"
    index = (folder / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\((results/[^)]+)\)", index))
    committed = subprocess.run(["git", "ls-files", "results"], cwd=folder, capture_output=True, text=True, check=True)
    assert linked == set(committed.stdout.split())
    assert all(re.fullmatch(r"results/[\w.-]+_20\d\d-\d\d-\d\d\.(json|svg)", link) for link in linked)
    scripts = {file.relative_to(folder).as_posix() for file in folder.rglob("*.py") if "def main(" in file.read_text()}
    named = set(re.findall(r"^\| `([\w/]+\.py)`", index, re.MULTILINE))
    assert scripts - {"precision/convert_gguf.py"} <= named and all((folder / name).is_file() for name in named)


def test_the_demo_s_folders_hold_the_numbers_of_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Checkpoint(DEMO / "target")
    demo_pair.write_target(source, tmp_path / "target")
    written = Checkpoint(tmp_path / "target")
    assert written.config == source.config and written.eos_token_ids() == source.eos_token_ids()
    for name in network_of(source.config).tensors():
        expected = source.tensor(name).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(written.tensor(name).astype(np.float32), expected)
    trimmed = Checkpoint(DEMO / "smollm2")
    demo_pair.write_full_draft(trimmed, DEMO / "smollm2", "Leaves change their colour.\n" * 9, tmp_path / "full")
    full, kept = Checkpoint(tmp_path / "full"), trimmed.kept_tokens
    assert full.kept_tokens is None and kept is not None
    np.testing.assert_array_equal(full.tensor(EMBEDDING_WEIGHT), trimmed.tensor(EMBEDDING_WEIGHT))
    np.testing.assert_array_equal(full.tensor(HEAD_WEIGHT)[kept], trimmed.tensor(HEAD_WEIGHT))
    assert float(capsys.readouterr().out.rpartition(": ")[2]) < 1e-6  # of the others


# The synthetic pair


def test_a_synthetic_pair_agrees_on_the_shares_asked_for(tmp_path: Path) -> None:
    size, agreement, second = SIZES["tiny"], 0.7, 0.4
    write_pair(size, agreement, second, 1, tmp_path / "pair")
    table = Agreement(size.vocab_size, agreement, second, 1)
    order = np.random.default_rng(0).permutation(len(table.words))
    text, right = torch.from_numpy(table.words[order])[None], table.words[table.following[order]]

    def best_two(role: str) -> Any:
        model: Any = LlamaForCausalLM.from_pretrained(tmp_path / "pair" / role, dtype=torch.float32)
        with torch.no_grad():
            return model(text).logits[0].topk(2)

    chosen = best_two("target")
    assert np.array_equal(chosen.indices[:, 0], right)
    assert (chosen.values[:, 0] - chosen.values[:, 1]).min() > 4, "no rounding touches it"
    proposed = best_two("draft").indices.numpy()
    assert np.mean(proposed[:, 0] == right) == pytest.approx(agreement, abs=0.02)
    assert np.sum(proposed[:, 1] == right) / np.sum(proposed[:, 0] != right) == pytest.approx(second, abs=0.08)
    with pytest.raises(ConfigError, match="--agreement is a share"):
        write_pair(size, 1.5, second, 0, tmp_path / "other")
    with pytest.raises(CheckpointError, match="choose another --output"):
        write_pair(size, agreement, second, 0, tmp_path / "pair")


# Inflated checkpoints


def shape_for(source: Checkpoint, heads: int = 8, kv_heads: int = 8, hidden_size: int = 96) -> InflatedShape:
    head_dim = source.config.head_dim
    return InflatedShape(hidden_size, 80, 4, heads * head_dim, kv_heads * head_dim)


def logits_of(folder: Path) -> torch.Tensor:
    """Beyond the original context of llama3's scaled positions."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, (1, 100)))
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


@pytest.mark.parametrize("name", SHAPES)
def test_an_inflated_checkpoint_computes_what_its_source_does(name: str, tmp_path: Path) -> None:
    """With a KV head for each query head, and for three; the second hidden size is no multiple of any source's."""
    source = Checkpoint(write_checkpoint(tmp_path / "source", name))
    expected = logits_of(source.path)
    for heads, kv_heads, hidden_size in ((8, 8, 96), (12, 4, 108)):
        output = tmp_path / str(heads)
        inflate.write_inflated(Inflation(source, shape_for(source, heads, kv_heads, hidden_size)), output)
        config = Checkpoint(output).config
        assert (config.num_heads, config.num_kv_heads, config.num_layers) == (heads, kv_heads, 4)
        assert (logits_of(output) - expected).abs().max() <= 1e-5 * expected.abs().max()
        extra = Checkpoint(output).tensor("model.layers.3.mlp.up_proj.weight")
        assert extra.all(), "the room is filled"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 24}, "needs 32 hidden_size and the shape has 24"),
        ({"query_size": 16, "kv_size": 16}, "needs 4 heads and the shape has 2"),
        ({"query_size": 32, "kv_size": 8}, "needs 2 key/value heads and the shape has 1"),
        ({"kv_size": 24}, "query width 64 is no multiple of its key width 24"),
        ({"query_size": 36}, "heads of 8 do not fill"),
        ({}, "only LLaMAs are inflated, and this model's layers have qk_norm"),
    ],
)
def test_what_cannot_be_inflated_is_refused(change: dict[str, int], message: str, tmp_path: Path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "source") if change else write_family(tmp_path / "source", "Qwen3"))
    with pytest.raises(ConfigError, match=message):
        Inflation(source, replace(shape_for(source), **change))


def test_the_command_that_inflates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tokenizer(write_checkpoint(tmp_path / "source"))
    monkeypatch.setitem(inflate.SHAPES, "110m", shape_for(Checkpoint(source)))
    for shape, code in (("110m", None), ("70b", 2)):
        output = tmp_path / shape
        monkeypatch.setattr(sys, "argv", ["x", "--checkpoint", str(source), "--shape", shape, "--output", str(output)])
        if code is None:
            inflate.main()
            assert (output / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        else:
            with pytest.raises(SystemExit, match="2"):
                inflate.main()
