"""Fused matrices of Phi-3, seen as the matrices that they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import packers
import pytest
import torch
from adapters import PREFIX, write_adapter
from checkpoints import edit_weights
from families import write_family
from packers import compressed, pack_checkpoint
from safetensors.torch import load_file

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.safetensors import Safetensors
from draftwood.builder.checkpoints.source import Blocks
from draftwood.builder.checkpoints.views import split as split_fused
from draftwood.models.errors import CheckpointError
from draftwood.models.layers import network_of

LAYER = "model.layers.1"
QKV, GATE_UP = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.gate_up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_family(tmp_path / "checkpoint", "Phi3")


class InBlocks(Safetensors):
    """A file whose matrices are stored in blocks: their codes are the numbers of their places."""

    def blocks(self, name: str) -> Blocks | None:
        shape = self.tensor(name).shape
        codes = np.arange(np.prod(shape)).reshape(shape).astype(np.int8)
        scales = np.arange(shape[0], dtype=np.float32)[:, None]
        return Blocks(8, codes, scales, -scales)


def test_blocks_of_a_fused_matrix_are_those_of_its_parts(folder: Path) -> None:
    split, whole = split_fused(InBlocks(folder), Checkpoint(folder).config), InBlocks(folder).blocks(QKV)
    parts = [split.blocks(f"{LAYER}.self_attn.{part}.weight") for part in ("q_proj", "k_proj", "v_proj")]
    assert whole is not None
    for index in range(1, len(whole)):
        found = np.concatenate([part[index] for part in parts if part is not None])
        np.testing.assert_array_equal(found, whole[index])
    plain = f"{LAYER}.self_attn.o_proj.weight"
    assert (kept := split.blocks(plain)) is not None and kept.codes.shape == split.tensor(plain).shape


@pytest.mark.parametrize("fused", [QKV, GATE_UP])
def test_a_fused_matrix_of_another_size_is_refused(fused: str, folder: Path) -> None:
    shorter = load_file(folder / "model.safetensors")[fused][:-1].clone()
    for wrong, shape in ((shorter, r"\(\d+, 42\), config.json asks for 10[04] rows"), (torch.zeros(()), r"\(\)")):
        edit_weights(folder, lambda tensors, wrong=wrong: tensors.update({fused: wrong}))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=rf"tensor {fused} has shape {shape}"):
            Checkpoint(folder)


def test_a_fused_matrix_that_is_missing_or_damaged_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors[QKV][70, 3].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"{LAYER}.self_attn.k_proj.weight holds NaN or infinity"):
        Checkpoint(folder).tensor(f"{LAYER}.self_attn.k_proj.weight")
    Checkpoint(folder).tensor(f"{LAYER}.self_attn.q_proj.weight")
    edit_weights(folder, lambda tensors: tensors.pop(QKV))
    with pytest.raises(CheckpointError, match=f"{LAYER}.self_attn.q_proj.weight is missing; the checkpoint is inc"):
        Checkpoint(folder)


def test_fused_matrices_may_be_quantised(folder: Path, tmp_path: Path) -> None:
    """They are dequantised first, and split then."""
    plain = write_family(tmp_path / "plain", "Phi3")
    pack_checkpoint(folder, plain, compressed("int-quantized", num_bits=8), packers.compressed_int8)
    checkpoint, expected = Checkpoint(folder), Checkpoint(plain)
    for name in network_of(checkpoint.config).tensors():
        np.testing.assert_array_equal(checkpoint.tensor(name), expected.tensor(name))


def test_an_adapter_of_a_fused_matrix_changes_its_parts(folder: Path, tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path / "lora", folder, ("qkv_proj",), settings={"r": 4, "lora_alpha": 8})
    module = QKV.removesuffix(".weight")
    first, second = (tensors[f"{PREFIX}{module}.lora_{end}.weight"].double().numpy() for end in "AB")
    change = 2 * second @ first
    before, after = Checkpoint(folder), Checkpoint(folder, tmp_path / "lora")
    row = 0
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"{LAYER}.self_attn.{part}.weight"
        weight = before.tensor(name)
        expected = weight.astype(np.float64) + change[row : row + len(weight)]
        np.testing.assert_allclose(after.tensor(name), expected, atol=1e-6, rtol=0)
        row += len(weight)
