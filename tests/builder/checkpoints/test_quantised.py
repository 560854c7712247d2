"""Quantised checkpoints: every tensor has exactly the values that its format defines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from checkpoints import transformers_logits, write_checkpoint, write_tokenizer
from engine_parts import TOLERANCE, random_text
from packers import PackedMatrix, pack_checkpoint, save_module
from quantised import AWQ, COMPRESSED, GPTQ, IN, OUT, SCHEME, compressed, opened
from steps import noted

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.folder import LAYOUTS
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.bindings import TARGET
from draftwood.models.errors import CheckpointError
from draftwood.runtime.engines.passes import prefill


def exact(folder: Path, config: dict[str, Any], matrix: PackedMatrix) -> None:
    source = opened(save_module(folder, matrix), config)
    stored = source.stored("m.weight")
    assert stored is not None and stored.is_read and stored.shape == (OUT, IN)
    weight = source.tensor("m.weight")
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight, matrix.weight)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("group", [-1, 8, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits: int, group: int, order: bool, v2: bool, tmp_path: Path) -> None:
    form = {"checkpoint_format": "gptq_v2" if v2 else "gptq"}
    config = GPTQ | {"bits": bits, "group_size": group, "desc_act": order} | form
    exact(tmp_path, config, packers.gptq(OUT, IN, bits, group, order, v2))


def test_gptq_without_a_format_is_the_first_one(tmp_path: Path) -> None:
    exact(tmp_path, GPTQ, packers.gptq(OUT, IN))


def test_a_zero_point_of_nought_borrows_from_the_next_one(tmp_path: Path) -> None:
    """As GPTQModel writes it into format v1: whole words less 0x11111111."""
    matrix = packers.gptq(OUT, IN, v2=True)
    zeros = matrix.tensors["qzeros"].numpy().view(np.uint32)
    matrix.tensors["qzeros"] = torch.from_numpy((zeros & 0xFFFF0F00).view(np.int32))
    source = opened(save_module(tmp_path / "v2", matrix), GPTQ | {"checkpoint_format": "gptq_v2"})
    matrix.tensors["qzeros"] = torch.from_numpy(((zeros & 0xFFFF0F00) - np.uint32(0x11111111)).view(np.int32))
    less = opened(save_module(tmp_path / "v1", matrix), GPTQ)
    np.testing.assert_array_equal(less.tensor("m.weight"), source.tensor("m.weight"))


def test_gptq_without_an_index(tmp_path: Path) -> None:
    matrix = packers.gptq(OUT, IN)
    del matrix.tensors["g_idx"]
    exact(tmp_path, GPTQ, matrix)
    with pytest.raises(CheckpointError, match=r"tensor m\.g_idx is missing; the checkpoint is incomplete"):
        opened(tmp_path, GPTQ | {"desc_act": True}).stored("m.weight")


@pytest.mark.parametrize("group", [-1, 8, 20])
def test_awq(group: int, tmp_path: Path) -> None:
    exact(tmp_path, AWQ | {"group_size": group}, packers.awq(OUT, IN, group))


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [-1, 8, 20])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_of_compressed_tensors(
    bits: int, group: int, symmetric: bool, order: bool, tmp_path: Path
) -> None:
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    config = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy)
    exact(tmp_path, config, packers.compressed_packed(OUT, IN, bits, group, symmetric, order))


def test_sizes_that_do_not_fill_words(tmp_path: Path) -> None:
    """Of inputs, and of the outputs that zero points are packed along."""
    matrix = packers.compressed_packed(21, 35, symmetric=False)
    source = opened(save_module(tmp_path, matrix), compressed("pack-quantized", symmetric=False))
    np.testing.assert_array_equal(source.tensor("m.weight"), matrix.weight)


def test_zero_points_that_an_older_release_did_not_pack(tmp_path: Path) -> None:
    matrix = packers.compressed_packed(OUT, IN, group=8, symmetric=False)
    packed = matrix.tensors["weight_zero_point"].numpy().view(np.uint8)  # [words, groups * 4]
    words = matrix.tensors["weight_zero_point"].T.contiguous().numpy().view(np.uint8)
    halves = np.stack([words & 15, words >> 4], axis=2).reshape(len(words), -1)  # [groups, out]
    assert packed.size == words.size
    matrix.tensors["weight_zero_point"] = torch.from_numpy(halves.T.astype(np.int8).copy() - 8)
    exact(tmp_path, compressed("pack-quantized", symmetric=False, strategy="group", group_size=8), matrix)


@pytest.mark.parametrize("scale", ["F32", "F16"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_plain_integers_of_compressed_tensors(symmetric: bool, scale: str, tmp_path: Path) -> None:
    config = compressed("int-quantized", num_bits=8, symmetric=symmetric)
    exact(tmp_path, config, packers.compressed_int8(OUT, IN, symmetric, scale))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("form", ["naive-quantized", "float-quantized"])
def test_float8_of_compressed_tensors(form: str, strategy: str, tmp_path: Path) -> None:
    block = {"block_structure": [16, 16]} if strategy == "block" else {}
    config = compressed(form, num_bits=8, type="float", strategy=strategy, **block)
    exact(tmp_path, config, packers.compressed_float8(OUT, IN, strategy))


def test_modules_of_two_schemes(tmp_path: Path) -> None:
    """The tensors say which of them a module has."""
    groups = {
        "group_0": {"targets": ["re:.*down_proj"], "weights": SCHEME | {"num_bits": 8}, "format": "int-quantized"},
        "group_1": {"targets": ["Linear"], "weights": SCHEME, "format": "pack-quantized"},
    }
    first, second = packers.compressed_packed(OUT, IN), packers.compressed_int8(OUT, IN)
    others = {f"n.{name}": tensor for name, tensor in second.tensors.items()}
    folder = save_module(tmp_path, first, **others)
    source = opened(folder, COMPRESSED | {"format": "mixed-precision", "config_groups": groups})
    np.testing.assert_array_equal(source.tensor("m.weight"), first.weight)
    np.testing.assert_array_equal(source.tensor("n.weight"), second.weight)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    rounded = {"num_bits": 8, "type": "int", "dynamic": True}
    groups = {"group_0": {"weights": SCHEME | {"num_bits": 8}, "input_activations": rounded}}
    config = COMPRESSED | {"format": "int-quantized", "config_groups": groups, "kv_cache_scheme": rounded}
    folder = write_checkpoint(tmp_path / "a")
    plain = write_checkpoint(tmp_path / "b")
    assert Checkpoint(folder).notes == ()
    pack_checkpoint(folder, plain, config, packers.compressed_int8)
    first, *others = Checkpoint(folder).notes
    assert first == "its weights are compressed-tensors, int8 by channel, and are dequantised"
    assert [note.split()[1:6] for note in others] == [
        ["input", "activations", "are", "not", "rounded"],
        ["keys", "and", "values", "are", "not"],
    ]


PAIRS: dict[str, tuple[dict[str, Any], Callable[[int, int], PackedMatrix]]] = {
    "gptq": (GPTQ | {"desc_act": True}, lambda outputs, inputs: packers.gptq(outputs, inputs, order=True)),
    "awq": (AWQ, lambda outputs, inputs: packers.awq(outputs, inputs, 8)),
    "compressed-tensors": (
        compressed("pack-quantized", symmetric=False),
        lambda outputs, inputs: packers.compressed_packed(outputs, inputs, symmetric=False),
    ),
}


@pytest.mark.parametrize("method", LAYOUTS)
def test_an_engine_of_a_quantised_pair_computes_what_transformers_does(method: str, tmp_path: Path) -> None:
    config, pack = PAIRS[method]
    for role in ("target", "draft"):
        for folder in (tmp_path / role, tmp_path / "plain" / role):
            write_tokenizer(write_checkpoint(folder, seed=len(role)))
        pack_checkpoint(tmp_path / role, tmp_path / "plain" / role, config, pack)
    steps: list[str] = []

    options = BuildOptions(tmp_path / "target", tmp_path / "draft", tmp_path / "bundle", "onnxruntime")
    bundle = build(options, noted(steps))
    assert any(title.startswith(f"The draft: its weights are {method}") for title in steps)
    engine, text = bundle.open_engine(TARGET), random_text(50)
    output = prefill(engine, engine.new_cache(), text)
    assert output is not None
    expected = transformers_logits(tmp_path / "plain" / "target")([text])[0]
    np.testing.assert_allclose(output.logits[0], expected, atol=TOLERANCE)
    engine.close()
