"""Fused tensors, which hold several matrices over the same input (Phi-3 has them), read as single matrices."""

from __future__ import annotations

from collections.abc import Container
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


def check_tied(source: TensorSource) -> None:
    """Raises CheckpointError if the files of a tied model also hold a vocabulary projection that is not its embedding:
    transformers computes with the projection from release 5 on, and with the embedding before."""
    embedding, head = (source.stored(name) for name in BY_TOKEN)
    if embedding is None or head is None:
        return
    same = embedding.shape == head.shape
    if not same or not np.array_equal(source.tensor(EMBEDDING_WEIGHT), source.tensor(HEAD_WEIGHT)):
        raise CheckpointError(DIFFERS)


class CutVocabulary:
    """A TensorSource over another one. It keeps the first `tokens` rows of the tensors `names`."""

    def __init__(self, source: TensorSource, tokens: int, names: tuple[str, ...] = BY_TOKEN) -> None:
        self._source, self._tokens, self._names = source, tokens, names

    def stored(self, name: str) -> Stored | None:
        found = self._source.stored(name)
        if found is None or name not in self._names:
            return found
        return found._replace(shape=(self._tokens, *found.shape[1:]))

    def tensor(self, name: str) -> NDArray[Any]:
        found = self._source.tensor(name)
        return found[: self._tokens] if name in self._names else found

    def blocks(self, name: str) -> Blocks | None:
        """See BlockSource.blocks."""
        found = stored_blocks(self._source, name)
        return found if found is None or name not in self._names else found.rows(slice(self._tokens))


class TrimmedVocabulary:
    """A TensorSource over another one, whose vocabulary projection has the rows of `tokens` only, int64 [N].

    tied: the projection's rows are the embedding's. Raises CheckpointError where a tied model has another projection.
    """

    def __init__(self, source: TensorSource, tokens: NDArray[np.int64], tied: bool) -> None:
        self._source, self._tokens = source, tokens
        self._head = EMBEDDING_WEIGHT if tied else HEAD_WEIGHT
        if tied and source.stored(HEAD_WEIGHT) is not None and not self._repeats_embedding():
            raise CheckpointError(DIFFERS)

    def stored(self, name: str) -> Stored | None:
        if name != HEAD_WEIGHT:
            return self._source.stored(name)
        found = self._source.stored(self._head)
        return None if found is None else found._replace(shape=(self._rows(found), *found.shape[1:]))

    def tensor(self, name: str) -> NDArray[Any]:
        return self._source.tensor(name) if name != HEAD_WEIGHT else self._kept(self._source.tensor(self._head))

    def blocks(self, name: str) -> Blocks | None:
        """See BlockSource.blocks."""
        if name != HEAD_WEIGHT:
            return stored_blocks(self._source, name)
        found = stored_blocks(self._source, self._head)
        return None if found is None else Blocks(found.bits, *(self._kept(rows) for rows in found[1:]))

    def _rows(self, found: Stored) -> int:
        """Rows of the projection; another number than N, which is refused later, where it has too few."""
        (rows, *_), last = found.shape or (0,), int(self._tokens[-1])
        return len(self._tokens) if rows > last or (rows == len(self._tokens) and self._head == HEAD_WEIGHT) else rows

    def _kept(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The rows of the kept tokens; a file of a trimmed draft may hold no others."""
        return rows if len(rows) == len(self._tokens) else rows[self._tokens]

    def _repeats_embedding(self) -> bool:
        shape, embedding = self._source.stored(HEAD_WEIGHT), self._source.stored(EMBEDDING_WEIGHT)
        if shape is None or embedding is None or embedding.shape[:1] <= (int(self._tokens[-1]),):
            return embedding is None  # which is refused as missing, or as too short
        if shape.shape not in (embedding.shape, (len(self._tokens), *embedding.shape[1:])):
            return False
        head, rows = self._source.tensor(HEAD_WEIGHT), self._source.tensor(EMBEDDING_WEIGHT)
        return np.array_equal(self._kept(head), rows[self._tokens])


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
