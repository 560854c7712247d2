"""Checkpoints seen differently: matrices of fused tensors (Phi-3 has them), and a vocabulary that is cut or trimmed.

Many embeddings have additional rows that belong to no token: they are cut off. A trimmed draft reads every token and
predicts some of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...models.config import LlamaConfig
from ...models.errors import CheckpointError
from ...models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, Matrix, network_of
from .source import Blocks, Stored, TensorSource, stored_blocks

QKV, GATE_UP = "qkv_proj", "gate_up_proj"  # fused modules, with the same parent as the modules that they replace
# int64 [N]: column i of a trimmed draft predicts token i + d2t[i], as in EAGLE-3 and vLLM's speculators.
OFFSETS = "d2t"
BY_TOKEN = (EMBEDDING_WEIGHT, HEAD_WEIGHT)  # tensors with one row for each token
DIFFERS = (
    f"tensor {HEAD_WEIGHT} differs from the embedding's rows, to which tie_word_embeddings ties it: remove the tensor, "
    "or set tie_word_embeddings to false"
)


class Part(NamedTuple):
    """Rows of another tensor."""

    tensor: str
    rows: slice | NDArray[np.int64]
    number: int  # of rows
    total: int | None = None  # rows that the other tensor must have
    is_fallback: bool = False  # only where there is no tensor of its own


class RowsOfTensors:
    """A TensorSource over another one, of which some tensors are rows of others."""

    def __init__(self, source: TensorSource, parts: Mapping[str, Part]) -> None:
        self._source, self._parts = source, parts

    def _part(self, name: str) -> Part | None:
        part = self._parts.get(name)
        return None if part is None or (part.is_fallback and self._source.stored(name) is not None) else part

    def stored(self, name: str) -> Stored | None:
        part = self._part(name)
        whole = self._source.stored(name if part is None else part.tensor)
        if part is None or whole is None:
            return whole
        if part.total is not None and whole.shape[:1] != (part.total,):
            raise CheckpointError(
                f"tensor {part.tensor} has shape {whole.shape}, config.json asks for {part.total} rows; "
                "the checkpoint's files belong to different models"
            )
        return whole._replace(shape=(part.number, *whole.shape[1:]))

    def tensor(self, name: str) -> NDArray[Any]:
        part = self._part(name)
        return self._source.tensor(name) if part is None else self._source.tensor(part.tensor)[part.rows]

    def blocks(self, name: str) -> Blocks | None:
        part = self._part(name)
        whole = stored_blocks(self._source, name if part is None else part.tensor)
        return whole if whole is None or part is None else whole.each(lambda array: array[part.rows])


class GemmaTensors:
    """A TensorSource over one with norms' weights less 1, which are summed in fp32. prefix: of names there."""

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self._source, self._prefix = source, prefix

    def stored(self, name: str) -> Stored | None:
        return self._source.stored(self._prefix + name)

    def tensor(self, name: str) -> NDArray[Any]:
        array = self._source.tensor(self._prefix + name)
        return array.astype(np.float32) + np.float32(1) if name.endswith("norm.weight") else array

    def blocks(self, name: str) -> Blocks | None:
        return stored_blocks(self._source, self._prefix + name)


def split(source: TensorSource, config: LlamaConfig) -> RowsOfTensors:
    """A source in which matrices that it lacks are read from the fused tensors that hold them."""
    return RowsOfTensors(source, fused_parts(config))


def fused_parts(config: LlamaConfig) -> dict[str, Part]:
    """Where each tensor of a model lies if it is part of a fused one."""
    layers = network_of(config).layers
    return dict(
        part
        for layer in layers
        for matrix, module in ((layer.qkv, QKV), (layer.gate_up, GATE_UP))
        for part in parts_of(matrix, module)
    )


def parts_of(matrix: Matrix, module: str) -> Iterator[tuple[str, Part]]:
    """The rows of each source of a merged matrix in the tensors of the fused module, which holds them in this order."""
    first, total = 0, sum(matrix.outputs)
    for source, rows in zip(matrix.sources, matrix.outputs, strict=True):
        fused, place = f"{source.rpartition('.')[0]}.{module}", slice(first, first + rows)
        for kind in ("weight", "bias") if matrix.bias else ("weight",):
            yield f"{source}.{kind}", Part(f"{fused}.{kind}", place, rows, total, is_fallback=True)
        first += rows


def tensors_needed(config: LlamaConfig, names: Container[str]) -> set[str]:
    """The tensors that a file with these names should have: a fused one, where it is there, in place of its parts."""
    parts = {name: part.tensor for name, part in fused_parts(config).items() if part.tensor in names}
    return {parts.get(name, name) for name in network_of(config).tensors()}


def cut(source: TensorSource, tokens: int, names: tuple[str, ...] = BY_TOKEN) -> TensorSource:
    """A source with the first `tokens` rows of the tensors `names`."""
    return RowsOfTensors(source, {name: Part(name, slice(tokens), tokens) for name in names})


def trimmed(source: TensorSource, tokens: NDArray[np.int64], tied: bool) -> TensorSource:
    """A source whose vocabulary projection has the rows of `tokens` only, int64 [N]. tied: the projection's rows are
    the embedding's. Raises CheckpointError where a tied model has another projection."""
    head = EMBEDDING_WEIGHT if tied else HEAD_WEIGHT
    whole, own = source.stored(head), source.stored(HEAD_WEIGHT)
    if whole is None or whole.shape[:1] <= (int(tokens[-1]),):
        return source  # the rows of a trimmed draft's file, which are no others, or what is refused later
    if tied and own is not None:
        rows = source.tensor(HEAD_WEIGHT)
        kept = rows[tokens] if own.shape == whole.shape else rows
        if not np.array_equal(kept, source.tensor(EMBEDDING_WEIGHT)[tokens]):
            raise CheckpointError(DIFFERS)
    return RowsOfTensors(source, {HEAD_WEIGHT: Part(head, tokens, len(tokens))})


def check_tied(source: TensorSource) -> None:
    """Raises CheckpointError if the files of a tied model also hold a vocabulary projection that is not its embedding:
    transformers computes with the projection from release 5 on, and with the embedding before."""
    embedding, head = (source.stored(name) for name in BY_TOKEN)
    if embedding is None or head is None:
        return
    same = embedding.shape == head.shape
    if not same or not np.array_equal(source.tensor(EMBEDDING_WEIGHT), source.tensor(HEAD_WEIGHT)):
        raise CheckpointError(DIFFERS)


def read_kept_tokens(source: TensorSource, count: int, vocab_size: int) -> NDArray[np.int64]:
    """The tokens int64 [N] that the columns of a trimmed draft predict, from its tensor of offsets. Raises
    CheckpointError unless they are `count` different tokens of the vocabulary, in ascending order."""
    stored = source.stored(OFFSETS)
    if stored is None:
        raise CheckpointError(
            f"config.json says draft_vocab_size, but tensor {OFFSETS} is missing, which names the kept tokens: remove "
            "the setting if all tokens are predicted, or write the tensor"
        )
    if stored.dtype != "I64" or stored.shape != (count,):
        raise CheckpointError(
            f"tensor {OFFSETS} is {stored.dtype} {list(stored.shape)}, and draft_vocab_size asks for I64 [{count}]"
        )
    offsets: NDArray[np.int64] = source.tensor(OFFSETS)
    last = vocab_size - count  # the greatest offset of ascending tokens
    if not (np.all(offsets >= 0) and np.all(offsets <= last) and np.all(np.diff(offsets) >= 0)):
        raise CheckpointError(
            f"tensor {OFFSETS} must hold offsets that never fall, from 0 to {last}: token i + {OFFSETS}[i] of column i "
            f"is then one of {vocab_size}, in ascending order"
        )
    return np.arange(count) + offsets
