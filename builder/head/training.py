"""The options and the results of the training of an acceptance head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...models.errors import ConfigError
from ...models.head_config import HeadConfig
from ...runtime.sampling.params import TEMPERATURES
from ..setting import setting
from .calibration import CalibrationFigures

CONTEXTS = ("mixed", "branched")
MAX_THREADS = 1024  # of torch


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """The options of a training. Raises ConfigError."""

    target: Path  # Hugging Face folder or GGUF file
    draft: Path
    output: Path  # the head's folder
    layers: int = setting(3, "ResBlocks of the head")
    tied: bool = True  # the blocks share their weights
    reject_weight: float = setting(6.0, "weight of a rejection in the loss")
    contexts: str = setting(
        "mixed", "texts that the draft reads: mixed, as published, or branched off the target's texts"
    )
    mixing_ratio: float = setting(0.15, "share of the target's tokens in training texts")
    texts: int = setting(320, "texts the target writes, prompts taken in turn")
    max_new_tokens: int = setting(128, "tokens of a text")
    max_prompt_tokens: int = setting(128, "longer prompts lose their beginning")
    temperature: float = setting(1.0, "at which the target writes")  # 0 is greedy; labels are those of 1
    batch_size: int = setting(32, "texts written at a time")
    epochs: int = setting(16, "times the head sees every example")
    learning_rate: float = setting(2e-3, "at its highest")
    held_out: float = setting(0.2, "share of the prompts kept for calibration")
    seed: int = setting(0, "the same seed gives the same head")
    threads: int = setting(0, "of torch; 0 chooses by the target's size")

    def __post_init__(self) -> None:
        self.head(1)  # refuses impossible shapes
        for name in ("texts", "max_new_tokens", "max_prompt_tokens", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.contexts not in CONTEXTS:
            raise ConfigError(f"contexts {self.contexts!r} is unknown; choose one of {', '.join(CONTEXTS)}")
        if not 0 <= self.mixing_ratio < 1:
            raise ConfigError(f"mixing_ratio must be at least 0 and less than 1, not {self.mixing_ratio}")
        coldest, hottest = TEMPERATURES
        if not (self.temperature == 0 or coldest <= self.temperature <= hottest):
            raise ConfigError(f"temperature must be 0, or {coldest:g} to {hottest:g}, not {self.temperature}")
        if not 0 < self.learning_rate <= 1:
            raise ConfigError(f"learning_rate must be above 0 and at most 1, not {self.learning_rate}")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"held_out must be between 0 and 1, not {self.held_out}")
        if self.texts < 2:
            raise ConfigError("texts must be at least 2: one to train on and one to hold out")
        for name, most in (("seed", 2**32 - 1), ("threads", MAX_THREADS)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be 0 to {most}, not {getattr(self, name)}")

    def head(self, hidden_size: int) -> HeadConfig:
        """The configuration of the untrained head."""
        return HeadConfig(hidden_size, self.layers, self.tied, self.reject_weight)


class Point(NamedTuple):
    """The weighted loss after `step` optimizer steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The figures of a trained head. Those of calibration are of held-out tokens."""

    config: HeadConfig
    training: tuple[Point, ...]  # weighted loss over steps
    validation: tuple[Point, ...]  # one point per epoch
    loss: float  # the least of `validation`, of the weights that were kept
    constant: CalibrationFigures  # of a constant prediction, the mean of the training labels, which a head must beat
    raw: CalibrationFigures  # of the probability as trained
    debiased: CalibrationFigures  # after adding log w_rej
    calibrated: CalibrationFigures  # after the temperature, too
    examples: int  # tokens
    held_out: int
    mean_acceptance: float  # mean of all labels, which is 1 - TV(p, q) on average
    seconds: float  # of the whole training

    def stages(self) -> dict[str, CalibrationFigures]:
        """Held-out figures in the order of the corrections."""
        return {"as trained": self.raw, "de-biased": self.debiased, "calibrated": self.calibrated}

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["config"] = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__}
        for name in ("constant", "raw", "debiased", "calibrated"):
            figures: CalibrationFigures = getattr(self, name)
            fields[name] = {**figures._asdict(), "bins": [each._asdict() for each in figures.bins]}
        for name in ("training", "validation"):
            fields[name] = [point._asdict() for point in getattr(self, name)]
        return fields
