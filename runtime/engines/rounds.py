"""RoundEngine: an engine one pass of which is a whole round, from the draft's first pass to the commit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ...models.errors import EngineError
from .base import KVCache, Pass, SoloEngine

BEST, MATCH, BLOCK = "best", "match", "block"  # how a round is verified; BEST: `match` at temperature 0


class RoundShape(NamedTuple):
    """The proposal of a round: the draft's `width` most probable nodes of each layer get `width` children each, down to
    `depth`; the `size` most probable nodes of all are verified. A chain has width 1, and as many tokens as layers.
    is_drawn: the tokens of a chain are drawn from the draft instead. verify: BEST, MATCH or, for a drawn chain, BLOCK.
    is_cut: whether top-p leaves tokens out.
    """

    depth: int
    size: int
    width: int
    verify: str = BEST
    is_drawn: bool = False
    is_cut: bool = False

    @property
    def fills_layers(self) -> bool:
        """Whether the last layers probably get nodes, too. A deeper tree of so few tokens mostly ends before; only the
        host then saves the remaining passes."""
        return self.depth <= 2 + self.size // self.width

    @property
    def most_draws(self) -> tuple[int, int, int]:
        """The most uniform numbers that a round needs for the draft, for tests and for the target's own tokens."""
        tests, last = (self.depth + 1, 1) if self.verify == BLOCK else (0, self.depth + 1)
        return (self.depth if self.is_drawn else 0, *((0, 0) if self.verify == BEST else (tests, last)))

    def num_draws(self, num_accepted: int) -> tuple[int, int, int]:
        """How many of them a round has used that accepted so many tokens: as many as the runtime's verifier."""
        draft, tests, last = self.most_draws
        return (draft, tests - num_accepted, last) if tests else (draft, 0, min(last, num_accepted + 1))


class RoundDraws(NamedTuple):
    """What a round above temperature 0 draws with. draft_share, target_share: tokens that are less probable than this
    share of the most probable one's have probability 0, for draft and target. top_p: the share of the others' mass that
    is kept. draft, tests, last: uniform numbers, see RoundShape.most_draws."""

    temperature: float
    draft_share: float
    target_share: float
    top_p: float
    draft: Sequence[float]
    tests: Sequence[float]
    last: Sequence[float]


class RoundOutcome(NamedTuple):
    """token_ids, parents, depths, values: of the rows of the verified tree, the root first, whose parent is -1; a value
    is the log-probability of a row's path. accepted: the accepted rows, a path. next_token: the target's token after
    them. num_scored: how many accepted rows, from the first on, the draft has read."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    values: tuple[float, ...]
    accepted: tuple[int, ...]
    next_token: int
    num_scored: int


class RoundEngine(SoloEngine):
    """Runs rounds over one cache of the target and one of the draft, and commits what it accepts in both. outcome: of
    the last round."""

    outcome: RoundOutcome

    def new_cache(self) -> KVCache:
        """Raises EngineError: rounds run over the caches for which the engine was made."""
        raise EngineError("rounds have no caches of their own: open those of the target and of the draft")

    @abstractmethod
    def fits(self, shape: RoundShape, num_pending: int) -> bool:
        """Whether a round of this shape can run now. num_pending: tokens that the draft has not read, the root
        included."""

    @abstractmethod
    def prepare(self, shape: RoundShape, pending: Sequence[int], draws: RoundDraws | None = None) -> Pass:
        """The pass that runs a round. pending: the tokens that the draft has not read; the last one is the root. draws:
        None at temperature 0."""
