"""Exports a LLaMA as an ONNX graph, one for each role. The graph is written node by node, without tracing. Weights are
read only while the graph is saved.

One layer, above the code that builds it (names are the graph's own node prefixes):

    hidden ─ input_norm ─ qkv_proj ─ split ─ rotary(q, k) ─ TensorScatter(past, k | v) ─ TreeAttention ─ o_proj ─ + ─┐
    hidden ◄─ + ─ down_proj ─ mul ◄─ silu(gate), up ◄─ gate_up_proj ◄─ post_norm ◄────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ...models import bindings
from ...models.acceptance_head import TrainedHead
from ...models.config import LlamaConfig
from ...models.layers import GELU_CURVE, GELU_SLOPE, Layer, Matrix, Norm, network_of, num_parameters
from ...models.rope import rope_tables
from ...plugins.tree_attention import op
from ..checkpoints.checkpoint import Checkpoint
from ..quantization.formats import QuantizedCheckpoint
from .graph import IR_VERSION, GraphWriter, dequantized, save

WINDOW_MASK = "window_mask"  # of layers with a window; made in the graph


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
    near_slots: int = 0,
) -> None:
    """Write `checkpoint` as the ONNX graph of `role`, for caches of up to `capacity` slots.

    head: the draft's acceptance head; its calibrated probability becomes the output `acceptance`. form: see
    `models/bindings.py`; the compact form fixes the cache, `capacity` slots for each of `max_batch` sequences.
    near_slots: of layers with a window, see `plan_slots`. precision: of weights, activations and cache; outputs are
    fp32. Matrices of a QuantizedCheckpoint are stored in its format. Weights of more than 8 MB in all go to
    `<path>.data` beside it, one at a time; `progress` is then told the name of each before it is written. Raises
    CheckpointError when a weight holds NaN or infinity.
    """
    builder = GraphBuilder(checkpoint, capacity, head, form, precision, max_batch, near_slots)
    weight_bytes = builder.dtype.itemsize * num_parameters(checkpoint.config)
    save(builder.build(role), path, int(weight_bytes), progress)


class GraphBuilder(GraphWriter):
    def __init__(
        self,
        checkpoint: Checkpoint | QuantizedCheckpoint,
        capacity: int,
        head: TrainedHead | None,
        form: str,
        precision: str,
        max_batch: int = 1,
        near_slots: int = 0,
    ) -> None:
        self.checkpoint = checkpoint
        self.head = head
        self.config: LlamaConfig = checkpoint.config
        self.network = network_of(self.config)
        self.positions, self.capacity, self.near_slots = capacity, max_batch * capacity, near_slots
        self.form = form
        self.precision = bindings.activations(precision, form)
        config = self.config
        axes = {"1": 1, "4": 4, "H_kv": config.num_kv_heads, "D": config.head_dim, "V": config.num_logits}
        axes |= {"K": bindings.top_columns(config.num_logits), "I": config.state_inputs, "O": config.state_size}
        fixed = {"B": 1, "N": max_batch, "C": self.capacity, "C_near": near_slots} if form == bindings.COMPACT else {}
        super().__init__(bindings.DTYPES[self.precision], axes | fixed)

    def build(self, role: str) -> ir.Model:
        """The whole graph; inputs and outputs as `models/bindings.py` names them."""
        network = self.network
        inputs = bindings.inputs(self.form, network.fusion is not None, self.near_slots > 0)
        feeds = {item.name: self.input(item) for item in inputs}
        caches: list[ir.Value] = []
        presents: list[ir.Value] = []
        hidden = self.node("Gather", "embed_tokens", [self.stored(network.embedding), feeds["input_ids"]], axis=0)
        tokens = hidden = self.scaled("embed_tokens/scaled", hidden, network.embedding_multiplier)
        if network.fusion is not None:
            hidden = self.fused(network.fusion, feeds[bindings.STATES_IN.name])
        feeds |= self.masks(feeds)
        near = self.near_feeds(feeds) if self.near_slots else feeds
        taps: list[ir.Value] = []
        for index, layer in enumerate(network.layers):
            is_near = self.near_slots > 0 and self.window_of(layer) is not None
            shape = bindings.NEAR_SHAPE if is_near else bindings.CACHE_SHAPE
            past = [self.cache_input(bindings.past(kind, index), shape) for kind in bindings.KINDS]
            normed = joined = self.norm(f"layers.{index}/input_norm", layer.input_norm, hidden)
            if layer.token_norm is not None:
                normed_tokens = self.norm(f"layers.{index}/token_norm", layer.token_norm, tokens)
                joined = self.node("Concat", f"layers.{index}/joined", [normed_tokens, normed], axis=-1)
            attended, present = self.attention(index, layer, joined, past, near if is_near else feeds)
            before = normed if layer.norm_first else hidden
            hidden = self.node("Add", f"layers.{index}/attention_residual", [before, attended])
            hidden = self.node("Add", f"layers.{index}/mlp_residual", [hidden, self.mlp(index, layer, hidden)])
            taps += [hidden] if index + 1 in network.taps else []
            caches += past
            presents += present
        # Only the requested rows go through the vocabulary projection, which is often the largest matrix.
        hidden = self.node("Gather", "select_rows", [hidden, feeds["output_rows"]], axis=1)
        hidden = self.norm("norm", network.norm, hidden)
        logits = self.scaled("lm_head/scaled", self.linear("lm_head", hidden, network.head), network.logits_multiplier)
        logits = self.widened("lm_head/fp32", logits)
        outputs = [self.output(logits, bindings.LOGITS)]
        if bindings.TOP_IDS.name in bindings.output_names(role, form=self.form):
            outputs += self.ranking(logits)
        if self.head is not None:
            outputs.append(self.acceptance(self.head, hidden))
        if taps:  # never the very value of a layer, which has a name of its own
            shown = self.node("Concat", "states/rows", taps, axis=-1)
            outputs.append(self.output(self.widened("states/fp32", shown), bindings.STATES))
        graph = ir.Graph(
            [*(feeds[item.name] for item in inputs), *caches],
            [*outputs, *presents],
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": op.OPSET} if self.form == bindings.ADDITIVE else {"": op.OPSET, op.DOMAIN: op.VERSION},
            name=role,
        )
        windows = dict.fromkeys((self.window_of(layer) or 0) for layer in network.layers)
        sizes = [self.near_slots or self.capacity if each else self.capacity for each in windows]
        functions = [op.function(self.precision, *each) for each in zip(sizes, windows, strict=True)]
        if self.form == bindings.ADDITIVE:
            functions = []
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="draftwood", functions=functions)

    def attention(
        self,
        index: int,
        layer: Layer,
        normed: ir.Value,
        past: Sequence[ir.Value],
        feeds: dict[str, ir.Value],
    ) -> tuple[ir.Value, list[ir.Value]]:
        """Tree attention of normed rows over the cache; returns its output [B, T, hidden] and the two cache outputs."""
        config, scope = self.config, f"layers.{index}/attention"
        merged = self.linear(f"{scope}/qkv_proj", normed, layer.qkv)
        heads = np.array(layer.qkv.outputs) // config.head_dim
        query, key, value = (
            self.node("Transpose", f"{scope}/{name}_by_head", [rows], perm=[0, 2, 1, 3])
            for name, rows in zip(("query", "key", "value"), self.divided(f"{scope}/split", merged, heads), strict=True)
        )
        query = self.norm(f"{scope}/query_norm", layer.query_norm, query)
        key = self.norm(f"{scope}/key_norm", layer.key_norm, key)
        if layer.rotary_size:
            query = self.rotated(f"{scope}/query_rotary", layer, query, feeds["position_ids"])
            key = self.rotated(f"{scope}/key_rotary", layer, key, feeds["position_ids"])
        present = []
        for kind, cache, rows in zip(bindings.KINDS, past, (key, value), strict=True):
            written = self.node("TensorScatter", f"{scope}/{kind}_cache", [cache, rows, feeds["write_indices"]], axis=2)
            written.name = bindings.present(kind, index)
            written.type, written.shape = cache.type, cache.shape
            present.append(written)
        attended = self.attend(f"{scope}/tree_attention", layer, query, present, feeds)
        attended = self.node("Transpose", f"{scope}/merge_heads", [attended], perm=[0, 2, 1, 3])
        flat = self.constant("flat_heads", np.array([0, 0, layer.output.inputs]))
        attended = self.node("Reshape", f"{scope}/flatten", [attended, flat])
        output = self.linear(f"{scope}/o_proj", attended, layer.output)
        output = self.norm(f"layers.{index}/output_norm", layer.output_norm, output)
        return self.scaled(f"{scope}/scaled", output, layer.residual_multiplier), present

    def fused(self, fusion: Matrix, states: ir.Value) -> ir.Value:
        """The rows that enter the layers of a draft that reads states, see Network."""
        sizes = self.constant("states_in/sizes", np.array([fusion.inputs, *fusion.outputs]))
        if self.dtype != ir.DataType.FLOAT:
            states = self.node("Cast", "states_in/cast", [states], to=self.dtype)
        given, own = self.nodes_out("Split", "states_in/split", [states, sizes], 2, axis=2)
        return self.node("Add", "fc/added", [self.linear("fc", given, fusion), own])

    def rotated(self, name: str, layer: Layer, heads: ir.Value, positions: ir.Value) -> ir.Value:
        """RoPE on the first numbers of each head. The operator takes 0 for all of them."""
        size = 0 if layer.rotary_size == self.config.head_dim else layer.rotary_size
        tables = zip(("cos", "sin"), rope_tables(self.config, self.positions, layer.local), strict=True)
        prefix = "local_rope" if layer.local else "rope"
        rotary = [self.constant(f"{prefix}.{part}", table) for part, table in tables]
        return self.node("RotaryEmbedding", name, [heads, *rotary, positions], rotary_embedding_dim=size)

    def window_of(self, layer: Layer) -> int | None:
        """The window of a layer; None where no text is longer."""
        return None if layer.window is None or layer.window >= self.positions else layer.window

    def near_feeds(self, feeds: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """The same inputs for layers whose caches have dropped slots: theirs are numbered from the next one on."""
        dropped, names = feeds[bindings.DROPPED.name], (bindings.WRITE_INDICES.name, bindings.SEQUENCES.name)
        numbers = self.node("Cast", "near/dropped", [dropped], to=ir.DataType.INT32)
        places = self.constant("near/fields", np.array([0, 1, 0, 1], np.int32))  # first_slot and tree_slot
        moved = dropped, self.node("Mul", "near/moved", [numbers, places])
        return feeds | {
            name: self.node("Sub", f"near/{name}", [feeds[name], each]) for name, each in zip(names, moved, strict=True)
        }

    def masks(self, feeds: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """The additive mask of layers with a window, if there are any: the last `window` slots that a row sees, counted
        from the end of the cache, whose slots ascend in the text."""
        window = next(filter(None, map(self.window_of, self.network.layers)), None)
        if window is None or self.form != bindings.ADDITIVE:
            return {}
        mask, masked = feeds["attention_mask"], self.constant("masked", np.array(bindings.MASKED))
        unseen = self.node("Equal", "window/unseen", [mask, masked])
        seen = self.node(
            "Where", "window/seen", [unseen, *(self.constant(f"{each}", np.array(each)) for each in (0.0, 1.0))]
        )
        after = self.node("CumSum", "window/after", [seen, self.constant("slots", np.array(3))], reverse=1)
        within = self.node("LessOrEqual", "window/within", [after, self.constant("window", np.array(float(window)))])
        return {WINDOW_MASK: self.node("Where", "window/mask", [within, mask, masked])}

    def attend(
        self, name: str, layer: Layer, query: ir.Value, present: Sequence[ir.Value], feeds: dict[str, ir.Value]
    ) -> ir.Value:
        """Attention of query [B, H, T, D] over the cache; returns [B, H, T, D]. The compact form's operator is ours."""
        window, scale = self.window_of(layer), layer.attention_scale
        if self.form == bindings.ADDITIVE:
            mask = feeds["attention_mask" if window is None else WINDOW_MASK]
            return self.node("Attention", name, [query, *present, mask], scale=scale)
        masks, kind = [feeds["sequences"], feeds["tree_mask"]], op.NAME if window is None else op.WINDOWED
        return self.node(kind, name, [query, *present, *masks], domain=op.DOMAIN, scale=scale)

    def mlp(self, index: int, layer: Layer, hidden: ir.Value) -> ir.Value:
        """down(silu(gate(x)) * up(x)), or the same with GELU, gate and up as one matrix."""
        scope = f"layers.{index}/mlp"
        normed = self.norm(f"layers.{index}/post_norm", layer.post_norm, hidden)
        merged = self.linear(f"{scope}/gate_up_proj", normed, layer.gate_up)
        gate, up = self.divided(f"{scope}/split", merged, np.ones(2, np.int64))
        inner = gate
        if layer.gelu:
            curve, slope = (self.constant(f"gelu.{each}", np.array(each)) for each in (GELU_CURVE, GELU_SLOPE))
            squared = self.node("Mul", f"{scope}/squared", [gate, gate])
            inner = self.node("Add", f"{scope}/slope", [self.node("Mul", f"{scope}/curve", [squared, curve]), slope])
            inner = self.node("Mul", f"{scope}/inner", [gate, inner])
        # ONNX Runtime fuses x * sigmoid(x), and decomposes the Swish operator.
        sigmoid = self.node("Sigmoid", f"{scope}/sigmoid", [inner])
        silu = self.node("Mul", f"{scope}/silu", [gate, sigmoid])
        gated = self.node("Mul", f"{scope}/gated", [silu, up])
        flat = self.constant("flat_gated", np.array([0, 0, layer.down.inputs]))
        gated = self.node("Reshape", f"{scope}/flatten", [gated, flat])
        down = self.linear(f"{scope}/down_proj", gated, layer.down)
        down = self.norm(f"layers.{index}/down_norm", layer.down_norm, down)
        return self.scaled(f"{scope}/scaled", down, layer.residual_multiplier)

    def ranking(self, logits: ir.Value) -> list[ir.Value]:
        """Top-k ids and log-probabilities, best first. (LogSoftmax + TopK: ReduceLogSumExp is 10x slower on a CPU.)"""
        columns = self.constant("top_columns", np.array([bindings.top_columns(self.config.num_logits)]))
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

    def divided(self, name: str, rows: ir.Value, counts: NDArray[np.int64]) -> Sequence[ir.Value]:
        """Rows [B, T, sum(counts) * size] -> for each count [B, T, count, size].

        Split along the new axis, not along the last one: TensorRT would divide the matrix of the product before, and
        merge its parts again, which takes two more copies of these weights in memory while it compiles.
        """
        total = int(counts.sum())
        shape = self.constant(f"groups.{total}", np.array([0, 0, total, -1]))
        sizes = self.constant(f"{name.split('/', 1)[1]}_sizes", counts)
        groups = self.node("Reshape", f"{name}/groups", [rows, shape])
        return self.nodes_out("Split", name, [groups, sizes], len(counts), axis=2)

    def norm(self, name: str, norm: Norm | None, hidden: ir.Value) -> ir.Value:
        """No node is added where there is no norm."""
        return (
            hidden
            if norm is None
            else self.node("RMSNormalization", name, [hidden, self.stored(norm)], axis=-1, epsilon=self.config.norm_eps)
        )

    def scaled(self, name: str, rows: ir.Value, multiplier: float) -> ir.Value:
        """Multiply rows by a number. No node is added when the number is 1."""
        if multiplier == 1:
            return rows
        return self.node("Mul", name, [rows, self.constant(f"{name}.multiplier", np.array(multiplier))])

    def linear(self, name: str, rows: ir.Value, matrix: Matrix) -> ir.Value:
        """rows @ concat(weights).T + concat(biases). Several matrices over one input become one MatMul."""
        size = sum(matrix.outputs)
        shape = (matrix.inputs, size)
        weights = (
            dequantized(self, f"{name}.weight", self.checkpoint, matrix)
            if isinstance(self.checkpoint, QuantizedCheckpoint)
            else self.lazy(f"{name}.weight", shape, lambda: self.concatenated(matrix.weights, shape))
        )
        product = self.node("MatMul", name, [rows, weights])
        if not matrix.bias:
            return product
        vector = self.lazy(f"{name}.bias", (size,), lambda: self.concatenated(matrix.biases, (size,)))
        return self.node("Add", f"{name}_bias", [product, vector])

    def concatenated(self, names: Sequence[str], shape: tuple[int, ...]) -> NDArray[Any]:
        """Concatenate transposed tensors along the last axis. They are converted one by one, without a second copy."""
        merged = np.empty(shape, self.dtype.numpy())
        start = 0
        for name in names:
            stored = self.checkpoint.tensor(name).T
            merged[..., start : start + stored.shape[-1]] = stored
            start += stored.shape[-1]
        return merged

    def stored(self, part: Norm | Matrix) -> ir.Value:
        """An initializer that is a tensor of the checkpoint, unchanged."""
        ((name, shape),) = part.tensors().items()
        return self.lazy(name, shape, lambda: self.checkpoint.tensor(name))
