"""Work on the rows of a matrix, on all cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..plugins.native.packing import PANEL
from ..runtime.engines.limits import cores

PART = 1 << 19  # numbers, of which a few arrays stay in a core's own cache


def in_parts(rows: int, columns: int, work: Callable[[slice], object]) -> None:
    """Call `work` for the rows of a matrix [rows, columns], some whole panels at a time, from one thread for each core.
    Whatever does not hold Python's lock runs at the same time: numpy on arrays of numbers, and the kernels. Raises what
    `work` raises."""
    step = max(PANEL, PART // max(1, columns) // PANEL * PANEL)
    parts = [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
    if len(parts) == 1:
        work(parts[0])
        return
    with ThreadPoolExecutor(cores()) as threads:
        for _ in threads.map(work, parts):
            pass
