"""The interface between the decoding algorithms and the engines: Engine, Pass, KVCache, EngineSpec, TokenBatch.

A cache holds `length` committed rows, followed by `speculative` rows that are computed but not yet accepted. A pass
appends its rows at the end. `commit` keeps the accepted speculative rows, in path order, and discards the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...models.config import LlamaConfig
from ...models.errors import EngineError
from ..sampling.softmax import Softmax, SoftmaxSettings
from .compatibility import TensorRTPlan

if TYPE_CHECKING:  # rounds.py imports this module
    from .rounds import Rounds

C = TypeVar("C", bound="KVCache")
Array = TypeVar("Array", bound=NDArray[Any])


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The model, shapes and precision that an engine was compiled for; one entry of a bundle's manifest."""

    role: str  # "target" | "draft"
    backend: str
    file: str  # relative to the bundle
    model: LlamaConfig
    widths: tuple[int, ...]  # possible numbers of rows of any pass, ascending
    capacity: int  # cache slots for committed and speculative rows together
    precision: str
    outputs: tuple[str, ...]
    plan: TensorRTPlan | None = None  # of the TensorRT backends
    max_batch: int = 1  # sequences in one pass over a static cache; each sequence has `capacity` slots
    prompt_widths: tuple[int, ...] = ()  # numbers of rows, above `widths`, that only prefill passes use; ascending
    kept_tokens: tuple[int, ...] = ()  # of a trimmed draft: the token of each column of its logits, ascending
    cache_precision: str = ""  # of keys and values; "": that in which they are computed
    # Precisions other than the engine's, by the engine's names of merged matrices.
    matrices: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def max_width(self) -> int:
        return self.widths[-1]

    @property
    def num_windowed_layers(self) -> int:
        """How many layers have a window that is shorter than the longest text."""
        window, full = self.model.variant.window, self.model.variant.full_layers
        return 0 if window is None or window >= self.capacity else self.model.num_layers - len(full)

    @property
    def pass_widths(self) -> tuple[int, ...]:
        """All numbers of rows for which a pass exists, prefill included."""
        return self.widths + self.prompt_widths if self.prompt_widths else self.widths

    def chunk_size(self, left: int) -> int:
        """How many of the `left` unread tokens of a prompt the next prefill pass reads: the largest prompt width that
        they fill, or else at most `max_width`."""
        return max((width for width in self.prompt_widths if width <= left), default=min(left, self.max_width))

    def width_for(self, tokens: int) -> int:
        """The smallest compiled width that holds `tokens` rows. Raises EngineError when no width is large enough."""
        widths = self.pass_widths
        place = bisect_left(widths, tokens)
        if place < len(widths):
            return widths[place]
        raise EngineError(
            f"{tokens} rows do not fit the {self.role} engine's widest pass of {self.max_width}: "
            "lower max_total_draft_tokens or rebuild with larger --widths"
        )


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The inputs of one pass over W rows, a compiled width. The first `num_tokens` rows are real, the others padding.

    token_ids, position_ids: int64 [W]. mask: bool [W, S]; mask[i, j] says whether row i attends to speculative slot j;
    S = speculative rows already in the cache + W. Every row attends to all committed slots. output_rows: int64 [R],
    the rows whose logits are computed: one row, all W rows, or a part of the rows of several requests. ranking_only:
    the caller reads `top_ids` and `top_logprobs`, not the logits; the logits of an engine that has these outputs are
    then undefined. cache_only: the caller reads no output. slots: int64 [num_tokens], the cache slots into which a
    cache that `places` rows writes them; S is then the number of slots up to the last one in use. None: the
    rows follow the others. settings: by output row, what the caller will ask of the row's softmax, for engines that
    compute it in the pass; it may be shorter than the rows. states: float32 [num_tokens, state_inputs] for a draft that
    reads states, else None. states_read: whether the caller reads the rows' states.
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    output_rows: NDArray[np.int64]
    num_tokens: int
    ranking_only: bool = False
    cache_only: bool = False
    slots: NDArray[np.int64] | None = None
    settings: tuple[SoftmaxSettings | None, ...] = ()
    states: NDArray[np.float32] | None = None
    states_read: bool = False

    @classmethod
    def pad(
        cls,
        token_ids: Sequence[int] | NDArray[np.int64],
        position_ids: Sequence[int] | NDArray[np.int64],
        mask: NDArray[np.bool_],
        width: int,
        last_only: bool = False,
        ranking_only: bool = False,
        settings: tuple[SoftmaxSettings | None, ...] = (),
        states: NDArray[np.float32] | None = None,
        states_read: bool = False,
    ) -> TokenBatch:
        """Pad n rows with mask [n, s + n] to `width` rows. last_only: the last real row is
        the only output row; else all rows are.

        A padding row attends to no speculative slot, and no row attends to it. The next pass overwrites its cache slot.
        """
        rows = len(token_ids)
        padding = width - rows
        if padding:
            token_ids = np.concatenate((token_ids, np.zeros(padding, np.int64)))
            position_ids = np.concatenate((position_ids, np.zeros(padding, np.int64)))
            wide = np.zeros((width, mask.shape[1] + padding), np.bool_)
            wide[:rows, : mask.shape[1]] = mask
            mask = wide
        output_rows = np.array([rows - 1]) if last_only else every_row(width)
        ids, positions = np.asarray(token_ids, np.int64), np.asarray(position_ids, np.int64)
        fields = (ids, positions, mask, output_rows, rows, ranking_only)
        return cls(*fields, settings=settings, states=states, states_read=states_read)


def read_only(array: Array) -> Array:
    """The array, to which nobody can write: for what requests share."""
    array.flags.writeable = False
    return array


@lru_cache(maxsize=256)  # every pass needs one of a few
def every_row(count: int) -> NDArray[np.int64]:
    """The first `count` rows."""
    return read_only(np.arange(count))


@lru_cache(maxsize=64)
def causal_mask(rows: int) -> NDArray[np.bool_]:
    """[rows, rows]: each row attends to the rows before, and to itself."""
    return read_only(np.tri(rows, dtype=np.bool_))


class ForwardOutput(NamedTuple):
    """The results of one pass for the batch's `output_rows`. They are views of the engine's buffers and valid until the
    engine's next pass.

    logits: float32 [R, V]. top_ids: int64 [R, K], and top_logprobs: float32 [R, K]: the columns of the most probable
    tokens under the unprocessed distribution, best first; None on an engine without these outputs. Of a trimmed draft V
    is the number of kept tokens, and DraftVocabulary says which token a column is. acceptance: float32 [R], the
    probability that the target accepts the row's own token; None where the draft has no acceptance head. softmaxes: of
    rows for which `TokenBatch.settings` was computed; may be shorter than the rows. states: float32 [num_tokens,
    state_size], of every row of the pass, if `TokenBatch.states_read`: see LlamaConfig.
    """

    logits: NDArray[np.float32]
    top_ids: NDArray[np.int64] | None
    top_logprobs: NDArray[np.float32] | None
    acceptance: NDArray[np.float32] | None = None
    softmaxes: Sequence[Softmax | None] = ()
    states: NDArray[np.float32] | None = None

    def part(self, rows: slice, every: slice) -> ForwardOutput:
        """The results of a range of output rows, and the states of a range of all rows, as views."""
        return ForwardOutput(
            self.logits[rows],
            None if self.top_ids is None else self.top_ids[rows],
            None if self.top_logprobs is None else self.top_logprobs[rows],
            None if self.acceptance is None else self.acceptance[rows],
            self.softmaxes[rows],
            None if self.states is None else self.states[every],
        )

    def rows(self, indices: Sequence[int]) -> ForwardOutput:
        """A copy of the results of these rows."""
        kept = list(indices)
        return ForwardOutput(
            self.logits[kept],
            None if self.top_ids is None else self.top_ids[kept],
            None if self.top_logprobs is None else self.top_logprobs[kept],
            None if self.acceptance is None else self.acceptance[kept],
        )


class KVCache(Protocol):
    """Keys and values of one sequence. The caller of `Engine.new_cache` closes the cache."""

    @property
    def length(self) -> int:
        """The number of committed rows."""

    @property
    def speculative(self) -> int:
        """The number of rows computed since the last commit."""

    def commit(self, slots: Sequence[int]) -> None:
        """Append these speculative slots, in this order, to the committed rows; discard the other speculative rows."""

    def truncate(self, length: int) -> None:
        """Discard the committed rows from index `length` on, and all speculative rows."""

    def close(self) -> None:
        """Release the cache's memory or slots. No pass may use the cache afterwards. A second call does nothing."""


class Pass(NamedTuple):
    """A batch to score over one cache. output_read: whether the caller reads the output; otherwise it needs only the
    rows that the pass appends to the cache. of_prompt: whether it is one of a text that is only read.
    Running texts do not wait long for these, whoever needs them. after: what follows in a text that is read in
    chunks, as far as nobody reads its outputs."""

    engine: Engine
    batch: TokenBatch
    cache: KVCache
    output_read: bool = True
    of_prompt: bool = False
    after: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return self.batch.num_tokens

    @property
    def num_outputs(self) -> int:
        return len(self.batch.output_rows)

    @property
    def is_chunk(self) -> bool:
        """Whether it may be a part of a prompt, whose rows may be known, or too many."""
        return self.batch.num_tokens > 2 and len(self.batch.output_rows) == 1

    def run(self) -> ForwardOutput:
        """Run this pass by itself and return its output. Raises as Engine.forward does."""
        return self.engine.forward([self])[0]

    def split(self, count: int) -> tuple[Pass, Pass]:
        """A pass over a chunk of text as two: over its first `count` rows, and over the others, to be run in turn."""
        rows, read = self.batch.num_tokens, self.cache.speculative
        return self.part(0, count, read)._replace(output_read=False, after=()), self.part(count, rows, read)

    def part(self, start: int, end: int, read: int) -> Pass:
        """The pass over some rows of a chunk of text. read: speculative rows of its cache before its first row."""
        batch, rows = self.batch, slice(start, end)
        ids, positions, mask = batch.token_ids[rows], batch.position_ids[rows], batch.mask[rows, : read + end]
        width = self.engine.spec.width_for(end - start)
        states = None if batch.states is None else batch.states[rows]
        padded = TokenBatch.pad(ids, positions, mask, width, True, batch.ranking_only, (), states, batch.states_read)
        return self._replace(batch=padded)


class Engine(ABC):
    """A compiled model."""

    spec: EngineSpec  # does not change while the engine is open
    # The number of allocated cache slots that its sequences share; None where each has slots of its own.
    allocated: int | None = None

    @abstractmethod
    def new_cache(self, salt: str | None = None) -> KVCache:
        """Open an empty cache of this engine. salt: only texts of the same salt may share rows. Raises EngineError when
        all caches of the engine are in use."""

    @abstractmethod
    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """Score the batches of passes over different caches and append their rows to the caches. Returns one output per
        pass, the same as if the pass ran by itself. Raises EngineError when a cache is full or the engine is closed,
        and MemoryError."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine's memory. No pass may run afterwards. A second call does nothing."""

    def num_joint(self, passes: Sequence[Pass]) -> int:
        """How many of these passes, from the first on, `forward` computes in one pass of the engine: at least 1."""
        return 1

    def warm_up(self) -> Sequence[Callable[[], None]]:
        """Steps that may precede the first request, which then waits for no preparation. Most engines have none."""
        return ()

    def recall(self, work: Pass) -> Pass | None:
        """Let the cache take over rows that the engine holds. Returns the pass over the others, None without any."""
        return work

    def set_limit(self, slots: int | None) -> None:  # noqa: B027 - most engines share no slots
        """Set the number of slots to which a shared cache may grow. None: as many as when it was opened."""

    def release(self) -> None:  # noqa: B027 - most engines keep nothing
        """Free what no text needs, because memory is short."""

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """Run one pass, see `forward`."""
        return Pass(self, batch, cache).run()

    def rounds(self, cache: KVCache, draft: Engine, draft_cache: KVCache) -> Rounds | None:
        """Whole rounds over a cache of this engine and a cache of `draft`, or None where the two engines cannot."""
        return None


class Runner(Engine):
    """An engine that cannot join several passes into one. A subclass implements `score`."""

    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        return [
            self.score(each.batch if each.output_read else replace(each.batch, cache_only=True), each.cache)
            for each in passes
        ]

    @abstractmethod
    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """Run one pass, see Engine.forward."""


def num_fitting(spec: EngineSpec, passes: Sequence[Pass]) -> int:
    """How many of these passes, from the first on, fit into one pass of `max_width` rows; 1 if the first does not."""
    room = spec.max_width
    for count, each in enumerate(passes):
        room -= each.batch.num_tokens
        if room < 0:
            return max(1, count)
    return len(passes)


def check_cache(cache: KVCache, kind: type[C]) -> C:
    """Return the cache if it has the type of the engine's caches. Raises EngineError otherwise."""
    if not isinstance(cache, kind):
        raise EngineError(f"a {type(cache).__name__} is no cache of this engine, whose caches are {kind.__name__}s")
    return cache


def closed_error(spec: EngineSpec) -> EngineError:
    return EngineError(f"the {spec.role} engine was closed")
