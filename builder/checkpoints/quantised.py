"""Which quantised checkpoints are read, by config.json's `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...models.config import brief
from ...models.errors import CheckpointError
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
    """How a checkpoint's matrices are packed; None for an ordinary one. config: config.json. Raises CheckpointError for
    what is not read, listing what is."""
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
