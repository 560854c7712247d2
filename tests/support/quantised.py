"""Settings of quantised checkpoints as their config.json holds them, and matrices opened with such settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftwood.builder.checkpoints.folder import layout_of
from draftwood.builder.checkpoints.packed import Dequantised
from draftwood.builder.checkpoints.safetensors import Safetensors

OUT, IN = 24, 40  # words and groups do not all divide these; 40 inputs are two groups of 16 and one of 8
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
SCHEME: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "group_size": None,
    "dynamic": False,
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEME, "input_activations": None}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors in this format; `weights` changes fields of SCHEME."""
    return COMPRESSED | {"format": form, "config_groups": {"group_0": {"weights": SCHEME | weights}}}


def opened(folder: Path, config: dict[str, Any]) -> Dequantised:
    """The tensors of a folder, read with these settings."""
    layout = layout_of({"quantization_config": config})
    assert layout is not None
    return Dequantised(Safetensors(folder), layout)
