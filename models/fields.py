"""Reads settings of JSON from an untrusted source. Each is checked and bounded; errors name the setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import CheckpointError

Settings = Mapping[str, Any]
# Limits of a checkpoint: larger than those of any published LLaMA, and small enough to loop over.
MOST = {
    "vocab_size": 1 << 22,
    "draft_vocab_size": 1 << 16,  # of a trimmed draft: what a manifest lists
    "draft_context": 1 << 27,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 27,
    "original_max_position_embeddings": 1 << 27,
}
MAX_EOS = 1024  # ids that end a text
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # limits of other numbers: squares and reciprocals are finite


def positive_int(config: Settings, name: str, most: int | None = None) -> int:
    """A setting that is a count from 1 to `most`, by default MOST[name]. Raises CheckpointError."""
    most, value = MOST[name] if most is None else most, config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise CheckpointError(f"config.json: {name} must be a positive integer of at most {most}, found {brief(value)}")
    return value


def optional_int(config: Settings, name: str) -> int | None:
    """See `positive_int`; None when the setting is absent or null."""
    return None if config.get(name) is None else positive_int(config, name)


def positive_number(name: str, value: Any) -> float:
    """A number from MIN_NUMBER to MAX_NUMBER. Raises CheckpointError that names it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not MIN_NUMBER <= value <= MAX_NUMBER:
        raise CheckpointError(
            f"config.json: {name} must be a positive number from {MIN_NUMBER:g} to {MAX_NUMBER:g}, found {brief(value)}"
        )
    return float(value)


def switch(config: Settings, name: str) -> bool:
    """A setting that is true or false; null and absent mean false. Raises CheckpointError."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, found {brief(value)}")
    return bool(value)


def token_ids(config: Settings, name: str, most: int = MAX_EOS, file: str = "config.json") -> tuple[int, ...]:
    """A setting that is one token id or a list of at most `most` ids; absent and null mean none. The id -1, which some
    checkpoints write for no token, is kept. Raises CheckpointError. file: its name in the error."""
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
    if not whole or not all(-1 <= each < MOST["vocab_size"] for each in ids) or len(ids) > most:
        raise CheckpointError(
            f"{file}: {name} must be a token id, or a list of at most {most} of them, found {brief(value)}"
        )
    return tuple(ids)


def brief(value: Any) -> str:
    """A short text that stands for an untrusted value in an error message."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
