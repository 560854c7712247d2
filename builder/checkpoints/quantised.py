"""The formats of quantised checkpoints that are read, by `quant_method` in config.json's `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...models.errors import CheckpointError
from ...models.fields import brief
from . import awq, compressed, gptq
from .awq import Awq
from .compressed import Compressed
from .gptq import Gptq
from .packed import Layout

LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], Layout]] = {
    awq.METHOD: Awq.read,
    gptq.METHOD: Gptq.read,
    compressed.METHOD: Compressed.read,
}


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
