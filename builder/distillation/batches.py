"""Batches of training: stored texts, packed into sequences of one length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.bindings import MASKED
from .state import GIVEN, TextStore, WrittenText

FILES_AT_A_TIME = 16  # whose texts are shuffled together; bounds the memory


class Batch(NamedTuple):
    """B sequences of L tokens. From `written` on: the target at the place after each token, see WrittenText."""

    tokens: Tensor  # int64 [B, L], the draft's input
    texts: Tensor  # int64 [B, L], a number for each text: a token sees only tokens of its own text
    written: Tensor  # int64 [B, L], the target's token
    kinds: Tensor  # uint8 [B, L]; GIVEN at places that are not trained on
    ids: Tensor  # int64 [B, L, K]
    logprobs: Tensor  # float32 [B, L, K]
    tails: Tensor  # float32 [B, L]
    states: Tensor  # float16 [B, L, S], the target's at the tokens of `tokens`; S is 0 for a plain draft

    @property
    def scored(self) -> Tensor:
        """bool [B, L]: the places that have a distribution."""
        return self.kinds != GIVEN

    def mask(self) -> Tensor:
        """float32 [B, 1, L, L], added to the attention scores."""
        length = self.tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.tokens.device).tril()
        seen = (self.texts[:, :, None] == self.texts[:, None, :]) & causal
        return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, MASKED)[:, None]

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self))


def pack(texts: Iterable[WrittenText], sequences: int, length: int, fill: bool = False) -> Iterator[Batch]:
    """Batches of `sequences` x `length` tokens, in the order of the texts. A text may go on in the next sequence. fill:
    the last batch is filled up with places that are not scored; otherwise what does not fill one is left out. A batch
    without a scored place, of a long prompt alone, is left out, too: it has neither a loss nor a gradient."""
    batches = cut(texts, sequences, length, fill)
    return (batch for batch in batches if batch.scored.any())


def cut(texts: Iterable[WrittenText], sequences: int, length: int, fill: bool) -> Iterator[Batch]:
    """See `pack`; every batch."""
    waiting: list[list[NDArray[np.generic]]] = []
    size, number = 0, 0
    for text in texts:
        if len(text.tokens) < 2:
            continue
        number += 1
        waiting.append(columns_of(text, number))
        size += len(text.tokens) - 1
        while size >= sequences * length:
            joined = [np.concatenate(parts) for parts in zip(*waiting, strict=True)]
            yield shaped([part[: sequences * length] for part in joined], sequences)
            waiting = [[part[sequences * length :] for part in joined]]
            size -= sequences * length
    if fill and size:
        joined = [np.concatenate(parts) for parts in zip(*waiting, strict=True)]
        missing = -size % length
        filled = [np.concatenate((part, np.zeros((missing, *part.shape[1:]), part.dtype))) for part in joined]
        yield shaped(filled, (size + missing) // length)


def columns_of(text: WrittenText, number: int) -> list[NDArray[np.generic]]:
    """A text's columns of a batch, in its order, each [T - 1], [T - 1, K] or [T - 1, S]."""
    inputs = text.tokens[:-1]
    described = (text.tokens, text.kinds, text.ids, text.logprobs, text.tails)
    return [inputs, np.full(len(inputs), number), *(array[1:] for array in described), text.states[:-1]]


def shaped(columns: Sequence[NDArray[np.generic]], sequences: int) -> Batch:
    """A batch of flat columns."""
    types = (np.int64, np.int64, np.int64, np.uint8, np.int64, np.float32, np.float32, np.float16)
    arrays = [column.reshape(sequences, len(column) // sequences, *column.shape[1:]) for column in columns]
    arrays = [array.astype(kind) for array, kind in zip(arrays, types, strict=True)]
    return Batch(*map(torch.from_numpy, arrays))


def training_batches(store: TextStore, sequences: int, length: int, seed: int) -> Iterator[Batch]:
    """Endless batches of the texts that are not held out, shuffled anew in each pass over them. Texts that are stored
    meanwhile take part from the next pass on. Ends when there is not enough text for one batch."""
    rng = np.random.default_rng(seed)
    while True:
        count = 0
        for batch in pack(shuffled(store, rng), sequences, length):
            count += 1
            yield batch
        if not count:
            return


def shuffled(store: TextStore, rng: np.random.Generator) -> Iterator[WrittenText]:
    """The texts that are not held out, in a random order; the texts of some files are in memory at a time."""
    files = store.files()
    rng.shuffle(files)  # type: ignore[arg-type]
    for first in range(0, len(files), FILES_AT_A_TIME):
        texts = [text for text in store.read(files[first : first + FILES_AT_A_TIME]) if not text.is_held_out]
        for index in rng.permutation(len(texts)).tolist():
            yield texts[index]
