"""A Hugging Face folder: config.json, generation_config.json, safetensors and a tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from ...models.config import LlamaConfig, token_ids
from ...runtime.text.tokenizer import Tokenizer
from ..tokenizer import convert_tokenizer
from .json_file import read_json
from .safetensors import Safetensors

CONFIG, GENERATION = "config.json", "generation_config.json"


class HuggingFaceFolder:
    """The ModelFiles of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = LlamaConfig.from_hf(read_json(folder / CONFIG))
        self.tensors = Safetensors(folder)

    def more_eos_ids(self) -> tuple[int, ...]:
        """generation_config.json's: chat models list several there."""
        file = self._folder / GENERATION
        return token_ids(read_json(file), "eos_token_id", file=file.name) if os.path.lexists(file) else ()

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        return convert_tokenizer(self._folder, destination)
