"""What goes into the training of an acceptance head, and what comes out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...models.acceptance_head import HeadConfig
from ...models.errors import ConfigError
from .calibration import Calibration

CONTEXTS = ("mixed", "branched")


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """How to train a head. Raises ConfigError.

    target, draft: Hugging Face folders or GGUF files. output: the head's folder. layers, tied, reject_weight: see
    HeadConfig. contexts: what the draft has read when it is asked about its token in training: "mixed", as published, a
    text in which a share `mixing_ratio` (r) is the target's and the rest its own; or "branched", the target's own text,
    as in use.

    texts: how many the target writes, prompts taken in turn; max_new_tokens: length of one; max_prompt_tokens: a longer
    prompt loses its beginning. temperature: at which the target writes, 0 is greedy; labels are always those of
    temperature 1. batch_size: texts written at a time. epochs: times the head sees every example. learning_rate: at its
    highest. held_out: share of the prompts that is kept from training, for calibration. threads: of torch, 0 chooses by
    the target's size.
    """

    target: Path
    draft: Path
    output: Path
    layers: int = 3
    tied: bool = True
    reject_weight: float = 6.0
    contexts: str = "mixed"
    mixing_ratio: float = 0.15
    texts: int = 320
    max_new_tokens: int = 128
    max_prompt_tokens: int = 128
    temperature: float = 1.0
    batch_size: int = 32
    epochs: int = 16
    learning_rate: float = 2e-3
    held_out: float = 0.2
    seed: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        self.head(1)  # refuses impossible shapes
        for name in ("texts", "max_new_tokens", "max_prompt_tokens", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.contexts not in CONTEXTS:
            raise ConfigError(f"contexts {self.contexts!r} is unknown; choose one of {', '.join(CONTEXTS)}")
        if not 0 <= self.mixing_ratio < 1:
            raise ConfigError(f"mixing_ratio must be at least 0 and less than 1, not {self.mixing_ratio}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 or positive, not {self.temperature}")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate must be positive, not {self.learning_rate}")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"held_out must be between 0 and 1, not {self.held_out}")
        if self.texts < 2:
            raise ConfigError("texts must be at least 2: one to train on and one to hold out")
        for name in ("seed", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")

    def head(self, hidden_size: int) -> HeadConfig:
        """The head before training."""
        return HeadConfig(hidden_size, self.layers, self.tied, self.reject_weight)


class Point(NamedTuple):
    """Weighted loss after so many optimizer steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class HeadResult:
    """A trained head's figures. training, validation: weighted loss over steps; validation has one point an epoch, the
    smallest of which, `loss`, is that of the weights that were kept. raw, debiased, calibrated: held-out figures of the
    probability as trained, after adding log w_rej, and after the temperature. constant: of one probability for every
    token, the training labels' mean, which a head must beat. examples, held_out: tokens. mean_acceptance: of all
    labels, 1 - TV(p, q) on average. seconds: of the whole training."""

    config: HeadConfig
    training: tuple[Point, ...]
    validation: tuple[Point, ...]
    loss: float
    constant: Calibration
    raw: Calibration
    debiased: Calibration
    calibrated: Calibration
    examples: int
    held_out: int
    mean_acceptance: float
    seconds: float

    def stages(self) -> dict[str, Calibration]:
        """Held-out figures in the order of the corrections."""
        return {"as trained": self.raw, "de-biased": self.debiased, "calibrated": self.calibrated}

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["config"] = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__}
        for name in ("constant", "raw", "debiased", "calibrated"):
            figures: Calibration = getattr(self, name)
            fields[name] = {**figures._asdict(), "bins": [each._asdict() for each in figures.bins]}
        for name in ("training", "validation"):
            fields[name] = [point._asdict() for point in getattr(self, name)]
        return fields
