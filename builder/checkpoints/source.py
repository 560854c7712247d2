"""What a checkpoint's path holds, whatever its format: a configuration, tensors by Hugging Face's names, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...models.config import LlamaConfig
from ...runtime.text.tokenizer import Tokenizer


class Stored(NamedTuple):
    """A tensor as its file describes it. dtype: the name that the file has for it. is_read: whether `tensor` can."""

    shape: tuple[int, ...]
    dtype: str
    is_read: bool = True


class Blocks(NamedTuple):
    """A matrix [N, K] as its file rounded it: weight = code * scale + offset. bits: 8 or 4, of a code. codes: int8
    [N, K]. scales, offsets: float32 [N, K / block], each a number of fp16."""

    bits: int
    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32]


class TensorSource(Protocol):
    """Reads headers when it is opened, and one tensor at a time after that; keeps none. A source may stand on another
    one, whose tensors it renames, splits, adds to or dequantises."""

    def stored(self, name: str) -> Stored | None:
        """What the headers say of a tensor; None where there is no such tensor. Raises CheckpointError."""

    def tensor(self, name: str) -> NDArray[Any]:
        """The tensor, fp32, fp16 or bf16. Raises CheckpointError."""


@runtime_checkable
class BlockSource(TensorSource, Protocol):
    """A TensorSource that also hands over matrices as they are stored: codes with a scale for each block. A source that
    stands on another one and changes tensors is none."""

    def blocks(self, name: str) -> Blocks | None:
        """A matrix as it is stored; None for a tensor in any other form. Raises CheckpointError."""


def stored_blocks(source: TensorSource, name: str) -> Blocks | None:
    """See BlockSource.blocks; None for any other source."""
    return source.blocks(name) if isinstance(source, BlockSource) else None


class ModelFiles(Protocol):
    """The files of one model in one format. Each method raises CheckpointError where they are missing or damaged."""

    @property
    def config(self) -> LlamaConfig:
        """What the model is."""

    @property
    def tensors(self) -> TensorSource:
        """Its weights."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody who builds from it should hear."""

    def more_eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text besides the configuration's `eos_token_ids`."""

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        """Write the tokenizer with its chat template into a folder, and open it there."""
