"""Drafts that read states, of random weights: as checkpoints that are on no disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from checkpoints import GQA
from numpy.typing import NDArray

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.source import Blocks
from draftwood.models.config import LlamaConfig, Reading
from draftwood.models.layers import network_of

TARGET = LlamaConfig.from_hf({**GQA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4})
TAPPED = replace(TARGET, taps=(1, 2, 4))
DRAFT = replace(
    TARGET, num_layers=1, reads=Reading(TAPPED.taps, TARGET.hidden_size), draft_vocab_size=100, intermediate_size=64
)


class RandomModel(Checkpoint):
    """A checkpoint of random weights."""

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        self.config, self.path, self.notes = config, Path("random"), ()
        rng = np.random.default_rng(seed)
        self.weights = {
            name: (
                rng.normal(1.0, 0.2, shape) if len(shape) == 1 else rng.normal(0, 1.5 / np.sqrt(shape[1]), shape)
            ).astype(np.float32)
            for name, shape in network_of(config).tensors().items()
        }
        kept = config.draft_vocab_size
        self.kept_tokens = None if kept is None else np.sort(rng.permutation(config.vocab_size)[:kept])

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self.weights[name]

    def blocks(self, name: str) -> Blocks | None:
        return None
