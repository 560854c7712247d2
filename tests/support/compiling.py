"""Options of a TensorRT compilation."""

from __future__ import annotations

from typing import Any

from draftwood.builder.engines.plan import CompileOptions

WIDTHS, COLUMNS = (1, 4, 16, 32), 64


def options(**changes: Any) -> CompileOptions:
    given: dict[str, Any] = {"backend": "tensorrt-rtx", "precision": "fp16", "widths": WIDTHS, "columns": COLUMNS}
    return CompileOptions(**given | {"compute_capabilities": ("8.0",), "plugin": False} | changes)
