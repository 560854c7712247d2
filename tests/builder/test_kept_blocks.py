"""A file of llama.cpp's mixed types is kept as it is: the integers of each matrix, read back from the engine's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from adapters import write_adapter
from checkpoints import write_checkpoint, write_tokenizer
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from steps import noted

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build, suited
from draftwood.builder.quantization.formats import QuantizedCheckpoint
from draftwood.builder.quantization.kept import kept_format, others_of
from draftwood.models.bindings import BITS, SUPERBLOCKS
from draftwood.models.layers import network_of
from draftwood.plugins.native.packing import GROUPS
from draftwood.runtime.engines.backends import BACKENDS, matrix_bytes, stored_matrices
from draftwood.runtime.engines.native.weights import read_weights

MIXED = {  # as llama.cpp mixes them in a file of the type Q4_K_M
    "token_embd.weight": Kind.Q6_K,
    "blk.0.attn_v.weight": Kind.Q6_K,
    "blk.0.ffn_down.weight": Kind.Q6_K,
    "blk.1.attn_v.weight": Kind.Q5_0,
    "blk.1.attn_output.weight": Kind.Q8_0,
    "blk.1.ffn_gate.weight": Kind.Q4_K,
    "blk.1.ffn_up.weight": Kind.Q5_K,
    "blk.1.ffn_down.weight": Kind.Q4_K,
}


def test_each_matrix_of_a_mixed_file_is_kept_in_integers_of_its_own(tmp_path: Path) -> None:
    """Numbers that the file's types hold exactly are read back from the engine's file; queries and keys of 4 bits that
    share a matrix with values of 6 are rounded to 6, and lose a quarter of a step of theirs at most."""
    folder = write_checkpoint(tmp_path / "folder", hidden_size=256, intermediate_size=256, num_attention_heads=8)
    write_tokenizer(folder)
    file = write_gguf(folder, tmp_path / "model.gguf", Kind.Q4_1, others=MIXED)
    options = suited(BuildOptions(file, None, tmp_path / "bundle", "native"), True, noted([]))
    assert options.precision == "int4" and options.keeps_blocks
    spec = build(options, noted([])).manifest.engines["target"]
    checkpoint, form = Checkpoint(file), kept_format(Checkpoint(file), BACKENDS["native"], "int4")
    assert form is not None
    view = QuantizedCheckpoint(checkpoint, form)
    expected = {"layers.0.qkv": "int6", "layers.0.down": "int6k", "layers.1.qkv": "int5", "layers.1.output": "int8"}
    expected |= {"embedding": "int6k", "layers.1.gate_up": "int5k", "layers.1.down": "int4k"}
    assert spec.matrices == others_of(view) == expected
    weights = read_weights(tmp_path / "bundle" / spec.file, spec)
    for name in (*expected.keys() - {"embedding"}, "layers.0.output"):
        matrix = next(each for each in stored_matrices(network_of(view.config), view.config) if each.name == name)
        found = unpacked(weights, name, spec.matrices.get(name, "int4"))
        assert matrix_bytes(spec, [matrix]) == weights[f"{name}.weights"].nbytes + weights[f"{name}.scales"].nbytes
        held = np.concatenate([view.tensor(weight) for weight in matrix.weights])
        assert matrix.gated or np.array_equal(found[: len(held)], held)
        for weight in matrix.weights:
            exact, rounded = checkpoint.tensor(weight), name == "layers.0.qkv" and "v_proj" not in weight
            near = 64 if rounded else name == "layers.0.qkv"  # values' scales are rounded to fp16
            assert np.abs(view.tensor(weight) - exact).max() <= near * 2**-11 * np.abs(exact).max()
    write_adapter(tmp_path / "lora", folder, ("down_proj",))
    adapted = kept_format(Checkpoint(file, tmp_path / "lora"), BACKENDS["native"], "int4")
    assert adapted is not None and others_of(QuantizedCheckpoint(checkpoint, adapted))["layers.0.down"] == "int6"


def unpacked(weights: dict[str, Any], name: str, precision: str) -> Any:
    """The numbers [N, K] of a packed matrix, by plain loops over its bytes."""
    packed, scales, bits = weights[f"{name}.weights"], weights[f"{name}.scales"], BITS[precision]
    group, panels, kinds = GROUPS[bits], len(packed), 1 + (bits < 6)
    vectors = packed.reshape(panels, -1, group * bits // 32, 16, 4)
    codes = np.empty((panels, 16, vectors.shape[1], group), np.float32)
    for four in range(group // 4):
        if bits == 8:
            found = vectors[:, :, four].astype(np.int16) - 128
        else:
            found = (vectors[:, :, four // 2] >> 4 * (four % 2) & 15).astype(np.int16)
        if bits in (5, 6):
            found |= (vectors[:, :, -1] >> (bits - 4) * four & (1 << bits - 4) - 1).astype(np.int16) << 4
            found -= 32 * (bits == 6)
        codes[..., 4 * four : 4 * four + 4] = found.transpose(0, 2, 1, 3)
    if precision in SUPERBLOCKS:
        shape = (*scales.shape[:2], -1, kinds, 16)
        factors = np.ascontiguousarray(scales[..., : 32 * kinds]).view(np.float16).reshape(shape)
        integers = np.ascontiguousarray(scales[..., 32 * kinds :]).view(np.int8).reshape(shape)
        numbers = integers * factors.astype(np.float32)
    else:
        numbers = scales.view(np.float16).astype(np.float32)
    numbers = numbers.reshape(panels, vectors.shape[1], -1, 16, 1).transpose(0, 3, 1, 2, 4)
    result = codes * numbers[:, :, :, 0] + (numbers[:, :, :, 1] if bits < 6 else 0)
    return result.reshape(16 * panels, -1)
