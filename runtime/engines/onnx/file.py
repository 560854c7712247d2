"""Validation of a bundle's ONNX graph by its bytes, before a library opens it.

ONNX graphs can contain more than an engine needs: loops, graphs within graphs, and weights in any file of the machine.
A valid graph has only the operators that the builder writes, exactly the inputs and outputs that follow from its spec,
and weights in its own file or the data file beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ....models import bindings
from ....models.bindings import ADDITIVE, CACHE_SHAPE, Binding
from ....models.errors import EngineError
from ....plugins.installation import lacking
from ..base import EngineSpec

OPERATORS = frozenset(
    (
        *("Add", "Attention", "Cast", "Concat", "CumSum", "DequantizeLinear", "Equal", "Gather", "LessOrEqual"),
        *("LogSoftmax", "MatMul", "Mul", "RMSNormalization", "Reshape", "RotaryEmbedding", "Sigmoid", "Split"),
        *("Squeeze", "TensorScatter", "TopK", "Transpose", "Where"),
    )
)
OWN_DOMAIN = ("", "ai.onnx")
EXTERNAL = ".data"  # the data file of `<name>.onnx` is `<name>.onnx.data`
MOST_BYTES = 1 << 24  # of a graph, which a parser makes up to 80 times as large in memory
GRAPHS = ("g", "graphs", "sparse_tensor", "sparse_tensors")  # fields of an attribute
ELEMENTS = {"float32": 1, "int64": 7}  # onnx.TensorProto.DataType


class TensorType(NamedTuple):
    """The element type and shape of an input or output. An axis is None where its size depends on the pass."""

    element: int
    shape: tuple[int | None, ...]


def check_graph(path: Path, spec: EngineSpec) -> None:
    """Raises EngineError unless the file is a graph that the builder can write for this spec."""
    try:
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from onnx import load_model_from_string
    except ModuleNotFoundError as error:
        raise EngineError(f"the {spec.role} needs {lacking(error)}") from error
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        model = load_model_from_string(path.read_bytes())
        check_model(model, path)
        inputs, outputs = (
            {each.name: type_of(each) for each in part} for part in (model.graph.input, model.graph.output)
        )
    except (OSError, ValueError, DecodeError, MemoryError) as error:
        raise EngineError(f"{path.name} is no graph of a bundle ({error}): rebuild the bundle") from error
    feeds, results = expected_tensors(spec)
    for kind, wanted, found in (("input", feeds, inputs), ("output", results, outputs)):
        for name in sorted({*wanted, *found}):
            if wanted.get(name) != found.get(name):
                raise EngineError(
                    f"{path.name}: its {kind} {name!r:.200} is {found.get(name)} where the manifest says "
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


def check_model(model: Any, path: Path) -> None:
    """Raises ValueError for contents that the builder never writes. model: an onnx.ModelProto."""
    if model.training_info or model.functions:
        raise ValueError(f"it holds {'training' if model.training_info else 'functions'}")
    if model.graph.sparse_initializer:
        raise ValueError("it holds sparse weights")
    tensors = [*model.graph.initializer]
    for node in model.graph.node:
        for attribute in node.attribute:
            if any(field.name in GRAPHS for field, _ in attribute.ListFields()):
                raise ValueError("it holds a graph or sparse weights within an operator")
            tensors += [attribute.t, *attribute.tensors]
        if node.op_type not in OPERATORS or node.domain not in OWN_DOMAIN:
            raise ValueError(f"it has an operator {f'{node.domain}.{node.op_type}'!r:.200}, which no build writes")
    for tensor in tensors:
        check_tensor(tensor, path.with_name(path.name + EXTERNAL))


def check_tensor(tensor: Any, beside: Path) -> None:
    """Check where the weights of a tensor are: in the graph itself, or within the data file. Raises ValueError."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries:
        return
    if entries.get("location") != beside.name:
        raise ValueError(f"its weights lie in {entries.get('location')!r:.200} instead of {beside.name}")
    offset, length = (int(entries.get(key, "0")) for key in ("offset", "length"))
    if offset < 0 or length < 0 or offset + length > beside.stat().st_size:
        raise ValueError(f"its weights lie beyond the end of {beside.name}")


def type_of(value: Any) -> TensorType:
    """The type of an onnx.ValueInfoProto. Raises ValueError."""
    if not isinstance(value.name, str) or value.type.WhichOneof("value") != "tensor_type":
        raise ValueError(f"{value.name!r:.200} is no tensor")  # a name that is no UTF-8 is of bytes
    kind = value.type.tensor_type
    shape = tuple(axis.dim_value if axis.HasField("dim_value") else None for axis in kind.shape.dim)
    return TensorType(kind.elem_type, shape)
