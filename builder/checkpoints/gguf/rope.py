"""Converts a GGUF file's settings of rotary positions into `rope_parameters` of a Hugging Face configuration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....models.errors import CheckpointError
from ....models.fields import LEAST_NUMBER, MOST_NUMBER
from .metadata import AGAIN, Metadata

ROPE_FREQS = "rope_freqs.weight"  # a divisor for each pair's frequency: how convert_hf_to_gguf.py writes `llama3`
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ORIGINAL_LENGTH = "scaling.original_context_length"
ORIGINAL = 8192  # Llama 3's value: divisors give llama3's three lengths only up to a common factor
TOLERANCE = 1e-4  # relative error of a divisor that was computed in fp32
YARN = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def rope_parameters(metadata: Metadata, architecture: str, head_dim: int, factors: dict[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` that config.json would have. factors: those arrays of ROPE_FREQS, LONG_FACTORS and
    SHORT_FACTORS that the file has. Raises CheckpointError."""
    prefix = f"{architecture}.rope."
    theta = metadata.get(f"{prefix}freq_base", float)
    theta = 10000.0 if theta is None else theta
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    kind = metadata.get(f"{prefix}scaling.type", str) or "none"
    factor = metadata.get(f"{prefix}scaling.factor", float)
    linear = metadata.get(f"{prefix}scale_linear", float)  # how older files write linear scaling
    original = metadata.get(f"{prefix}{ORIGINAL_LENGTH}", int)
    scaled = {} if original is None else {"original_max_position_embeddings": original}
    metadata.get(f"{prefix}scaling.finetuned", bool)  # known, and without effect here
    if LONG_FACTORS in factors or SHORT_FACTORS in factors:
        metadata.get(f"{prefix}scaling.attn_factor", float)  # not used: it follows from the two lengths
        for name, key in ((LONG_FACTORS, "long_factor"), (SHORT_FACTORS, "short_factor")):
            parameters[key] = factors[name].tolist() if name in factors else None
        return parameters | scaled | {"rope_type": "longrope"}
    if ROPE_FREQS in factors:
        if kind not in ("none", "llama3"):
            raise CheckpointError(f"{metadata.file}: it has both {ROPE_FREQS} and rope scaling {kind!r}; {AGAIN}")
        return parameters | llama3(metadata, factors[ROPE_FREQS], theta, head_dim)
    if kind == "none" and linear not in (None, 1.0):
        kind, factor = "linear", linear
    if kind == "none":
        return parameters
    parameters |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        parameters |= scaled
        for name, key in YARN.items():
            value = metadata.get(f"{prefix}scaling.{name}", float)
            if value is not None:
                parameters[key] = value
    return parameters


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
