"""LLaMA in torch: the numeric reference, the model that heads are trained on, and what the torch engine runs.

Parameters carry the names of Hugging Face checkpoints, so `load_state_dict` takes one as it is. There are two ways in:
`full` reads whole sequences causally and can be differentiated; `forward` scores the rows of a token tree behind a
key/value cache that it extends in place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import LlamaConfig
from .rope import rope_tables


class LlamaOutput(NamedTuple):
    """logits: [B, R, V] of the model's dtype. hidden: [B, R, hidden_size], what the vocabulary projection read, that
    is, after the final norm."""

    logits: Tensor
    hidden: Tensor


class Rotary(NamedTuple):
    """Cosine and sine of each row's position, [B, 1, T, head_dim / 2], broadcast over heads."""

    cosine: Tensor
    sine: Tensor

    def rotate(self, heads: Tensor) -> Tensor:
        """Turn [B, H, T, D] by position; a pair is (i, i + D/2), as in Hugging Face checkpoints."""
        first, second = heads.chunk(2, dim=-1)
        cosine, sine = self.cosine.to(heads.dtype), self.sine.to(heads.dtype)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class LayerCache(NamedTuple):
    """One layer's keys and values, each [B, H_kv, C, D], and the slot of this pass's first row."""

    keys: Tensor
    values: Tensor
    start: int

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write this pass's rows [B, H_kv, T, D]; returns everything up to and including them, as views."""
        end = self.start + keys.shape[2]
        self.keys[:, :, self.start : end] = keys
        self.values[:, :, self.start : end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean is taken in fp32 whatever the model's dtype."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normed.to(rows.dtype)


class Attention(nn.Module):
    """Grouped attention: num_heads / num_kv_heads query heads share each key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_heads != config.num_kv_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.query_size, bias)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_size, bias)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_size, bias)
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias)

    def forward(self, rows: Tensor, rotary: Rotary, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """Without `cache` the rows see only each other; without `mask`, causally."""
        query = rotary.rotate(self.heads(self.q_proj(rows)))
        keys = rotary.rotate(self.heads(self.k_proj(rows)))
        values = self.heads(self.v_proj(rows))
        if cache is not None:
            keys, values = cache.append(keys, values)
        attended = functional.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=mask is None, enable_gqa=self.grouped
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def heads(self, rows: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]."""
        return rows.view(*rows.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, rows: Tensor, rotary: Rotary, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), rotary, mask, cache)
        output: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return output


class Decoder(nn.Module):
    """Embeddings, layers and final norm: the part of a checkpoint whose names begin with `model.`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, token_ids: Tensor, rotary: Rotary, mask: Tensor | None, cache: Tensor | None, start: int
    ) -> Tensor:
        """Rows [B, T, hidden_size] before the final norm."""
        rows: Tensor = self.embed_tokens(token_ids)
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else LayerCache(cache[2 * index], cache[2 * index + 1], start)
            rows = layer(rows, rotary, mask, layer_cache)
        return rows


class Llama(nn.Module):
    """A whole LLaMA. `positions`: how many position ids the rotary tables cover."""

    rope_cosine: Tensor
    rope_sine: Tensor

    def __init__(self, config: LlamaConfig, positions: int) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        # A checkpoint with tied embeddings holds no lm_head, and neither does this.
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cosine, sine = rope_tables(config, positions)
        self.register_buffer("rope_cosine", torch.from_numpy(cosine), persistent=False)
        self.register_buffer("rope_sine", torch.from_numpy(sine), persistent=False)

    def full(self, token_ids: Tensor) -> LlamaOutput:
        """Read whole sequences, int64 [B, T], causally; every row is scored. Differentiable."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        return self.score(self.model(token_ids, self.rotary(positions), None, None, 0))

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        cache: Tensor,
        write_index: int,
        output_rows: Tensor,
    ) -> LlamaOutput:
        """Score T rows that see the cache and each other through `mask`, and append them to the cache.

        token_ids, position_ids: int64 [B, T]. mask: [B or 1, 1, T, write_index + T], added to the attention scores:
        0 sees, `bindings.MASKED` does not. cache: [2 * layers, B, H_kv, C, D], keys and values of a layer one after the
        other; slots `write_index` to `write_index + T` are overwritten. output_rows: int64 [R], the rows to score.
        """
        rows = self.model(token_ids, self.rotary(position_ids), mask, cache, write_index)
        return self.score(rows[:, output_rows])

    def rotary(self, position_ids: Tensor) -> Rotary:
        return Rotary(self.rope_cosine[position_ids].unsqueeze(1), self.rope_sine[position_ids].unsqueeze(1))

    def score(self, rows: Tensor) -> LlamaOutput:
        """Final norm and vocabulary projection."""
        hidden: Tensor = self.model.norm(rows)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return LlamaOutput(functional.linear(hidden, head.weight), hidden)
