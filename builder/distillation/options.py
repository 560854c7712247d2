"""The options of a distillation, checked before torch is imported and before any file is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...models.errors import ConfigError
from ...models.fields import MOST
from ..setting import setting

TEXT_SHARE = 0.6  # of the minutes, for writing text
MIN_MINUTES, MAX_MINUTES = 0.1, 60 * 24 * 30.0
WORTH_MINUTES = 30  # with fewer, a draft agrees with its target too seldom
LAYERS, VOCABULARY = 2, 8192
PLAIN = ("layers", "hidden", "heads", "head_dim", "start", "full_vocabulary")  # options of plain drafts alone
BATCH, RATE = {"states": 3, "text": 8}, {"states": 1.2e-3, "text": 2e-3}  # by kind
SIZES = {"layers": 64, "hidden": 8192, "heads": 1024, "kv_heads": 1024, "head_dim": 1024, "intermediate": 8192}  # most
LIMITS = {
    **{name: (1, most) for name, most in SIZES.items()},
    "vocabulary": (16, MOST["draft_vocab_size"]),
    "requests": (1, 256),
    "context": (16, 8192),
    "batch": (1, 1024),
    "threads": (0, 64),
    "seed": (0, 2**32 - 1),
}


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """The options of a distillation. Raises ConfigError."""

    target: Path  # Hugging Face folder, GGUF file or id on the Hub
    output: Path  # the draft's folder
    minutes: float  # for text and training together, over all runs with this state
    text_minutes: float | None = setting(None, "the part of the minutes in which the target writes", "60 %%")
    questions: tuple[str, ...] = ()  # of the user, to answer instead of the target's own
    state: Path | None = setting(None, "folder of texts and checkpoints", "DRAFT.state")
    start: Path | None = None  # a draft of an earlier distillation, with whose weights and sizes the training begins
    kind: str | None = setting(
        None,
        "states: a head that reads its target's states; text: a small model of its own",
        "states for targets of hidden size 1024 or more",
        is_further=False,
    )
    layers: int | None = setting(None, "of a plain draft", f"{LAYERS}")
    hidden: int | None = setting(None, "hidden size of a plain draft", "about 0.45 of the target's")
    heads: int | None = setting(None, "attention heads of a plain draft", "hidden size / head size")
    kv_heads: int | None = setting(
        None, "heads of keys and values", "half of the heads; with states a third of the target's"
    )
    head_dim: int | None = setting(None, "size of an attention head of a plain draft", "64")
    intermediate: int | None = setting(None, "feed-forward size", "three times the hidden size; with states twice")
    # None: those of `start`, or VOCABULARY.
    vocabulary: int | None = setting(None, "tokens that the draft writes, the most frequent ones of the text", "8192")
    requests: int = setting(48, "texts written at a time")
    context: int = setting(512, "tokens of a training sequence")
    batch: int | None = setting(None, "sequences of a training step", "8; with states 3")
    threads: int = setting(0, "of the engine and of torch; 0 chooses")
    learning_rate: float | None = setting(None, "at its highest", "0.002; with states 0.0012")
    seed: int = setting(0, "of the texts and of the training")
    full_vocabulary: bool = setting(False, "write the draft for programs that cannot load a trimmed one")

    def __post_init__(self) -> None:
        if not MIN_MINUTES <= self.minutes <= MAX_MINUTES:
            raise ConfigError(
                f"minutes must be {MIN_MINUTES:g} to {MAX_MINUTES:g}, not {self.minutes:g}: a draft worth having "
                f"takes some {WORTH_MINUTES} minutes"
            )
        if self.text_minutes is not None and not 0 <= self.text_minutes <= self.minutes:
            raise ConfigError(f"text_minutes must be 0 to minutes ({self.minutes:g}), not {self.text_minutes:g}")
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} must be {least} to {most}, not {value}")
            if self.start is not None and value is not None and name in SIZES:
                raise ConfigError(f"{name} cannot be given beside --from: the draft in {self.start} has its own")
        if self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(f"head_dim ({self.head_dim}) must be even: rotary positions need pairs")
        state, output = self.folder.resolve(), self.output.resolve()
        if output in (state, *state.parents):
            raise ConfigError(
                f"the state {self.folder} lies in {self.output}, which each better draft replaces: move it"
            )
        if self.full_vocabulary and self.start is not None and self.start.resolve() == output:
            raise ConfigError(
                "--full-vocabulary would replace the draft of --from by one that no training can begin "
                "with: choose another --output"
            )
        if self.kind not in (None, *BATCH):
            raise ConfigError(f"kind must be {' or '.join(BATCH)}, not {self.kind}")
        if self.kind == "states" and (given := next((name for name in PLAIN if getattr(self, name)), None)):
            told = "--from" if given == "start" else given
            raise ConfigError(f"{told} goes with --kind text: a head has its target's sizes and begins as its target")
        if self.learning_rate is not None and not 0 < self.learning_rate <= 1:
            raise ConfigError(f"learning_rate must be above 0 and at most 1, not {self.learning_rate}")

    @property
    def is_plain(self) -> bool:
        """Whether an option that is for plain drafts alone is given."""
        return any(getattr(self, name) for name in PLAIN)

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
        output = self.output.resolve()
        return output.with_name(f"{output.name}.state") if self.state is None else self.state
