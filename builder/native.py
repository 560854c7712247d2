"""Write a checkpoint as the native engine reads it: packed matrices, one safetensors file for each role."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..models.acceptance_head import TrainedHead
from ..models.rope import rope_tables
from ..plugins.native.packing import PANEL, alternated, code_panels, flat, half_panels, joined, panels
from ..runtime.engines.native import ACCEPTANCE, DTYPES, EMBEDDING, whole_panels
from .checkpoint import Checkpoint
from .quantize import Quantized, QuantizedCheckpoint, RoundedCheckpoint

ALIGNMENT = 64  # bytes: a vector
Weights = Checkpoint | QuantizedCheckpoint | RoundedCheckpoint
Join = Callable[[Sequence[NDArray[Any]]], NDArray[Any]]


class Tensor(NamedTuple):
    """One tensor of the file. read: its content, when it is written."""

    name: str
    read: Callable[[], NDArray[Any]]
    dtype: str  # safetensors' name
    shape: tuple[int, ...]


class Packer:
    """Names, shapes and contents of everything a native engine reads."""

    def __init__(self, checkpoint: Weights, positions: int, head: TrainedHead | None) -> None:
        self.checkpoint, self.positions, self.head = checkpoint, positions, head
        self.config = checkpoint.config

    def tensors(self) -> Iterator[Tensor]:
        """All of them, in the order a pass reads them, and the embedding."""
        config = self.config
        cosine, sine = rope_tables(config, self.positions)
        yield self.floats("cosine", lambda: cosine, cosine.shape)
        yield self.floats("sine", lambda: sine, sine.shape)
        for layer in range(config.num_layers):
            source, name = f"model.layers.{layer}.", f"layers.{layer}."
            attention, mlp = source + "self_attn.", source + "mlp."
            yield self.vector(name + "input_norm", [source + "input_layernorm.weight"])
            yield self.vector(name + "post_norm", [source + "post_attention_layernorm.weight"])
            yield from self.matrix(name + "qkv", [f"{attention}{part}_proj" for part in "qkv"], config.attention_bias)
            yield from self.matrix(name + "output", [attention + "o_proj"], config.attention_bias)
            yield from self.matrix(name + "gate_up", [mlp + "gate_proj", mlp + "up_proj"], config.mlp_bias, in_turn)
            yield from self.matrix(name + "down", [mlp + "down_proj"], config.mlp_bias)
        yield self.vector("norm", ["model.norm.weight"])
        embedding = "model.embed_tokens"
        yield from self.matrix("head", [embedding if config.tie_embeddings else "lm_head"], False)
        if self.head is not None:
            yield from self.acceptance(self.head)
        shape = (config.vocab_size, config.hidden_size)
        yield self.floats(EMBEDDING, lambda: self.checkpoint.tensor(embedding + ".weight"), shape)

    def acceptance(self, head: TrainedHead) -> Iterator[Tensor]:
        """The SpecDec++ head: each block's panels and bias, then the row that gives the log-odds."""
        config, weights = head.config, head.weights
        odds, shift = config.logit_projection(weights["output.weight"], weights["output.bias"])
        arrays = {"odds": flat(odds.ravel()), "shift": shift}
        for layer in range(config.layers):
            block = f"blocks.{config.block_of(layer)}.linear"
            arrays[f"block.{layer}.weights"] = panels(weights[f"{block}.weight"])
            arrays[f"block.{layer}.bias"] = flat(weights[f"{block}.bias"])
        for name, array in arrays.items():
            yield self.floats(ACCEPTANCE + name, partial(np.copy, array), array.shape)

    def floats(self, name: str, read: Callable[[], NDArray[Any]], shape: tuple[int, ...]) -> Tensor:
        return Tensor(name, lambda: np.ascontiguousarray(read(), np.float32), "F32", shape)

    def vector(self, name: str, sources: Sequence[str], join: Join = joined) -> Tensor:
        """fp32, filled up to whole panels."""
        size = sum(whole_panels(self.checkpoint.shape(source)[0]) for source in sources)
        if join is joined:
            size = whole_panels(sum(self.checkpoint.shape(source)[0] for source in sources))
        return self.floats(name, lambda: flat(join([self.checkpoint.tensor(source) for source in sources])), (size,))

    def matrix(self, name: str, sources: Sequence[str], bias: bool, join: Join = joined) -> Iterator[Tensor]:
        """Panels of some matrices over one input; with scales where they are of integers."""
        weights = [f"{source}.weight" for source in sources]
        inputs = self.checkpoint.shape(weights[0])[1]
        outputs = [self.checkpoint.shape(weight)[0] for weight in weights]
        rows = sum(map(whole_panels, outputs)) if join is in_turn else whole_panels(sum(outputs))
        count = rows // PANEL
        if isinstance(self.checkpoint, QuantizedCheckpoint):
            checkpoint, bits = self.checkpoint, self.checkpoint.form.bits
            waiting: list[Quantized] = []  # codes and scales are written one after the other: rounded once

            def codes() -> NDArray[Any]:
                parts = [checkpoint.quantized(weight) for weight in weights]
                waiting[:] = [Quantized(join([part.codes for part in parts]), join([part.scales for part in parts]))]
                return code_panels(waiting[0].codes, bits)

            def scales() -> NDArray[Any]:
                return half_panels(waiting.pop().scales)

            block = checkpoint.form.block_of(name, inputs)
            yield Tensor(f"{name}.weights", codes, "U8", (count, inputs * bits // 32, PANEL, 4))
            yield Tensor(f"{name}.scales", scales, "U16", (count, inputs // block, PANEL))
        else:
            yield Tensor(
                f"{name}.weights",
                lambda: self.stored(panels(join([self.checkpoint.tensor(weight) for weight in weights]))),
                "U16" if isinstance(self.checkpoint, RoundedCheckpoint) else "F32",
                (count, inputs, PANEL),
            )
        if bias:
            yield self.vector(f"{name}.bias", [f"{source}.bias" for source in sources], join)

    def stored(self, weights: NDArray[Any]) -> NDArray[Any]:
        """As they lie in memory: numpy has no bf16, so 16-bit floats go as their bits."""
        if isinstance(self.checkpoint, RoundedCheckpoint):
            return weights.astype(self.checkpoint.dtype).view(np.uint16)
        return weights.astype(np.float32, copy=False)


def in_turn(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The panels of gate and up alternate: one thread finishes both."""
    first, second = parts
    return alternated(first, second)


def write_weights(checkpoint: Weights, positions: int, path: Path, head: TrainedHead | None = None) -> None:
    """Write `checkpoint`, with the draft's head, for passes at up to `positions` positions, one tensor in memory at a
    time. Raises CheckpointError when a weight holds NaN or infinity."""
    tensors = list(Packer(checkpoint, positions, head).tensors())
    header: dict[str, Any] = {}
    end = 0
    for tensor in tensors:
        size = int(np.prod(tensor.shape)) * DTYPES[tensor.dtype].itemsize
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (end, end + size)}
        end += -(-size // ALIGNMENT) * ALIGNMENT
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            content = tensor.read()
            content.tofile(file)
            file.write(bytes(-content.nbytes % ALIGNMENT))
