"""Bundles of GGUF files: in every mixture with folders, and with the codes that the file has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import write_adapter
from checkpoints import write_checkpoint
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.quantization.formats import FORMATS, QuantizedCheckpoint
from draftwood.models.layers import HEAD_WEIGHT, network_of

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 8}


KEPT = [
    (Kind.Q8_0, "native", "int8"),
    (Kind.Q8_0, "onnxruntime", "int8"),
    (Kind.Q4_0, "native", "int8"),
    (Kind.Q4_0, "native", "int4"),
    (Kind.Q4_0, "onnxruntime", "int4"),
    (Kind.Q4_1, "native", "int4"),
]


@pytest.mark.parametrize(("kind", "backend", "precision"), KEPT)
def test_blocks_that_a_format_holds_are_not_rounded_twice(
    kind: Kind, backend: str, precision: str, tmp_path: Path
) -> None:
    """Every matrix is the file's own number for number; a tied projection and rows of queries and keys included, and an
    embedding that is cut to the tokens of a draft. Codes of 8 bits, which the projection has beside 4, hold those of
    Q4_0, and have no offsets for those of Q4_1."""
    folder = write_checkpoint(tmp_path / "folder", num_key_value_heads=2, tie_word_embeddings=True, **SHAPE)
    checkpoint = Checkpoint(write_gguf(folder, tmp_path / "model.gguf", kind))
    for model in (checkpoint, checkpoint.cut(checkpoint.config.vocab_size - 10)):
        view = QuantizedCheckpoint(model, FORMATS[backend, precision])
        for name, shape in network_of(model.config).tensors().items():
            if len(shape) == 2:
                kept = view.tensor(HEAD_WEIGHT if "embed" in name else name)[: shape[0], : shape[1]]
                step = np.abs(model.tensor(name)).max() / 127 if "embed" in name and kind == Kind.Q4_1 else 0
                np.testing.assert_allclose(kept, model.tensor(name), rtol=0, atol=step)


def test_blocks_that_an_adapter_leaves_alone_are_kept(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", num_key_value_heads=2, **SHAPE)
    file = write_gguf(folder, tmp_path / "model.gguf", Kind.Q8_0)
    write_adapter(tmp_path / "lora", folder, ("q_proj",))
    plain, adapted = Checkpoint(file), Checkpoint(file, tmp_path / "lora")
    for name, shape in network_of(plain.config).tensors().items():
        before, after = plain.blocks(name), adapted.blocks(name)
        assert (before is None) == (len(shape) < 2) and (after is None) == (before is None or "q_proj" in name)
        if before is not None and after is not None:
            np.testing.assert_array_equal(after.codes, before.codes)


def test_blocks_of_q4_k_keep_their_codes(tmp_path: Path) -> None:
    """A scale is a product of 17 bits, of which fp16 keeps 11: both terms of a weight change by 2^-12 of themselves. To
    round the weights again would change some of them by half a step, a thirtieth of the block's range."""
    folder = write_checkpoint(tmp_path / "folder", hidden_size=256, intermediate_size=256, num_attention_heads=8)
    checkpoint = Checkpoint(write_gguf(folder, tmp_path / "model.gguf", Kind.Q4_K))
    view = QuantizedCheckpoint(checkpoint, FORMATS["native", "int4"])
    for name in network_of(checkpoint.config).layers[0].tensors():
        exact = checkpoint.tensor(name)
        if exact.ndim == 2:
            _, scales, offsets = view.quantized(name)
            assert offsets is not None
            parts = 15 * np.abs(scales) + np.abs(offsets)
            assert (np.abs(view.tensor(name) - exact) <= 2**-11 * parts.repeat(32, 1) + 1e-6).all()
