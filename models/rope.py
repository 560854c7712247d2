"""Rotary position tables, shared by the exporter and the torch reference."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> NDArray[np.float64]:
    """Angle per position of each rotary pair, [rotary_size / 2], scaling applied.

    `llama3` follows transformers' `_compute_llama3_parameters`: wavelengths beyond the original context are
    stretched by `factor`, short ones kept, those in between interpolated.
    """
    exponents = np.arange(0, config.rotary_size, 2, dtype=np.float64) / config.rotary_size
    frequencies: NDArray[np.float64] = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def rope_tables(config: LlamaConfig, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine tables, each [positions, rotary_size / 2] float32. Angles are computed in float64."""
    angles = np.outer(np.arange(positions, dtype=np.float64), inverse_frequencies(config))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
