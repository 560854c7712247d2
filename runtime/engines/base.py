"""The one seam between the algorithms and whatever computes a LLaMA: Engine, KVCache, EngineSpec, TokenBatch.

A cache holds `length` committed rows followed by `speculative` rows that were computed but not decided on. A pass
appends its rows behind both; `commit` keeps the accepted ones, in path order, and forgets the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...models.config import LlamaConfig
from ...models.errors import EngineError
from .compatibility import Plan

FIRST_CAPACITY = 256  # slots a growing cache starts with; it doubles from there


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
    plan: Plan | None = None  # of the TensorRT backends
    max_batch: int = 1  # sequences that a pass of a static cache may serve; each has `capacity` slots of it
    prompt_widths: tuple[int, ...] = ()  # rows, beyond `widths`, that only a pass over a prompt may have; ascending

    @property
    def max_width(self) -> int:
        return self.widths[-1]

    @property
    def pass_widths(self) -> tuple[int, ...]:
        """Rows a pass may have, whatever they are."""
        return self.widths + self.prompt_widths

    def chunk(self, left: int) -> int:
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
    def padded(
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
    """Keys and values of one sequence."""

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


class StackedKVCache(ABC):
    """The KVCache of engines that keep one growing buffer [2 * layers, 1, H_kv, C, D] for all layers, numpy or torch:
    one indexing operation moves the accepted rows of every layer. A subclass says how the buffer is made."""

    buffer: Any

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.limit = spec.capacity  # slots it may grow to
        self.length = 0
        self.speculative = 0
        self._allocate(min(FIRST_CAPACITY, spec.capacity))

    @property
    def capacity(self) -> int:
        """Slots allocated so far."""
        return int(self.buffer.shape[3])

    def commit(self, slots: Sequence[int]) -> None:
        """See KVCache.commit. Slots already in place are not moved. Raises EngineError for a slot never computed."""
        if any(not 0 <= slot < self.speculative for slot in slots):
            raise EngineError(f"slots {list(slots)} were not computed; {self.speculative} speculative rows exist")
        kept = len(slots)
        if any(slot != index for index, slot in enumerate(slots)):
            self._move(self.length + np.asarray(slots, np.int64))
        self.length += kept
        self.speculative = 0

    def truncate(self, length: int) -> None:
        """See KVCache.truncate."""
        self.length = min(self.length, length)
        self.speculative = 0

    def compact(self, slots: NDArray[np.int64]) -> None:
        """Keep these speculative slots, in this order, as speculative ones; forget the others."""
        self._move(self.length + slots)
        self.speculative = len(slots)

    def shrink(self, capacity: int) -> None:
        """Give back the slots beyond `capacity`, or beyond what is used."""
        used = self.length + self.speculative
        self._replace(min(max(capacity, used, FIRST_CAPACITY), self.limit), used)

    def reserve(self, batch: TokenBatch) -> int:
        """Make room for a batch behind everything computed so far; returns the slot of its first row.

        Doubles the buffer where needed, so that growing costs O(1) per row. Raises EngineError when the engine has no
        pass of this width, or not that many slots.
        """
        check_mask(self._spec, batch.mask, self.speculative)
        columns = batch.mask.shape[1]
        slots = self.length + columns
        if slots > self.limit:
            raise EngineError(
                f"{slots} rows exceed this engine's {self.limit} cache slots: "
                "shorten the request or rebuild with a larger --max-length"
            )
        capacity, used = self.capacity, self.length + self.speculative
        while capacity < slots:
            capacity *= 2
        if capacity > self.capacity:
            self._replace(min(capacity, self.limit), used)
        return used

    def _replace(self, capacity: int, used: int) -> None:
        """Resize, or change nothing: where memory runs out between two buffers, the old ones are in place again."""
        before = dict(vars(self))
        try:
            self._resize(capacity, used)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    def _resize(self, capacity: int, used: int) -> None:
        """Another buffer, of `capacity` slots, with the first `used` ones in it."""
        old = self.buffer
        self._allocate(capacity)
        self.buffer[:, :, :, :used] = old[:, :, :, :used]

    def _move(self, rows: NDArray[np.int64]) -> None:
        """Copy these slots, in this order, behind the committed rows of every layer."""
        self.buffer[:, 0, :, self.length : self.length + len(rows)] = self.buffer[:, 0][:, :, rows]

    @abstractmethod
    def _allocate(self, capacity: int) -> None:
        """Replace `buffer` by a zeroed one of `capacity` slots."""


class Engine(Protocol):
    """A compiled model."""

    @property
    def spec(self) -> EngineSpec: ...

    def new_cache(self) -> Any:
        """An empty cache of this engine's own kind."""

    def forward(self, batch: TokenBatch, cache: Any) -> ForwardOutput:
        """Score one batch and append its rows to `cache`. Raises EngineError when the cache is full, or the engine was
        closed."""

    def close(self) -> None:
        """Release what the engine holds; it has no passes afterwards. Closing it again does nothing."""


def closed(spec: EngineSpec) -> EngineError:
    """What a pass of an engine that was closed raises."""
    return EngineError(f"the {spec.role} engine was closed")


def check_mask(spec: EngineSpec, mask: NDArray[np.bool_], speculative: int) -> None:
    """Raises EngineError for a mask [W, S] of no pass of this engine behind so many speculative rows."""
    width, columns = mask.shape
    if width not in spec.pass_widths or columns != speculative + width:
        compiled = ", ".join(map(str, spec.pass_widths))
        raise EngineError(
            f"a mask of {width} x {columns} does not fit this engine: its passes have {compiled} rows, "
            f"with one column for each and for the {speculative} speculative rows before them"
        )


def causal_batch(spec: EngineSpec, token_ids: Sequence[int], start: int, ranking_only: bool = False) -> TokenBatch:
    """A chunk of committed text that begins at position `start`; only its last row's logits are wanted."""
    rows = len(token_ids)
    mask = np.tri(rows, dtype=np.bool_)
    positions = np.arange(start, start + rows)
    return TokenBatch.padded(token_ids, positions, mask, spec.width_for(rows), True, ranking_only)


class Pass(NamedTuple):
    """A pass somebody waits for. Decoding yields its passes instead of running them, so that whoever drives several
    requests can run theirs together. output_read: whether anybody looks at the answer, or the cache is all that counts.
    """

    engine: Engine
    batch: TokenBatch
    cache: Any
    output_read: bool = True

    def run(self) -> ForwardOutput:
        """On its own."""
        batch = self.batch if self.output_read else replace(self.batch, cache_only=True)
        return self.engine.forward(batch, self.cache)


T = TypeVar("T")
Passes = Generator[Pass, ForwardOutput, T]  # answered with each pass's output; returns T


def forward(engine: Engine, batch: TokenBatch, cache: Any) -> Passes[ForwardOutput]:
    """One pass."""
    return (yield Pass(engine, batch, cache))


def prefill_passes(
    engine: Engine, cache: Any, token_ids: Sequence[int], ranking_only: bool = False, output_read: bool = True
) -> Passes[ForwardOutput | None]:
    """Append committed text in chunks; returns the last row's output, None for empty text and where whoever ran the
    passes knew that nobody reads it."""
    output, end = None, 0
    while end < len(token_ids):
        spec = engine.spec  # asked anew for each chunk: a pool's depends on who shares it
        chunk = token_ids[end : end + spec.chunk(len(token_ids) - end)]
        end += len(chunk)
        batch = causal_batch(spec, chunk, cache.length, ranking_only)
        output = yield Pass(engine, batch, cache, output_read and end == len(token_ids))
        cache.commit(range(len(chunk)))
    return output


def prefill(engine: Engine, cache: Any, token_ids: Sequence[int]) -> ForwardOutput | None:
    """The same, each pass at once."""
    return run(prefill_passes(engine, cache, token_ids))


def run(passes: Passes[T]) -> T:
    """Run every pass as soon as it is asked for."""
    try:
        wanted = next(passes)
        while True:
            wanted = passes.send(wanted.run())
    except StopIteration as end:
        result: T = end.value
        return result
