"""A head in training: EAGLE-3's draft (2503.01840), which reads its target's states and shares its embedding.

The state after a token and the embedding of the next one enter one layer, whose row becomes the state of the token that
is drafted then. So the head learns on its own rows as well: STEPS tokens in a row are drafted from every place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...models.config import LlamaConfig, Reading
from ...models.errors import ConfigError
from ...models.families import Variant
from ...models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of
from ..checkpoints.checkpoint import Checkpoint
from .batches import Batch
from .network import Drafted, DraftNetwork
from .options import DistillOptions

STEPS = 3  # tokens that it learns to draft in a row
TAPS = (0.25, 0.6, 1.0)  # shares of the target's layers after which it reads
INNER = 2  # feed-forward size over the hidden size
LARGE = 1024  # hidden size of a target from which on a head brings more than a plain draft, see docs/drafts.md
SELF = 0.9  # standard deviation of queries and keys of one token at the start, which then attends to itself


def taps_of(options: DistillOptions, target: LlamaConfig) -> tuple[int, ...]:
    """The target's layers that a head reads; none for a plain draft. Raises ConfigError."""
    scales = target.variant.embedding_multiplier != 1
    by_default = "text" if options.is_plain or scales or target.hidden_size < LARGE else "states"
    if (options.kind or by_default) == "text":
        return ()
    if scales:
        raise ConfigError("a head would share the embedding, which this target multiplies: choose --kind text")
    return tuple(sorted({max(1, round(share * target.num_layers)) for share in TAPS}))


def head_config(options: DistillOptions, target: LlamaConfig) -> LlamaConfig:
    """The configuration of a head for a target with taps. Raises ConfigError for sizes that do not go together."""
    divisors = [count for count in range(1, target.num_heads // 3 + 1) if target.num_heads % count == 0]
    kv_heads = options.kv_heads or max(target.num_kv_heads, *divisors, 1)
    if target.num_heads % kv_heads:
        raise ConfigError(f"kv_heads ({kv_heads}) must divide the target's {target.num_heads} heads")
    return replace(
        target,
        intermediate_size=options.intermediate or INNER * target.hidden_size,
        num_layers=1,
        num_kv_heads=kv_heads,
        rope_scaling=None,
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        variant=Variant(),
        taps=(),
        reads=Reading(target.taps, target.hidden_size),
    )


class HeadNetwork(DraftNetwork):
    """The head, with the target's embedding and output, which do not learn."""

    steps = STEPS
    by_muon = False

    def projection(self) -> Tensor:
        assert self.llama.lm_head is not None
        return self.llama.lm_head.weight

    def drafted(self, batch: Batch) -> Iterator[Drafted]:
        model, length, unrolled = self.llama.model, batch.tokens.shape[1], Unrolled(batch.mask())
        positions = torch.arange(length, device=batch.tokens.device)[None]
        assert self.llama.fc is not None
        rows = self.llama.fc(batch.states.float())
        for step in range(STEPS):
            # A place knows its state and the tokens up to the one after it: it drafts the place after that.
            ahead = functional.pad(batch.written[:, step:], (0, step))
            rows, _ = model(ahead, self.llama.rotary(positions + step), unrolled, rows.float())
            own = batch.texts[:, 1 + step :] == batch.texts[:, : length - 1 - step]
            drafts = own & batch.scored[:, 1 + step :]
            yield Drafted(model.norm(rows[:, : length - 1 - step][drafts]), functional.pad(drafts, (1 + step, 0)))


class Unrolled:
    """The attention of steps in a row: a place attends to the first step's rows of its own text up to itself, and to
    its own rows of the steps since."""

    def __init__(self, mask: Tensor) -> None:
        """mask: [B, 1, L, L], added to the scores of the first step's rows."""
        self.mask, self.keys, self.values = mask, list[Tensor](), list[Tensor]()

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        groups, length = query.shape[1] // keys.shape[1], query.shape[2]
        self.keys.append(keys.repeat_interleave(groups, 1))
        self.values.append(values.repeat_interleave(groups, 1))
        scores = query @ self.keys[0].transpose(-1, -2) * scale + self.mask
        own = [(query * each).sum(-1, keepdim=True) * scale for each in self.keys[1:]]
        probs = torch.cat([scores, *own], -1).float().softmax(-1).to(query.dtype)
        rows = probs[..., :length] @ self.values[0]
        for step, each in enumerate(self.values[1:]):
            rows = rows + probs[..., length + step, None] * each
        return rows


def initialise_head(network: HeadNetwork, target: Checkpoint, batches: Sequence[Batch], seed: int) -> None:
    """Begin as the target's own last row, at the scale of its norm: what it says of the next token, without that token.
    Queries equal keys, and depend on the token alone, so that each place attends to itself. batches: of any text."""
    llama, config, generator = network.llama, network.llama.config, torch.Generator().manual_seed(seed)
    size, heads = config.hidden_size, config.num_kv_heads
    layer = network_of(config).layers[0]
    output = EMBEDDING_WEIGHT if target.config.tie_embeddings else HEAD_WEIGHT
    last = torch.from_numpy(target.tensor("model.norm.weight").astype(np.float32))
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if parameter.ndim == 2 and name not in (EMBEDDING_WEIGHT, HEAD_WEIGHT):
                parameter.uniform_(-1, 1, generator=generator).mul_(parameter.shape[1] ** -0.5)
        for name in (*layer.output.weights, *layer.down.weights):
            llama.get_parameter(name).zero_()
        query, key = (llama.get_parameter(name) for name in layer.qkv.weights[:2])
        key.normal_(std=SELF * size**-0.5, generator=generator)[:, size:] = 0
        grouped = key.view(heads, config.head_dim, -1).repeat_interleave(config.num_heads // heads, 0)
        query.copy_(grouped.flatten(0, 1))
        for name, source in ((EMBEDDING_WEIGHT, EMBEDDING_WEIGHT), (HEAD_WEIGHT, output)):
            rows = torch.from_numpy(target.tensor(source).astype(np.float32))
            llama.get_parameter(name).requires_grad_(False).copy_(rows[network.kept] if name == HEAD_WEIGHT else rows)
        states = torch.cat([batch.states[batch.scored] for batch in batches])[:, -size:].float()
        scale = states.square().mean(-1).sqrt().median()
        assert llama.fc is not None
        llama.fc.weight.zero_()[:, -size:] = torch.diag(last) / scale
        entered = (states * last / scale).square().mean(-1).sqrt().median()
        llama.get_parameter("model.norm.weight").fill_(entered)
