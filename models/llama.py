"""LLaMA in torch, for the training of heads and calibrated rounding.

Parameters have the names of Hugging Face checkpoints, so `load_state_dict` accepts a checkpoint unchanged. `full`
reads whole sequences causally and can be differentiated. `forward` scores the rows of a token tree after a key/value
cache, which it extends in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .bindings import MASKED
from .config import LlamaConfig
from .layers import Layer, Matrix, Network, Norm, network_of
from .rope import LOCAL, rope_tables


class LlamaOutput(NamedTuple):
    """logits: [B, R, V] of the model's dtype. hidden: [B, R, hidden_size], the input of the vocabulary projection after
    the final norm. states: [B, T, state_size], see LlamaConfig; None where it is 0."""

    logits: Tensor
    hidden: Tensor
    states: Tensor | None = None


class Rotary(NamedTuple):
    """Cosine and sine of each row's position, [B, 1, T, rotary_size / 2], broadcast over heads."""

    cosine: Tensor
    sine: Tensor

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate the first R = rotary_size numbers of heads [B, H, T, D] by position, in pairs (i, i + R/2)."""
        cosine, sine = self.cosine.to(heads.dtype), self.sine.to(heads.dtype)
        half = cosine.shape[-1]
        first, second, rest = heads.tensor_split((half, 2 * half), dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)


class LayerAttention(Protocol):
    """The attention of a pass. Called once per layer."""

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """query [B, H, T, D] and the pass's own keys and values [B, H_kv, T, D], rotated -> [B, H, T, D]. scale: factor
        on the products of queries and keys. window: see `layers.Layer`."""


def causal(layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Causal attention: the rows are whole sequences, and attend only to each other."""
    grouped, mask, rows = query.shape[1] != keys.shape[1], None, query.shape[2]
    if window is not None and window < rows:
        before = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
        mask = before & ~before.tril(-window)
    return functional.scaled_dot_product_attention(
        query, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


class GrowingCache(NamedTuple):
    """Attention over a cache [2 * layers, B, H_kv, C, D] to which the rows are appended at slot `start`. mask, [B or 1,
    1, T, start + T], is added to the scores."""

    cache: Tensor
    start: int
    mask: Tensor

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        end = self.start + keys.shape[2]
        cached = self.cache[2 * layer : 2 * layer + 2]
        cached[0, :, :, self.start : end] = keys
        cached[1, :, :, self.start : end] = values
        grouped, mask = query.shape[1] != keys.shape[1], self.mask
        if window is not None and window < end:
            after = (mask == 0).flip(-1).cumsum(-1).flip(-1)  # visible slots from each one on
            mask = mask.masked_fill(after > window, MASKED)
        return functional.scaled_dot_product_attention(
            query, cached[0, :, :, :end], cached[1, :, :, :end], mask, scale=scale, enable_gqa=grouped
        )


class RMSNorm(nn.Module):
    """x / rms(x) * weight. The mean is computed in fp32 for every dtype of the model."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        if rows.is_cuda:  # one kernel launch instead of eight, of about forty in a layer
            return functional.rms_norm(rows, self.weight.shape, self.weight, self.epsilon)
        wide = rows.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normed.to(rows.dtype)


def norm_of(norm: Norm | None, config: LlamaConfig) -> nn.Module:
    return nn.Identity() if norm is None else RMSNorm(norm.size, config.norm_eps)


def linears(matrix: Matrix) -> list[nn.Linear]:
    """One Linear for each tensor of a merged matrix."""
    return [nn.Linear(matrix.inputs, outputs, matrix.bias) for outputs in matrix.outputs]


def scaled(rows: Tensor, multiplier: float) -> Tensor:
    return rows if multiplier == 1 else rows * multiplier


class Attention(nn.Module):
    """Grouped attention: num_heads / num_kv_heads query heads share each key and value head."""

    def __init__(self, layer: Layer, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.num_heads = config.head_dim, config.num_heads
        self.rotates, self.scale, self.window = layer.rotary_size > 0, layer.attention_scale, layer.window
        self.q_proj, self.k_proj, self.v_proj = linears(layer.qkv)
        self.q_norm, self.k_norm = norm_of(layer.query_norm, config), norm_of(layer.key_norm, config)
        (self.o_proj,) = linears(layer.output)

    def forward(self, rows: Tensor, rotary: Rotary, attention: LayerAttention, layer: int) -> Tensor:
        heads = self.q_norm(self.heads(self.q_proj(rows))), self.k_norm(self.heads(self.k_proj(rows)))
        turned = torch.cat(heads, 1)
        if self.rotates:
            turned = rotary.rotate(turned)
        query, keys = turned[:, : self.num_heads], turned[:, self.num_heads :]
        attended = attention(layer, query, keys, self.heads(self.v_proj(rows)), self.scale, self.window)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def heads(self, rows: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]."""
        return rows.view(*rows.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or the same with GELU."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linears(layer.gate_up)
        (self.down_proj,) = linears(layer.down)
        self.gelu = layer.gelu

    def forward(self, rows: Tensor) -> Tensor:
        gate = self.gate_proj(rows)
        gated = functional.gelu(gate, approximate="tanh") if self.gelu else functional.silu(gate)
        output: Tensor = self.down_proj(gated * self.up_proj(rows))
        return output


class DecoderLayer(nn.Module):
    """A layer as models/layers.py describes it, operation by operation."""

    def __init__(self, layer: Layer, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(layer, config)
        self.mlp = MLP(layer)
        self.local, self.multiplier = layer.local, layer.residual_multiplier
        self.joins, self.norm_first = layer.token_norm is not None, layer.norm_first
        self.norms = [None if norm is None else norm.source.rpartition(".")[2] for norm in norms_of_rows(layer)]
        for name, norm in zip(self.norms, norms_of_rows(layer), strict=True):
            if name is not None:
                self.add_module(name, norm_of(norm, config))

    def forward(
        self, rows: Tensor, tokens: Tensor, rotary: Sequence[Rotary], attention: LayerAttention, layer: int
    ) -> Tensor:
        """rotary: of layers with the model's tables, and with the local ones. tokens: their embeddings."""
        before, after, before_mlp, after_mlp, of_token = (
            nn.Identity() if name is None else self.get_submodule(name) for name in self.norms
        )
        normed = before(rows)
        inputs = torch.cat((of_token(tokens), normed), -1) if self.joins else normed
        attended = after(self.self_attn(inputs, rotary[self.local], attention, layer))
        rows = (normed if self.norm_first else rows) + scaled(attended, self.multiplier)
        return rows + scaled(after_mlp(self.mlp(before_mlp(rows))), self.multiplier)


def norms_of_rows(layer: Layer) -> tuple[Norm | None, ...]:
    """Before and after attention, before and after the MLP, of a token beside a state."""
    return layer.input_norm, layer.output_norm, layer.post_norm, layer.down_norm, layer.token_norm


class Decoder(nn.Module):
    """Embeddings, layers and final norm: the part of a checkpoint whose names begin with `model.`."""

    def __init__(self, network: Network, config: LlamaConfig) -> None:
        super().__init__()
        self.multiplier = network.embedding_multiplier
        (vocabulary,) = network.embedding.outputs
        self.embed_tokens = nn.Embedding(vocabulary, network.embedding.inputs)
        self.layers = nn.ModuleList(DecoderLayer(layer, config) for layer in network.layers)
        self.norm, self.taps = norm_of(network.norm, config), network.taps

    def forward(
        self, token_ids: Tensor, rotary: Sequence[Rotary], attention: LayerAttention, fused: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows [B, T, hidden_size] before the final norm, and the states. fused: the rows of a draft that reads states,
        in place of the embeddings, which enter its first layer beside them."""
        tokens = scaled(self.embed_tokens(token_ids), self.multiplier)
        rows, taps = tokens if fused is None else fused, list[Tensor]()
        for index, layer in enumerate(self.layers):
            rows = layer(rows, tokens, rotary, attention, index)
            taps += [rows] if index + 1 in self.taps else []
        return rows, torch.cat(taps, -1) if taps else None


class Llama(nn.Module):
    """A whole LLaMA. positions: number of position ids in the rotary tables."""

    rope: Tensor

    def __init__(self, config: LlamaConfig, positions: int) -> None:
        super().__init__()
        self.config = config
        network = network_of(config)
        self.multiplier = network.logits_multiplier
        self.model = Decoder(network, config)
        # A checkpoint with tied embeddings contains no lm_head, and neither does this model.
        self.lm_head = None if config.tie_embeddings else linears(network.head)[0]
        self.fc = None if network.fusion is None else linears(network.fusion)[0]
        # Cosine and sine, of layers with the model's tables, and with the local ones.
        tables = torch.stack([torch.from_numpy(np.stack(rope_tables(config, positions, local))) for local in LOCAL])
        self.register_buffer("rope", tables, persistent=False)

    def full(self, token_ids: Tensor, states: Tensor | None = None) -> LlamaOutput:
        """Read whole sequences, int64 [B, T], causally; every row is scored. Differentiable. states: see `forward`."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        rows, states = self.model(token_ids, self.rotary(positions), causal, self.fused(states))
        return self.score(rows, states)

    def fused(self, states: Tensor | None) -> Tensor | None:
        """The rows that enter the layers of a draft that reads states, see Network."""
        if self.fc is None or states is None:
            return None
        given, own = states.tensor_split((self.fc.in_features,), -1)
        rows: Tensor = self.fc(given) + own
        return rows

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        cache: Tensor,
        write_index: int,
        output_rows: Tensor,
        states: Tensor | None = None,
    ) -> LlamaOutput:
        """Score T rows, which attend to the cache and to each other through `mask`, and append them to the cache.

        token_ids, position_ids: int64 [B, T]. mask: [B or 1, 1, T, write_index + T], added to the attention scores:
        0 for visible slots, `bindings.MASKED` for others. cache: [2 * layers, B, H_kv, C, D], first the keys and then
        the values of each layer; slots `write_index` to `write_index + T` are overwritten. output_rows: int64 [R], the
        rows to score. states: [B, T, state_inputs], of a draft that reads states.
        """
        attention = GrowingCache(cache, write_index, mask)
        rows, states = self.model(token_ids, self.rotary(position_ids), attention, self.fused(states))
        return self.score(rows[:, output_rows], states)

    def rotary(self, position_ids: Tensor) -> list[Rotary]:
        dtype = self.model.embed_tokens.weight.dtype  # cast once, not in every layer
        return [Rotary._make(table[position_ids].unsqueeze(1).to(dtype) for table in tables) for tables in self.rope]

    def score(self, rows: Tensor, states: Tensor | None = None) -> LlamaOutput:
        """Final norm and vocabulary projection. states: of the output."""
        hidden: Tensor = self.model.norm(rows)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return LlamaOutput(scaled(functional.linear(hidden, head.weight), self.multiplier), hidden, states)
