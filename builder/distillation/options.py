"""The options of a distillation, checked before torch is imported and before any file is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ...models.errors import ConfigError
from ...models.fields import MOST

TEXT_SHARE = 0.6  # of the minutes, for writing text
LEAST_MINUTES, MOST_MINUTES = 0.1, 60 * 24 * 30.0
WORTH_MINUTES = 30  # with fewer, a draft agrees with its target too seldom
MOST_THREADS, MOST_REQUESTS = 64, 256
LAYERS, VOCABULARY = 2, 8192
SIZES = ("hidden", "heads", "kv_heads", "head_dim", "intermediate")


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """The options of a distillation. Raises ConfigError.

    target: Hugging Face folder, GGUF file or id on the Hub. output: the draft's folder. minutes: for text and training
    together, over all runs with this state. text_minutes: the part for text; None takes TEXT_SHARE. Training takes the
    rest. questions: of the user, to answer instead of the target's own. state: folder of texts and checkpoints; None
    takes one beside the output. start: a draft that an earlier distillation for this target wrote; the training begins
    with it instead of random numbers, and with its sizes. layers, hidden, heads, kv_heads, head_dim, intermediate: the
    draft's sizes; None takes LAYERS, and chooses the others by the target's. vocabulary: the number of tokens that the
    draft writes, the most frequent ones of the text; None takes the tokens of `start`, else VOCABULARY.
    full_vocabulary: write the draft for programs that cannot load a trimmed one. requests: texts written at a time.
    context: tokens of a training sequence. batch: sequences of a step. threads: of the engine and of torch; 0 chooses.
    learning_rate: the highest.
    """

    target: Path
    output: Path
    minutes: float
    text_minutes: float | None = None
    questions: tuple[str, ...] = ()
    state: Path | None = None
    start: Path | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    vocabulary: int | None = None
    full_vocabulary: bool = False
    requests: int = 48
    context: int = 512
    batch: int = 8
    threads: int = 0
    learning_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if not LEAST_MINUTES <= self.minutes <= MOST_MINUTES:
            raise ConfigError(
                f"minutes must be {LEAST_MINUTES:g} to {MOST_MINUTES:g}, not {self.minutes:g}: a draft worth having "
                f"takes some {WORTH_MINUTES} minutes"
            )
        if self.text_minutes is not None and not 0 <= self.text_minutes <= self.minutes:
            raise ConfigError(f"text_minutes must be 0 to minutes ({self.minutes:g}), not {self.text_minutes:g}")
        for name, least, most in (
            ("vocabulary", 16, MOST["draft_vocab_size"]),
            ("requests", 1, MOST_REQUESTS),
            ("context", 16, 8192),
            ("batch", 1, 1024),
            ("threads", 0, MOST_THREADS),
            ("seed", 0, 2**32 - 1),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} must be {least} to {most}, not {value}")
        for name in ("layers", *SIZES):
            if self.start is not None and getattr(self, name) is not None:
                raise ConfigError(f"{name} cannot be given beside --from: the draft in {self.start} has its own")
        if not 0 < self.learning_rate <= 1 or not math.isfinite(self.learning_rate):
            raise ConfigError(f"learning_rate must be above 0 and at most 1, not {self.learning_rate}")

    @property
    def text_seconds(self) -> float:
        """Seconds for writing text."""
        return 60 * (TEXT_SHARE * self.minutes if self.text_minutes is None else self.text_minutes)

    @property
    def training_seconds(self) -> float:
        """Seconds for training."""
        return 60 * self.minutes - self.text_seconds

    @property
    def folder(self) -> Path:
        """The state folder."""
        return self.output.with_name(f"{self.output.name}.state") if self.state is None else self.state
