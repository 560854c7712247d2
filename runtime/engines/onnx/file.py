"""Validation of a bundle's ONNX graph by its bytes, before a library opens it.

ONNX graphs can contain more than an engine needs: loops, graphs within graphs, and weights in any file of the machine.
A valid graph has only the operators that the builder writes, exactly the inputs and outputs that follow from its spec,
and weights in its own file or the data file beside it. This module reads the necessary fields of onnx.proto itself, so
the runtime does not need the onnx package.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ....models import bindings
from ....models.bindings import ADDITIVE, CACHE_SHAPE, Binding
from ....models.errors import EngineError
from ..base import EngineSpec

OPERATORS = frozenset(
    (
        *("Add", "Attention", "Cast", "Concat", "CumSum", "DequantizeLinear", "Equal", "Gather", "LessOrEqual"),
        *("LogSoftmax", "MatMul", "Mul", "RMSNormalization", "Reshape", "RotaryEmbedding", "Sigmoid", "Split"),
        *("Squeeze", "TensorScatter", "TopK", "Transpose", "Where"),
    )
)
OWN_DOMAIN = (b"", b"ai.onnx")
EXTERNAL = ".data"  # the data file of `<name>.onnx` is `<name>.onnx.data`
ELEMENTS = {"float32": 1, "int64": 7}  # onnx.TensorProto.DataType
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protobuf
# Field numbers of onnx.proto, by message.
GRAPH, MODEL_UNKNOWN = 7, {20: "training", 25: "functions"}
NODE, INITIALIZER, INPUT, OUTPUT, SPARSE = 1, 5, 11, 12, 15
OPERATOR, ATTRIBUTE, DOMAIN = 4, 5, 7
ATTRIBUTE_TENSORS, ATTRIBUTE_UNKNOWN = (5, 10), (6, 11, 22, 23)
EXTERNAL_DATA, KEY, VALUE = 13, 1, 2
NAME, TYPE, TENSOR_TYPE, ELEMENT, SHAPE, DIM, DIM_VALUE = 1, 2, 1, 1, 2, 1, 1


class MessageField(NamedTuple):
    """One field of a protobuf message. value: of a varint. start, end: the range of the field's bytes."""

    number: int
    value: int
    start: int
    end: int


class TensorType(NamedTuple):
    """The element type and shape of an input or output. An axis is None where its size depends on the pass."""

    element: int
    shape: tuple[int | None, ...]


class Graph(NamedTuple):
    inputs: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]


def check_graph(path: Path, spec: EngineSpec) -> None:
    """Raises EngineError unless the file is a graph that the builder can write for this spec."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            graph = read_graph(content, path)
    except (OSError, ValueError, IndexError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{path.name} is no graph of a bundle ({error}): rebuild the bundle") from error
    feeds, results = expected_tensors(spec)
    for kind, wanted, found in (("input", feeds, graph.inputs), ("output", results, graph.outputs)):
        for name in sorted({*wanted, *found}):
            if wanted.get(name) != found.get(name):
                raise EngineError(
                    f"{path.name}: its {kind} {name!r} is {found.get(name)} where the manifest says "
                    f"{wanted.get(name)}: rebuild the bundle"
                )


def expected_tensors(spec: EngineSpec) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
    """The inputs and outputs of a graph in the additive form."""
    model = spec.model
    sizes = {"1": 1, "V": model.num_logits, "K": bindings.top_columns(model.num_logits)}
    sizes |= {"H_kv": model.num_kv_heads, "D": model.head_dim, "I": model.state_inputs, "O": model.state_size}

    def tensor(binding: Binding) -> TensorType:
        return TensorType(ELEMENTS[binding.dtype], tuple(sizes.get(axis) for axis in binding.shape))

    feeds = {item.name: tensor(item) for item in bindings.inputs(ADDITIVE, model.reads is not None)}
    results = {item.name: tensor(item) for item in bindings.outputs(spec.outputs)}
    for layer in range(model.num_layers):
        for kind in bindings.KINDS:
            feeds[bindings.past(kind, layer)] = tensor(Binding("", "float32", CACHE_SHAPE))
            results[bindings.present(kind, layer)] = tensor(Binding("", "float32", CACHE_SHAPE))
    return feeds, results


def read_graph(content: mmap.mmap, path: Path) -> Graph:
    """The graph's inputs and outputs. Raises ValueError or IndexError for contents that the builder never writes."""
    inputs: dict[str, TensorType] = {}
    outputs: dict[str, TensorType] = {}
    for field in read_fields(content, 0, len(content)):
        if field.number in MODEL_UNKNOWN:
            raise ValueError(f"it holds {MODEL_UNKNOWN[field.number]}")
        if field.number != GRAPH:
            continue
        for part in read_fields(content, field.start, field.end):
            if part.number == NODE:
                check_node(content, part, path)
            elif part.number == INITIALIZER:
                check_tensor(content, part, path)
            elif part.number == SPARSE:
                raise ValueError("it holds sparse weights")
            elif part.number in (INPUT, OUTPUT):
                name, tensor = read_value(content, part)
                (inputs if part.number == INPUT else outputs)[name] = tensor
    return Graph(inputs, outputs)


def check_node(content: mmap.mmap, node: MessageField, path: Path) -> None:
    """Check one operator and its attributes. Raises ValueError."""
    operator = domain = b""
    for part in read_fields(content, node.start, node.end):
        if part.number == OPERATOR:
            operator = content[part.start : part.end]
        elif part.number == DOMAIN:
            domain = content[part.start : part.end]
        elif part.number == ATTRIBUTE:
            for value in read_fields(content, part.start, part.end):
                if value.number in ATTRIBUTE_UNKNOWN:
                    raise ValueError("it holds a graph or sparse weights within an operator")
                if value.number in ATTRIBUTE_TENSORS:
                    check_tensor(content, value, path)
    if operator.decode("utf-8", "replace") not in OPERATORS or domain not in OWN_DOMAIN:
        raise ValueError(f"it has an operator {domain + b'.' + operator!r}, which no build writes")


def check_tensor(content: mmap.mmap, tensor: MessageField, path: Path) -> None:
    """Check where the weights of a tensor are: in the graph itself, or within the data file. Raises ValueError."""
    entries: dict[bytes, bytes] = {}
    for part in read_fields(content, tensor.start, tensor.end):
        if part.number == EXTERNAL_DATA:
            entry = {item.number: content[item.start : item.end] for item in read_fields(content, part.start, part.end)}
            entries[entry.get(KEY, b"")] = entry.get(VALUE, b"")
    if not entries:
        return
    beside = path.with_name(path.name + EXTERNAL)
    if entries.get(b"location") != beside.name.encode():
        raise ValueError(f"its weights lie in {entries.get(b'location')!r} instead of {beside.name}")
    offset, length = (int(entries.get(key, b"0")) for key in (b"offset", b"length"))
    if offset < 0 or length < 0 or offset + length > beside.stat().st_size:
        raise ValueError(f"its weights lie beyond the end of {beside.name}")


def read_value(content: mmap.mmap, value: MessageField) -> tuple[str, TensorType]:
    name, element = "", 0
    shape: list[int | None] = []
    for part in read_fields(content, value.start, value.end):
        if part.number == NAME:
            name = content[part.start : part.end].decode("utf-8")
        if part.number != TYPE:
            continue
        for kind in read_fields(content, part.start, part.end):
            if kind.number != TENSOR_TYPE:
                raise ValueError(f"{name!r} is no tensor")
            for item in read_fields(content, kind.start, kind.end):
                if item.number == ELEMENT:
                    element = item.value
                if item.number == SHAPE:
                    axes = [axis for axis in read_fields(content, item.start, item.end) if axis.number == DIM]
                    shape = [read_axis(content, axis) for axis in axes]
    return name, TensorType(element, tuple(shape))


def read_axis(content: mmap.mmap, axis: MessageField) -> int | None:
    """The size of an axis; None where the axis has only a name."""
    sizes = [part.value for part in read_fields(content, axis.start, axis.end) if part.number == DIM_VALUE]
    return sizes[-1] if sizes else None


def read_fields(content: mmap.mmap, start: int, end: int) -> Iterator[MessageField]:
    """Yield the fields of a message. Raises ValueError or IndexError when the message is cut off."""
    while start < end:
        key, start = read_varint(content, start)
        number, wire = key >> 3, key & 7
        value = 0
        if wire == VARINT:
            value, after = read_varint(content, start)
        elif wire == BYTES:
            length, start = read_varint(content, start)
            after = start + length
        elif wire in (FIXED32, FIXED64):
            after = start + (4 if wire == FIXED32 else 8)
        else:
            raise ValueError("it is no protobuf")
        if after > end:
            raise ValueError("it is cut off")
        yield MessageField(number, value, start, after)
        start = after


def read_varint(content: mmap.mmap, start: int) -> tuple[int, int]:
    """The varint at `start`, and the index of the byte after it."""
    value = 0
    for index in range(10):
        byte = content[start + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, start + index + 1
    raise ValueError("it is no protobuf")
