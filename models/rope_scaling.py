"""How a config.json scales rotary positions: RopeScaling, read as transformers' `modeling_rope_utils` does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import CheckpointError
from .fields import MOST, Settings, brief, optional_int, positive_int, positive_number, switch

ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
LINEAR, LLAMA3, YARN, LONGROPE = STATIC = "linear", "llama3", "yarn", "longrope"  # kinds with tables that never change
# Settings that the object may have besides OF_ALL_KINDS, by kind. `dynamic` changes nothing within the context that the
# model was trained for, and no longer one is built.
KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    LINEAR: ("factor",),
    "dynamic": ("factor",),
    LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    YARN: (
        *("factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate", "finetuned"),
    ),
    LONGROPE: ("factor", ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}
OF_ALL_KINDS = ("rope_type", "type", "rope_theta", PARTIAL)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary positions.

    `linear` divides every frequency by `factor`. `llama3` divides the frequencies of long wavelengths by it, with a
    smooth transition. `yarn` does the same for pairs with few turns, and multiplies the tables by `attention_factor`.
    `longrope` divides the frequency of each pair by a factor of its own, the one for texts of at most
    `original_max_position` tokens, and multiplies the tables by `attention_factor`.
    """

    kind: str  # one of STATIC
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0  # pairs with more turns within the original context keep their wavelength
    beta_slow: float = 1.0  # pairs with fewer turns are stretched by `factor`
    truncate: bool = True  # whether the transition begins and ends at whole pairs
    factors: tuple[float, ...] = ()  # longrope's, one for each pair


def rope_settings(config: Settings) -> Settings:
    """`rope_scaling` of transformers 4, or `rope_parameters` of 5; empty when both are absent or null."""
    found = {name: config.get(name) for name in ("rope_scaling", "rope_parameters")}
    for name, value in found.items():
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"config.json: {name} must be an object or null, found {brief(value)}")
    return found["rope_scaling"] or found["rope_parameters"] or {}


def read_theta(config: Settings) -> float:
    """The base of the rotary frequencies. Raises CheckpointError."""
    return positive_number("rope_theta", rope_settings(config).get("rope_theta", config.get("rope_theta", 10000.0)))


def read_rope_scaling(config: Settings, rotary_size: int, aliases: Settings) -> RopeScaling | None:
    """Read the scaling; None when there is none. rotary_size: numbers of a head that are rotated. aliases: kinds, by
    the other names that a family has for them. Raises CheckpointError, also for a setting that the kind does not
    have."""
    rope = rope_settings(config)
    found = rope.get("rope_type", rope.get("type", "default"))
    kind = aliases.get(found, found) if isinstance(found, str) else None
    if kind not in KINDS:
        raise CheckpointError(
            f"config.json: rope scaling {brief(found)} is not supported; "
            f"{', '.join(map(repr, [*KINDS][:-1]))} and {[*KINDS][-1]!r} are"
        )
    for name, value in rope.items():
        if name not in OF_ALL_KINDS + KINDS[kind] and value is not None:
            raise CheckpointError(f"config.json: rope setting {brief(name)} is not supported for {brief(found)}")
    if kind == "default":
        return None
    if kind == LONGROPE:
        return longrope(config, rope, rotary_size // 2)
    if kind == YARN:
        return yarn(config, rope)
    factor = positive_number("rope factor", rope.get("factor"))
    if kind == LLAMA3:
        low, high = (positive_number(f"rope {name}", rope.get(name)) for name in KINDS[kind][1:3])
        if high <= low:
            raise CheckpointError("config.json: rope high_freq_factor must be larger than low_freq_factor")
        return RopeScaling(kind, factor, low, high, original_context(config, rope))
    return RopeScaling(kind, factor) if kind == LINEAR else None


def original_context(config: Settings, rope: Settings) -> int:
    """Tokens that the model was trained for before it was scaled. The setting beside the object takes precedence."""
    outside = optional_int(config, ORIGINAL)
    if outside is not None:
        return outside
    return positive_int({ORIGINAL: rope.get(ORIGINAL, config.get("max_position_embeddings"))}, ORIGINAL)


def scaled_by(config: Settings, rope: Settings, original: int) -> float:
    """The factor; by default the model's context divided by the original one. Raises CheckpointError."""
    factor = rope.get("factor")
    if factor is None:
        return positive_int(config, "max_position_embeddings") / original
    return positive_number("rope factor", factor)


def yarn(config: Settings, rope: Settings) -> RopeScaling:
    """Read YaRN's settings. Raises CheckpointError."""
    original = original_context(config, rope)
    factor = scaled_by(config, rope, original)
    if read_theta(config) <= 1:
        raise CheckpointError("config.json: rope_theta must be larger than 1 for 'yarn'")
    if (attention := rope.get("attention_factor")) is None:
        mscale, of_all = (rope.get(name) or 0 for name in ("mscale", "mscale_all_dim"))
        attention = magnitude(factor, 1)
        if mscale and of_all:
            attention = magnitude(factor, positive_number("rope mscale", mscale))
            attention /= magnitude(factor, positive_number("rope mscale_all_dim", of_all))
    return RopeScaling(
        YARN,
        factor,
        original_max_position=original,
        attention_factor=positive_number("rope attention_factor", attention),
        beta_fast=positive_number("rope beta_fast", rope.get("beta_fast") or 32.0),
        beta_slow=positive_number("rope beta_slow", rope.get("beta_slow") or 1.0),
        truncate=switch({"truncate": True} | dict(rope), "truncate"),
    )


def magnitude(factor: float, mscale: float) -> float:
    """The factor by which YaRN multiplies the rotary tables. It keeps attention over a longer text as sharp."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope(config: Settings, rope: Settings, pairs: int) -> RopeScaling:
    """Read longrope's settings. pairs: rotated pairs of a head. Raises CheckpointError."""
    original = original_context(config, rope)
    factor = scaled_by(config, rope, original)
    for name in ("short_factor", "long_factor"):
        listed = rope.get(name)
        if not isinstance(listed, list) or len(listed) != pairs:
            raise CheckpointError(f"config.json: rope {name} must list {pairs} numbers, one for each rotated pair")
    if (attention := rope.get("attention_factor")) is None:
        if factor > 1 and original < 2:
            raise CheckpointError(f"config.json: {ORIGINAL} must be at least 2 for 'longrope', found {original}")
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        LONGROPE,
        factor,
        original_max_position=original,
        attention_factor=positive_number("rope attention_factor", attention),
        factors=tuple(positive_number("rope short_factor", each) for each in rope["short_factor"]),
    )


def scaled_context(config: Settings, scaling: RopeScaling | None) -> int:
    """Tokens of the longest context. `max_position_embeddings` is often the context before YaRN; then the scaled one
    counts. Raises CheckpointError."""
    trained = positive_int(config, "max_position_embeddings")
    if scaling is None or scaling.kind != YARN:
        return trained
    stretched = int(min(scaling.factor * scaling.original_max_position, MOST["max_position_embeddings"]))
    return max(trained, stretched)
