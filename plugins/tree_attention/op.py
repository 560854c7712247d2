"""The TreeAttention operator: its name in ONNX and its contract.

    draftwood::TreeAttention(query, key, value, cache_lengths, tree_mask) -> output        attribute: scale (float)

query [B, H, T, D]; key, value [B, H_kv, C, D], whole static caches with this pass's rows already written; cache_lengths
[B], int32; tree_mask [B, T, S], bool; output [B, H, T, D]. Row i of sequence b sees the committed slots
0 .. cache_lengths[b] - 1, and slot cache_lengths[b] + j where tree_mask[b, i, j]. A row that sees nothing gives zeros.

In a graph it is an ONNX *local function*: a runtime without a kernel for it inlines the body (`body.py`), a TensorRT
parser with our creator registered and ENABLE_PLUGIN_OVERRIDE takes the plugin instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # running an engine needs the names alone
    import onnx_ir as ir

DOMAIN, NAME, VERSION = "draftwood", "TreeAttention", 1
OPSET = 24  # TensorScatter and Attention with an explicit mask over a cache
INPUTS = ("query", "key", "value", "cache_lengths", "tree_mask")
PRECISIONS = ("fp32", "fp16", "bf16")


def function(precision: str, capacity: int) -> ir.Function:
    """The body for caches of `capacity` slots (the axis C). Raises ValueError for an unknown precision."""
    from .body import FunctionBuilder

    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return FunctionBuilder(precision, capacity).build()
