"""Matrices packed as AutoGPTQ, AutoAWQ and compressed-tensors pack them, written without a look at what reads them:
a row becomes one long integer, and its bytes are cut into words. And the settings that config.json has beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from checkpoints import edit_weights
from numpy.typing import NDArray
from safetensors.torch import save_file

from draftwood.builder.checkpoints.folder import layout_of
from draftwood.builder.checkpoints.packed import Dequantised
from draftwood.builder.checkpoints.safetensors import Safetensors

OUT, IN = 24, 40  # words and groups do not all divide these; 40 inputs are two groups of 16 and one of 8
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
SCHEME: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "group_size": None,
    "dynamic": False,
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEME, "input_activations": None}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors in this format; `weights` changes fields of SCHEME."""
    return COMPRESSED | {"format": form, "config_groups": {"group_0": {"weights": SCHEME | weights}}}


def opened(folder: Path, config: dict[str, Any]) -> Dequantised:
    """The tensors of a folder, read with these settings."""
    layout = layout_of({"quantization_config": config})
    assert layout is not None
    return Dequantised(Safetensors(folder), layout)


class PackedMatrix(NamedTuple):
    """tensors: what a module stores, by the ends of their names. weight: fp32 [out, in], what they mean."""

    tensors: dict[str, torch.Tensor]
    weight: NDArray[np.float32]


Pack = Callable[[int, int], PackedMatrix]  # of [out, in]


def words(rows: Sequence[Sequence[int]], bits: int) -> torch.Tensor:
    """int32 [rows, words]; the first value has the lowest bits, the last word is filled with zeros."""
    packed = []
    for row in rows:
        number = sum(int(value) << bits * place for place, value in enumerate(row))
        size = -(-len(row) * bits // 32) * 4
        packed.append(np.frombuffer(number.to_bytes(size, "little"), "<i4"))
    return torch.from_numpy(np.stack(packed))


def columns(matrix: NDArray[Any], bits: int) -> torch.Tensor:
    """Packed along the first axis: int32 [words, columns]."""
    return words(matrix.T.tolist(), bits).T.contiguous()


def meaning(
    values: NDArray[Any], zeros: NDArray[Any], scales: NDArray[Any], index: NDArray[Any]
) -> NDArray[np.float32]:
    """fp32 [out, in] of [in, out] values and [groups, out] zeros and scales, computed in fp64 one input at a time."""
    rows = [(row - zeros[group]) * scales[group].astype(np.float64) for row, group in zip(values, index, strict=True)]
    weight: NDArray[np.float32] = np.stack(rows, axis=1).astype(np.float32)
    return weight


def drawn(
    seed: int, outputs: int, inputs: int, groups: int, bits: int, least_zero: int = 1
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Values [in, out], zeros and fp16 scales [groups, out]; a matrix of a size that a layer may have."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(least_zero, 1 << bits, (groups, outputs))
    scales = rng.uniform(0.5, 1.5, (groups, outputs)) * 3 / ((1 << bits) * np.sqrt(inputs))
    return values, zeros, scales.astype(np.float16)


def gptq(
    outputs: int, inputs: int, bits: int = 4, group: int = 16, order: bool = False, v2: bool = False, seed: int = 0
) -> PackedMatrix:
    """order: desc_act; the last group may be smaller than the others."""
    size = inputs if group == -1 else group
    groups = -(-inputs // size)
    index = np.arange(inputs) // size
    if order:
        index = np.random.default_rng(seed).permutation(index)
    values, zeros, scales = drawn(seed, outputs, inputs, groups, bits)
    tensors = {
        "qweight": columns(values, bits),
        "qzeros": words((zeros if v2 else zeros - 1).tolist(), bits),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    return PackedMatrix(tensors, meaning(values, zeros, scales, index))


def awq(outputs: int, inputs: int, group: int = 16, seed: int = 0) -> PackedMatrix:
    size = inputs if group == -1 else group
    values, zeros, scales = drawn(seed, outputs, inputs, inputs // size, 4, least_zero=0)
    places = [8 * word + place for word in range(outputs // 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    tensors = {
        "qweight": words(values[:, places].tolist(), 4),
        "qzeros": words(zeros[:, places].tolist(), 4),
        "scales": torch.from_numpy(scales),
    }
    return PackedMatrix(tensors, meaning(values, zeros, scales, np.arange(inputs) // size))


def compressed_packed(
    outputs: int,
    inputs: int,
    bits: int = 4,
    group: int = -1,
    symmetric: bool = True,
    order: bool = False,
    seed: int = 0,
) -> PackedMatrix:
    size = inputs if group == -1 else group
    values, zeros, scales = drawn(0, outputs, inputs, inputs // size, bits, least_zero=0)
    index = np.arange(inputs) // size
    tensors = {
        "weight_packed": words(values.T.tolist(), bits),
        "weight_shape": torch.tensor([outputs, inputs]),
        "weight_scale": torch.from_numpy(scales.T.copy()),
    }
    if order:
        index = np.random.default_rng(0).permutation(index)
        tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
    if symmetric:
        zeros = np.full_like(zeros, 1 << (bits - 1))
    else:
        tensors["weight_zero_point"] = columns(zeros.T, bits)
    return PackedMatrix(tensors, meaning(values, zeros, scales, index))


def compressed_int8(outputs: int, inputs: int, symmetric: bool = True, scale: str = "F32") -> PackedMatrix:
    """One scale for each output."""
    values, zeros, scales = drawn(0, outputs, inputs, 1, 8, least_zero=0)
    kind = {"F32": np.float32, "F16": np.float16}[scale]
    tensors = {
        "weight": torch.from_numpy((values.T - 128).astype(np.int8, order="C")),
        "weight_scale": torch.from_numpy(scales.T.astype(kind, order="C")),
    }
    if symmetric:
        zeros = np.full_like(zeros, 128)
    else:
        tensors["weight_zero_point"] = torch.from_numpy((zeros.T - 128).astype(np.int8, order="C"))
    return PackedMatrix(tensors, meaning(values, zeros, scales, np.zeros(inputs, int)))


def compressed_float8(outputs: int, inputs: int, strategy: str = "tensor", block: int = 16) -> PackedMatrix:
    """strategy: "tensor", "channel" or "block"; the last blocks may be smaller than the others."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(0, 1, (outputs, inputs)).astype(np.float32)).to(torch.float8_e4m3fn)
    sizes = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (block, block)}[strategy]
    shape = [-(-size // part) for size, part in zip((outputs, inputs), sizes, strict=True)]
    scales = (rng.uniform(0.5, 1.5, shape) / np.sqrt(inputs)).astype(np.float16)
    weight = np.empty((outputs, inputs), np.float32)
    exact = values.to(torch.float64).numpy()
    for row in range(outputs):
        for column in range(inputs):
            weight[row, column] = exact[row, column] * scales[row // sizes[0], column // sizes[1]].astype(np.float64)
    scale = torch.from_numpy(scales).reshape(1) if strategy == "tensor" else torch.from_numpy(scales)
    return PackedMatrix({"weight": values, "weight_scale": scale}, weight)


def save_module(folder: Path, matrix: PackedMatrix, **others: torch.Tensor) -> Path:
    """A folder with nothing but one module, m, and what is said by name."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"m.{name}": tensor for name, tensor in matrix.tensors.items()} | others
    save_file(tensors, folder / "model.safetensors")
    return folder


def pack_checkpoint(folder: Path, plain: Path, config: Mapping[str, Any], pack: Pack) -> None:
    """Pack every matrix of the layers of the checkpoint in `folder`, and write what they mean into `plain`, a copy of
    it. config: `quantization_config`."""
    weights: dict[str, torch.Tensor] = {}

    def packed(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers" in name and tensors[name].dim() == 2]:
            matrix = pack(*tensors.pop(name).shape)
            module = name.removesuffix(".weight")
            tensors.update({f"{module}.{end}": tensor.clone() for end, tensor in matrix.tensors.items()})
            weights[name] = torch.from_numpy(matrix.weight)

    edit_weights(folder, packed)
    edit_weights(plain, lambda tensors: tensors.update(weights))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
