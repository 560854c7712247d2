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
from ..models.layers import GATED, STACKED, Matrix, Norm, network_of
from ..models.rope import rope_tables
from ..plugins.native.packing import PANEL, alternated, code_panels, flat, half_panels, joined, panels
from ..runtime.engines.native import ACCEPTANCE, DTYPES, packed_rows, refuse_variant, whole_panels
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
        network = network_of(self.config)
        cosine, sine = rope_tables(self.config, self.positions)
        yield self.floats("cosine", lambda: cosine, cosine.shape)
        yield self.floats("sine", lambda: sine, sine.shape)
        for layer in network.layers:
            for norm in layer.norms:
                yield self.norm(norm)
            for matrix in layer.matrices:
                yield from self.matrix(matrix)
        yield self.norm(network.norm)
        yield from self.matrix(network.head)
        if self.head is not None:
            yield from self.acceptance(self.head)
        ((name, shape),) = network.embedding.tensors().items()
        yield self.floats(network.embedding.name, lambda: self.checkpoint.tensor(name), shape)

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

    def norm(self, norm: Norm) -> Tensor:
        """fp32, filled up to whole panels."""
        return self.floats(norm.name, lambda: flat(self.checkpoint.tensor(norm.weight)), (whole_panels(norm.size),))

    def matrix(self, matrix: Matrix) -> Iterator[Tensor]:
        """Panels of some matrices over one input; with scales where they are of integers, and with biases in fp32."""
        name, weights, inputs, join = matrix.name, matrix.weights, matrix.inputs, JOINS[matrix.join]
        rows = packed_rows(matrix)
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
        if matrix.bias:
            yield self.floats(
                f"{name}.bias", lambda: flat(join([self.checkpoint.tensor(bias) for bias in matrix.biases])), (rows,)
            )

    def stored(self, weights: NDArray[Any]) -> NDArray[Any]:
        """As they lie in memory: numpy has no bf16, so 16-bit floats go as their bits."""
        if isinstance(self.checkpoint, RoundedCheckpoint):
            return weights.astype(self.checkpoint.dtype).view(np.uint16)
        return weights.astype(np.float32, copy=False)


def in_turn(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The panels of gate and up alternate: one thread finishes both."""
    first, second = parts
    return alternated(first, second)


JOINS: dict[str, Join] = {STACKED: joined, GATED: in_turn}


def write_weights(checkpoint: Weights, positions: int, path: Path, head: TrainedHead | None = None) -> None:
    """Write `checkpoint`, with the draft's head, for passes at up to `positions` positions, one tensor in memory at a
    time. Raises CheckpointError when a weight holds NaN or infinity, and EngineError for a model whose layers the
    kernels do not compute."""
    refuse_variant(checkpoint.config)
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
