"""A language model that is a function of its context, with the Engine protocol: no weights, no ONNX.

Each cache slot stores the *context* of its row, so a wrong mask, position or commit changes the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from draftwood.models.config import LlamaConfig
from draftwood.runtime.engines.backends import UNLISTED
from draftwood.runtime.engines.base import EngineSpec, ForwardOutput, KVCache, Runner, TokenBatch, check_cache

Predict = Callable[[tuple[int, ...]], NDArray[np.float64]]  # context -> probabilities [V]
POOLED = replace(UNLISTED, name="fake", grows=True)  # for the table of backends: requests share one cache
EMPTY_SLOT = (-1, -1, np.zeros(0, np.bool_))
Accept = Callable[[tuple[int, ...]], float]  # context, its last token included -> probability that it is accepted


class FakeCache:
    """(token, position) per slot; the speculative ones with the slots they see. places: see Storage."""

    def __init__(self, places: bool = False) -> None:
        self.places, self.near = places, None
        self.committed: list[int] = []
        self.rows: list[tuple[int, int, NDArray[np.bool_]]] = []

    capacity = most = 4096  # slots that there are, and may be

    @property
    def length(self) -> int:
        return len(self.committed)

    @property
    def speculative(self) -> int:
        return len(self.rows)

    def commit(self, slots: Sequence[int]) -> None:
        for slot in slots:
            token, position, _ = self.rows[slot]
            assert position == len(self.committed), "a committed row stands at the wrong position"
            self.committed.append(token)
        self.rows = []

    def truncate(self, length: int) -> None:
        del self.committed[length:]
        self.rows = []

    def close(self) -> None:
        self.truncate(0)

    def limit(self, slots: int) -> None:
        self.most = slots

    def drop(self, slots: int) -> None:
        del self.rows[slots:]

    def move(self, rows: NDArray[np.int64], first: int) -> None:
        """The slots that a row sees move with it: those of its path are among them, or stay."""
        names = {slot: first + place for place, slot in enumerate(rows.tolist())}
        moved = []
        for slot in rows.tolist():
            token, position, seen = self.rows[slot]
            kept = np.zeros(len(seen), np.bool_)
            kept[[names.get(other, other) for other in np.flatnonzero(seen).tolist()]] = True
            moved.append((token, position, kept))
        self.rows[first : first + len(moved)] = moved

    def reserve_near(self, slots: int) -> None:
        raise AssertionError("there is no window")

    def move_near(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        raise AssertionError("there is no window")

    def compact(self, slots: NDArray[np.int64]) -> None:
        self.rows = [self.rows[slot] for slot in slots.tolist()]

    def shrink(self, capacity: int) -> None:
        self.capacity = capacity


class FakeEngine(Runner):
    """Scores rows by `predict(context)`; the context is read off mask and positions like attention would."""

    def __init__(
        self,
        predict: Predict,
        vocab_size: int,
        role: str = "target",
        max_width: int = 64,
        accept: Accept | None = None,
        kept_tokens: tuple[int, ...] = (),
        places: bool = False,
    ) -> None:
        """kept_tokens: those whose columns a draft computes; empty: all. places: see Storage."""
        self.places = places
        model = LlamaConfig(
            vocab_size, 2, 2, 1, 1, 1, 2, 4096, 1e-5, 10000.0, draft_vocab_size=len(kept_tokens) or None
        )
        widths = tuple(width for width in (1, 2, 4, 8, 16, 32, 64) if width <= max_width)
        self.spec = EngineSpec(
            role, "fake", "", model, widths, 4096, "fp32", ("logits",), kept_tokens=kept_tokens, cache_precision="fp32"
        )
        self.predict = predict
        self.accept = accept
        self.passes = 0

    def new_cache(self, salt: str | None = None) -> FakeCache:
        return FakeCache(self.places)

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        cache = check_cache(cache, FakeCache)
        self.passes += 1
        start = cache.speculative
        slots = start + np.arange(batch.num_tokens) if batch.slots is None else batch.slots
        columns = start + batch.num_tokens if batch.slots is None else batch.mask.shape[1]
        cache.rows += [EMPTY_SLOT] * (columns - start)
        for row, slot in enumerate(slots.tolist()):
            seen = batch.mask[row, : len(cache.rows)]
            cache.rows[slot] = int(batch.token_ids[row]), int(batch.position_ids[row]), seen
        logits = np.full((len(batch.output_rows), self.spec.model.num_logits), -1.0)
        acceptance = np.zeros(len(batch.output_rows))
        for index, row in enumerate(batch.output_rows.tolist()):
            if row < batch.num_tokens:
                context = self._context(cache, int(slots[row]))
                with np.errstate(divide="ignore"):
                    logits[index] = np.log(self.predict(context)[list(self.spec.kept_tokens) or slice(None)])
                acceptance[index] = self.accept(context) if self.accept else 0.0
        # float64, so that enumeration is exact
        return ForwardOutput(logits, None, None, acceptance.astype(np.float32) if self.accept else None)

    def close(self) -> None:
        pass

    def _context(self, cache: FakeCache, slot: int) -> tuple[int, ...]:
        seen = cache.rows[slot][2]
        visible = sorted((cache.rows[other][1], cache.rows[other][0]) for other in np.flatnonzero(seen).tolist())
        positions = [position for position, _ in visible]
        assert positions == list(range(cache.length, cache.length + len(visible))), "a row sees a gap or a sibling"
        return (*cache.committed, *(token for _, token in visible))


def random_model(seed: int, vocab_size: int, sharpness: float = 1.5) -> Predict:
    """Probabilities that depend on the whole context; the same context always gives the same ones."""

    @cache
    def predict(context: tuple[int, ...]) -> NDArray[np.float64]:
        generator = np.random.default_rng([seed, *context])
        weights = np.exp(sharpness * generator.standard_normal(vocab_size))
        return np.asarray(weights / weights.sum())

    return predict


def mixture(first: Predict, second: Predict, share: float) -> Predict:
    """A draft that agrees with `first` to the degree `share`."""
    return lambda context: share * first(context) + (1 - share) * second(context)


def random_head(seed: int) -> Accept:
    """An acceptance estimate that depends on the whole context, the scored token included."""
    return cache(lambda context: float(np.random.default_rng([seed, *context]).uniform(0.05, 0.95)))
