"""Quantised checkpoints: every tensor has exactly the values that its format defines, and anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from checkpoints import edit_weights, transformers_logits, write_checkpoint, write_tokenizer
from engine_parts import TOLERANCE, random_text
from packers import AWQ, COMPRESSED, GPTQ, IN, OUT, SCHEME, PackedMatrix, compressed, opened, pack_checkpoint
from packers import save_module as saved
from steps import noted

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.folder import LAYOUTS, layout_of
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.bindings import TARGET
from draftwood.models.errors import CheckpointError
from draftwood.runtime.engines.passes import prefill

PACKED, GROUPED = "pack-quantized", {"strategy": "group", "group_size": 8}


def older_zero_points() -> PackedMatrix:
    """An older release of compressed-tensors did not pack them."""
    matrix = packers.compressed_packed(OUT, IN, group=8, symmetric=False)
    words = matrix.tensors["weight_zero_point"].T.contiguous().numpy().view(np.uint8)
    halves = np.stack([words & 15, words >> 4], axis=2).reshape(len(words), -1)  # [groups, out]
    return changed(matrix, weight_zero_point=torch.from_numpy(halves.T.astype(np.int8).copy() - 8))


def changed(matrix: PackedMatrix, **tensors: torch.Tensor | None) -> PackedMatrix:
    """With other tensors, or without those that are None."""
    all_of = matrix.tensors | tensors
    return matrix._replace(tensors={name: tensor for name, tensor in all_of.items() if tensor is not None})


def formats() -> Iterator[Any]:
    """Settings, and a matrix that was packed by them."""

    def case(name: str, config: dict[str, Any], matrix: PackedMatrix) -> Any:
        return pytest.param(config, matrix, id=name)

    both = (False, True)
    for bits, group, order, v2 in product((4, 8), (-1, 8, 16), both, both):
        form = {"checkpoint_format": "gptq_v2" if v2 else "gptq", "desc_act": order}
        config = GPTQ | {"bits": bits, "group_size": group} | form
        yield case(f"gptq {bits} {group} {order} {v2}", config, packers.gptq(OUT, IN, bits, group, order, v2))
    yield case("gptq without a format", GPTQ, packers.gptq(OUT, IN))
    yield case("gptq without an index", GPTQ, changed(packers.gptq(OUT, IN), g_idx=None))
    for group in (-1, 8, 20):
        yield case(f"awq {group}", AWQ | {"group_size": group}, packers.awq(OUT, IN, group))
    for bits, group, symmetric, order in product((4, 8), (-1, 8, 20), both, both):
        strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
        config = compressed(PACKED, num_bits=bits, symmetric=symmetric, **strategy)
        matrix = packers.compressed_packed(OUT, IN, bits, group, symmetric, order)
        yield case(f"packed {bits} {group} {symmetric} {order}", config, matrix)
    odd = packers.compressed_packed(21, 35, symmetric=False)  # fills no words, neither of inputs nor of zero points
    yield case("odd sizes", compressed(PACKED, symmetric=False), odd)
    yield case("older zero points", compressed(PACKED, symmetric=False, **GROUPED), older_zero_points())
    for symmetric, scale in product(both, ("F32", "F16")):
        config = compressed("int-quantized", num_bits=8, symmetric=symmetric)
        yield case(f"int8 {symmetric} {scale}", config, packers.compressed_int8(OUT, IN, symmetric, scale))
    for form_of, strategy_of in product(("naive-quantized", "float-quantized"), ("tensor", "channel", "block")):
        block = {"block_structure": [16, 16]} if strategy_of == "block" else {}
        config = compressed(form_of, num_bits=8, type="float", strategy=strategy_of, **block)
        yield case(f"float8 {form_of} {strategy_of}", config, packers.compressed_float8(OUT, IN, strategy_of))


@pytest.mark.parametrize(("config", "matrix"), [*formats()])
def test_a_matrix_has_exactly_the_values_of_its_format(
    config: dict[str, Any], matrix: PackedMatrix, tmp_path: Path
) -> None:
    source = opened(saved(tmp_path, matrix), config)
    stored = source.stored("m.weight")
    assert stored is not None and stored.is_read and stored.shape == matrix.weight.shape
    weight = source.tensor("m.weight")
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight, matrix.weight)


def test_a_zero_point_of_nought_borrows_from_the_next_one(tmp_path: Path) -> None:
    """As GPTQModel writes it into format v1: whole words less 0x11111111."""
    matrix = packers.gptq(OUT, IN, v2=True)
    zeros = matrix.tensors["qzeros"].numpy().view(np.uint32) & 0xFFFF0F00
    found = []
    for version, words in (("gptq_v2", zeros), ("gptq", zeros - np.uint32(0x11111111))):
        folder = saved(tmp_path / version, changed(matrix, qzeros=torch.from_numpy(words.view(np.int32))))
        found.append(opened(folder, GPTQ | {"checkpoint_format": version}).tensor("m.weight"))
    np.testing.assert_array_equal(found[0], found[1])


def test_modules_of_two_schemes(tmp_path: Path) -> None:
    """The tensors say which of them a module has."""
    groups = {
        "group_0": {"targets": ["re:.*down_proj"], "weights": SCHEME | {"num_bits": 8}, "format": "int-quantized"},
        "group_1": {"targets": ["Linear"], "weights": SCHEME, "format": PACKED},
    }
    first, second = packers.compressed_packed(OUT, IN), packers.compressed_int8(OUT, IN)
    others = {f"n.{name}": tensor for name, tensor in second.tensors.items()}
    source = opened(
        saved(tmp_path, first, **others), COMPRESSED | {"format": "mixed-precision", "config_groups": groups}
    )
    np.testing.assert_array_equal(source.tensor("m.weight"), first.weight)
    np.testing.assert_array_equal(source.tensor("n.weight"), second.weight)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    rounded = {"num_bits": 8, "type": "int", "dynamic": True}
    groups = {"group_0": {"weights": SCHEME | {"num_bits": 8}, "input_activations": rounded}}
    config = COMPRESSED | {"format": "int-quantized", "config_groups": groups, "kv_cache_scheme": rounded}
    folder, plain = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    assert Checkpoint(folder).notes == ()
    pack_checkpoint(folder, plain, config, packers.compressed_int8)
    first, second, third = Checkpoint(folder).notes
    assert first == "its weights are compressed-tensors, int8 by channel, and are dequantised"
    assert "input activations are not rounded" in second and "keys and values are not" in third


PAIRS: dict[str, tuple[dict[str, Any], Callable[[int, int], PackedMatrix]]] = {
    "gptq": (GPTQ | {"desc_act": True}, lambda outputs, inputs: packers.gptq(outputs, inputs, order=True)),
    "awq": (AWQ, lambda outputs, inputs: packers.awq(outputs, inputs, 8)),
    "compressed-tensors": (
        compressed(PACKED, symmetric=False),
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


# Refusals

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
    for value in HOSTILE:
        for field in SCHEME:
            refused(compressed(PACKED, **{field: value}))
            refused(compressed("float-quantized", **{"type": "float", "strategy": "block", field: value}))
        refused(value)
        refused(compressed("naive-quantized", strategy="block", block_structure=value))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "quantization_config of None is not supported; awq, gptq, compressed-tensors are, and fp32"),
        ({"quant_method": "bitsandbytes"}, "quantization_config of 'bitsandbytes' is not supported"),
        ("gptq", "quantization_config must be an object"),
        (GPTQ | {"bits": 2}, "gptq with bits 2 is not supported; 4 and 8 bits are"),
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
        (compressed(PACKED, num_bits=3), "num_bits 3 is not supported; 4 and 8 bits are"),
        (compressed("float-quantized", type="float", num_bits=4), "num_bits 4 is not supported; 8 bits are"),
        (compressed(PACKED, strategy="tensor_group"), "strategy 'tensor_group' is not supported"),
        (compressed(PACKED, strategy="tensor"), "pack-quantized holds no weights of type int with strategy"),
        (COMPRESSED | {"config_groups": {}}, "config_groups must be an object of 1 to 64 groups"),
        (COMPRESSED | {"config_groups": {"W4A16": ["Linear"]}}, "names of presets are not supported"),
        (COMPRESSED | {"config_groups": {"a": {"weights": None}}}, "a config group without weights"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config is not supported"),
        (COMPRESSED | {"quantization_status": "calibration"}, "quantization_status 'calibration' is not supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(configured(write_checkpoint(tmp_path), config))


def configured(folder: Path, config: Any) -> Path:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return folder


MATRICES: dict[str, tuple[dict[str, Any], PackedMatrix]] = {
    "gptq": (GPTQ | {"desc_act": True}, packers.gptq(OUT, IN, order=True)),
    "awq": (AWQ, packers.awq(OUT, IN, 8)),
    "packed": (
        compressed(PACKED, symmetric=False, **GROUPED),
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
        bytes_ = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        wrong = [tensor[:-1].contiguous(), torch.cat([bytes_, bytes_]).view(tensor.dtype), bytes_.to(torch.float64)]
        wrong += [tensor[:, :-1].contiguous(), tensor[None]] if tensor.dim() == 2 else []
        for number, each in enumerate(wrong):
            folder = saved(tmp_path / f"{name} {number}", changed(matrix, **{name: each}))
            with pytest.raises(CheckpointError, match=r"^(tensor )?m[ .:]"):
                stored = opened(folder, config).stored("m.weight")
                assert stored is not None and stored.shape != (OUT, IN)  # Checkpoint compares it with config.json
                raise CheckpointError("m is of another size")
        folder = saved(tmp_path / f"without {name}", changed(matrix, **{name: None}))
        if name not in optional and not (name == "weight_scale" and kind != "packed"):
            with pytest.raises(CheckpointError, match=r"missing|which is not"):
                assert opened(folder, config).stored("m.weight") is not None


def test_indices_and_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for kind, name in (("gptq", "g_idx"), ("packed", "weight_g_idx")):
        config, matrix = MATRICES[kind]
        for value in (-1, 5, 2**31 - 1, -(2**31)):
            index = matrix.tensors[name].clone()
            index[7] = value
            source = opened(saved(tmp_path, changed(matrix, **{name: index})), config)
            with pytest.raises(CheckpointError, match=rf"tensor m\.{name} names groups .* the checkpoint is damaged"):
                source.tensor("m.weight")
    source = opened(saved(tmp_path, MATRICES["gptq"][1]), GPTQ)
    with pytest.raises(CheckpointError, match=r"tensor m\.g_idx reorders inputs, and desc_act .* says that nothing"):
        source.tensor("m.weight")
    for size in ((-1, 40), (24, 0), (24, 2**62), (2**62, 40), (25, 40), (24, 999)):
        folder = saved(tmp_path, packers.compressed_packed(OUT, IN), **{"m.weight_shape": torch.tensor(size)})
        with pytest.raises(CheckpointError, match=r"weight_shape says .* is damaged|has weight_packed .* not int4"):
            opened(folder, compressed(PACKED)).stored("m.weight")


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed"])
def test_a_matrix_that_is_stored_twice_is_refused(kind: str, tmp_path: Path) -> None:
    config, matrix = MATRICES[kind]
    source = opened(saved(tmp_path, matrix, **{"m.weight": torch.zeros(OUT, IN)}), config)
    with pytest.raises(CheckpointError, match="m is stored twice, packed and as F32"):
        source.stored("m.weight")


def test_a_checkpoint_whose_settings_and_tensors_contradict_each_other_is_refused(tmp_path: Path) -> None:
    """Modules that are listed as plain are read as they are stored."""
    folder, plain = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    listed = AWQ | {"modules_to_not_convert": ["lm_head"]}
    pack_checkpoint(folder, plain, listed, PAIRS["awq"][1])
    head = Checkpoint(folder).tensor("lm_head.weight")
    np.testing.assert_array_equal(head, Checkpoint(plain).tensor("lm_head.weight"))
    name = "model.layers.1.mlp.up_proj"
    with pytest.raises(CheckpointError, match=f"{name} is packed, and quantization_config in config.json lists it"):
        Checkpoint(configured(folder, AWQ | {"modules_to_not_convert": [name]}))
    with pytest.raises(CheckpointError, match=r"weight is missing; the checkpoint is incomplete"):
        Checkpoint(configured(folder, {}))
    edit_weights(configured(folder, listed), lambda tensors: tensors[f"{name}.scales"][0].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=rf"tensor {name}.weight holds NaN or infinity"):
        Checkpoint(folder).tensor(f"{name}.weight")
