"""Converts a GGUF file's settings of rotary positions into `rope_parameters` of a Hugging Face configuration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....models.errors import CheckpointError, shown
from ....models.fields import LEAST_NUMBER, MOST_NUMBER
from ....models.rope_scaling import LINEAR, LONGROPE, YARN
from .metadata import AGAIN, Metadata

ROPE_FREQS = "rope_freqs.weight"  # a divisor for each pair's frequency: how convert_hf_to_gguf.py writes `llama3`
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
BY_LENGTH = {LONG_FACTORS: "long_factor", SHORT_FACTORS: "short_factor"}
NONE = "none"  # GGUF's name of no scaling
ORIGINAL_LENGTH = "scaling.original_context_length"
ORIGINAL = 8192  # Llama 3's value: divisors give llama3's three lengths only up to a common factor
TOLERANCE = 1e-4  # relative error of a divisor that was computed in fp32
OF_YARN = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def rope_parameters(metadata: Metadata, architecture: str, head_dim: int, factors: dict[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` that config.json would have. factors: those arrays of ROPE_FREQS, LONG_FACTORS and
    SHORT_FACTORS that the file has. Raises CheckpointError."""
    prefix = f"{architecture}.rope."
    theta = metadata.get(f"{prefix}freq_base", float)
    theta = 10000.0 if theta is None else theta
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    kind, factor = scaling_of(metadata, prefix)
    original = metadata.get(f"{prefix}{ORIGINAL_LENGTH}", int)
    scaled = {} if original is None else {"original_max_position_embeddings": original}
    metadata.get(f"{prefix}scaling.finetuned", bool)  # known, and without effect here
    if factors:
        check_alone(metadata, factors, kind, factor)
    if ROPE_FREQS in factors:
        return parameters | llama3(metadata, factors[ROPE_FREQS], theta, head_dim)
    if factors:
        for name, key in BY_LENGTH.items():
            parameters[key] = factors[name].tolist() if name in factors else None
        parameters["attention_factor"] = metadata.get(f"{prefix}scaling.attn_factor", float)
        return parameters | scaled | {"rope_type": LONGROPE}
    if kind == NONE:
        return parameters
    parameters |= {"rope_type": kind, "factor": factor}
    if kind == YARN:
        parameters |= scaled
        for name, key in OF_YARN.items():
            value = metadata.get(f"{prefix}scaling.{name}", float)
            if value is not None:
                parameters[key] = value
    return parameters


def scaling_of(metadata: Metadata, prefix: str) -> tuple[str, float]:
    """Kind and factor of the scaling that the metadata describes, by llama.cpp's rules: without a name the kind is
    linear, an absent factor and 0 mean 1, and linear scaling by 1 is none. Raises CheckpointError."""
    kind = metadata.get(f"{prefix}scaling.type", str) or LINEAR
    factor = metadata.get(f"{prefix}scaling.factor", float)
    older = metadata.get(f"{prefix}scale_linear", float)  # the key of older files
    factor = (older if factor is None else factor) or 1.0
    return (NONE, 1.0) if kind == NONE or (kind, factor) == (LINEAR, 1.0) else (kind, factor)


def check_alone(metadata: Metadata, factors: dict[str, Any], kind: str, factor: float) -> None:
    """Raises CheckpointError if a file has another scaling beside that of its tensors: llama.cpp computes both."""
    name, *more = factors
    if name == ROPE_FREQS and more:
        other = more[0]
    elif factor != 1 or kind not in (NONE, LONGROPE if name in BY_LENGTH else NONE):
        other = f"rope scaling {shown(kind)} by {factor:g}"
    else:
        return
    raise CheckpointError(f"{metadata.file}: it has both {name} and {other}; {AGAIN}")


def llama3(metadata: Metadata, divisors: NDArray[Any], theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters of `llama3` scaling from which the divisors of the frequencies, [head_dim / 2], were computed.

    With w = original / wavelength, a frequency is multiplied by s + (1 - s) / factor, where s = (w - low) / (high -
    low), clipped to 0..1 (models/rope.py). A common factor of low, high and original changes nothing, so `original` is
    set to ORIGINAL. Raises CheckpointError for divisors that follow no such rule.
    """
    divisors = divisors.astype(np.float64)
    refused = CheckpointError(
        f"{metadata.file}: {ROPE_FREQS} does not hold the divisors of llama3's rope scaling, and no other is read; "
        f"{AGAIN}"
    )
    usable = divisors.shape == (head_dim // 2,) and np.isfinite(divisors).all() and (divisors >= 1).all()
    if not usable or not LEAST_NUMBER <= theta <= MOST_NUMBER:
        raise refused
    factor = float(divisors.max())
    if factor == 1:
        return {}
    w = ORIGINAL * theta ** -(np.arange(head_dim // 2) * 2 / head_dim) / (2 * math.pi)  # decreases from pair to pair
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > TOLERANCE) & (smooth < 1 - TOLERANCE)
    kept, stretched = w[smooth >= 1 - TOLERANCE], w[smooth <= TOLERANCE]
    highest = kept.min() if len(kept) else w.max() * 2
    lowest = stretched.max() if len(stretched) else w.min() / 2
    if between.sum() >= 2:  # the line through them
        slope, shift = np.polyfit(w[between], smooth[between], 1)
    elif between.any():  # a line through the point that reaches 0 and 1 before the next points
        here, value = w[between][0], smooth[between][0]
        slope = max((1 - value) / (highest - here), value / (here - lowest))
        shift = value - slope * here
    else:
        slope = 1 / (highest - lowest)
        shift = -slope * lowest
    low, high = near(-shift / slope), near((1 - shift) / slope)
    found = np.clip((w - low) / (high - low), 0, 1) if high > low else np.zeros_like(w)
    if not np.allclose(1 / (found + (1 - found) / factor), divisors, rtol=TOLERANCE, atol=0):
        raise refused
    return {
        "rope_type": "llama3",
        "factor": near(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": ORIGINAL,
    }


def near(value: float) -> float:
    """The nearest whole number, when the value differs from it only by the rounding of fp32; otherwise the value."""
    if not math.isfinite(value):
        return float(value)
    whole = round(value)
    return float(whole) if abs(value - whole) <= TOLERANCE * max(1.0, abs(value)) else float(value)
