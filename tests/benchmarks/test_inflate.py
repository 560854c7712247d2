"""Inflated checkpoints: the same function in another shape, whose room is filled with weights that are really there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from checkpoints import SHAPES, VOCAB_SIZE, write_checkpoint, write_tokenizer
from families import write_family

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


def inflated(source: Path, shape: InflatedShape) -> Path:
    output = source.parent / f"inflated {shape.query_size}"
    inflate.write_inflated(Inflation(Checkpoint(source), shape), output)
    return output


def logits_of(folder: Path) -> torch.Tensor:
    checkpoint = Checkpoint(folder)
    model = Llama(checkpoint.config, 128)
    names = network_of(checkpoint.config).tensors()
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name).astype(np.float32)) for name in names})
    with torch.no_grad():
        return model.full(token_ids()).logits


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
        result = inflated(source, shape_for(source, heads, kv_heads, hidden_size))
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


def test_extra_room_is_filled_at_the_scale_of_the_source(tmp_path: Path) -> None:
    """So that engines compute with all weights, and no two matrices are equal; what they compute adds nothing."""
    source = Checkpoint(write_checkpoint(tmp_path / "source", "biases"))
    result = Checkpoint(inflated(source.path, shape_for(source.path)))
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        tensor = result.tensor(EXTRA_LAYER + part + ".weight")
        scale = source.tensor(LAYER.format(1) + part + ".weight").std()
        assert tensor.all() and 0.7 * scale < tensor.std() < 1.4 * scale, part
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        assert result.tensor(LAYER.format(0) + part + ".weight").any()
        assert not result.tensor(EXTRA_LAYER + part + ".weight").any()
    gate, up = (result.tensor(EXTRA_LAYER + f"mlp.{part}.weight") for part in ("gate_proj", "up_proj"))
    assert abs(np.corrcoef(gate.ravel(), up.ravel())[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("shape", "message"), [("110m", ""), ("70b", "choose from"), ("1.1b", "heads of 8 do not fill")]
)
def test_the_command_line(
    shape: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tokenizer(write_checkpoint(tmp_path / "source"))
    monkeypatch.setitem(inflate.SHAPES, "110m", shape_for(source))
    monkeypatch.setitem(inflate.SHAPES, "1.1b", replace(shape_for(source), query_size=36))
    result = tmp_path / "result"
    monkeypatch.setattr(sys, "argv", ["x", "--checkpoint", str(source), "--shape", shape, "--output", str(result)])
    if message:
        with pytest.raises(SystemExit, match="2"):
            inflate.main()
        assert message in capsys.readouterr().err and not result.exists()
        return
    inflate.main()
    assert "4 layers of 96, 8 heads of 8" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (result / name).read_bytes() == (source / name).read_bytes()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "source"))
    shape = shape_for(source.path)
    for change, message in (
        ({"hidden_size": 24}, "needs 32 hidden_size and the shape has 24"),
        ({"query_size": 16, "kv_size": 16}, "needs 4 heads and the shape has 2"),
        ({"query_size": 32, "kv_size": 8}, "needs 2 key/value heads and the shape has 1"),
        ({"kv_size": 24}, "query width 64 is no multiple of its key width 24"),
    ):
        with pytest.raises(ConfigError, match=message):
            Inflation(source, replace(shape, **change))
    other = write_family(tmp_path / "other", "Qwen3")
    with pytest.raises(ConfigError, match="only LLaMAs are inflated, and this model's layers have qk_norm"):
        Inflation(Checkpoint(other), shape_for(other))


def test_nothing_is_left_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source")
    inflation = Inflation(Checkpoint(source), shape_for(source))
    with pytest.raises(CheckpointError, match="exists: choose another --output"):
        inflate.write_inflated(inflation, source)
    monkeypatch.setattr(inflation.source, "tensor", Mock(side_effect=CheckpointError("damaged")))
    with pytest.raises(CheckpointError, match="damaged"):
        inflate.write_inflated(inflation, tmp_path / "result")
    assert list(tmp_path.iterdir()) == [source]
