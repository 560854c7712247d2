"""Quantised checkpoints: every tensor is what its format defines, to the last bit; what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from checkpoints import edit_weights, transformers_logits, write_checkpoint, write_tokenizer
from engine_parts import TOLERANCE, random_text
from packers import PackedMatrix, pack_checkpoint, save_module

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.packed import Dequantised
from draftwood.builder.checkpoints.quantised import LAYOUTS, layout_of
from draftwood.builder.checkpoints.safetensors import Safetensors
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.builder.progress import Step
from draftwood.models.bindings import TARGET
from draftwood.models.errors import CheckpointError
from draftwood.runtime.engines.passes import prefill

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
    return COMPRESSED | {"format": form, "config_groups": {"group_0": {"weights": SCHEME | weights}}}


def opened(folder: Path, config: dict[str, Any]) -> Dequantised:
    layout = layout_of({"quantization_config": config})
    assert layout is not None
    return Dequantised(Safetensors(folder), layout)


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

    def begin(step: Step) -> Callable[[], None]:
        steps.append(step.title)
        return lambda: None

    options = BuildOptions(tmp_path / "target", tmp_path / "draft", tmp_path / "bundle", "onnxruntime")
    bundle = build(options, begin)
    assert any(title.startswith(f"The draft: its weights are {method}") for title in steps)
    engine, text = bundle.open_engine(TARGET), random_text(50)
    output = prefill(engine, engine.new_cache(), text)
    assert output is not None
    expected = transformers_logits(tmp_path / "plain" / "target")([text])[0]
    np.testing.assert_allclose(output.logits[0], expected, atol=TOLERANCE)
    engine.close()


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
