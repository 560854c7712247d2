"""A checkpoint whose vocabulary is cut. Many embeddings have additional rows that belong to no token."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ...models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT
from .source import Stored, TensorSource

BY_TOKEN = (EMBEDDING_WEIGHT, HEAD_WEIGHT)  # tensors with one row for each token


class CutVocabulary:
    """A TensorSource over another one. It keeps the first `tokens` rows of embedding and vocabulary projection."""

    def __init__(self, source: TensorSource, tokens: int) -> None:
        self._source, self._tokens = source, tokens

    def stored(self, name: str) -> Stored | None:
        found = self._source.stored(name)
        if found is None or name not in BY_TOKEN:
            return found
        return found._replace(shape=(self._tokens, *found.shape[1:]))

    def tensor(self, name: str) -> NDArray[Any]:
        found = self._source.tensor(name)
        return found[: self._tokens] if name in BY_TOKEN else found
