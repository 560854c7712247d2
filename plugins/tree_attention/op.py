"""The TreeAttention operator: its name in ONNX and its contract.

    draftwood::TreeAttention(query, key, value, sequences, tree_mask) -> output            attribute: scale (float)

query [1, H, T, D]; key, value [1, H_kv, C, D], whole static caches with this pass's rows already written; sequences
[N, 4], int32; tree_mask [1, T, S], bool; output [1, H, T, D].

The T rows belong to up to N sequences, one after the other. sequences[b] has the fields of `SequenceRow`. The rows of
sequence b begin at its first_row and end before the next sequence's first_row, or with the pass; a sequence without
rows has first_row T. Row i of sequence b attends to the committed slots first_slot .. first_slot + length - 1, and to
slot tree_slot + j if tree_mask[0, i, j] is true. A row without visible slots gives zeros.

In a graph the operator is an ONNX *local function*: a runtime without a kernel for it inlines the body (`body.py`). A
TensorRT parser with our registered creator and ENABLE_PLUGIN_OVERRIDE uses the plugin instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # running an engine needs only the names
    import onnx_ir as ir

DOMAIN, NAME, VERSION = "draftwood", "TreeAttention", 1
WINDOWED = "WindowAttention"  # the same over the last slots that a row sees, as many as its body says; has no kernel
OPSET = 24  # TensorScatter and Attention with an explicit mask over a cache
INPUTS = ("query", "key", "value", "sequences", "tree_mask")
PRECISIONS = ("fp32", "fp16", "bf16")


class SequenceRow(NamedTuple):
    """One row of `sequences`: the sequence's first row in the pass, the first slot and the number of its committed
    rows, and the slot of the mask's first column."""

    first_row: int
    first_slot: int
    length: int
    tree_slot: int


def function(precision: str, capacity: int, window: int = 0) -> ir.Function:
    """The body for caches of `capacity` slots. window: of WINDOWED; 0 for NAME. Raises ValueError for a precision."""
    from .body import FunctionBuilder

    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return FunctionBuilder(precision, capacity, window).build()
