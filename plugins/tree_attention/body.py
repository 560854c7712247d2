"""TreeAttention's body in standard ONNX operators, for runtimes without a kernel for it.

fp16, bf16: one standard Attention node, for which runtimes have fused kernels. fp32: its elementary operators, because
TensorRT-RTX has no fused fp32 attention and cannot decompose the operator. Both multiply invisible values by zero, so
every slot of a cache must be finite. The plugin's kernel does not read invisible slots at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .op import DOMAIN, INPUTS, NAME, OPSET, WINDOWED, SequenceRow

DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


class FunctionBuilder:
    """Builds the local function of one precision and capacity."""

    def __init__(self, precision: str, capacity: int, window: int) -> None:
        self.precision = precision
        self.capacity, self.window = capacity, window
        self.nodes: list[ir.Node] = []
        self.scale = ir.RefAttr("scale", "scale", ir.AttributeType.FLOAT)

    def build(self) -> ir.Function:
        inputs = [ir.Value(name=name) for name in INPUTS]
        query, key, value, sequences, tree_mask = inputs
        visible = self.visible(sequences, tree_mask)
        if self.precision == "fp32":
            attended = self.decomposed(query, key, value, visible)
        else:
            mask = self.node("Unsqueeze", [visible, self.integers([1])], "mask_by_head")
            arguments = [query, key, value, mask]
            attended = self.node("Attention", arguments, "attention", [self.scale, ir.AttrInt64("is_causal", 0)])
        output = self.zero_blind_rows(attended, visible)
        output.name = "output"
        graph = ir.Graph(inputs, [output], nodes=self.nodes, opset_imports={"": OPSET}, name=NAME)
        name = WINDOWED if self.window else NAME
        return ir.Function(DOMAIN, name, graph=graph, attributes=[ir.Attr("scale", ir.AttributeType.FLOAT, None)])

    def visible(self, sequences: ir.Value, tree_mask: ir.Value) -> ir.Value:
        """[1, T, C], bool: each row's committed slots, and the compact mask at the slots of its columns.

        The slots' numbers are a constant and not a Range: TensorRT-RTX 1.7 fails on a Range used by several layers.
        """
        zero, one = self.constant("zero", np.int32(0)), self.constant("one", np.int32(1))
        slots = self.constant("slots", np.arange(self.capacity, dtype=np.int32))
        first_slot, length, tree_slot = self.of_each_row(sequences, tree_mask, slots)  # [T, 1]
        numbers = self.cast(tree_mask, ir.DataType.INT32, "mask_int32")
        ahead = self.node("Sub", [slots, first_slot], "slots_from_first")  # [T, C]
        begun = self.node("GreaterOrEqual", [ahead, zero], "not_before_first")
        if self.window:
            numbers, seen = self.in_window(numbers)
            beyond = self.node("Sub", [self.node("Add", [length, seen], "rows_seen"), self.window_size()], "beyond")
            begun = self.node("And", [begun, self.node("GreaterOrEqual", [ahead, beyond], "near")], "begun_and_near")
        committed = self.node("And", [begun, self.node("Less", [ahead, length], "before_end")], "committed")
        relative = self.node("Sub", [slots, tree_slot], "relative_slot")  # [T, C]
        columns = self.node("Shape", [tree_mask], "columns", [ir.AttrInt64("start", 2), ir.AttrInt64("end", 3)])
        last = self.node("Sub", [self.cast(columns, ir.DataType.INT32, "columns_int32"), one], "last_column")
        column = self.node("Min", [self.node("Max", [relative, zero], "not_committed"), last], "column")
        speculative = self.node("Equal", [relative, column], "speculative")
        column = self.node("Unsqueeze", [column, self.integers([0])], "column_of_batch")
        seen = self.node("GatherElements", [numbers, column], "gathered", [ir.AttrInt64("axis", 2)])
        seen = self.node("And", [self.cast(seen, ir.DataType.BOOL, "seen"), speculative], "seen_speculative")
        return self.node("Or", [committed, seen], "visible")

    def window_size(self) -> ir.Value:
        return self.constant("window", np.int32(self.window))

    def in_window(self, numbers: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The mask's last numbers of each row [1, T, S], which a window leaves, and how many there were, [T, 1]."""
        wide = self.cast(numbers, ir.DataType.FLOAT, "mask_fp32")  # TensorRT sums no integers
        axis, reverse = self.constant("mask_axis", np.int64(2)), [ir.AttrInt64("reverse", 1)]
        after = self.cast(self.node("CumSum", [wide, axis], "after", reverse), ir.DataType.INT32, "after_int32")
        near = self.node("LessOrEqual", [after, self.window_size()], "in_window")
        kept = self.node("Mul", [numbers, self.cast(near, ir.DataType.INT32, "in_window_int32")], "mask_in_window")
        seen = self.node("ReduceSum", [numbers, self.integers([2])], "columns_seen", [ir.AttrInt64("keepdims", 1)])
        return kept, self.node("Squeeze", [seen, self.integers([0])], "columns_seen_of_row")

    def of_each_row(self, sequences: ir.Value, tree_mask: ir.Value, slots: ir.Value) -> tuple[ir.Value, ...]:
        """The three numbers of each row's sequence in `sequences`, without `first_row`: each [T, 1], int32."""
        count = self.node("Shape", [tree_mask], "row_count_of_mask", [ir.AttrInt64("start", 1), ir.AttrInt64("end", 2)])
        numbers = self.node("Slice", [slots, self.integers([0]), count], "row_numbers")  # [T]
        starts, *wanted = (
            self.node("Slice", [sequences, *map(self.integers, ([each], [each + 1], [1]))], f"field_{each}")
            for each in range(len(SequenceRow._fields))
        )  # [N, 1] each
        begun = self.node("LessOrEqual", [starts, numbers], "begun")  # [N, T]
        begun = self.cast(begun, ir.DataType.INT32, "begun_int32")
        begun = self.node("ReduceSum", [begun, self.integers([0])], "sequences_begun", [ir.AttrInt64("keepdims", 0)])
        index = self.node("Sub", [begun, self.constant("one", np.int32(1))], "sequence_of_row")  # [T]
        return tuple(
            self.node("Gather", [field, index], f"row_field_{number}", [ir.AttrInt64("axis", 0)])
            for number, field in enumerate(wanted)
        )

    def decomposed(self, query: ir.Value, key: ir.Value, value: ir.Value, visible: ir.Value) -> ir.Value:
        """Attention with the query heads of a group as rows of one matrix: keys and values are never repeated."""
        zero, minus_one = self.integers([0]), self.integers([-1])
        heads = self.node("Shape", [key], "kv_heads", [ir.AttrInt64("start", 1), ir.AttrInt64("end", 2)])
        shape = self.node("Shape", [query], "query_shape")
        axis = [ir.AttrInt64("axis", 0)]
        grouped = self.node("Concat", [zero, heads, minus_one, zero], "grouped_shape", axis)  # [B, H_kv, G * T, D]
        by_row = self.node("Shape", [query], "row_count", [ir.AttrInt64("start", 2), ir.AttrInt64("end", 3)])
        split = self.node(
            "Concat", [zero, heads, minus_one, by_row, self.integers([self.capacity])], "split_shape", axis
        )
        scale = self.node("Constant", [], "scale_value", [ir.RefAttr("value_float", "scale", ir.AttributeType.FLOAT)])
        query = self.node("Mul", [self.node("Reshape", [query, grouped], "grouped_query"), scale], "scaled_query")
        key = self.node("Transpose", [key], "transposed_key", [ir.AttrInt64s("perm", [0, 1, 3, 2])])
        scores = self.node("MatMul", [query, key], "scores")
        scores = self.node("Reshape", [scores, split], "split_scores")  # [B, H_kv, G, T, C]
        mask = self.node("Unsqueeze", [visible, self.integers([1, 2])], "mask_by_group")
        least = self.constant("least_score", np.finfo(np.float32).min)  # finite: no NaN without visible slots
        weights = self.node("Softmax", [self.node("Where", [mask, scores, least], "masked_scores")], "weights")
        merged = self.node("Concat", [zero, heads, minus_one, self.integers([self.capacity])], "merged_shape", axis)
        weights = self.node("Reshape", [weights, merged], "merged_weights")
        return self.node("Reshape", [self.node("MatMul", [weights, value], "weighted_values"), shape], "attended")

    def zero_blind_rows(self, attended: ir.Value, visible: ir.Value) -> ir.Value:
        """Set rows without visible slots to zero: they are padding, and their softmax is meaningless."""
        numbers = self.cast(visible, ir.DataType.INT32, "visible_int32")
        count = self.node("ReduceMax", [numbers, self.integers([2])], "sees_any_int32", [ir.AttrInt64("keepdims", 1)])
        sees = self.node("Unsqueeze", [self.cast(count, ir.DataType.BOOL, "sees_any"), self.integers([1])], "sighted")
        zero = self.cast(self.constant("zero_value", np.float32(0)), DTYPES[self.precision], "zero_output")
        return self.node("Where", [sees, attended, zero], "zeroed")

    def node(self, kind: str, inputs: Sequence[ir.Value], name: str, attributes: Sequence[Any] = ()) -> ir.Value:
        node = ir.Node("", kind, inputs, list(attributes), name=name)
        node.outputs[0].name = name
        self.nodes.append(node)
        return node.outputs[0]

    def cast(self, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        return self.node("Cast", [value], name, [ir.AttrInt64("to", int(dtype))])

    def integers(self, values: Sequence[int]) -> ir.Value:
        """A shape or a list of axes."""
        name = "integers_" + "_".join(str(value).replace("-", "minus") for value in values)
        return self.constant(name, np.array(values, np.int64))

    def constant(self, name: str, array: NDArray[Any] | np.generic) -> ir.Value:
        for node in self.nodes:
            if node.name == name:
                return node.outputs[0]
        return self.node("Constant", [], name, [ir.AttrTensor("value", ir.Tensor(np.asarray(array), name=name))])
