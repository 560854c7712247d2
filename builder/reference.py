"""The reference of the parity check: a prompt and a token tree through a model, in numpy and fp32, one layer's weights
at a time: what Hugging Face's models compute, as models/layers.py describes it. Whether damaged weights made NaN of
logits is judged where they are compared."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..models.acceptance_head import TrainedHead
from ..models.config import LlamaConfig
from ..models.head_config import ACCEPT, REJECT
from ..models.layers import EMBEDDING_WEIGHT, GELU_CURVE, GELU_SLOPE, Layer, Matrix, Norm, last_seen, network_of
from ..models.rope import rope_tables
from .parity import Rows, Scored

Array = NDArray[np.float32]
ReadTensor = Callable[[str], NDArray[np.generic]]


class Reference:
    """Rows on their way through a model. Call `layer` for each layer in order, then `scored`."""

    @np.errstate(all="ignore")
    def __init__(self, tensor: ReadTensor, config: LlamaConfig, rows: Rows, head: TrainedHead | None = None) -> None:
        """tensor: reads a tensor of the model by Hugging Face's name; what it raises is passed on."""
        self._tensor, self._config, self._head, self._mask = tensor, config, head, rows.mask
        self._network = network_of(config)
        positions = int(rows.positions.max(initial=0)) + 1
        # By layers with tables of their own: cosine, sine, each [R, 1, rotary_size / 2].
        self._rotary = {
            local: [table[rows.positions, None] for table in rope_tables(config, positions, local)]
            for local in {layer.local for layer in self._network.layers}
        }
        embedded = np.asarray(tensor(EMBEDDING_WEIGHT)[rows.tokens], np.float32)
        self._rows = self._tokens = embedded * np.float32(self._network.embedding_multiplier)
        if self._network.fusion is not None and rows.states is not None:
            inputs = self._network.fusion.inputs
            (fused,) = self._products(self._network.fusion, rows.states[:, :inputs])
            self._rows = fused + rows.states[:, inputs:]
        self._taps: list[Array] = []

    @np.errstate(all="ignore")
    def layer(self, index: int) -> None:
        """Let the rows [R, hidden_size] pass a layer, whose weights are read and dropped."""
        layer, multiplier = self._network.layers[index], np.float32(self._network.layers[index].residual_multiplier)
        normed = inputs = self._normed(layer.input_norm, self._rows)
        if layer.token_norm is not None:
            inputs = np.concatenate((self._normed(layer.token_norm, self._tokens), normed), -1)
        (attended,) = self._products(layer.output, self._attention(layer, inputs))
        rows = (normed if layer.norm_first else self._rows) + multiplier * self._normed(layer.output_norm, attended)
        gate, up = self._products(layer.gate_up, self._normed(layer.post_norm, rows))
        (fed,) = self._products(layer.down, (gelu if layer.gelu else silu)(gate) * up)
        self._rows = rows + multiplier * self._normed(layer.down_norm, fed)
        if index + 1 in self._network.taps:
            self._taps.append(self._rows)

    @np.errstate(all="ignore")
    def scored(self) -> Scored:
        hidden = self._normed(self._network.norm, self._rows)
        (logits,) = self._products(self._network.head, hidden)
        acceptance = None if self._head is None else accepted(self._head, hidden)
        states = np.concatenate(self._taps, -1) if self._taps else None
        return Scored(logits * np.float32(self._network.logits_multiplier), acceptance, states)

    def _attention(self, layer: Layer, rows: Array) -> Array:
        """Grouped attention, [R, hidden_size] -> [R, H * D]."""
        shape = len(rows), -1, self._config.head_dim
        query, keys, values = (part.reshape(shape) for part in self._products(layer.qkv, rows))  # [R, H or H_kv, D]
        query, keys = self._normed(layer.query_norm, query), self._normed(layer.key_norm, keys)
        if layer.rotary_size:
            query, keys = (self._rotated(part, *self._rotary[layer.local]) for part in (query, keys))
        group = query.shape[1] // keys.shape[1]
        query, keys, values = (part.transpose(1, 0, 2) for part in (query, keys, values))  # [H or H_kv, R, D]
        keys, values = np.repeat(keys, group, 0), np.repeat(values, group, 0)
        scores = query @ keys.transpose(0, 2, 1) * np.float32(layer.attention_scale)  # [H, R, R]
        seen = self._mask if layer.window is None else last_seen(self._mask, layer.window)
        scores[:, ~seen] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended: Array = weights / weights.sum(-1, keepdims=True) @ values
        return attended.transpose(1, 0, 2).reshape(len(rows), -1)

    def _rotated(self, heads: Array, cosine: Array, sine: Array) -> Array:
        """Rotate the first numbers of heads [R, H, D]; a pair is (i, i + half), as in Hugging Face's checkpoints."""
        first, second, rest = np.split(heads, (cosine.shape[-1], 2 * cosine.shape[-1]), -1)
        return np.concatenate((first * cosine - second * sine, second * cosine + first * sine, rest), -1)

    def _normed(self, norm: Norm | None, rows: Array) -> Array:
        """x / rms(x) * weight."""
        if norm is None:
            return rows
        squares = np.square(rows).mean(-1, keepdims=True) + np.float32(self._config.norm_eps)
        return np.asarray(rows / np.sqrt(squares) * self._read(norm.weight))

    def _products(self, matrix: Matrix, rows: Array) -> list[Array]:
        """Rows [R, K] times each part of a matrix [N, K]: [R, N] each."""
        products = [rows @ self._read(weight).T for weight in matrix.weights]
        for product, bias in zip(products, matrix.biases, strict=False):  # one for each part, or none
            product += self._read(bias)
        return products

    def _read(self, name: str) -> Array:
        return np.asarray(self._tensor(name), np.float32)


def silu(rows: Array) -> Array:
    return rows / (1 + np.exp(-rows))


def gelu(rows: Array) -> Array:
    """Of the kind with tanh."""
    return np.asarray(rows / (1 + np.exp(-rows * (GELU_SLOPE + GELU_CURVE * rows * rows))), np.float32)


def accepted(head: TrainedHead, rows: Array) -> Array:
    """What SpecDec++'s head says of rows [R, hidden_size], see models/acceptance_head.py: probabilities [R]."""
    config, weights = head.config, head.weights
    for layer in range(config.layers):
        block = f"blocks.{config.block_of(layer)}.linear"
        rows = rows + silu(rows @ weights[f"{block}.weight"].T + weights[f"{block}.bias"])
    logits = rows @ weights["output.weight"].T + weights["output.bias"]
    odds = (logits[:, ACCEPT] - logits[:, REJECT] + math.log(config.reject_weight)) / config.temperature
    return np.asarray(1 / (1 + np.exp(-odds)), np.float32)


def score_rows(
    tensor: ReadTensor,
    config: LlamaConfig,
    rows: Rows,
    head: TrainedHead | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Scored:
    """All of it at once. advance: called after each layer."""
    reference = Reference(tensor, config, rows, head)
    for index in range(config.num_layers):
        reference.layer(index)
        advance()
    return reference.scored()
