"""Language models that are functions of their context, for rounds: by the host, over `fakes`, and by the kernels on the
driver in libcuda's place. Caches hold each row's token and position there, so that a wrong mask, position or commit
changes a prediction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from cuda_driver.machine import Machine
from cuda_driver.memory import Span, array_at
from fakes import FakeCache, FakeEngine
from numpy.typing import NDArray

from draftwood.models import bindings
from draftwood.plugins.device_round.images import PENDING
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.engines.layout import Layout, PassShape, mask_columns
from draftwood.runtime.engines.rounds import RoundDraws, RoundOutcome, RoundShape
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.device import CacheGeometry, DeviceMemory, Stream
from draftwood.runtime.engines.static.memory import CachePart
from draftwood.runtime.engines.static.round import CachePlace, Names, Round, TextPlace

CAPACITY, WORDS = 320, 3
REGION = 50  # slots of a text where texts share a cache
VOCABULARY, COLUMNS = 40, 18  # tokens, and those that a trimmed draft keeps
GEOMETRY = CacheGeometry(2, 2, CAPACITY, 4 * WORDS, 2 * CAPACITY * 4 * WORDS + 64)
Context = tuple[int, ...]
Ranking = tuple[NDArray[np.int64], NDArray[np.float32]]  # tokens and their log-probabilities, best first


class Scorer:
    """Logits [num_logits] that depend on the context, and the ranking of the best `columns` of them. other: a draft
    that they are like, to the degree `share`; `names`: the tokens of its columns. step: logits are multiples of it, if
    it is not 0. gaps: the last log-probabilities, or all of them, are minus infinity now and then, and others are
    multiples of the step, too."""

    def __init__(
        self,
        seed: int,
        num_logits: int,
        columns: int,
        other: Scorer | None = None,
        names: Sequence[int] = (),
        share: float = 0.8,
        step: float = 0.0,
        gaps: bool = False,
    ) -> None:
        self.num_logits, self.columns, self._seed, self._share = num_logits, columns, seed, share
        self._step, self._gaps = step, gaps
        self._other, self._names = other, list(names) or slice(None)
        self.logits: Callable[[Context], NDArray[np.float32]] = cache(self._logits)
        self.after: Callable[[Context], Ranking] = cache(self._after)

    def _logits(self, context: Context) -> NDArray[np.float32]:
        logits = 2.5 * np.random.default_rng((self._seed, *context)).standard_normal(self.num_logits)
        if self._other is not None:
            logits[self._names] = (1 - self._share) * logits[self._names] + self._share * self._other.logits(context)
        if self._step:
            logits = np.round(logits / self._step) * self._step
        return logits.astype(np.float32)

    def _after(self, context: Context) -> Ranking:
        logits, rng = self.logits(context), np.random.default_rng((self._seed, 7, *context))
        ids = np.argsort(-logits, kind="stable")[: self.columns]
        logprobs = (logits[ids] - np.log(np.exp(logits.astype(np.float64)).sum())).astype(np.float32)
        if self._gaps:
            if self._step:
                logprobs = np.ceil(logprobs / np.float32(self._step)) * np.float32(self._step)
            if rng.random() < 0.5:
                logprobs[rng.integers(0, self.columns) :] = -np.inf
        return ids, logprobs


class RankingEngine(FakeEngine):
    """The host's engine."""

    def __init__(self, ranker: Scorer, vocab_size: int, kept_tokens: tuple[int, ...] = ()) -> None:
        super().__init__(lambda context: np.ones(vocab_size), vocab_size, kept_tokens=kept_tokens)
        self._ranker = ranker

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        assert isinstance(cache, FakeCache)
        first = cache.speculative
        output = super().score(batch, cache)
        rows = [row for row in batch.output_rows.tolist() if row < batch.num_tokens]
        contexts = [self._context(cache, first + row) for row in rows]
        ids, logprobs = (np.stack(each) for each in zip(*map(self._ranker.after, contexts), strict=True))
        logits = np.stack([self._ranker.logits(context) for context in contexts])
        return output._replace(logits=logits, top_ids=ids, top_logprobs=logprobs)


class DeviceCache(NamedTuple):
    """A cache on the device: every row holds a token and its position."""

    memory: DeviceMemory
    ranker: Scorer
    dropped: DeviceMemory

    @property
    def rows(self) -> NDArray[np.int32]:
        """[tensors, heads, slots, words]"""
        tensors, heads, capacity, row_bytes, tensor_bytes = GEOMETRY
        block = array_at(self.memory.address, (tensors, tensor_bytes), np.uint8)
        return block[:, : heads * capacity * row_bytes].view(np.int32).reshape(tensors, heads, capacity, WORDS)

    def place(self, sequences: int) -> CachePlace:
        part = CachePart((0,), GEOMETRY, self.memory.address, self.dropped.address)
        return CachePlace([part], self.ranker.columns, self.ranker.num_logits, sequences)

    def write(self, start: int, tokens: Sequence[int], positions: Sequence[int]) -> None:
        for word, numbers in enumerate((tokens, positions, np.multiply(tokens, 31))):
            self.rows[:, :, start : start + len(tokens), word] = numbers

    def text(self, first: int, length: int) -> list[int]:
        """The committed tokens from this slot on, which stand at their positions in every plane."""
        rows = self.rows[:, :, first : first + length]
        assert (rows == rows[0, 0]).all() and (rows[0, 0, :, 1] == np.arange(length)).all()
        return [int(token) for token in rows[0, 0, :, 0]]


class DevicePass:
    """A RoundPass over such a cache, with rows of `texts` texts of at most `sequences`."""

    def __init__(
        self, machine: Machine, device: CudaDevice, cache: DeviceCache, shape: PassShape, texts: int, sequences: int
    ) -> None:
        sizes = {"T": shape.width, "S": shape.columns, "R": shape.outputs, "B": 1, "N": sequences, "4": 4}
        sizes |= {"K": cache.ranker.columns, "V": cache.ranker.num_logits}
        items = (*bindings.inputs(bindings.COMPACT), bindings.TOP_IDS, bindings.TOP_LOGPROBS, bindings.LOGITS)
        self._layout = Layout.packed({i.name: (i.dtype, tuple(sizes[axis] for axis in i.shape)) for i in items})
        self.shape, self._machine, self._cache, self._texts = shape, machine, cache, texts
        self._memory = device.allocate(self._layout.nbytes)
        array_at(self._memory.address, (self._layout.nbytes,), np.uint8)[:] = 1  # what an earlier pass has left
        places = (self._memory.address, self._layout.nbytes), (cache.memory.address, GEOMETRY.nbytes)
        self._spans = [Span(start, start + nbytes) for start, nbytes in places]
        self._bound = False

    def address(self, name: str) -> int:
        return self._memory.address + self._layout.fields[name].offset

    def bind(self) -> None:
        self._machine.answer(self._machine.enter, "a binding", True)
        self._bound = True

    def enqueue(self, stream: Stream) -> None:
        assert self._bound
        self._machine.enqueue("a program", self._run, ((), self._spans), stream)

    def is_capturable(self, stream: Stream) -> bool:
        return True

    def _run(self) -> None:
        memory = array_at(self._memory.address, (self._layout.nbytes,), np.uint8)
        views: dict[str, Any] = self._layout.views(memory)
        (ids,), (positions,), (mask,) = (views[name] for name in ("input_ids", "position_ids", "tree_mask"))
        (start,), sequences = views["write_indices"].tolist(), views["sequences"].tolist()
        assert start <= CAPACITY - len(ids) and mask.max() <= 1
        field = self._layout.fields["sequences"]
        gap = memory[field.offset + field.nbytes : self._layout.fields["tree_mask"].offset]
        assert (gap == 1).all(), "something was written after the texts"
        assert all(fields == [len(ids), 0, 0, 0] for fields in sequences[self._texts :]), "texts without rows"
        self._cache.write(start, ids, positions)
        firsts = [fields[0] for fields in sequences[: self._texts]]
        assert firsts == sorted(set(firsts)) and firsts[0] == 0
        for output, row in enumerate(views["output_rows"].tolist()):
            seen = np.flatnonzero(mask[row])
            if not len(seen):
                assert ids[row] == positions[row] == 0, "padding"
                continue
            _, first_slot, length, place = sequences[bisect_right(firsts, row) - 1]
            assert place + seen[-1] == start + row, "a row sees itself, and nothing after it"
            rows = self._cache.rows[0, 0, place + seen, :2]
            assert rows[:, 1].tolist() == list(range(length, length + len(seen))), "a row sees a gap or a sibling"
            context = (*self._cache.text(first_slot, length), *rows[:, 0].tolist())
            views["top_ids"][0, output], views["top_logprobs"][0, output] = self._cache.ranker.after(context)
            views["logits"][0, output] = self._cache.ranker.logits(context)


def widths(rows: int) -> int:
    """A compiled width."""
    return 1 << (rows - 1).bit_length()


class DeviceRounds:
    """Rounds of one shape of several texts, which the target has read without their last tokens. A single text's
    speculative rows stand after it, those of several texts in an area after all of them; `used` columns of it are
    somebody else's. widest: rows of the target's widest pass, a compiled width."""

    def __init__(
        self,
        machine: Machine,
        shape: RoundShape,
        target: Scorer,
        draft: Scorer,
        texts: Sequence[Sequence[int]],
        kept_tokens: Sequence[int] = (),
        sequences: int = 1,
        widest: int = 64,
        used: int = 0,
    ) -> None:
        self._machine, self.device, self._sequences = machine, CudaDevice(), sequences
        self._area = None if sequences == 1 else sequences * REGION + used
        allocate = self.device.allocate
        self.caches = [DeviceCache(allocate(GEOMETRY.nbytes), each, allocate(8)) for each in (target, draft)]
        for each in self.caches:
            for first, text in zip(range(0, CAPACITY, REGION), texts, strict=False):
                each.write(first, text[:-1], range(len(text) - 1))
        self.restart(texts)
        names = self.device.allocate(4 * len(kept_tokens))
        array_at(names.address, (len(kept_tokens),), np.int32)[:] = kept_tokens
        count, group = len(texts), min(len(texts), widest // (shape.size + 1))
        firsts = [(PENDING + layer * shape.width) * count for layer in range(shape.depth - 1)]
        layers = [self._pass(1, shape.width, first, count) for first in firsts]
        sizes = [min(group, count - first) for first in range(0, count, group)]
        self._round = Round(
            self.device,
            self.device.new_stream(),
            shape,
            [self._pass(1, PENDING, 0, count, count == 1), *layers],
            [self._pass(0, shape.size + 1, 0, size) for size in sizes],
            (self.caches[0].place(sequences), self.caches[1].place(sequences)),
            Names(names, len(kept_tokens)),
            count,
        )

    def _pass(self, cache: int, rows: int, first: int, texts: int, last_only: bool = False) -> DevicePass:
        width = widths(rows * texts)
        shape = PassShape(width, mask_columns(width, first + width, 99), 1 if last_only else width)
        return DevicePass(self._machine, self.device, self.caches[cache], shape, texts, self._sequences)

    def restart(self, texts: Sequence[Sequence[int]]) -> None:
        """Begin anew with the texts of the first round."""
        self._texts = [list(text) for text in texts]
        self._lengths = [len(text) - 1 for text in texts]
        self._read = list(self._lengths)

    @property
    def pending(self) -> list[list[int]]:
        """Of each text the tokens that the draft has not read."""
        return [text[read:] for text, read in zip(self._texts, self._read, strict=True)]

    def run(self, draws: RoundDraws | None = None) -> list[RoundOutcome]:
        """A round; afterwards both caches hold what it has accepted."""
        places = []
        for number, pending in enumerate(self.pending):
            length, read, first = self._lengths[number], self._read[number], number * REGION
            areas = (first + length, first + read) if self._area is None else (self._area, self._area)
            places.append(TextPlace(length, pending, (first, areas[0]), (first, areas[1])))
        outcomes = self._round.run(places, draws)
        for number, outcome in enumerate(outcomes):
            text = self._texts[number]
            text += outcome.written
            self._read[number] = self._lengths[number] + 1 + outcome.num_scored
            self._lengths[number] += 1 + len(outcome.accepted)
        for first, text, length, read in zip(
            range(0, CAPACITY, REGION), self._texts, self._lengths, self._read, strict=False
        ):
            assert self.caches[0].text(first, length) == text[:-1]
            assert self.caches[1].text(first, read) == text[:read]
        return outcomes
