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
from .views import GemmaTensors

CONFIG = "config.json"
SEEING = "Gemma3ForConditionalGeneration"
SHARED = ("quantization_config", "bos_token_id", "eos_token_id", "tie_word_embeddings")  # settings beside text_config
# transformers 4 left out what these settings are by default.
TEXT_DEFAULTS = {"vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072}
LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], Layout]]
LAYOUTS = {AWQ: read_awq, GPTQ: read_gptq, METHOD: Compressed.read}


class HuggingFaceFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = read_json(folder / CONFIG)
        content = text_part(found)
        self.config = LlamaConfig.from_hf(content)
        self.tensors: TensorSource = Safetensors(folder)
        self.notes: tuple[str, ...] = ()
        if layout := layout_of(content):
            self.tensors = Dequantised(self.tensors, layout)
            self.notes = (f"its weights are {layout.name}, and are dequantised", *layout.notes)
        if content is not found:
            self.notes = ("of a model that sees, the part that reads text alone is built", *self.notes)
        if family_of(content)[0].adds_one:
            self.tensors = GemmaTensors(self.tensors, "language_model." if content is not found else "")

    def more_eos_ids(self) -> tuple[int, ...]:
        """The ids in generation_config.json, where chat models list several."""
        return token_ids(self.sampling(), "eos_token_id", file=GENERATION)

    def sampling(self) -> Mapping[str, Any]:
        """The content of generation_config.json."""
        file = self._folder / GENERATION
        return read_json(file) if os.path.lexists(file) else {}

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        return convert_tokenizer(self._folder, destination)


def text_part(content: dict[str, Any]) -> dict[str, Any]:
    """Of a Gemma 3 that sees, the config.json of its part for text; any other as it is. Raises CheckpointError."""
    if content.get("architectures") != [SEEING]:
        return content
    text = content.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json: text_config must be an object, found {brief(text)}; copy the file again")
    shared = {name: content[name] for name in SHARED if content.get(name) is not None}
    return TEXT_DEFAULTS | text | shared | {"architectures": ["Gemma3ForCausalLM"]}


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
