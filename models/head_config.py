"""The shape and the calibration of an acceptance head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError

REJECT, ACCEPT = 0, 1
MOST = {"hidden_size": 1 << 17, "layers": 64}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape and calibration of a head. Raises ConfigError."""

    hidden_size: int  # the draft's
    layers: int = 3  # ResBlocks, 0 for a linear head
    tied: bool = True  # they share their weights
    reject_weight: float = 6.0  # w_rej of the training loss
    temperature: float = 1.0  # divides the de-biased logit

    def __post_init__(self) -> None:
        for name, least in (("hidden_size", 1), ("layers", 0)):
            value, most = getattr(self, name), MOST[name]
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        if not isinstance(self.tied, bool):
            raise ConfigError(f"tied must be true or false, not {self.tied!r}")
        for name in ("reject_weight", "temperature"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value <= 1e6:
                raise ConfigError(f"{name} must be a positive number from 1e-6 to 1e6, not {value!r}")

    @property
    def blocks(self) -> int:
        """The number of blocks that have their own weights."""
        return min(self.layers, 1) if self.tied else self.layers

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the head, matrices as [out, in]."""
        size = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for block in range(self.blocks):
            shapes |= {f"blocks.{block}.linear.weight": (size, size), f"blocks.{block}.linear.bias": (size,)}
        return shapes | {"output.weight": (2, size), "output.bias": (2,)}

    def block_of(self, layer: int) -> int:
        """The block whose weights a layer uses."""
        return 0 if self.tied else layer

    def logit_projection(
        self, weight: NDArray[np.float32], bias: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The last layer with the calibrated log-odds merged in: weight [2, d] and bias [2] become [d, 1] and [1]."""
        odds = (weight[ACCEPT] - weight[REJECT]) / self.temperature
        shift = (bias[ACCEPT] - bias[REJECT] + math.log(self.reject_weight)) / self.temperature
        return odds[:, None].astype(np.float32), np.array([shift], np.float32)
