"""The TreeAttention operator: its name in ONNX and its contract.

    draftwood::TreeAttention(query, key, value, sequences, tree_mask) -> output            attribute: scale (float)

query [1, H, T, D]; key, value [1, H_kv, C, D], whole static caches with this pass's rows already written; sequences
[N, 4], int32; tree_mask [1, T, S], bool; output [1, H, T, D].

The T rows are those of up to N sequences, one after the other. sequences[b] holds what `SequenceRow` names: rows from
first_row up to the next sequence's are b's, and the last one's end with the pass; one without rows begins at T. Row i
of sequence b sees the slots first_slot .. first_slot + length - 1, which are committed, and slot tree_slot + j where
tree_mask[0, i, j]. A row that sees nothing gives zeros.

In a graph it is an ONNX *local function*: a runtime without a kernel for it inlines the body (`body.py`), a TensorRT
parser with our creator registered and ENABLE_PLUGIN_OVERRIDE takes the plugin instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # running an engine needs the names alone
    import onnx_ir as ir

DOMAIN, NAME, VERSION = "draftwood", "TreeAttention", 1
OPSET = 24  # TensorScatter and Attention with an explicit mask over a cache
INPUTS = ("query", "key", "value", "sequences", "tree_mask")
PRECISIONS = ("fp32", "fp16", "bf16")


class SequenceRow(NamedTuple):
    """One row of `sequences`: the sequence's first row of the pass, the first slot of its committed rows and how many
    they are, and the slot that the first column of the mask stands for."""

    first_row: int
    first_slot: int
    length: int
    tree_slot: int


def function(precision: str, capacity: int) -> ir.Function:
    """The body for caches of `capacity` slots (the axis C). Raises ValueError for an unknown precision."""
    from .body import FunctionBuilder

    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return FunctionBuilder(precision, capacity).build()
