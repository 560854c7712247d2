"""Inflated checkpoints: the same function in another shape, whose room is filled with weights that are really there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SHAPES, VOCAB_SIZE, edit_weights, write_checkpoint, write_tokenizer
from families import write_family
from safetensors import safe_open
from transformers import LlamaForCausalLM

from benchmarks.tools import inflate
from benchmarks.tools.inflate import InflatedShape, Inflation, count_residual_copies
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models.errors import CheckpointError, ConfigError
from draftwood.models.layers import network_of
from draftwood.models.llama import Llama

LAYER = "model.layers.{}."
EXTRA_LAYER = LAYER.format(3)


def shape_for(folder: Path, heads: int = 8, kv_heads: int = 8, hidden_size: int = 96) -> InflatedShape:
    head_dim = Checkpoint(folder).config.head_dim
    return InflatedShape(hidden_size, 80, 4, heads * head_dim, kv_heads * head_dim)


def inflated(source: Path, shape: InflatedShape, dtype: str | None = None, seed: int = 0) -> Path:
    output = source.parent / f"inflated {dtype} {seed}"
    inflate.write_inflated(Inflation(Checkpoint(source), shape, dtype, seed), output)
    return output


def logits_of(folder: Path) -> torch.Tensor:
    checkpoint = Checkpoint(folder)
    model = Llama(checkpoint.config, 128)
    names = network_of(checkpoint.config).tensors()
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name).astype(np.float32)) for name in names})
    with torch.no_grad():
        return model.full(token_ids()).logits


def hidden_states(folder: Path) -> tuple[torch.Tensor, ...]:
    """What transformers has before each of its layers."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states: tuple[torch.Tensor, ...] = model(token_ids(), output_hidden_states=True).hidden_states
    return states[:-1]


def token_ids() -> torch.Tensor:
    """Beyond the original context of llama3's scaled positions."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, (1, 100)))


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_greedy_tokens_are_the_source_s(name: str, tmp_path: Path) -> None:
    """With a KV head for each query head, and for three; the second hidden size is no multiple of any source's."""
    source = write_checkpoint(tmp_path / "source", name)
    expected = logits_of(source)
    for heads, kv_heads, hidden_size in ((8, 8, 96), (12, 4, 108)):
        result = inflated(source, shape_for(source, heads, kv_heads, hidden_size), seed=heads)
        config = Checkpoint(result).config
        assert (config.num_heads, config.num_kv_heads, config.num_layers) == (heads, kv_heads, 4)
        assert (config.hidden_size, config.intermediate_size) == (hidden_size, 80)
        assert_same(logits_of(result), expected)


@pytest.mark.parametrize(("hidden_size", "copies", "gain"), [(96, 3, 1.0), (256, 2, 0.5), (512, 1, 0.25)])
def test_nothing_is_rounded_when_the_hidden_size_allows(
    hidden_size: int, copies: int, gain: float, tmp_path: Path
) -> None:
    assert count_residual_copies(32, hidden_size) == copies
    source = write_checkpoint(tmp_path / "source", dtype="bfloat16")
    result = inflated(source, shape_for(source, hidden_size=hidden_size))
    narrow, wide = Checkpoint(source), Checkpoint(result)
    name = LAYER.format(1) + "input_layernorm.weight"
    assert wide.tensor(name).dtype == narrow.tensor(name).dtype
    np.testing.assert_array_equal(wide.tensor(name)[:32].astype(float), narrow.tensor(name).astype(float) * gain)
    assert not wide.tensor(name)[32:].any()
    assert wide.config.norm_eps == narrow.config.norm_eps * gain**2
    assert_same(logits_of(result), logits_of(source))


def test_as_many_copies_as_leave_norms_a_power_of_two() -> None:
    assert [count_residual_copies(32, 32 * ratio) for ratio in (1, 4, 9, 12)] == [1, 1, 9, 3]
    assert count_residual_copies(30, 96) == 1


@pytest.mark.parametrize("name", ["gqa", "biases"])
def test_the_residual_stream_is_the_source_s_some_times_and_zeros(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", name)
    result = inflated(source, shape_for(source, hidden_size=256))
    narrow, wide = hidden_states(source), hidden_states(result)
    for expected, rows in zip(narrow, wide, strict=False):
        torch.testing.assert_close(rows[..., :32], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(rows[..., 32:64], expected, atol=1e-4, rtol=0)
    for rows in wide:
        assert not rows[..., 64:].any()
    torch.testing.assert_close(wide[2], wide[3], atol=0, rtol=0)  # an extra layer adds nothing


def test_extra_room_is_filled_at_the_scale_of_the_source(tmp_path: Path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "source", "biases"))
    result = Checkpoint(inflated(source.path, shape_for(source.path)))
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        for kind in (".weight", ".bias"):
            for layer in (0, 3):
                tensor = result.tensor(LAYER.format(layer) + part + kind)
                scale = source.tensor(LAYER.format(min(layer, 1)) + part + kind).std()
                assert tensor.all() and 0.7 * scale < tensor.std() < 1.4 * scale, (part, kind, layer)
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        assert result.tensor(LAYER.format(0) + part + ".weight").any()
        assert not result.tensor(EXTRA_LAYER + part + ".weight").any()
        assert not result.tensor(EXTRA_LAYER + part + ".bias").any()
    assert result.tensor(EXTRA_LAYER + "input_layernorm.weight").any()
    gate, up = (result.tensor(EXTRA_LAYER + f"mlp.{part}.weight") for part in ("gate_proj", "up_proj"))
    assert abs(np.corrcoef(gate.ravel(), up.ravel())[0, 1]) < 0.1


def test_shards_dtypes_and_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source")
    whole = inflated(source, shape_for(source), "fp16")
    monkeypatch.setattr(inflate, "SHARD_BYTES", 50_000)
    shape = shape_for(source)
    sharded = inflated(source, shape, "bf16")
    other = inflated(source, shape, "fp32", seed=1)
    assert sorted(file.name for file in whole.glob("*.safetensors")) == ["model-00001-of-00001.safetensors"]
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 3 and files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    assert max(file.stat().st_size for file in files) < 60_000
    with safe_open(files[0], framework="numpy") as handle:  # transformers before 5 asks for it
        assert handle.metadata() == {"format": "pt"}
    first, second, third = map(Checkpoint, (whole, sharded, other))
    name = EXTRA_LAYER + "mlp.up_proj.weight"
    dtypes = [checkpoint.tensor(name).dtype.name for checkpoint in (first, second, third)]
    assert dtypes == ["float16", "bfloat16", "float32"]
    assert [json.loads((folder / "config.json").read_text())["dtype"] for folder in (whole, sharded, other)] == dtypes
    np.testing.assert_allclose(first.tensor(name), second.tensor(name).astype(np.float32), rtol=2**-7)
    assert not np.array_equal(first.tensor(name), third.tensor(name).astype(np.float16))


def test_the_command_line_copies_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tokenizer(write_checkpoint(tmp_path / "source"))
    monkeypatch.setitem(inflate.SHAPES, "110m", shape_for(source))
    run(monkeypatch, source, "110m", tmp_path / "result")
    assert "4 layers of 96, 8 heads of 8" in " ".join(capsys.readouterr().out.split())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "result" / name).read_bytes() == (source / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "result"}


def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "source", "head_dim 12")
    for shape, message in (("70b", "choose from"), ("1.1b", "heads of 12 do not fill")):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, source, shape, tmp_path / "result")
        assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def run(monkeypatch: pytest.MonkeyPatch, source: Path, shape: str, output: Path) -> None:
    arguments = ["--checkpoint", str(source), "--shape", shape, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["inflate.py", *arguments])
    inflate.main()


def test_a_shape_without_room_is_refused(tmp_path: Path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "source"))
    shape = shape_for(source.path)
    for change, message in (
        ({"hidden_size": 24}, "needs 32 hidden_size and the shape has 24"),
        ({"intermediate_size": 40}, "needs 48 intermediate_size"),
        ({"num_layers": 1}, "needs 2 layers"),
        ({"query_size": 16, "kv_size": 16}, "needs 4 heads and the shape has 2"),
        ({"query_size": 32, "kv_size": 8}, "needs 2 key/value heads and the shape has 1"),
        ({"query_size": 36}, "heads of 8 do not fill the shape's query width of 36"),
        ({"kv_size": 24}, "query width 64 is no multiple of its key width 24"),
    ):
        with pytest.raises(ConfigError, match=message):
            Inflation(source, replace(shape, **change))


def test_other_families_are_refused_by_what_they_add(tmp_path: Path) -> None:
    for name, added in (("Qwen3", "qk_norm"), ("Granite", "embedding_multiplier, attention_multiplier")):
        source = write_family(tmp_path / name, name)
        with pytest.raises(ConfigError, match=f"only LLaMAs are inflated, and this model's layers have {added}"):
            Inflation(Checkpoint(source), shape_for(source))


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    shape = shape_for(source)
    edit_weights(source, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    with pytest.raises(CheckpointError, match="too large for float16: choose --dtype bf16 or fp32"):
        inflated(source, shape, "fp16")
    edit_weights(source, lambda tensors: tensors["lm_head.weight"].fill_(torch.nan))
    with pytest.raises(CheckpointError, match="NaN"):
        inflated(source, shape)
    assert list(tmp_path.iterdir()) == [source]
    with pytest.raises(CheckpointError, match="exists: choose another --output"):
        inflate.write_inflated(Inflation(Checkpoint(source), shape), source)
