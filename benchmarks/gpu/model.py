"""A LLaMA that torch executes behind the interface of compiled programs: what a TensorRT plan is to the static engine.

It makes passes, captures, pools, rounds and the attention kernel run on GPUs for which no plan can be built. Users get
no such engine. On a machine without a GPU it runs over the driver that tests put in libcuda's place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from draftwood.models import bindings
from draftwood.models.config import LlamaConfig
from draftwood.models.errors import EngineError
from draftwood.models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, Layer, Matrix, network_of
from draftwood.models.rope import rope_tables
from draftwood.runtime.engines.base import EngineSpec
from draftwood.runtime.engines.static.device import Stream

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Weights = Callable[[str], Tensor]  # Hugging Face name of a tensor -> tensor
Bound = dict[str, tuple[tuple[int, ...], int]]  # shape and address by name


# query, key, value, sequences, tree_mask, scale -> output; see plugins/tree_attention/op.py
TreeAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


def dense_tree_attention(
    query: Tensor, keys: Tensor, values: Tensor, sequences: Tensor, tree_mask: Tensor, scale: float
) -> Tensor:
    """TreeAttention in standard operations, which read every slot of the cache. A row without visible slots gives
    zeros."""
    rows, columns = tree_mask.shape[1:]
    begun = sequences[:, :1] <= torch.arange(rows, device=keys.device)  # [N, T]
    first_slot, length, tree_slot = sequences[begun.sum(0) - 1, 1:, None].unbind(1)  # [T, 1]
    slots = torch.arange(keys.shape[2], device=keys.device)
    relative = slots - tree_slot  # [T, C]
    column = relative.clamp(0, columns - 1)
    committed = (slots >= first_slot) & (slots < first_slot + length)
    visible = committed | (tree_mask[0].gather(1, column.long()) & (relative == column))
    grouped = query.shape[1] != keys.shape[1]
    output = functional.scaled_dot_product_attention(query, keys, values, visible, scale=scale, enable_gqa=grouped)
    return output.masked_fill(~visible.any(-1, keepdim=True), 0.0)


class TorchLlama:
    """A LLaMA without additions of a family. Its matrices over the same input are merged. weights: by Hugging Face's
    names, in the order of the network; each is asked for once."""

    def __init__(self, config: LlamaConfig, weights: Weights, positions: int, dtype: torch.dtype, device: str) -> None:
        """Raises EngineError for a model of another family. positions: number of position ids in the RoPE tables."""
        if config.variant.differences or config.attention_bias or config.mlp_bias:
            raise EngineError("the check's model is a LLaMA without biases: choose another checkpoint")
        self.config, self.network, self.device = config, network_of(config), torch.device(device)

        def take(name: str) -> Tensor:
            return weights(name).to(self.device, dtype)

        def merged(matrix: Matrix) -> Tensor:
            return torch.cat([take(name) for name in matrix.weights])

        self.embedding = take(EMBEDDING_WEIGHT)
        self.layers = [
            (take(layer.input_norm.weight), merged(layer.qkv), merged(layer.output), take(layer.post_norm.weight),
             merged(layer.gate_up), merged(layer.down))
            for layer in self.network.layers
        ]  # fmt: skip
        self.norm = take(self.network.norm.weight)
        self.head = self.embedding if config.tie_embeddings else take(HEAD_WEIGHT)
        self.tables = tuple(torch.from_numpy(each).to(self.device, dtype) for each in rope_tables(config, positions))
        if self.device.type == "cuda":
            from .attention import tree_attention
            from .launches import TritonSteps

            self.steps: Any = TritonSteps()
            self.attend: TreeAttention = tree_attention
        else:
            self.steps, self.attend = TorchSteps(), dense_tree_attention

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a pass reads: all but the table of embeddings, of which it reads single rows."""
        return sum(each.nbytes for each in (self.norm, self.head, *(each for layer in self.layers for each in layer)))

    def tensor(self, name: str) -> Tensor:
        """A tensor by Hugging Face's name, as a view."""
        modules: dict[str, Tensor] = {EMBEDDING_WEIGHT: self.embedding, HEAD_WEIGHT: self.head}
        modules[self.network.norm.weight] = self.norm
        for layer, (input_norm, qkv, output, post_norm, gate_up, down) in zip(
            self.network.layers, self.layers, strict=True
        ):
            modules |= {layer.input_norm.weight: input_norm, layer.post_norm.weight: post_norm}
            for matrix, merged in zip(layer.matrices, (qkv, output, gate_up, down), strict=True):
                modules |= dict(zip(matrix.weights, torch.split(merged, list(matrix.outputs)), strict=True))
        return modules[name]

    def forward(self, views: dict[str, Tensor], cache: Tensor) -> Tensor:
        """Score the rows of a pass (tensors by the names of models/bindings.py) over a cache [2 * layers, 1, H_kv, C,
        D], which is extended in place. Returns logits [R, V]."""
        steps, epsilon = self.steps, self.config.norm_eps
        rows = self.embedding[views[bindings.INPUT_IDS.name][0]]
        for index, (layer, weights) in enumerate(zip(self.network.layers, self.layers, strict=True)):
            input_norm, qkv, output, post_norm, gate_up, down = weights
            products = steps.product(rows, qkv, ProductStep(input_norm, epsilon))
            attended = self._attention(layer, products, views, cache[2 * index], cache[2 * index + 1])
            rows = steps.product(attended, output, ProductStep(residual=rows))
            gated = steps.product(rows, gate_up, ProductStep(post_norm, epsilon, gates=True))
            rows = steps.product(gated, down, ProductStep(residual=rows))
        scored = rows[views[bindings.OUTPUT_ROWS.name]]
        logits: Tensor = steps.product(scored, self.head, ProductStep(self.norm, epsilon))
        return logits

    def _attention(self, layer: Layer, qkv: Tensor, views: dict[str, Tensor], keys: Tensor, values: Tensor) -> Tensor:
        """Rotate, write the rows' keys and values, and attend: [T, H * D]."""
        config, first_slot = self.config, views[bindings.WRITE_INDICES.name]
        positions = views[bindings.POSITION_IDS.name][0]
        self.steps.rotate_and_store(qkv, positions, self.tables, keys[0], values[0], first_slot, config.num_heads)
        query = qkv[:, : config.query_size].view(1, -1, config.num_heads, config.head_dim).transpose(1, 2)
        sequences, mask = views[bindings.SEQUENCES.name], views[bindings.TREE_MASK.name]
        attended = self.attend(query, keys, values, sequences, mask, layer.attention_scale)
        return attended.transpose(1, 2).reshape(-1, config.query_size)


class ProductStep(NamedTuple):
    """What a product is computed with."""

    # Weight [K] of an RMSNorm of the rows, and what is added to the mean of their squares.
    norm: Tensor | None = None
    epsilon: float = 0.0
    # Whether the result is silu(first half) * second half.
    gates: bool = False
    # Added to the result, [T, N].
    residual: Tensor | None = None


class TorchSteps:
    """The steps in torch's operations, for a CPU."""

    def norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return functional.rms_norm(rows, weight.shape, weight, epsilon)

    def product(self, rows: Tensor, weight: Tensor, step: ProductStep) -> Tensor:
        """rows [T, K] times weight [N, K], with the steps around it: [T, N], gated [T, N / 2]."""
        found = functional.linear(rows if step.norm is None else self.norm(rows, step.norm, step.epsilon), weight)
        found = self.gate(found) if step.gates else found
        return found if step.residual is None else found + step.residual

    def gate(self, both: Tensor) -> Tensor:
        first, second = both.chunk(2, -1)
        return functional.silu(first) * second

    def rotate_and_store(
        self, qkv: Tensor, positions: Tensor, tables: tuple[Tensor, ...], keys: Tensor, values: Tensor,
        first_slot: Tensor, query_heads: int,
    ) -> None:  # fmt: skip
        """See kernels.rotate_and_store. keys, values: [H_kv, C, D] of one layer."""
        kv_heads, _, head_dim = keys.shape
        heads = qkv.view(len(qkv), -1, head_dim)
        cosine, sine = (table[positions][:, None] for table in tables)
        first, second = heads[:, : query_heads + kv_heads].chunk(2, -1)
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        heads[:, : query_heads + kv_heads] = turned
        slots = first_slot + torch.arange(len(qkv), device=qkv.device)
        keys.index_copy_(1, slots, turned[:, query_heads:].transpose(0, 1))
        values.index_copy_(1, slots, heads[:, query_heads + kv_heads :].transpose(0, 1))


class _Array:
    """What torch.as_tensor takes as a CUDA array."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor over memory that belongs to others."""
    nbytes = prod(shape) * dtype.itemsize
    if device.type == "cuda":
        flat = torch.as_tensor(_Array(address, nbytes), device=device)
    else:
        flat = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


class TorchProgram:
    """See Program of static/device.py. enqueue: on a machine without a GPU, how work is queued on a stream; else
    None."""

    workspace_bytes = 0

    def __init__(
        self, model: TorchLlama, spec: EngineSpec, enqueue: Callable[[Callable[[], None], Stream], None] | None = None
    ) -> None:
        self.model, self._queue = model, enqueue
        self.max_columns, self.near_slots = spec.capacity, 0  # no layer has a window
        self.weight_bytes = model.nbytes + model.embedding.nbytes
        dtype = model.embedding.dtype
        self.cache_itemsize = dtype.itemsize
        items = (*bindings.inputs(bindings.COMPACT), *bindings.outputs(spec.outputs))
        self.named = {item.name: getattr(torch, str(np.dtype(item.dtype))) for item in items}
        self.caches = [(kind, layer) for layer in range(spec.model.num_layers) for kind in bindings.KINDS]
        self._streams: dict[Stream, Any] = {}

    def execution(self, width: int, stream: Stream) -> TorchExecution:
        return TorchExecution(self)

    def enqueue(self, views: dict[str, Tensor], cache: Tensor, stream: Stream) -> None:
        if self._queue is not None:
            self._queue(lambda: self.run(views, cache), stream)
            return
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.ExternalStream(stream)  # type: ignore[no-untyped-call]  # of torch
        with torch.cuda.stream(self._streams[stream]):
            self.run(views, cache)

    @torch.inference_mode()
    def run(self, views: dict[str, Tensor], cache: Tensor) -> None:
        logits = self.model.forward(views, cache).float()
        views[bindings.LOGITS.name][0].copy_(logits)
        if bindings.TOP_IDS.name in views:
            top_ids, top_logprobs = views[bindings.TOP_IDS.name][0], views[bindings.TOP_LOGPROBS.name][0]
            top = logits.topk(top_ids.shape[-1])
            top_ids.copy_(top.indices)
            torch.sub(top.values, logits.logsumexp(-1, keepdim=True), out=top_logprobs)

    def close(self) -> None:
        del self.model


class TorchExecution:
    """See Execution of static/device.py."""

    def __init__(self, program: TorchProgram) -> None:
        self._program = program
        self._bound: Bound = {}
        self._views: tuple[dict[str, Tensor], Tensor] | None = None

    def bind(self, name: str, shape: tuple[int, ...], address: int) -> None:
        if self._bound.get(name) != (shape, address):
            self._bound[name], self._views = (shape, address), None

    def enqueue(self, stream: Stream) -> None:
        if self._views is None:
            self._views = self._tensors()
        self._program.enqueue(*self._views, stream)

    def is_capturable(self, stream: Stream) -> bool:
        return True

    def _tensors(self) -> tuple[dict[str, Tensor], Tensor]:
        """The bound tensors by name, and the caches of all layers as one [2 * layers, 1, H_kv, C, D]. Raises
        EngineError for caches that are not written in place, or not at equal distances."""
        program, bound = self._program, self._bound
        device, dtype = program.model.device, program.model.embedding.dtype
        shape, first = bound[bindings.past(*program.caches[0])]
        distance = bound[bindings.past(*program.caches[1])][1] - first
        for index, each in enumerate(program.caches):
            place = shape, first + index * distance
            if bound[bindings.past(*each)] != place or bound[bindings.present(*each)] != place:
                raise EngineError("the caches must be written in place, at equal distances")
        flat = tensor_at(first, (len(program.caches), distance // dtype.itemsize), dtype, device)
        cache = flat[:, : prod(shape)].view(-1, *shape)
        names = (name for name in program.named if name in bound)
        return {name: tensor_at(bound[name][1], bound[name][0], program.named[name], device) for name in names}, cache
