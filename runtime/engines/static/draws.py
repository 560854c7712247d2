"""What a round above temperature 0 does on the device besides the passes and the tree: draws, and block verification.
The kernels are those of `drawing.py` and `chain.py` in `plugins/device_round`, which say what the buffers hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ....models.errors import EngineError
from ....plugins.device_round.images import BINS, LEVELS, MAX_BLOCKS, RANKS, TOKEN_BLOCK
from ...sampling.softmax import NO_NUMBERS
from ..layout import Layout
from ..rounds import BEST, BLOCK, MATCH, RoundDraws, RoundShape
from .device import Device, Stream

Fields = Mapping[str, tuple[str, tuple[int, ...]]]
DOUBLE = 8
SETTINGS = 4  # numbers of the settings of draft and target each, see `drawing.py`


class Scores(Protocol):
    """A pass with logits on the device."""

    def address(self, name: str) -> int: ...


class Vocabulary(NamedTuple):
    """The columns of the logits of target and draft, and the address of the tokens of a trimmed draft's columns."""

    target: int
    draft: int
    names: int
    num_names: int

    @property
    def fits(self) -> bool:
        """Whether the kernels can draw from these rows."""
        return num_blocks(self.target) <= MAX_BLOCKS and (self.num_names > 0 or self.draft == self.target)


def num_blocks(columns: int) -> int:
    return -(-columns // TOKEN_BLOCK)


def given_fields(shape: RoundShape) -> Fields:
    """What the host uploads: the settings, then the uniform numbers."""
    if shape.verify == BEST:
        return {}
    estimates = 2 * RANKS * BINS if shape.is_tree else 0
    return {"draws": ("float64", (2 * SETTINGS + sum(shape.most_draws) + estimates,))}


def found_fields(shape: RoundShape) -> Fields:
    """Also for the host: probabilities of a chain's drawn tokens, and the rows' peaks, the draft's first."""
    if shape.verify == BEST:
        return {}
    peaks = {"row_peaks": ("float32", (num_scored(shape) + shape.size + 1,))}
    return peaks if shape.is_tree else {"shares": ("float64", (num_scored(shape),)), **peaks}


def num_scored(shape: RoundShape) -> int:
    """The most nodes from which tokens are drawn."""
    if not shape.is_drawn:
        return 0
    return 1 + (shape.depth - 1) * shape.width


def work_fields(shape: RoundShape, vocabulary: Vocabulary) -> Fields:
    if shape.verify == BEST:
        return {}
    rows, blocks = max(shape.size + 1, shape.width), num_blocks(max(vocabulary.target, vocabulary.draft))
    fields = {
        "block_peaks": ("float32", (rows, blocks)),
        "sums": ("float64", (rows, blocks)),
        "drawn": ("int64", (rows,)),
    }
    fields |= {"bounds": ("float64", (rows,)), "lasts": ("int32", (rows,))}
    fields |= {"likely": ("float64", (rows, LEVELS, blocks)), "counts": ("int32", (rows, LEVELS, blocks))}
    if shape.is_cut:
        columns = max(vocabulary.target, vocabulary.draft)
        fields |= {"found": ("int32", (rows,)), "found_weights": ("float64", (rows, columns))}
        fields |= {"found_columns": ("int32", (rows, columns))}
    if shape.is_drawn:
        fields |= {"weights": ("float64", (num_scored(shape), vocabulary.target)), "masses": ("float64", (rows,))}
    if shape.verify == BLOCK:
        fields |= {"pi": ("float64", (rows,)), "excesses": ("float64", (shape.depth, blocks))}
    return fields


class Buffers:
    """The memory of a round, by the names of its parts, and the stream on which it is used."""

    def __init__(self, device: Device, stream: Stream, layouts: Sequence[Layout]) -> None:
        self._device, self._stream = device, stream
        self._places = [(layout, device.allocate(layout.nbytes)) for layout in layouts]

    def at(self, name: str, text: int = 0) -> int:
        """The address of a part, or of a text's numbers in it."""
        for layout, memory in self._places:
            if name in layout.fields:
                field = layout.fields[name]
                return memory.address + field.offset + (text and text * field.nbytes // field.shape[0])
        raise KeyError(name)

    def launch(self, kernel: str, grid: tuple[int, int], pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None:
        self._device.launch(kernel, grid, (*pointers, *numbers), self._stream)


class Draws:
    """Queues the kernels of the rounds of one shape, with chosen tokens or a drawn chain."""

    def __init__(self, shape: RoundShape, vocabulary: Vocabulary, buffers: Buffers) -> None:
        self._shape, self._vocabulary = shape, vocabulary
        self._at, self._launch = buffers.at, buffers.launch
        given = self._at("draws")
        self._draft_settings, self._target_settings = given, given + SETTINGS * DOUBLE
        draft, tests, last = shape.most_draws
        self._draft = given + 2 * SETTINGS * DOUBLE
        self._tests = self._draft + draft * DOUBLE
        self._last = self._tests + tests * DOUBLE
        self._estimates = self._last + last * DOUBLE

    def extend(self, layer: int, each: Scores, slot: int) -> None:
        """Draw a chain's next token from the draft's first row. slot: the token's in the draft's cache, -1 for none."""
        at, (stride, columns, names, num_names) = self._at, self._vocabulary
        weights = at("weights") + layer * stride * DOUBLE
        row = self._row(each, self._draft_settings)
        blocks = num_blocks(columns)
        self._weigh(row, 1, columns, (weights, names), (num_names, stride))
        nodes = map(at, ("tokens", "parents", "depths", "slots", "values", "frontier", "totals"))
        found = map(at, ("masses", "shares", "row_peaks"))
        pointers = (*row, self._draft, names, *nodes, *found)
        self._launch("extend", (1, 1), pointers, (columns, blocks, num_names, layer, slot))

    def choose(self, target: Scores) -> int:
        """Draw the target's tokens. Returns the address of one for each row, as `verify` reads them."""
        at, shape, columns = self._at, self._shape, self._vocabulary.target
        row, blocks = self._row(target, self._target_settings), num_blocks(columns)
        row_peaks = at("row_peaks") + num_scored(shape) * 4
        self._weigh(row, shape.size + 1, columns, (0, 0), (0, 0))
        if shape.verify == MATCH:
            pointers = (*row, self._last, at("row_nodes"), at("depths"), at("drawn"), row_peaks)
            self._launch("draw", (shape.size + 1, 1), pointers, (columns, blocks, shape.size))
        else:
            self._verify(row, row_peaks)
        return at("drawn")

    def _verify(self, row: tuple[int, ...], row_peaks: int) -> None:
        """Verify what was drawn. row: see _row; row_peaks: of the target."""
        at, shape, columns = self._at, self._shape, self._vocabulary.target
        blocks = num_blocks(columns)
        chain = (*row, at("weights"), at("masses"))
        numbers = columns, blocks, shape.depth
        self._launch("chances", (1, 1), (*chain, at("tokens"), at("pi"), row_peaks), numbers)
        self._launch("excess", (shape.depth, blocks), (*chain, at("pi"), at("excesses")), numbers[:2])
        draws = at("pi"), at("excesses"), self._tests, self._last, at("tokens"), at("drawn")
        self._launch("accept", (1, 1), (*chain, *draws), numbers)

    def _weigh(
        self, row: tuple[int, ...], rows: int, columns: int, kept: tuple[int, int], names: tuple[int, int]
    ) -> None:
        """Find the sums of these rows. kept, names: the addresses and numbers that `weigh` needs to keep weights."""
        blocks, likely = num_blocks(columns), (self._at("likely"), self._at("counts"))
        numbers, grid = (columns, blocks), (rows, blocks)
        self._launch("peaks", grid, row[:2], numbers)
        self._launch("weigh", grid, (*row, *kept, *likely), (*numbers, *names, 0))
        if self._shape.is_cut:
            found = tuple(map(self._at, ("found", "found_weights", "found_columns")))
            self._launch("gather", grid, (*row, *likely, *found), (*numbers, 0))
            self._launch("cut", (rows, 1), (*row[2:], *found), numbers)
            self._launch("weigh", grid, (*row, *kept, *likely), (*numbers, *names, 1))

    def _row(self, each: Scores, settings: int) -> tuple[int, ...]:
        logits, at = each.address(bindings.LOGITS.name), self._at
        return logits, at("block_peaks"), settings, at("sums"), at("bounds"), at("lasts")


def numbers_of(draws: RoundDraws) -> list[float]:
    """The content of "draws"."""
    T, *shares, top_p, top_k = draws.settings
    offsets = (T * math.log(share) if share > 0 else -math.inf for share in shares)
    return [
        *(number for offset in offsets for number in (T, offset, top_p, top_k)),
        *draws.draft,
        *draws.tests,
        *draws.last,
        *draws.estimates,
    ]


def check_peaks(peaks: NDArray[np.float32]) -> None:
    """Raises EngineError if a row of logits had a NaN, or no finite peak."""
    if not np.isfinite(peaks).all():
        raise EngineError(NO_NUMBERS)
