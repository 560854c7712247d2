"""The draft in training: a small LLaMA with the target's vocabulary, of which it writes only a part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ...models.config import LlamaConfig
from ...models.errors import ConfigError
from ...models.families import Variant
from ...models.layers import EMBEDDING_WEIGHT, network_of
from ...models.llama import Llama
from ..checkpoints.checkpoint import Checkpoint
from .batches import Batch
from .options import LAYERS, DistillOptions

EMBEDDING_SCALE = 0.05  # standard deviation of the embedding at the start
SHARE_OF_WIDTH = 0.45  # the draft's default hidden size over the target's
STEP, MIN_HIDDEN, MAX_HIDDEN = 64, 64, 768
BLOCK = 32  # low-bit engines store matrices in blocks of at least so many inputs


def draft_config(options: DistillOptions, target: LlamaConfig) -> LlamaConfig:
    """The configuration of a new draft for this target. Raises ConfigError for sizes that do not go together."""
    preferred = STEP * round(SHARE_OF_WIDTH * target.hidden_size / STEP)
    hidden = options.hidden or min(max(preferred, MIN_HIDDEN), MAX_HIDDEN, target.hidden_size)
    head_dim = options.head_dim or min(64, max(8, hidden // 8 * 2))
    heads = options.heads or max(1, hidden // head_dim)
    kv_heads = options.kv_heads or (heads // 2 if heads % 2 == 0 else heads)
    if heads % kv_heads:
        raise ConfigError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    if hidden > target.hidden_size:
        raise ConfigError(
            f"hidden ({hidden}) exceeds the target's {target.hidden_size}: a draft must be smaller than its target"
        )
    return replace(
        target,
        hidden_size=hidden,
        intermediate_size=options.intermediate or -(-3 * hidden // BLOCK) * BLOCK,
        num_layers=options.layers or LAYERS,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_scaling=None,
        tie_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        variant=Variant(),
    )


class Drafted(NamedTuple):
    """What a draft says of N places of a batch."""

    hidden: Tensor  # [N, hidden_size], states before the vocabulary projection
    places: Tensor  # bool [B, L], the scored places of which it says it, in order


class DraftNetwork(nn.Module):
    """The LLaMA, and the ids of the tokens that it writes."""

    steps = 1  # tokens that it learns to draft in a row: along the true text all are alike
    by_muon = True  # see Trainer
    kept: Tensor  # int64 [N], ascending
    place_of: Tensor  # int64 [V]: the index of each token in `kept`, or -1

    def __init__(self, config: LlamaConfig, positions: int, kept: NDArray[np.int64]) -> None:
        super().__init__()
        self.llama = Llama(config, positions)
        place_of = np.full(config.vocab_size, -1)
        place_of[kept] = np.arange(len(kept))
        self.register_buffer("kept", torch.from_numpy(kept), persistent=False)
        self.register_buffer("place_of", torch.from_numpy(place_of), persistent=False)

    def hidden(self, batch: Batch) -> Tensor:
        """States before the vocabulary projection [N, hidden_size], of the scored places in order."""
        mask = batch.mask()

        def attention(
            layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
        ) -> Tensor:
            grouped = query.shape[1] != keys.shape[1]
            added = mask.to(query.dtype)
            return functional.scaled_dot_product_attention(query, keys, values, added, scale=scale, enable_gqa=grouped)

        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
        rows, _ = self.llama.model(batch.tokens, self.llama.rotary(positions), attention)
        hidden: Tensor = self.llama.model.norm(rows[batch.scored])
        return hidden

    def projection(self) -> Tensor:
        """The embedding's rows [len(kept), hidden_size] of the tokens that it writes."""
        rows: Tensor = self.llama.model.embed_tokens.weight[self.kept]
        return rows

    def learning(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by their names in a checkpoint."""
        return {name: parameter for name, parameter in self.llama.named_parameters() if parameter.requires_grad}

    def drafted(self, batch: Batch) -> Iterator[Drafted]:
        """For each of `steps`."""
        yield Drafted(self.hidden(batch), batch.scored)


def principal(embedding: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Coordinates [V, size] of an embedding [V, E] along its principal directions, so that tokens that are similar for
    the target are similar for the draft, also those that its text never contains."""
    centred = embedding - embedding.mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    first = np.ascontiguousarray(vectors[:, ::-1][:, :size])  # numpy multiplies reversed columns without BLAS
    return np.ascontiguousarray(centred @ first, np.float32)


def initialise(network: DraftNetwork, target: Checkpoint, seed: int) -> None:
    """Random matrices, silent residual branches, and the target's embedding in fewer dimensions."""
    generator = torch.Generator().manual_seed(seed)
    layers = network_of(network.llama.config).layers
    silent = {weight for layer in layers for weight in (*layer.output.weights, *layer.down.weights)}
    embedding = target.tensor(EMBEDDING_WEIGHT).astype(np.float32)
    rows = principal(embedding, network.llama.config.hidden_size)
    rows *= EMBEDDING_SCALE / max(float(rows.std()), 1e-12)
    with torch.no_grad():
        for name, parameter in network.llama.named_parameters():
            if name == EMBEDDING_WEIGHT:
                parameter.copy_(torch.from_numpy(rows))
            elif name in silent:
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
