"""Rotary position tables, shared by the exporter, the packer and the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .config import LlamaConfig
from .rope_scaling import LINEAR, LONGROPE, YARN, RopeScaling

LOCAL = (False, True)  # tables of a model: for all layers, or for those with a window and a base of their own


def inverse_frequencies(config: LlamaConfig) -> NDArray[np.float64]:
    """Radians per position of each rotary pair, float64 [rotary_size / 2], scaled as in `modeling_rope_utils`."""
    exponents = np.arange(0, config.rotary_size, 2, dtype=np.float64) / config.rotary_size
    frequencies: NDArray[np.float64] = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == LINEAR:
        return frequencies / scaling.factor
    if scaling.kind == LONGROPE:
        return np.divide(frequencies, scaling.factors, dtype=np.float64)
    kept = kept_by_yarn(config, scaling) if scaling.kind == YARN else kept_by_llama3(frequencies, scaling)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def kept_by_llama3(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """The share of its frequency that each pair keeps, float64 [rotary_size / 2], from 0 to 1. Short wavelengths are
    kept (1). Wavelengths beyond the original context are stretched by `factor` (0). Those in between are
    interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    return np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)


def kept_by_yarn(config: LlamaConfig, scaling: RopeScaling) -> NDArray[np.float64]:
    """The same for YaRN (arXiv 2309.00071). Pairs that turn more than `beta_fast` times within the original context
    keep their frequency (1). Pairs that turn less than `beta_slow` times do not (0). The share falls linearly over the
    pairs in between."""
    size = config.rotary_size

    def pair_that_turns(times: float) -> float:
        ratio = math.log(scaling.original_max_position / (times * 2 * math.pi))
        return size * ratio / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 if first == last else 0  # avoids a division by 0, as transformers does
    places = np.arange(size // 2, dtype=np.float64)
    return np.clip(np.divide(last - places, last - first, dtype=np.float64), 0.0, 1.0)


def rope_tables(
    config: LlamaConfig, positions: int, local: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine tables, each [positions, rotary_size / 2] float32, times the scaling's attention factor. Angles
    are computed in float64. local: of layers with a base of their own, which is not scaled."""
    if local and config.variant.local_theta is not None:
        config = replace(config, rope_theta=config.variant.local_theta, rope_scaling=None)
    angles = np.outer(np.arange(positions, dtype=np.float64), inverse_frequencies(config))
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    return (factor * np.cos(angles)).astype(np.float32), (factor * np.sin(angles)).astype(np.float32)
