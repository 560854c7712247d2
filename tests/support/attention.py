"""Tree attention cases: tensors of random shapes with NaN in all invisible slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwood.plugins.tree_attention import op
from draftwood.plugins.tree_attention.operands import Operands, Strides
from draftwood.plugins.tree_attention.plan import LaunchPlan, Shape
from draftwood.plugins.tree_attention.reference import sequence_of, tree_attention, visible_slots

TYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}  # outputs are averages of values of unit variance
SCALE = 0.2


class Tensors(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sequences: torch.Tensor
    tree_mask: torch.Tensor

    def expected(self) -> NDArray[np.float32]:
        query, key, value = (tensor.float().cpu().numpy() for tensor in self[:3])
        return tree_attention(query, key, value, self.sequences.cpu().numpy(), self.tree_mask.cpu().numpy(), SCALE)

    def shape(self) -> Shape:
        names = {dtype: name for name, dtype in DTYPES.items()}
        return Shape.of([tensor.shape for tensor in self], names[self.query.dtype])


@dataclass(frozen=True)
class Case:
    """A pass of `rows` rows, of a sequence for each of `lengths`: row i sees itself and, as often as not, each earlier
    speculative row. The last row of the pass is padding, which sees nothing of the mask.

    One sequence has the mask's columns after its committed slots. Several have a region each, in any order, and the
    columns lie after all of them, `overhang` of them beyond the cache; some sequences may have no row.
    """

    kv_heads: int
    group: int
    rows: int
    earlier: int
    capacity: int
    lengths: tuple[int, ...]
    head_dim: int
    dtype: str
    multiprocessors: int = 1
    seed: int = 0
    overhang: int = 0

    @property
    def columns(self) -> int:
        return self.earlier + self.rows

    def sequences(self) -> NDArray[np.int32]:
        """[N, 4]."""
        if len(self.lengths) == 1:
            return np.array([(0, 0, self.lengths[0], self.lengths[0])], np.int32)
        rng, tree_slot = np.random.default_rng(self.seed), self.capacity - self.columns + self.overhang
        region = tree_slot // len(self.lengths)
        assert max(self.lengths) <= region, "a sequence is longer than its region"
        first_rows = [0, *np.sort(rng.integers(0, self.rows + 1, len(self.lengths) - 1)).tolist()]
        first_slots = (region * rng.permutation(len(self.lengths))).tolist()
        fields = zip(first_rows, first_slots, self.lengths, strict=True)
        return np.array([(*each, tree_slot) for each in fields], np.int32)

    def tensors(self, poison: float = float("nan")) -> Tensors:
        """Slots that no row sees hold `poison`."""
        rng = np.random.default_rng(self.seed)
        sequences = self.sequences()
        mask = np.tril(rng.random((1, self.rows, self.columns)) < 0.5, self.earlier)
        mask |= np.eye(self.rows, self.columns, self.earlier, dtype=np.bool_)
        mask[:, -1] = False
        cache = (1, self.kv_heads, self.capacity, self.head_dim)
        query, key, value = (
            rng.standard_normal(size, np.float32)
            for size in ((1, self.kv_heads * self.group, self.rows, self.head_dim), cache, cache)
        )
        hidden = np.ones(self.capacity, np.bool_)
        for row in range(self.rows):
            hidden[visible_slots(sequence_of(row, sequences), mask[0, row], self.capacity)] = False
        key[:, :, hidden] = value[:, :, hidden] = poison
        floats = [torch.from_numpy(array).to(DTYPES[self.dtype]) for array in (query, key, value)]
        return Tensors._make([*floats, torch.from_numpy(sequences), torch.from_numpy(mask)])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, earlier = draw(st.integers(1, 9)), draw(st.sampled_from([0, 0, 1, 5]))
    count, overhang = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 2]))
    capacity = draw(st.integers(40, 400))
    longest = capacity - 1 if count == 1 else (capacity - rows - earlier + overhang) // count
    return Case(
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 8])),
        rows=rows,
        earlier=earlier,
        capacity=capacity,
        lengths=tuple(draw(st.lists(st.integers(0, longest), min_size=count, max_size=count))),
        head_dim=draw(st.sampled_from([8, 64, 80, 96, 128])),
        dtype=draw(st.sampled_from(["fp32", "fp16"])),
        multiprocessors=draw(st.sampled_from([1, 4, 132])),
        seed=draw(st.integers(0, 99)),
        overhang=overhang,
    )


def operands(tensors: Tensors, output: torch.Tensor, workspace: torch.Tensor | None) -> Operands:
    address = 0 if workspace is None else workspace.data_ptr()
    pointers = [tensor.data_ptr() for tensor in (*tensors, output)]
    return Operands._make((*pointers, address, strides(tensors.query), strides(output)))


def strides(tensor: torch.Tensor) -> Strides:
    _, head, row, _ = tensor.stride()
    return head, row


def workspace(layout: LaunchPlan, device: str = "cpu") -> torch.Tensor | None:
    """Filled with NaN: nothing may be read from it before it is written."""
    if not layout.workspace_bytes:
        return None
    return torch.full((layout.workspace_bytes // 4,), float("nan"), device=device)


def live_splits(plan: LaunchPlan, length: int) -> int:
    """The splits that a sequence of `length` committed slots takes, as the kernel counts them on the device."""
    slots = plan.variant.block_slots
    blocks = -(-min(length + plan.shape.columns, plan.shape.capacity) // slots)
    return -(-blocks // max(-(-blocks // plan.num_splits), plan.variant.split_slots // slots))


def split_traffic(plan: LaunchPlan, length: int) -> int:
    """Bytes of partial results that a call writes and reads, if its rows belong to one sequence."""
    if plan.num_splits == 1:
        return 0
    live = live_splits(plan, length)
    return 8 * plan.items * (1 + (live * (plan.shape.head_dim + 1) if live > 1 else 0))


def model(precision: str, capacity: int, heads: int, kv_heads: int, head_dim: int) -> onnx.ModelProto:
    """A graph of one TreeAttention, N, T and S free."""
    floating = TYPES[precision]
    inputs: dict[str, tuple[ir.DataType, tuple[int | str, ...]]] = {
        "query": (floating, (1, heads, "T", head_dim)),
        "key": (floating, (1, kv_heads, capacity, head_dim)),
        "value": (floating, (1, kv_heads, capacity, head_dim)),
        "sequences": (ir.DataType.INT32, ("N", 4)),
        "tree_mask": (ir.DataType.BOOL, (1, "T", "S")),
    }
    values = [ir.Value(name=name, type=ir.TensorType(t), shape=ir.Shape(s)) for name, (t, s) in inputs.items()]
    node = ir.node(op.NAME, values, {"scale": SCALE}, domain=op.DOMAIN, name="attention")
    output = node.outputs[0]
    output.name, output.type, output.shape = "output", values[0].type, values[0].shape
    opsets = {"": op.OPSET, op.DOMAIN: op.VERSION}
    graph = ir.Graph(values, [output], nodes=[node], opset_imports=opsets, name="graph")
    return ir.to_proto(ir.Model(graph, ir_version=11, functions=[op.function(precision, capacity)]))
