"""A checked checkpoint: what the model is, its tensors as named arrays, and its tokenizer."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.errors import CheckpointError
from ...models.layers import HEAD_WEIGHT, network_of
from ...runtime.text.tokenizer import Tokenizer
from .folder import HuggingFaceFolder
from .fused import Split
from .lora import Merged
from .source import Blocks, ModelFiles, TensorSource, stored_blocks
from .vocabulary import CutVocabulary


class Checkpoint:
    """Opening a checkpoint reads headers only; `tensor` reads one tensor at a time and keeps none."""

    def __init__(self, path: Path, lora: Path | None = None) -> None:
        """lora: an adapter that is merged into the model's tensors.

        Raises CheckpointError when anything the model needs is missing, damaged or of the wrong shape."""
        self.path = path
        self._files = files_at(path)
        self.config = self._files.config
        self.notes = self._files.notes  # what somebody who builds from it should hear
        self._source: TensorSource = self._files.tensors
        if lora is not None:
            merged = Merged(self._source, lora, frozenset((HEAD_WEIGHT,) if self.config.tie_embeddings else ()))
            self._source, self.notes = merged, (*self.notes, *merged.notes)
        self._source = Split(self._source, self.config)
        for name, shape in network_of(self.config).tensors().items():
            self._check(name, shape)

    def tensor(self, name: str) -> NDArray[Any]:
        """One tensor in its stored dtype. Raises CheckpointError when it holds NaN or infinity."""
        array = self._source.tensor(name)
        self._refuse_not_finite(name, array)
        return array

    def cut(self, tokens: int) -> Checkpoint:
        """The same checkpoint for the first `tokens` tokens only, of those it has."""
        result = copy(self)
        result.config = replace(self.config, vocab_size=tokens)
        result._source = CutVocabulary(self._source, tokens)
        return result

    def blocks(self, name: str) -> Blocks | None:
        """A matrix that is stored as codes with a scale for each block, as it is stored; None for any other tensor.
        Raises CheckpointError when a scale or an offset is NaN or infinite."""
        blocks = stored_blocks(self._source, name)
        if blocks is not None:
            self._refuse_not_finite(name, blocks.scales)
            self._refuse_not_finite(name, blocks.offsets)
        return blocks

    def eos_token_ids(self) -> list[int]:
        """Ids that end a text, in order; some may be none of the model's. Raises CheckpointError."""
        return sorted({*self.config.eos_token_ids, *self._files.more_eos_ids()})

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        """Write the tokenizer with its chat template into a folder, and open it there. Raises CheckpointError."""
        return self._files.write_tokenizer(destination)

    def _refuse_not_finite(self, name: str, array: NDArray[Any]) -> None:
        if not np.isfinite(array).all():
            raise CheckpointError(f"{self.path}: tensor {name} holds NaN or infinity; the checkpoint is damaged")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._source.stored(name)
        if stored is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; the checkpoint is incomplete")
        if not stored.is_read:
            raise CheckpointError(f"{self.path}: tensor {name} is {stored.dtype}; use an fp32, fp16 or bf16 checkpoint")
        if stored.shape != shape:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {stored.shape}, its configuration asks for {shape}"
            )


def files_at(path: Path) -> ModelFiles:
    """Whatever format a path is in. Raises CheckpointError."""
    if path.is_dir():
        return HuggingFaceFolder(path)
    if path.suffix.lower() == ".gguf":
        from .gguf.file import GgufFile  # which imports the gguf package

        return GgufFile(path)
    raise CheckpointError(
        f"{path} is not a folder: give the path of a Hugging Face checkpoint folder, or of a .gguf file"
    )
