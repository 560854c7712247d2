"""A GGUF file as a Hugging Face folder in bf16, by transformers: SOURCE.gguf FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def write_folder(source: Path, folder: Path) -> None:
    named = {"gguf_file": source.name}
    AutoTokenizer.from_pretrained(source.parent, **named).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, **named)
    model.hf_quantizer = None  # the weights are ordinary ones by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
