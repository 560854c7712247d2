"""LLaMA -> one ONNX graph per role, written node by node: no tracing, no torch, weights read lazily while saving.

One layer, above the code that builds it (names are the graph's own node prefixes):

    hidden ─ input_norm ─ qkv_proj ─ split ─ rotary(q, k) ─ TensorScatter(past, k | v) ─ TreeAttention ─ o_proj ─ + ─┐
    hidden ◄─ + ─ down_proj ─ mul ◄─ silu(gate), up ◄─ gate_up_proj ◄─ post_norm ◄────────────────────────────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ...models import bindings
from ...models.config import LlamaConfig
from ...models.rope import rope_tables
from ...plugins.tree_attention import op
from ..checkpoint import Checkpoint
from ..quantize import QuantizedCheckpoint, dequantized
from .graph import IR_VERSION, GraphWriter, save

if TYPE_CHECKING:  # its module imports torch, which writing a graph does not need
    from ...models.acceptance_head import TrainedHead


def export(
    checkpoint: Checkpoint | QuantizedCheckpoint,
    role: str,
    capacity: int,
    path: Path,
    progress: Callable[[str], None],
    head: TrainedHead | None = None,
    form: str = bindings.ADDITIVE,
    precision: str = "fp32",
    max_batch: int = 1,
) -> None:
    """Write `checkpoint` as the ONNX graph of `role`, for caches of up to `capacity` slots.

    head: of the draft; its calibrated probability becomes the output `acceptance`. form: see `models/bindings.py`; the
    compact form fixes the cache, `capacity` slots for each of `max_batch` sequences. precision: of weights, activations
    and cache; outputs are fp32. Matrices of a QuantizedCheckpoint are stored in its format.
    Weights of more than 32 MB in all go to `<path>.data` beside it, one at a time; `progress` is then told the name of
    each before it is written. Raises CheckpointError when a weight holds NaN or infinity.
    """
    builder = GraphBuilder(checkpoint, capacity, head, form, precision, max_batch)
    weight_bytes = builder.dtype.itemsize * checkpoint.config.num_parameters
    save(builder.build(role), path, int(weight_bytes), progress)


class GraphBuilder(GraphWriter):
    """Builds the graph of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint | QuantizedCheckpoint,
        capacity: int,
        head: TrainedHead | None,
        form: str,
        precision: str,
        max_batch: int = 1,
    ) -> None:
        self.checkpoint = checkpoint
        self.head = head
        self.config: LlamaConfig = checkpoint.config
        self.positions, self.capacity = capacity, max_batch * capacity
        self.form = form
        self.precision = bindings.activations(precision, form)
        config = self.config
        axes = {"1": 1, "4": 4, "H_kv": config.num_kv_heads, "D": config.head_dim, "V": config.vocab_size}
        axes["K"] = bindings.top_columns(config.vocab_size)
        fixed = axes if form == bindings.ADDITIVE else axes | {"B": 1, "N": max_batch, "C": self.capacity}
        super().__init__(bindings.DTYPES[self.precision], fixed)

    def build(self, role: str) -> ir.Model:
        """The whole graph; inputs and outputs as `models/bindings.py` names them."""
        config = self.config
        feeds = {item.name: self.input(item) for item in bindings.inputs(self.form)}
        caches: list[ir.Value] = []
        presents: list[ir.Value] = []
        embedding = "model.embed_tokens.weight"
        hidden = self.node("Gather", "embed_tokens", [self.stored(embedding), feeds["input_ids"]], axis=0)
        cosine, sine = rope_tables(config, self.positions)
        rotary = [self.constant("rope.cos", cosine), self.constant("rope.sin", sine), feeds["position_ids"]]
        for layer in range(config.num_layers):
            past = [self.cache_input(bindings.past(kind, layer), bindings.CACHE_SHAPE) for kind in bindings.KINDS]
            attended, present = self.attention(layer, hidden, past, rotary, feeds)
            hidden = self.node("Add", f"layers.{layer}/attention_residual", [hidden, attended])
            hidden = self.node("Add", f"layers.{layer}/mlp_residual", [hidden, self.mlp(layer, hidden)])
            caches += past
            presents += present
        # Only the rows somebody asked for go through the vocabulary projection, often the largest matrix of all.
        hidden = self.node("Gather", "select_rows", [hidden, feeds["output_rows"]], axis=1)
        hidden = self.norm("norm", "model.norm.weight", hidden)
        head = embedding if config.tie_embeddings else "lm_head.weight"
        logits = self.widened("lm_head/fp32", self.linear("lm_head", hidden, [head], []))
        outputs = [self.output(logits, bindings.LOGITS)]
        if bindings.TOP_IDS.name in bindings.output_names(role, form=self.form):
            outputs += self.ranking(logits)
        if self.head is not None:
            outputs.append(self.acceptance(self.head, hidden))
        graph = ir.Graph(
            [*feeds.values(), *caches],
            [*outputs, *presents],
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": op.OPSET} if self.form == bindings.ADDITIVE else {"": op.OPSET, op.DOMAIN: op.VERSION},
            name=role,
        )
        functions = [] if self.form == bindings.ADDITIVE else [op.function(self.precision, self.capacity)]
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="draftwood", functions=functions)

    def attention(
        self,
        layer: int,
        hidden: ir.Value,
        past: Sequence[ir.Value],
        rotary: Sequence[ir.Value],
        feeds: dict[str, ir.Value],
    ) -> tuple[ir.Value, list[ir.Value]]:
        """Tree attention over the cache; returns its output [B, T, hidden] and the two cache outputs."""
        config, scope, prefix = self.config, f"layers.{layer}/attention", f"model.layers.{layer}."
        normed = self.norm(f"layers.{layer}/input_norm", prefix + "input_layernorm.weight", hidden)
        names = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        biases = [f"{name}.bias" for name in names] if config.attention_bias else []
        merged = self.linear(f"{scope}/qkv_proj", normed, [f"{name}.weight" for name in names], biases)
        sizes = np.array([config.query_size, config.kv_size, config.kv_size])
        query, key, value = self.nodes_out(
            "Split", f"{scope}/split", [merged, self.constant("qkv_sizes", sizes)], 3, axis=-1
        )
        query = self.heads(f"{scope}/query", query, config.num_heads)
        key = self.heads(f"{scope}/key", key, config.num_kv_heads)
        value = self.heads(f"{scope}/value", value, config.num_kv_heads)
        query = self.node("RotaryEmbedding", f"{scope}/query_rotary", [query, *rotary])
        key = self.node("RotaryEmbedding", f"{scope}/key_rotary", [key, *rotary])
        present = []
        for kind, cache, rows in zip(bindings.KINDS, past, (key, value), strict=True):
            written = self.node("TensorScatter", f"{scope}/{kind}_cache", [cache, rows, feeds["write_indices"]], axis=2)
            written.name = bindings.present(kind, layer)
            written.type, written.shape = cache.type, cache.shape
            present.append(written)
        attended = self.attend(f"{scope}/tree_attention", query, present, feeds)
        attended = self.node("Transpose", f"{scope}/merge_heads", [attended], perm=[0, 2, 1, 3])
        flat = self.constant("flat_heads", np.array([0, 0, config.query_size]))
        attended = self.node("Reshape", f"{scope}/flatten", [attended, flat])
        output = prefix + "self_attn.o_proj"
        biases = [output + ".bias"] if config.attention_bias else []
        return self.linear(f"{scope}/o_proj", attended, [output + ".weight"], biases), present

    def attend(self, name: str, query: ir.Value, present: Sequence[ir.Value], feeds: dict[str, ir.Value]) -> ir.Value:
        """[B, H, T, D] -> [B, H, T, D], by the standard operator or by ours."""
        scale = 1.0 / math.sqrt(self.config.head_dim)
        if self.form == bindings.ADDITIVE:
            return self.node("Attention", name, [query, *present, feeds["attention_mask"]], scale=scale)
        masks = [feeds["sequences"], feeds["tree_mask"]]
        return self.node(op.NAME, name, [query, *present, *masks], domain=op.DOMAIN, scale=scale)

    def mlp(self, layer: int, hidden: ir.Value) -> ir.Value:
        """down(silu(gate(x)) * up(x)), gate and up as one matrix."""
        config, scope, prefix = self.config, f"layers.{layer}/mlp", f"model.layers.{layer}."
        normed = self.norm(f"layers.{layer}/post_norm", prefix + "post_attention_layernorm.weight", hidden)
        names = [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"]
        biases = [f"{name}.bias" for name in names] if config.mlp_bias else []
        merged = self.linear(f"{scope}/gate_up_proj", normed, [f"{name}.weight" for name in names], biases)
        sizes = self.constant("gate_up_sizes", np.array([config.intermediate_size] * 2))
        gate, up = self.nodes_out("Split", f"{scope}/split", [merged, sizes], 2, axis=-1)
        # x * sigmoid(x), which ONNX Runtime fuses; the Swish operator it takes apart.
        sigmoid = self.node("Sigmoid", f"{scope}/sigmoid", [gate])
        silu = self.node("Mul", f"{scope}/silu", [gate, sigmoid])
        gated = self.node("Mul", f"{scope}/gated", [silu, up])
        down = prefix + "mlp.down_proj"
        return self.linear(f"{scope}/down_proj", gated, [down + ".weight"], [down + ".bias"] if config.mlp_bias else [])

    def ranking(self, logits: ir.Value) -> list[ir.Value]:
        """Top-k ids and log-probabilities, best first. (LogSoftmax + TopK: ReduceLogSumExp is 10x slower on a CPU.)"""
        columns = self.constant("top_columns", np.array([bindings.top_columns(self.config.vocab_size)]))
        logprobs = self.node("LogSoftmax", "ranking/log_softmax", [logits], axis=-1)
        values, ids = self.nodes_out("TopK", "ranking/top_k", [logprobs, columns], 2, axis=-1)
        return [self.output(ids, bindings.TOP_IDS), self.output(values, bindings.TOP_LOGPROBS)]

    def acceptance(self, head: TrainedHead, hidden: ir.Value) -> ir.Value:
        """The SpecDec++ head: L blocks x + SiLU(W x + b), then the calibrated probability of acceptance."""
        config, weights, scope = head.config, head.weights, "acceptance_head"
        for layer in range(config.layers):
            name, block = f"{scope}/block.{layer}", f"blocks.{config.block_of(layer)}.linear"
            matrix = self.constant(f"{scope}.{block}.weight", np.ascontiguousarray(weights[f"{block}.weight"].T))
            bias = self.constant(f"{scope}.{block}.bias", weights[f"{block}.bias"])
            inner = self.node("Add", f"{name}/bias", [self.node("MatMul", f"{name}/linear", [hidden, matrix]), bias])
            silu = self.node("Mul", f"{name}/silu", [inner, self.node("Sigmoid", f"{name}/sigmoid", [inner])])
            hidden = self.node("Add", f"{name}/residual", [hidden, silu])
        odds, shift = config.logit_projection(weights["output.weight"], weights["output.bias"])
        logit = self.node("MatMul", f"{scope}/odds", [hidden, self.constant(f"{scope}.odds.weight", odds)])
        logit = self.node("Add", f"{scope}/shift", [logit, self.constant(f"{scope}.odds.bias", shift)])
        logit = self.widened(f"{scope}/fp32", logit)
        rows = self.node("Squeeze", f"{scope}/rows", [logit, self.constant("last_axis", np.array([-1]))])
        return self.output(self.node("Sigmoid", f"{scope}/probability", [rows]), bindings.ACCEPTANCE)

    def heads(self, name: str, rows: ir.Value, count: int) -> ir.Value:
        """[B, T, count * D] -> [B, count, T, D]."""
        shape = self.constant(f"heads.{count}", np.array([0, 0, count, self.config.head_dim]))
        split = self.node("Reshape", f"{name}_heads", [rows, shape])
        return self.node("Transpose", f"{name}_by_head", [split], perm=[0, 2, 1, 3])

    def norm(self, name: str, weight: str, hidden: ir.Value) -> ir.Value:
        scale = self.stored(weight)
        return self.node("RMSNormalization", name, [hidden, scale], axis=-1, epsilon=self.config.norm_eps)

    def linear(self, name: str, rows: ir.Value, weights: Sequence[str], biases: Sequence[str]) -> ir.Value:
        """rows @ concat(weights).T + concat(biases). Several matrices over one input become one MatMul."""
        size = sum(self.checkpoint.shape(weight)[0] for weight in weights)
        shape = (self.checkpoint.shape(weights[0])[1], size)

        matrix = (
            dequantized(self, f"{name}.weight", self.checkpoint, weights)
            if isinstance(self.checkpoint, QuantizedCheckpoint)
            else self.lazy(f"{name}.weight", shape, lambda: self.concatenated(weights, shape))
        )
        product = self.node("MatMul", name, [rows, matrix])
        if not biases:
            return product
        vector = self.lazy(f"{name}.bias", (size,), lambda: self.concatenated(biases, (size,)))
        return self.node("Add", f"{name}_bias", [product, vector])

    def concatenated(self, names: Sequence[str], shape: tuple[int, ...]) -> NDArray[Any]:
        """Transposed tensors side by side along the last axis, converted on the way: no second copy in memory."""
        merged = np.empty(shape, self.dtype.numpy())
        start = 0
        for name in names:
            stored = self.checkpoint.tensor(name).T
            merged[..., start : start + stored.shape[-1]] = stored
            start += stored.shape[-1]
        return merged

    def stored(self, name: str) -> ir.Value:
        """A tensor of the checkpoint as it is."""
        return self.lazy(name, self.checkpoint.shape(name), lambda: self.checkpoint.tensor(name))
