"""The interfaces of a checkpoint's files in any format: configuration, tensors by Hugging Face's names, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...models.config import LlamaConfig
from ...models.errors import CheckpointError
from ...models.plain_files import read_object
from ...runtime.text.tokenizer import Tokenizer


class Stored(NamedTuple):
    """A tensor as its file describes it."""

    shape: tuple[int, ...]
    dtype: str  # its name in the file
    is_read: bool = True  # whether `tensor` supports this dtype


class Blocks(NamedTuple):
    """A matrix [N, K] in the blocks in which its file stores it: weight = code * scale + offset."""

    bits: int  # of a code, 8 or 4 to 6
    codes: NDArray[np.int8]  # [N, K]
    scales: NDArray[np.float32]  # [N, K / block], numbers that fp16 can hold, unless there are factors
    offsets: NDArray[np.float32]  # the same
    # [N, K / 256, 1 or 2], numbers that fp16 can hold: of which the scales of a superblock, and the offsets, if it has
    # any but those of its scales, are multiples by integers of 8 bits
    factors: NDArray[np.float32] | None = None

    def in_fp16(self) -> Blocks:
        """The same without factors: scales and offsets are the nearest numbers that fp16 can hold, or infinity."""
        if self.factors is None:
            return self
        with np.errstate(over="ignore"):
            scales, offsets = (each.astype(np.float16).astype(np.float32) for each in (self.scales, self.offsets))
        return self._replace(scales=scales, offsets=offsets, factors=None)

    def each(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Blocks:
        """The same with other rows. change: makes them of the rows of an array."""
        factors = None if self.factors is None else change(self.factors)
        return Blocks(self.bits, change(self.codes), change(self.scales), change(self.offsets), factors)


class TensorSource(Protocol):
    """Tensors by name. Opening a source reads headers only. Later it reads one tensor at a time and keeps none. A
    source may wrap another one, and rename, split, change or dequantise its tensors."""

    def stored(self, name: str) -> Stored | None:
        """The description of a tensor in the headers; None when there is no such tensor. Raises CheckpointError."""

    def tensor(self, name: str) -> NDArray[Any]:
        """A tensor in fp32, fp16 or bf16, perhaps of a mapped file: copy it before writing. Raises CheckpointError."""


@runtime_checkable
class BlockSource(TensorSource, Protocol):
    """A TensorSource that can also return a matrix as its file stores it, in blocks. A source that changes a tensor
    of another one has no blocks of it."""

    def blocks(self, name: str) -> Blocks | None:
        """A matrix's codes, scales and offsets; None for another tensor. Raises CheckpointError."""


def stored_blocks(source: TensorSource, name: str) -> Blocks | None:
    """See BlockSource.blocks. None for a source that is not a BlockSource."""
    return source.blocks(name) if isinstance(source, BlockSource) else None


class ModelFiles(Protocol):
    """The files of one model in one format. Each method raises CheckpointError when they are missing or damaged."""

    @property
    def config(self) -> LlamaConfig:
        """The configuration of the model."""

    @property
    def tensors(self) -> TensorSource:
        """The weights of the model."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a build shows to its user."""

    def more_eos_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end a text, in addition to the configuration's `eos_token_ids`."""

    def sampling(self) -> Mapping[str, Any]:
        """The sampling settings that the model's authors recommend, by their names in a generation_config.json."""

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        """Write the tokenizer with its chat template into a folder, and open it there."""


def read_json(file: Path, folder: str = "Hugging Face checkpoint folder") -> dict[str, Any]:
    """Read a JSON object. folder: what the file's folder should be. Raises CheckpointError that names the file."""
    try:
        return read_object(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: is this a {folder}?") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}; download it again") from error
