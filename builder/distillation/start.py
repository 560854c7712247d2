"""What a training begins with: a new network of the wanted sizes, or a draft that an earlier distillation wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...models.config import LlamaConfig
from ...models.errors import ConfigError
from ...models.families import Variant
from ...models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT
from ...models.plain_files import read_object
from ..checkpoints.checkpoint import Checkpoint
from ..tokenizer import check_same_vocabulary
from .draft import FIGURES
from .network import DraftNetwork
from .state_files import write_json
from .target import digest

BEGINNING = "beginning.json"  # beside the checkpoint of a training
NAMED = ("text_tokens", "tokens_seen", "training_minutes")  # of an earlier distillation, for the new figures


class Start(NamedTuple):
    """A finished draft. config: of the network in training, whose projection is tied: the embedding has a row for
    whatever token the draft shall write. kept: int64 [N], the tokens that it writes so far. earlier: figures of its own
    distillation, see NAMED."""

    checkpoint: Checkpoint
    config: LlamaConfig
    kept: NDArray[np.int64]
    earlier: Mapping[str, Any]

    def load(self, network: DraftNetwork) -> None:
        """Copy the weights."""
        with torch.no_grad():
            for name, parameter in network.llama.named_parameters():
                parameter.copy_(torch.from_numpy(self.checkpoint.tensor(name).astype(np.float32)))


def read_start(folder: Path, target: Checkpoint) -> Start:
    """Read a draft that was distilled for a target with the same tokens. Raises CheckpointError and ConfigError."""
    checkpoint = Checkpoint(folder)
    config, kept = checkpoint.config, checkpoint.kept_tokens
    if config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"{folder} reads {config.vocab_size} tokens, and the target has {target.config.vocab_size}: give a draft "
            "of this target with --from"
        )
    with (
        tempfile.TemporaryDirectory() as ours,
        tempfile.TemporaryDirectory() as theirs,
        target.write_tokenizer(Path(ours)) as wanted,
        checkpoint.write_tokenizer(Path(theirs)) as given,
    ):
        check_same_vocabulary(wanted, given)
    plain = config.variant == Variant() and config.rope_scaling is None
    if kept is None or not plain or config.attention_bias or config.mlp_bias or not is_tied(checkpoint, kept):
        raise ConfigError(
            f"{folder} is no draft that a training can begin with: give a folder with --from that `draftwood distill` "
            "wrote without --full-vocabulary"
        )
    try:
        figures = read_object(folder / FIGURES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / FIGURES} cannot be read ({error}): give a folder of `distill`") from error
    earlier = {name: figures[name] for name in NAMED if isinstance(figures.get(name), int | float)}
    config = replace(config, draft_vocab_size=None, tie_embeddings=True)
    return Start(checkpoint, config, kept.astype(np.int64), earlier)


def check_beginning(folder: Path, start: Start | None, continued: bool) -> None:
    """Raises ConfigError if the training in a folder is continued with another --from than it began with. Writes what a
    new one begins with: the draft's folder, too, since a draft may be written over the one that it began with."""
    file, given = folder / BEGINNING, None if start is None else start.checkpoint
    beginning = {} if given is None else {"from": str(given.path.resolve()), "digest": digest(given)}
    if not continued:
        write_json(file, beginning)
        return
    if not file.is_file():
        return
    try:
        earlier = read_object(file, own=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not readable ({error}): remove it") from error
    same = (name for name in beginning if earlier.get(name) == beginning[name])
    if earlier != beginning and next(same, None) is None:
        raise ConfigError(
            f"{folder} holds a training that began with another --from, or with none: give the same as then, choose "
            f"another --state, or remove {folder}, which keeps the texts"
        )


def is_tied(checkpoint: Checkpoint, kept: NDArray[np.int64]) -> bool:
    """Whether the projection is the embedding's rows of the tokens that a draft writes, as in training."""
    return np.array_equal(checkpoint.tensor(HEAD_WEIGHT), checkpoint.tensor(EMBEDDING_WEIGHT)[kept])
