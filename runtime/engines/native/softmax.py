"""The softmax of the native engine: of one row, and of rows that a pass prepared on all threads of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....models.errors import EngineError
from ....plugins.native.library import DRAW, RUN, KernelError, NativeLibrary, Pass, address
from ...sampling.softmax import EVERY, NO_NUMBERS, Columns, NumpySoftmax, Softmax, Wanted, Weights

ROOM = 1024  # likely tokens of a row for which a pass has room; the host looks for more of them itself


class NativeSoftmax(NumpySoftmax):
    """A softmax in float32, which the kernels compute. numpy computes it for logits that are not contiguous float32."""

    dtype: type[np.floating[Any]] = np.float32

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library

    def weights(
        self, logits: NDArray[np.floating[Any]], temperature: float, values: NDArray[np.floating[Any]]
    ) -> Weights:
        """See Softmax.weights."""
        if not self._reads(logits):
            return super().weights(logits, temperature, values)
        try:
            total, runs = self.library.softmax(logits, temperature, values)
        except KernelError as error:
            raise EngineError(NO_NUMBERS) from error
        return Weights(total, values.__getitem__, runs, RUN)

    def likely(
        self, logits: NDArray[np.floating[Any]], temperature: float, share: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """See Softmax.likely."""
        if not self._reads(logits):
            return super().likely(logits, temperature, share)
        try:
            return self.library.likely(logits, temperature, share)
        except KernelError as error:
            raise EngineError(NO_NUMBERS) from error

    @staticmethod
    def _reads(logits: NDArray[np.floating[Any]]) -> bool:
        return logits.dtype == np.float32 and logits.flags.c_contiguous


class PreparedRows:
    """Buffers for what passes compute of up to R rows of logits; each of these passes overwrites them."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        """logits [R, V]: the buffer of these passes."""
        rows, columns = logits.shape
        self.logits = logits
        self.draws, self._outputs = np.zeros(rows, DRAW), np.zeros(rows, np.int64)
        self.sums = np.zeros((rows, -(-columns // RUN)))
        self.ids, self.weights = np.zeros((rows, ROOM), np.int64), np.zeros((rows, ROOM))

    def ask(self, wanted: Sequence[Wanted | None], into: Pass) -> None:
        """Let a pass prepare output rows for the settings that are wanted of them. It has at least as many rows."""
        asked = [(row, each) for row, each in enumerate(wanted) if each is not None]
        rows = np.array([row for row, _ in asked], np.int64)
        draws, count = self.draws[: len(asked)], len(asked)
        self._outputs[:count] = rows
        draws["temperature"] = [each.temperature for _, each in asked]
        draws["share"], draws["room"] = [each.share for _, each in asked], ROOM
        # A buffer without an address is one that the pass leaves out.
        draws["sums"] = self._places(self.sums, rows, [each.weights for _, each in asked])
        for name, buffer in (("ids", self.ids), ("weights", self.weights)):
            draws[name] = self._places(buffer, rows, [each.share > 0 for _, each in asked])
        into.drawn, into.draw_outputs, into.draws = count, address(self._outputs), address(self.draws)

    def answers(self, wanted: Sequence[Wanted | None], softmax: NativeSoftmax) -> tuple[Softmax | None, ...]:
        """The softmax of each output row after the pass; None for rows of which nothing was wanted."""
        found = iter(self.draws[["total", "peak", "count"]].tolist())
        return tuple(
            None if each is None else PreparedSoftmax(softmax, self, row, each, *next(found))
            for row, each in enumerate(wanted)
        )

    @staticmethod
    def _places(buffer: NDArray[Any], rows: NDArray[np.int64], used: Sequence[bool]) -> NDArray[np.uint64]:
        """The addresses of rows of a buffer, 0 for rows that are not used."""
        return np.where(used, (address(buffer) or 0) + buffer.strides[0] * rows, 0).astype(np.uint64)


class PreparedSoftmax:
    """The softmax of one row of a pass. It knows the answers for the settings that were wanted, and computes others as
    the engine's softmax does. total, peak, count: of `struct draw`."""

    dtype: type[np.floating[Any]] = np.float32

    def __init__(
        self,
        softmax: NativeSoftmax,
        rows: PreparedRows,
        row: int,
        wanted: Wanted,
        total: float,
        peak: float,
        count: int,
    ) -> None:
        self._softmax, self._rows, self._row, self._wanted = softmax, rows, row, wanted
        self._total, self._peak, self._count = total, peak, count

    def weights(
        self, logits: NDArray[np.floating[Any]], temperature: float, values: NDArray[np.floating[Any]]
    ) -> Weights:
        """See Softmax.weights. Only those that are read are computed."""
        if not self._wanted.weights or not self._is_of(logits, temperature):
            return self._softmax.weights(logits, temperature, values)
        if np.isnan(self._total):
            raise EngineError(NO_NUMBERS)

        def of(columns: Columns) -> NDArray[np.floating[Any]]:
            some = logits[columns]
            room = values if columns is EVERY else np.empty(len(some), np.float32)
            return self._softmax.library.weigh(some, self._peak, temperature, room)

        return Weights(self._total, of, self._rows.sums[self._row], RUN)

    def likely(
        self, logits: NDArray[np.floating[Any]], temperature: float, share: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """See Softmax.likely."""
        if share != self._wanted.share or self._count > ROOM or not self._is_of(logits, temperature):
            return self._softmax.likely(logits, temperature, share)
        if self._count < 0:
            raise EngineError(NO_NUMBERS)
        return self._rows.ids[self._row, : self._count].copy(), self._rows.weights[self._row, : self._count].copy()

    def _is_of(self, logits: NDArray[np.floating[Any]], temperature: float) -> bool:
        """Whether the row is the one that was prepared: some wrappers of engines change logits afterwards."""
        own = self._rows.logits[self._row]
        return temperature == self._wanted.temperature and len(logits) == len(own) and address(logits) == address(own)
