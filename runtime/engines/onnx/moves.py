"""The two ONNX graphs that copy rows of a cache on the device where it lies, as bytes of onnx.proto.

    GATHER: source [P, H, S, D], rows [C]                           -> kept [P, H, C, D]
    MOVE:   cache [P, H, C, D], rows [n], first [P]                 -> moved, the cache itself

MOVE gathers the rows before it writes them, so a row that is overwritten may also be one that moves. TensorScatter
writes in place where its output is bound to its input's memory. The runtime does not need the onnx package for this.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import file as onnx

GATHER_OPSET, MOVE_OPSET = 13, 24  # of the operator set that has the newest operator of the graph
IR_VERSION = 10
# Field numbers of onnx.proto that only a writer needs.
MODEL_IR_VERSION, MODEL_OPSET, OPSET_VERSION, GRAPH_NAME = 1, 8, 2, 2
NODE_INPUT, NODE_OUTPUT, DIM_NAME = 1, 2, 2
ATTRIBUTE_NAME, ATTRIBUTE_INT, ATTRIBUTE_TYPE, INT = 1, 3, 20, 2
PLANES = ("P", "H")  # axes before the slots: of layers with keys and values, of heads
SLOT_AXIS = 2


def gather_graph(dtype: str) -> bytes:
    source = tensor("source", dtype, (*PLANES, "S", "D"))
    kept = tensor("kept", dtype, (*PLANES, "C", "D"))
    nodes = [node("Gather", ("source", "rows"), "kept")]
    return model(GATHER_OPSET, nodes, [source, tensor("rows", "int64", ("C",))], kept)


def move_graph(dtype: str) -> bytes:
    cache = tensor("cache", dtype, (*PLANES, "C", "D"))
    moved = tensor("moved", dtype, (*PLANES, "C", "D"))
    nodes = [node("Gather", ("cache", "rows"), "kept"), node("TensorScatter", ("cache", "kept", "first"), "moved")]
    return model(MOVE_OPSET, nodes, [cache, tensor("rows", "int64", ("n",)), tensor("first", "int64", ("P",))], moved)


def model(opset: int, nodes: Sequence[bytes], inputs: Sequence[bytes], output: bytes) -> bytes:
    parts = [*(field(onnx.NODE, each) for each in nodes), field(GRAPH_NAME, b"moves")]
    parts += [*(field(onnx.INPUT, each) for each in inputs), field(onnx.OUTPUT, output)]
    versions = field(MODEL_OPSET, field(OPSET_VERSION, opset))
    return field(MODEL_IR_VERSION, IR_VERSION) + field(onnx.GRAPH, b"".join(parts)) + versions


def node(operator: str, inputs: Sequence[str], output: str) -> bytes:
    """An operator along the axis of slots."""
    axis = field(ATTRIBUTE_NAME, b"axis") + field(ATTRIBUTE_INT, SLOT_AXIS) + field(ATTRIBUTE_TYPE, INT)
    names = b"".join(field(NODE_INPUT, name.encode()) for name in inputs) + field(NODE_OUTPUT, output.encode())
    return names + field(onnx.OPERATOR, operator.encode()) + field(onnx.ATTRIBUTE, axis)


def tensor(name: str, dtype: str, axes: Sequence[str]) -> bytes:
    """An input or output of the graph, whose axes have names instead of sizes."""
    shape = b"".join(field(onnx.DIM, field(DIM_NAME, axis.encode())) for axis in axes)
    kind = field(onnx.ELEMENT, onnx.ELEMENTS[dtype]) + field(onnx.SHAPE, shape)
    return field(onnx.NAME, name.encode()) + field(onnx.TYPE, field(onnx.TENSOR_TYPE, kind))


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message: a number, or bytes with their length before them."""
    if isinstance(value, int):
        return varint(number << 3 | onnx.VARINT) + varint(value)
    return varint(number << 3 | onnx.BYTES) + varint(len(value)) + value


def varint(value: int) -> bytes:
    groups = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])
