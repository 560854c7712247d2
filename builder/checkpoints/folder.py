"""A Hugging Face folder: config.json, generation_config.json, safetensors and a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...models.config import LlamaConfig
from ...models.fields import token_ids
from ...runtime.bundle.bundle import GENERATION
from ...runtime.text.tokenizer import Tokenizer
from ..tokenizer import convert_tokenizer
from .json_file import read_json
from .packed import Dequantised
from .quantised import layout_of
from .safetensors import Safetensors
from .source import TensorSource

CONFIG = "config.json"


class HuggingFaceFolder:
    """The ModelFiles of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        content = read_json(folder / CONFIG)
        self.config = LlamaConfig.from_hf(content)
        self.tensors: TensorSource = Safetensors(folder)
        self.notes: tuple[str, ...] = ()
        if layout := layout_of(content):
            self.tensors = Dequantised(self.tensors, layout)
            self.notes = (f"its weights are {layout.name}, and are dequantised", *layout.notes)

    def more_eos_ids(self) -> tuple[int, ...]:
        """The ids in generation_config.json, where chat models list several."""
        return token_ids(self.sampling(), "eos_token_id", file=GENERATION)

    def sampling(self) -> Mapping[str, Any]:
        """The content of generation_config.json."""
        file = self._folder / GENERATION
        return read_json(file) if os.path.lexists(file) else {}

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        return convert_tokenizer(self._folder, destination)
