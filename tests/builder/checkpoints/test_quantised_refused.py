"""Quantised checkpoints that are damaged, hostile or of unsupported settings: each is refused with a short error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from checkpoints import edit_weights, write_checkpoint
from packers import PackedMatrix, pack_checkpoint, save_module
from quantised import AWQ, COMPRESSED, GPTQ, IN, OUT, SCHEME, compressed, opened

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.folder import LAYOUTS, layout_of
from draftwood.models.errors import CheckpointError

HOSTILE: tuple[Any, ...] = (
    *(True, -1, 0, 1, 3, 10**9, 10**300, 0.5, float("nan"), "", "8", "x" * 100_000, "\x1b[2J"),
    *([], {}, [1], [[]], {"a": 1}, [None] * 100_000, {str(key): {} for key in range(100)}),
)
COMPLETE: dict[str, dict[str, Any]] = {
    "gptq": GPTQ | {"checkpoint_format": "gptq", "format": "gptq", "pack_dtype": "int32", "dynamic": None},
    "awq": AWQ | {"modules_to_not_convert": ["lm_head"], "checkpoint_format": "gemm"},
    "compressed-tensors": COMPRESSED | {"transform_config": {}, "sparsity_config": {}, "quantization_status": "frozen"},
}


def refused(config: Any) -> bool:
    """By the right error, in one short line."""
    try:
        layout_of({"quantization_config": config})
    except CheckpointError as error:
        assert str(error).startswith("config.json: ") and len(str(error)) < 400 and "\n" not in str(error)
        return True
    return False


@pytest.mark.parametrize("method", LAYOUTS)
def test_hostile_fields_are_refused_or_harmless(method: str) -> None:
    for field in COMPLETE[method]:
        found = [refused(COMPLETE[method] | {field: value}) for value in HOSTILE]
        assert any(found) or field in ("sym", "zero_point", "kv_cache_scheme")
    for field in SCHEME:
        for value in HOSTILE:
            refused(compressed("pack-quantized", **{field: value}))
            refused(compressed("float-quantized", **{"type": "float", "strategy": "block", field: value}))
    for value in HOSTILE:
        refused(value)
        refused(compressed("naive-quantized", strategy="block", block_structure=value))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "quantization_config of None is not supported; awq, gptq, compressed-tensors are, and fp32"),
        ({"quant_method": "bitsandbytes"}, "quantization_config of 'bitsandbytes' is not supported"),
        ("gptq", "quantization_config must be an object"),
        (GPTQ | {"bits": 2}, "gptq with bits 2 is not supported; 4 and 8 bits are"),
        (GPTQ | {"bits": 3}, "gptq with bits 3 is not supported; 4 and 8 bits are"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; gptq, gptq_v2 are"),
        (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "checkpoint_format and format of gptq differ"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype 'int8' is not supported; int32 is"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "gptq with dynamic is not supported"),
        (GPTQ | {"is_marlin_format": True}, "gptq with is_marlin_format is not supported"),
        (GPTQ | {"group_size": 0}, "group_size must be -1 or a whole number from 1"),
        (GPTQ | {"desc_act": "no"}, "desc_act must be true or false"),
        (AWQ | {"version": "gemv"}, "awq with version 'gemv' is not supported; gemm is"),
        (AWQ | {"bits": 8}, "awq with bits 8 is not supported; 4 bits are"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
        (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not supported; pack-quantized, int-q"),
        (compressed("pack-quantized", num_bits=3), "num_bits 3 is not supported; 4 and 8 bits are"),
        (compressed("float-quantized", type="float", num_bits=4), "num_bits 4 is not supported; 8 bits are"),
        (compressed("pack-quantized", strategy="tensor_group"), "strategy 'tensor_group' is not supported"),
        (compressed("pack-quantized", strategy="tensor"), "pack-quantized holds no weights of type int with strategy"),
        (COMPRESSED | {"config_groups": {}}, "config_groups must be an object of 1 to 64 groups"),
        (COMPRESSED | {"config_groups": {"W4A16": ["Linear"]}}, "names of presets are not supported"),
        (COMPRESSED | {"config_groups": {"a": {"weights": None}}}, "a config group without weights"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config is not supported"),
        (COMPRESSED | {"quantization_status": "calibration"}, "quantization_status 'calibration' is not supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


MATRICES: dict[str, tuple[dict[str, Any], PackedMatrix]] = {
    "gptq": (GPTQ | {"desc_act": True}, packers.gptq(OUT, IN, order=True)),
    "awq": (AWQ, packers.awq(OUT, IN, 8)),
    "packed": (
        compressed("pack-quantized", symmetric=False, strategy="group", group_size=8),
        packers.compressed_packed(OUT, IN, group=8, symmetric=False, order=True),
    ),
    "int8": (compressed("int-quantized", num_bits=8, symmetric=False), packers.compressed_int8(OUT, IN, False)),
    "float8": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        packers.compressed_float8(OUT, IN, "channel"),
    ),
}


@pytest.mark.parametrize("kind", MATRICES)
def test_tensors_that_do_not_belong_together_are_refused(kind: str, tmp_path: Path) -> None:
    """Each of them missing, of another dtype, and larger or smaller by one, before anything is computed."""
    config, matrix = MATRICES[kind]
    optional = {"weight_g_idx", "qweight", "weight_packed"}  # without these, a module is another one or a plain one
    for name, tensor in matrix.tensors.items():
        others = {end: each for end, each in matrix.tensors.items() if end != name}
        bytes_ = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        wrong = [tensor[:-1].contiguous(), torch.cat([bytes_, bytes_]).view(tensor.dtype), bytes_.to(torch.float64)]
        wrong += [tensor[:, :-1].contiguous(), tensor[None]] if tensor.dim() == 2 else []
        for number, each in enumerate(wrong):
            folder = save_module(tmp_path / f"{name} {number}", matrix._replace(tensors=others | {name: each}))
            with pytest.raises(CheckpointError, match=r"^(tensor )?m[ .:]"):
                stored = opened(folder, config).stored("m.weight")
                assert stored is not None and stored.shape != (OUT, IN)  # Checkpoint compares it with config.json
                raise CheckpointError("m is of another size")
        folder = save_module(tmp_path / f"without {name}", matrix._replace(tensors=others))
        if name not in optional and not (name == "weight_scale" and kind != "packed"):
            with pytest.raises(CheckpointError, match=r"missing|which is not"):
                assert opened(folder, config).stored("m.weight") is not None


@pytest.mark.parametrize("value", [-1, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize(("kind", "name"), [("gptq", "g_idx"), ("packed", "weight_g_idx")])
def test_groups_that_are_not_there_are_refused(kind: str, name: str, value: int, tmp_path: Path) -> None:
    config, matrix = MATRICES[kind]
    index = matrix.tensors[name].clone()
    index[7] = value
    source = opened(save_module(tmp_path, matrix._replace(tensors=matrix.tensors | {name: index})), config)
    assert source.stored("m.weight") is not None
    with pytest.raises(CheckpointError, match=rf"tensor m\.{name} names groups .* the checkpoint is damaged"):
        source.tensor("m.weight")


def test_an_index_that_config_json_denies_is_refused(tmp_path: Path) -> None:
    source = opened(save_module(tmp_path, packers.gptq(OUT, IN, order=True)), GPTQ)
    with pytest.raises(CheckpointError, match=r"tensor m\.g_idx reorders inputs, and desc_act .* says that nothing"):
        source.tensor("m.weight")


@pytest.mark.parametrize("size", [(-1, 40), (24, 0), (24, 2**62), (2**62, 40), (25, 40), (24, 999)])
def test_a_size_that_the_words_do_not_have_is_refused(size: tuple[int, int], tmp_path: Path) -> None:
    matrix = packers.compressed_packed(OUT, IN)
    source = opened(
        save_module(tmp_path, matrix, **{"m.weight_shape": torch.tensor(size)}), compressed("pack-quantized")
    )
    with pytest.raises(CheckpointError, match=r"weight_shape says .* it is damaged|m has weight_packed .* not int4"):
        source.stored("m.weight")


def test_modules_that_are_listed_are_plain(tmp_path: Path) -> None:
    """They are read as they are stored; packed tensors of a listed module contradict the list."""
    folder, plain = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    pack_checkpoint(
        folder,
        plain,
        AWQ | {"modules_to_not_convert": ["lm_head"]},
        lambda outputs, inputs: packers.awq(outputs, inputs, 8),
    )
    checkpoint = Checkpoint(folder)
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight"), Checkpoint(plain).tensor("lm_head.weight"))
    name = "model.layers.1.mlp.up_proj"
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"]["modules_to_not_convert"] = [name]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{name} is packed, and quantization_config in config.json lists it"):
        Checkpoint(folder)


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed"])
def test_a_matrix_that_is_stored_twice_is_refused(kind: str, tmp_path: Path) -> None:
    config, matrix = MATRICES[kind]
    source = opened(save_module(tmp_path, matrix, **{"m.weight": torch.zeros(OUT, IN)}), config)
    with pytest.raises(CheckpointError, match="m is stored twice, packed and as F32"):
        source.stored("m.weight")


def test_packed_tensors_of_an_ordinary_checkpoint_are_none(tmp_path: Path) -> None:
    """Without quantization_config, a file with packed matrices lacks its weights."""
    folder, plain = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    pack_checkpoint(folder, plain, {}, packers.gptq)
    with pytest.raises(CheckpointError, match=r"weight is missing; the checkpoint is incomplete"):
        Checkpoint(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(value: float, tmp_path: Path) -> None:
    folder, plain = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    pack_checkpoint(folder, plain, GPTQ, packers.gptq)
    name = "model.layers.0.self_attn.q_proj"
    edit_weights(folder, lambda tensors: tensors[f"{name}.scales"][0].fill_(value))
    with pytest.raises(CheckpointError, match=rf"tensor {name}.weight holds NaN or infinity"):
        Checkpoint(folder).tensor(f"{name}.weight")
