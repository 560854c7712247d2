"""Settings of a stranger's JSON, each checked and bounded; what is wrong with one is said with its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import CheckpointError

Settings = Mapping[str, Any]
# The most that a checkpoint may ask for: beyond any LLaMA there is, and little enough to count to.
MOST = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 27,
    "original_max_position_embeddings": 1 << 27,
}
MOST_EOS = 1024  # ids that end a text
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e30  # of every other setting: its square and its reciprocal are finite


def positive_int(config: Settings, name: str, most: int | None = None) -> int:
    """A count; without `most` it is a field of MOST."""
    most, value = MOST[name] if most is None else most, config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise CheckpointError(f"config.json: {name} must be a positive integer of at most {most}, found {brief(value)}")
    return value


def optional_int(config: Settings, name: str) -> int | None:
    return None if config.get(name) is None else positive_int(config, name)


def positive_number(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not LEAST_NUMBER <= value <= MOST_NUMBER:
        raise CheckpointError(
            f"config.json: {name} must be a positive number from {LEAST_NUMBER:g} to {MOST_NUMBER:g}, "
            f"found {brief(value)}"
        )
    return float(value)


def switch(config: Settings, name: str) -> bool:
    """True or false; null and nothing mean false."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, found {brief(value)}")
    return bool(value)


def token_ids(config: Settings, name: str, most: int = MOST_EOS, file: str = "config.json") -> tuple[int, ...]:
    """Absent, one id, or a list of at most `most` ids; -1, which some checkpoints write for no token, is kept."""
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
    if not whole or not all(-1 <= each < MOST["vocab_size"] for each in ids) or len(ids) > most:
        raise CheckpointError(
            f"{file}: {name} must be a token id, or a list of at most {most} of them, found {brief(value)}"
        )
    return tuple(ids)


def brief(value: Any) -> str:
    """A value of a stranger's file as an error message shows it."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
