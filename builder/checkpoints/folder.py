"""A Hugging Face folder: config.json, generation_config.json, safetensors and a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...models.config import LlamaConfig
from ...models.errors import CheckpointError
from ...models.families import family_of
from ...models.fields import brief, token_ids
from ...runtime.bundle.bundle import GENERATION
from ...runtime.text.tokenizer import Tokenizer
from ..tokenizer import convert_tokenizer
from .compressed import METHOD, Compressed
from .packed import Dequantised, Layout
from .qweight import AWQ, GPTQ, read_awq, read_gptq
from .safetensors import Safetensors
from .source import TensorSource, read_json
from .views import OnesAdded

CONFIG = "config.json"
LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], Layout]]
LAYOUTS = {AWQ: read_awq, GPTQ: read_gptq, METHOD: Compressed.read}


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
        if family_of(content)[0].adds_one:
            self.tensors = OnesAdded(self.tensors)

    def more_eos_ids(self) -> tuple[int, ...]:
        """The ids in generation_config.json, where chat models list several."""
        return token_ids(self.sampling(), "eos_token_id", file=GENERATION)

    def sampling(self) -> Mapping[str, Any]:
        """The content of generation_config.json."""
        file = self._folder / GENERATION
        return read_json(file) if os.path.lexists(file) else {}

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        return convert_tokenizer(self._folder, destination)


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """The layout of a checkpoint's matrices; None when they are not quantised. config: the content of config.json.
    Raises CheckpointError for a format that is not supported, and lists those that are."""
    found = config.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"config.json: quantization_config must be an object, found {brief(found)}")
    method = found.get("quant_method")
    if not isinstance(method, str) or method not in LAYOUTS:
        raise CheckpointError(
            f"config.json: quantization_config of {brief(method)} is not supported; {', '.join(LAYOUTS)} are, and "
            "fp32, fp16 and bf16 checkpoints, which the builder quantises"
        )
    return LAYOUTS[method](found)
