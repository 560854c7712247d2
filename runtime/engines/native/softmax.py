"""The softmax of the native engine: of one row, and of rows that a pass prepared on all threads of the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models.errors import EngineError
from ....plugins.native.library import DRAW, RUN, NativeLibrary, Pass, address
from ....plugins.native.processor import KernelError
from ....plugins.native.residual import Row
from ...sampling.softmax import NO_NUMBERS, Likely, NumpySoftmax, Softmax, SoftmaxSettings
from ...sampling.weights import Floats, Weights
from .residual import NativeWeights

MAX_ASKED = 48  # different wishes that are kept: by the numbers of rows, and where a chain or a tree begins
ROOM = 1024  # likely tokens of a row for which a pass has room; the host looks for more of them itself


class NativeSoftmax(NumpySoftmax):
    """A softmax in float32, which the kernels compute. numpy computes it for logits that are not contiguous float32."""

    dtype: type[np.floating[Any]] = np.float32

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library

    def weights(self, logits: Floats, temperature: float, values: Floats) -> Weights:
        if not self._reads(logits):
            return super().weights(logits, temperature, values)
        sums = np.empty(-(-len(logits) // RUN))
        try:
            total, row = self.library.softmax(logits, temperature, sums)
        except KernelError as error:
            raise EngineError(NO_NUMBERS) from error
        return NativeWeights(self.library, row, total, (logits, sums, values))

    def likely(self, logits: Floats, temperature: float, share: float) -> Likely:
        if not self._reads(logits):
            return super().likely(logits, temperature, share)
        try:
            return self.library.likely(logits, temperature, share)
        except KernelError as error:
            raise EngineError(NO_NUMBERS) from error

    @staticmethod
    def _reads(logits: Floats) -> bool:
        return logits.dtype == np.float32 and logits.flags.c_contiguous


class PassDraws(NamedTuple):
    """What passes with the same wishes are asked. draws [count] of `struct draw`, which a pass fills, for the output
    rows `outputs` [count]; where these two lie. softmaxes: by row, up to the last one that has settings."""

    outputs: NDArray[np.int64]
    draws: NDArray[np.void]
    places: tuple[int | None, int | None]
    softmaxes: tuple[PreparedSoftmax | None, ...]


class PreparedRows:
    """Buffers for what passes compute of up to R rows of logits; each of these passes overwrites them."""

    def __init__(self, logits: NDArray[np.float32], softmax: NativeSoftmax) -> None:
        """logits [R, V]: the buffer of these passes. softmax: answers what a pass did not prepare."""
        rows, columns = logits.shape
        self.softmax, self.logits = softmax, logits
        self.sums = np.zeros((rows, -(-columns // RUN)))
        self.ids, self.weights = np.zeros((rows, ROOM), np.int64), np.zeros((rows, ROOM))
        self._asked: dict[tuple[SoftmaxSettings | None, ...], PassDraws] = {}

    def ask(self, settings: tuple[SoftmaxSettings | None, ...], into: Pass) -> Sequence[Softmax | None]:
        """Let a pass of at least as many rows prepare output rows for these settings, None for a row without. Returns
        each row's softmax, after the pass. Settings of an earlier pass, as most have, are not written again."""
        asked = self._asked.get(settings)
        if asked is None:
            if len(self._asked) == MAX_ASKED:
                self._asked.clear()
            asked = self._asked[settings] = self._describe(settings)
        into.drawn = len(asked.draws)
        into.draw_outputs, into.draws = asked.places
        return asked.softmaxes

    def _describe(self, settings: tuple[SoftmaxSettings | None, ...]) -> PassDraws:
        given = [(row, each) for row, each in enumerate(settings) if each is not None]
        rows, draws = np.array([row for row, _ in given], np.int64), np.zeros(len(given), DRAW)
        draws["temperature"] = [each.temperature for _, each in given]
        draws["share"], draws["room"] = [each.share for _, each in given], ROOM
        # A buffer without an address is one that the pass leaves out.
        draws["sums"] = addresses(self.sums, rows, [each.weights for _, each in given])
        for name, buffer in (("ids", self.ids), ("weights", self.weights)):
            draws[name] = addresses(buffer, rows, [each.share > 0 for _, each in given])
        places = iter(range(len(given)))
        softmaxes = tuple(
            None if each is None else PreparedSoftmax(self, draws, row, next(places), each)
            for row, each in enumerate(settings)
        )
        return PassDraws(rows, draws, (address(rows), address(draws)), softmaxes)


def addresses(buffer: NDArray[Any], rows: NDArray[np.int64], used: Sequence[bool]) -> NDArray[np.uint64]:
    """Of rows of a buffer, 0 for rows that are not used."""
    return np.where(used, (address(buffer) or 0) + buffer.strides[0] * rows, 0).astype(np.uint64)


class PreparedSoftmax:
    """The softmax of one row of a pass, until the next pass. It knows the answers for the settings that were asked for,
    and computes others as the engine's softmax does."""

    dtype: type[np.floating[Any]] = np.float32

    def __init__(
        self, rows: PreparedRows, draws: NDArray[np.void], row: int, place: int, settings: SoftmaxSettings
    ) -> None:
        """row: of the buffers. place: in `draws`, see PassDraws."""
        self._rows, self._row, self._place, self._settings = rows, row, place, settings
        self._total, self._peak, self._count, self._best = (draws[name] for name in ("total", "peak", "count", "best"))
        own, self._sums = rows.logits[row], rows.sums[row]
        self._softmax = Row(address(own), len(own), 0.0, settings.temperature, address(self._sums))

    def best(self, logits: Floats) -> int:
        if not self._is_of(logits, 0.0):
            return self._rows.softmax.best(logits)
        token: int = self._best.item(self._place)
        if token < 0:
            raise EngineError(NO_NUMBERS)
        return token

    def weights(self, logits: Floats, temperature: float, values: Floats) -> Weights:
        rows = self._rows
        if not self._settings.weights or not self._is_of(logits, temperature):
            return rows.softmax.weights(logits, temperature, values)
        total = self._total.item(self._place)
        if math.isnan(total):
            raise EngineError(NO_NUMBERS)
        self._softmax.peak = self._peak.item(self._place)
        return NativeWeights(rows.softmax.library, self._softmax, total, (logits, self._sums, values))

    def likely(self, logits: Floats, temperature: float, share: float) -> Likely:
        rows, count = self._rows, self._count.item(self._place)
        if share != self._settings.share or count > ROOM or not self._is_of(logits, temperature):
            return rows.softmax.likely(logits, temperature, share)
        if count < 0:
            raise EngineError(NO_NUMBERS)
        return rows.ids[self._row, :count].copy(), rows.weights[self._row, :count]

    def _is_of(self, logits: Floats, temperature: float) -> bool:
        """Whether the row is the one that was prepared, and no copy that somebody may have changed."""
        return temperature == self._settings.temperature and logits.base is self._rows.logits
