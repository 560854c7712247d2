"""The acceptance head of SpecDec++ (arXiv 2405.19715, section 4): estimates whether the target accepts a draft token.

    ResBlock(x) = x + SiLU(W x + b)        head(x) = Linear_2(ResBlock^L(x))        class 1: accept, class 0: reject

x is the draft's last hidden state after the final norm. The authors' code `[ResBlock] * L` contains one object L times,
so in the published head the blocks share W and b. Training weights rejections by w_rej. The head's best odds are then
the true odds divided by w_rej, and adding log(w_rej) to the accept logit removes this bias exactly. A temperature
corrects the remaining error of calibration.

A trained head is a folder with `head.safetensors` and `head.json`; nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from .errors import CheckpointError, ConfigError
from .head_config import HeadConfig
from .plain_files import check_plain, read_object

WEIGHTS, DESCRIPTION = "head.safetensors", "head.json"
FORMAT = 1


class TrainedHead(NamedTuple):
    """A stored head: fp32 weights by the names of `HeadConfig.shapes`."""

    config: HeadConfig
    weights: Mapping[str, NDArray[np.float32]]


def write_head(folder: Path, head: TrainedHead) -> None:
    """Write both files into an existing folder. Raises OSError."""
    (folder / WEIGHTS).write_bytes(save({name: np.ascontiguousarray(w) for name, w in head.weights.items()}))
    content = {"format": FORMAT, **asdict(head.config)}
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_head(folder: Path, hidden_size: int) -> TrainedHead:
    """Read and check a head for a draft of `hidden_size`. Raises CheckpointError naming the fix."""
    config = read_description(folder)
    if config.hidden_size != hidden_size:
        raise CheckpointError(
            f"{folder}: this head reads {config.hidden_size} hidden values and the draft has {hidden_size}: "
            "train one for this draft with draftwood train-head"
        )
    try:
        check_plain(folder / WEIGHTS)
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS} is missing or unreadable ({error}): copy it again, or run draftwood train-head"
        ) from error
    check_weights(config, weights, str(folder))
    return TrainedHead(config, weights)


def read_description(folder: Path) -> HeadConfig:
    """head.json. Raises CheckpointError."""
    file = folder / DESCRIPTION
    try:
        content = read_object(file)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} is missing: give a folder that draftwood train-head wrote, or train one there"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON ({error}): run draftwood train-head again") from error
    if content.get("format") != FORMAT:
        found = repr(content.get("format"))[:80]
        raise CheckpointError(f"{file} has format {found}, this release reads {FORMAT}: update draftwood or retrain")
    try:
        return HeadConfig(**{field.name: content[field.name] for field in fields(HeadConfig)})
    except (KeyError, ConfigError) as error:
        raise CheckpointError(f"{file} is damaged ({error}): run draftwood train-head again") from error


def check_weights(config: HeadConfig, weights: Mapping[str, NDArray[Any]], place: str) -> None:
    """Raises CheckpointError unless every tensor is there, fp32, finite and of its shape."""
    shapes = config.shapes()
    if missing := shapes.keys() ^ weights.keys():
        raise CheckpointError(f"{place}: tensors missing or not expected: {', '.join(sorted(missing))}; train it again")
    for name, shape in shapes.items():
        if weights[name].shape != shape or weights[name].dtype != np.float32:
            raise CheckpointError(
                f"{place}: tensor {name} is {weights[name].dtype} {weights[name].shape}, "
                f"expected float32 {shape}; train it again"
            )
        if not np.isfinite(weights[name]).all():
            raise CheckpointError(f"{place}: tensor {name} holds NaN or infinity; the head is damaged, train it again")
