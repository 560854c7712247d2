"""Fused tensors, which hold several matrices over the same input (Phi-3 has them), read as single matrices."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ...models.config import LlamaConfig
from ...models.errors import CheckpointError
from ...models.layers import Matrix, network_of
from .source import Blocks, Stored, TensorSource, stored_blocks

QKV, GATE_UP = "qkv_proj", "gate_up_proj"  # fused modules, with the same parent as the modules that they replace


class Part(NamedTuple):
    """Rows `first` to `first + rows` of a tensor that has `total` rows."""

    tensor: str
    first: int
    rows: int
    total: int


class Split:
    """A TensorSource over another one. A matrix that the other one lacks is read from the fused tensor that holds
    it."""

    def __init__(self, source: TensorSource, config: LlamaConfig) -> None:
        self._source, self._parts = source, fused_parts(config)

    def stored(self, name: str) -> Stored | None:
        found, part = self._source.stored(name), self._parts.get(name)
        if found is not None or part is None:
            return found
        whole = self._source.stored(part.tensor)
        if whole is None:
            return None
        if whole.shape[:1] != (part.total,):
            raise CheckpointError(
                f"tensor {part.tensor} has shape {whole.shape}, config.json asks for {part.total} rows; "
                "the checkpoint's files belong to different models"
            )
        return whole._replace(shape=(part.rows, *whole.shape[1:]))

    def tensor(self, name: str) -> NDArray[Any]:
        part = self._parts.get(name)
        if part is None or self._source.stored(name) is not None:
            return self._source.tensor(name)
        return self._source.tensor(part.tensor)[part.first : part.first + part.rows]

    def blocks(self, name: str) -> Blocks | None:
        """See BlockSource.blocks."""
        part = self._parts.get(name)
        if part is None or self._source.stored(name) is not None:
            return stored_blocks(self._source, name)
        whole = stored_blocks(self._source, part.tensor)
        return None if whole is None else whole.rows(slice(part.first, part.first + part.rows))


def fused_parts(config: LlamaConfig) -> dict[str, Part]:
    """Where each tensor of a model lies if it is part of a fused one."""
    parts = dict[str, Part]()
    for layer in network_of(config).layers:
        for matrix, module in ((layer.qkv, QKV), (layer.gate_up, GATE_UP)):
            parts |= parts_of(matrix, module)
    return parts


def tensors_needed(config: LlamaConfig, names: Container[str]) -> set[str]:
    """The tensors that a file with these names should have: a fused one, where it is there, in place of its parts."""
    parts = {name: part.tensor for name, part in fused_parts(config).items() if part.tensor in names}
    return {parts.get(name, name) for name in network_of(config).tensors()}


def parts_of(matrix: Matrix, module: str) -> dict[str, Part]:
    """The rows of each source of a merged matrix in the tensors of the fused module, which holds them in this order."""
    found, first, total = dict[str, Part](), 0, sum(matrix.outputs)
    for source, rows in zip(matrix.sources, matrix.outputs, strict=True):
        fused = f"{source.rpartition('.')[0]}.{module}"
        for kind in ("weight", "bias") if matrix.bias else ("weight",):
            found[f"{source}.{kind}"] = Part(f"{fused}.{kind}", first, rows, total)
        first += rows
    return found
