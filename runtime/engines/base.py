"""The one seam between the algorithms and whatever computes a LLaMA: Engine, Pass, KVCache, EngineSpec, TokenBatch.

A cache holds `length` committed rows followed by `speculative` rows that were computed but not decided on. A pass
appends its rows behind both; `commit` keeps the accepted ones, in path order, and forgets the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...models.config import LlamaConfig
from ...models.errors import EngineError
from .compatibility import TensorRTPlan

C = TypeVar("C", bound="KVCache")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine was compiled for; one entry of a bundle's manifest."""

    role: str  # "target" | "draft"
    backend: str
    file: str  # relative to the bundle
    model: LlamaConfig
    widths: tuple[int, ...]  # rows a pass may have, ascending
    capacity: int  # cache slots, committed and speculative together
    precision: str
    outputs: tuple[str, ...]
    plan: TensorRTPlan | None = None  # of the TensorRT backends
    max_batch: int = 1  # sequences that a pass of a static cache may serve; each has `capacity` slots of it
    prompt_widths: tuple[int, ...] = ()  # rows, beyond `widths`, that only a pass over a prompt may have; ascending

    @property
    def max_width(self) -> int:
        return self.widths[-1]

    @property
    def pass_widths(self) -> tuple[int, ...]:
        """Rows a pass may have, whatever they are."""
        return self.widths + self.prompt_widths

    def chunk_size(self, left: int) -> int:
        """How many of `left` tokens of a prompt its next pass reads: those that fill a wide one, or else a round's."""
        return max((width for width in self.prompt_widths if width <= left), default=min(left, self.max_width))

    def width_for(self, tokens: int) -> int:
        """The smallest compiled width that holds `tokens` rows. Raises EngineError when none does."""
        for width in self.pass_widths:
            if width >= tokens:
                return width
        raise EngineError(
            f"{tokens} rows do not fit the {self.role} engine's widest pass of {self.max_width}: "
            "lower max_total_draft_tokens or rebuild with larger --widths"
        )


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One pass over W rows (padded to a compiled width), of which the first `num_tokens` are real.

    token_ids, position_ids: int64 [W]. mask: bool [W, S]; row i sees speculative slot j; S = speculative rows already
    in the cache + W. Every row sees all committed slots. output_rows: int64 [R], the rows whose logits are wanted:
    one row, all W, or, of several requests, some. ranking_only: nobody will read the logits of an engine that ranks
    them; what the output holds in their place is undefined. cache_only: nobody will read any of it.
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    output_rows: NDArray[np.int64]
    num_tokens: int
    ranking_only: bool = False
    cache_only: bool = False

    @classmethod
    def pad(
        cls,
        token_ids: Sequence[int] | NDArray[np.int64],
        position_ids: Sequence[int] | NDArray[np.int64],
        mask: NDArray[np.bool_],
        width: int,
        last_only: bool = False,
        ranking_only: bool = False,
    ) -> TokenBatch:
        """Pad n rows, seen through mask [n, s + n], to `width`: the only place where anything is padded.

        A padding row sees nothing speculative and is seen by nobody; its cache slot is overwritten by the next pass.
        """
        rows = len(token_ids)
        padding = width - rows
        if padding:
            token_ids = np.concatenate((token_ids, np.zeros(padding, np.int64)))
            position_ids = np.concatenate((position_ids, np.zeros(padding, np.int64)))
            wide = np.zeros((width, mask.shape[1] + padding), np.bool_)
            wide[:rows, : mask.shape[1]] = mask
            mask = wide
        output_rows = np.array([rows - 1]) if last_only else np.arange(width)
        ids, positions = np.asarray(token_ids, np.int64), np.asarray(position_ids, np.int64)
        return cls(ids, positions, mask, output_rows, rows, ranking_only)


class ForwardOutput(NamedTuple):
    """Results of one pass, for the rows asked for. Views of the engine's buffers: valid until its next pass.

    logits: float32 [R, V]. top_ids int64 and top_logprobs float32 [R, K]: the draft's most probable tokens under the
    unprocessed distribution, best first; None on a target engine. acceptance float32 [R]: probability that the target
    accepts the row's own token, where the draft has a head for it.
    """

    logits: NDArray[np.float32]
    top_ids: NDArray[np.int64] | None
    top_logprobs: NDArray[np.float32] | None
    acceptance: NDArray[np.float32] | None = None

    def rows(self, indices: Sequence[int]) -> ForwardOutput:
        """The results of some rows only."""
        kept = list(indices)
        return ForwardOutput(
            self.logits[kept],
            None if self.top_ids is None else self.top_ids[kept],
            None if self.top_logprobs is None else self.top_logprobs[kept],
            None if self.acceptance is None else self.acceptance[kept],
        )


class KVCache(Protocol):
    """Keys and values of one sequence. Whoever opened a cache (`Engine.new_cache`) closes it."""

    @property
    def length(self) -> int:
        """Committed rows."""

    @property
    def speculative(self) -> int:
        """Rows computed since the last commit."""

    def commit(self, slots: Sequence[int]) -> None:
        """Keep these speculative slots, in this order, behind the committed rows; forget the other ones."""

    def truncate(self, length: int) -> None:
        """Forget everything from committed row `length` on."""

    def close(self) -> None:
        """Give back what the cache holds; no pass appends to it afterwards. Closing it again does nothing."""


class Pass(NamedTuple):
    """A batch to score over one cache. output_read: whether the caller reads the output, or needs only the rows that
    the pass appends to the cache."""

    engine: Engine
    batch: TokenBatch
    cache: KVCache
    output_read: bool = True

    def run(self) -> ForwardOutput:
        """The output of this pass alone. Raises as Engine.forward does."""
        return self.engine.forward([self])[0]


class Engine(ABC):
    """A compiled model."""

    spec: EngineSpec  # does not change while the engine is open

    @abstractmethod
    def new_cache(self) -> KVCache:
        """An empty cache of this engine's own kind. Raises EngineError when there is none left."""

    @abstractmethod
    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """Score the batches of passes over different caches and append their rows; one output for each, as its pass
        alone would give it. Raises EngineError when a cache is full, or the engine was closed; MemoryError."""

    @abstractmethod
    def close(self) -> None:
        """Release what the engine holds; it has no passes afterwards. Closing it again does nothing."""

    def num_joint(self, passes: Sequence[Pass]) -> int:
        """How many of these passes, from the first on, `forward` computes at the cost of one: at least 1."""
        return 1

    def chunk_size(self, left: int) -> int:
        """How many of the `left` tokens of a prompt its next pass shall read."""
        return self.spec.chunk_size(left)

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """One pass, see `forward`."""
        return Pass(self, batch, cache).run()


class SoloEngine(Engine):
    """An engine that computes each pass by itself."""

    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """See Engine.forward."""
        return [
            self.score(each.batch if each.output_read else replace(each.batch, cache_only=True), each.cache)
            for each in passes
        ]

    @abstractmethod
    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """One pass, see Engine.forward."""


def num_fitting(spec: EngineSpec, passes: Sequence[Pass]) -> int:
    """How many of these passes, from the first on, an engine's widest pass holds; one that is wider has it alone."""
    room = spec.max_width
    for count, each in enumerate(passes):
        room -= each.batch.num_tokens
        if room < 0:
            return max(1, count)
    return len(passes)


def check_cache(cache: KVCache, kind: type[C]) -> C:
    """The cache as its engine's own kind. Raises EngineError for a cache of another engine."""
    if not isinstance(cache, kind):
        raise EngineError(f"a {type(cache).__name__} is no cache of this engine, whose caches are {kind.__name__}s")
    return cache


def closed_error(spec: EngineSpec) -> EngineError:
    """What a pass of an engine that was closed raises."""
    return EngineError(f"the {spec.role} engine was closed")
