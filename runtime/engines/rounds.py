"""Rounds that an engine runs as a whole, from the draft's first pass to the commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from .base import EngineSpec, KVCache, Pass

BEST, MATCH, BLOCK = "best", "match", "block"  # how a round is verified; BEST: `match` at temperature 0
TRAVERSAL, REJECTION = "traversal", "rejection"


class RoundShape(NamedTuple):
    """The proposal of a round: the draft's `width` most probable nodes of each layer get `width` children each, down to
    `depth`; the `size` most probable nodes of all are verified. A chain has width 1, and as many tokens as layers.
    is_drawn: the tokens are drawn from the draft instead: those of a chain, or if is_tree, those of DySpec's tree.
    verify: BEST, MATCH or, for a drawn chain, BLOCK, for a drawn tree, TRAVERSAL or REJECTION. is_cut: whether top-k or
    top-p leaves tokens out.
    """

    depth: int
    size: int
    width: int
    verify: str = BEST
    is_drawn: bool = False
    is_cut: bool = False
    is_tree: bool = False

    @property
    def fills_layers(self) -> bool:
        """Whether the last layers probably get nodes. Else the tree mostly ends before, and the host saves passes."""
        return self.depth <= 2 + self.size // self.width

    @property
    def most_draws(self) -> tuple[int, int, int]:
        """The most uniform numbers that a round needs for the draft, for tests and for the target's own tokens."""
        if self.verify == BEST:
            return 0, 0, 0
        draft = self.depth * self.most_drawn if self.is_drawn else 0
        if self.verify == MATCH:
            return draft, 0, self.depth + 1
        return draft, self.size if self.is_tree else self.depth + 1, 1

    @property
    def most_drawn(self) -> int:
        """The most tokens of a layer that are drawn. Each is among the `size` best at that time, and so are the first
        tokens below the nodes of a layer, whose values may be equal."""
        return self.size + self.width if self.is_tree else 1

    def num_draws(self, accepted: int, drawn: int = 0, tests: int = 0) -> tuple[int, int, int]:
        """How many of them a round has used that accepted so many rows: as many as the runtime's growers and verifiers.
        drawn, tests: how many a drawn tree has used for the draft and for tests."""
        most_drawn, most_tests, last = self.most_draws
        if not self.is_tree:
            drawn, tests = most_drawn, most_tests - accepted if most_tests else 0
        return drawn, tests, min(last, accepted + 1)


class DrawSettings(NamedTuple):
    """How a text above temperature 0 draws. draft_share, target_share: tokens that are less probable than this share of
    the most probable one's have probability 0, for draft and target. top_p: the share of the mass that is kept of the
    `top_k` most probable others, or of all others if that is 0."""

    temperature: float
    draft_share: float
    target_share: float
    top_p: float
    top_k: int


class RoundDraws(NamedTuple):
    """draft, tests, last: uniform numbers, see RoundShape.most_draws. estimates: log a and log (1 - a) of a drawn
    token's estimated acceptance a, by its rank and the bin of its probability."""

    settings: DrawSettings
    draft: array[float]
    tests: array[float]
    last: array[float]
    estimates: array[float]


class RoundOutcome(NamedTuple):
    """token_ids, parents, depths, shares: of the rows of the verified tree, the root first, whose parent is -1; a share
    is the draft's probability of the row's token, see TokenGraph. accepted: the accepted rows, a path. written: their
    tokens, and the target's own after them. num_scored: how many accepted rows, from the first on, the draft has read.
    used: how many of its uniform numbers for the draft, for tests and for the target's own tokens. draft_passes,
    draft_rows: of the draft, padding included. seconds: of the passes of draft and target, where the round measures
    them; else all of its time counts as the target's."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    shares: tuple[float, ...]
    accepted: tuple[int, ...]
    written: list[int]
    num_scored: int
    used: tuple[int, int, int]
    draft_passes: int
    draft_rows: int
    seconds: tuple[float, float] | None = None


class Rounds(ABC):
    """The rounds of one text, over its caches of target and draft."""

    @abstractmethod
    def fits(self, shape: RoundShape, num_pending: int) -> bool:
        """Whether a round of this shape can run now. num_pending: tokens that the draft has not read, with the root."""

    @abstractmethod
    def round(self, shape: RoundShape, pending: Sequence[int], draws: RoundDraws | None = None) -> WholeRound:
        """pending: the tokens that the draft has not read; the last one is the root. draws: None at temperature 0."""

    @abstractmethod
    def close(self) -> None:
        """No round follows. The caches are their owner's."""


class RoundRunner(ABC):
    """Runs rounds of one shape, of several texts at a time."""

    spec: EngineSpec  # of the target

    @abstractmethod
    def num_joint(self, rounds: Sequence[WholeRound]) -> int:
        """How many of these rounds, from the first on, `forward` runs together."""

    @abstractmethod
    def forward(self, rounds: Sequence[WholeRound]) -> list[RoundOutcome]:
        """Run rounds, which commit in both caches what they accept. Raises EngineError as Engine.forward does."""


class WholeRound(NamedTuple):
    """A round of one text, from the draft's first pass to the commit. A scheduler runs it as it runs a Pass."""

    engine: RoundRunner
    text: Rounds
    # Of the target.
    cache: KVCache
    pending: tuple[int, ...]
    draws: RoundDraws | None

    # As of a pass.
    of_prompt: bool = False
    is_chunk: bool = False
    num_outputs: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.pending)

    def run(self) -> RoundOutcome:
        return self.engine.forward([self])[0]


Work = Pass | WholeRound
