"""A checked checkpoint: what the model is, and its tensors as named arrays."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.config import LlamaConfig
from ...models.errors import CheckpointError
from ...models.layers import HEAD_WEIGHT, network_of
from .fused import Split
from .json_file import read_json
from .lora import Merged
from .packed import Dequantised
from .quantised import layout_of
from .safetensors import Safetensors
from .source import TensorSource
from .vocabulary import CutVocabulary


class Checkpoint:
    """Opening a checkpoint reads headers only; `tensor` reads one tensor at a time and keeps none."""

    def __init__(self, folder: Path, lora: Path | None = None) -> None:
        """lora: an adapter that is merged into the model's tensors.

        Raises CheckpointError when anything the model needs is missing, damaged or of the wrong shape."""
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder: give the path of a Hugging Face checkpoint folder")
        content = read_json(folder / "config.json")
        self.config = LlamaConfig.from_hf(content)
        self._source: TensorSource = Safetensors(folder)
        self.notes: tuple[str, ...] = ()  # what somebody who builds from it should hear
        if layout := layout_of(content):
            self._source = Dequantised(self._source, layout)
            self.notes = (f"its weights are {layout.name}, and are dequantised", *layout.notes)
        if lora is not None:
            merged = Merged(self._source, lora, frozenset((HEAD_WEIGHT,) if self.config.tie_embeddings else ()))
            self._source, self.notes = merged, (*self.notes, *merged.notes)
        self._source = Split(self._source, self.config)
        for name, shape in network_of(self.config).tensors().items():
            self._check(name, shape)

    def tensor(self, name: str) -> NDArray[Any]:
        """One tensor in its stored dtype. Raises CheckpointError when it holds NaN or infinity."""
        array = self._source.tensor(name)
        if not np.isfinite(array).all():
            raise CheckpointError(f"{self.folder}: tensor {name} holds NaN or infinity; the checkpoint is damaged")
        return array

    def cut(self, tokens: int) -> Checkpoint:
        """The same checkpoint for the first `tokens` tokens only, of those it has."""
        result = copy(self)
        result.config = replace(self.config, vocab_size=tokens)
        result._source = CutVocabulary(self._source, tokens)
        return result

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._source.stored(name)
        if stored is None:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing; the checkpoint is incomplete")
        if not stored.is_read:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is {stored.dtype}; use an fp32, fp16 or bf16 checkpoint"
            )
        if stored.shape != shape:
            raise CheckpointError(
                f"{self.folder}: tensor {name} has shape {stored.shape}, config.json asks for {shape}"
            )
