"""The native engine's cache: rows of every slot, and of layers with a window those that a window may still reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....models.bindings import INTEGERS
from ....plugins.native.library import FORMATS, Cache, Moved, address
from ....plugins.native.packing import PANEL, whole_panels
from ..base import EngineSpec, TokenBatch
from ..cache import FIRST_CAPACITY, GrowingKVCache

if TYPE_CHECKING:  # engine.py imports this module
    from .engine import NativeEngine, Results

# Types of a cache's numbers, by precision.
STORED: dict[str, type[Any]] = {"": np.float32, "fp32": np.float32, "fp16": np.float16, "int8": np.int8}


class Inputs:
    """Buffers for the inputs of up to `rows` rows, int64, and where they lie. Each pass overwrites them."""

    def __init__(self, rows: int) -> None:
        self.token_ids, self.position_ids, self.output_rows, self.slots = np.zeros((4, rows), np.int64)
        self.states: NDArray[np.float32] | None = None  # of the rows of a pass, once somebody reads them
        arrays = (self.token_ids, self.position_ids, self.output_rows, self.slots)
        self.addresses = tuple(map(address, arrays))

    def fill(self, batch: TokenBatch, rows: int, scored: int) -> None:
        self.token_ids[:rows] = batch.token_ids[:rows]
        self.position_ids[:rows] = batch.position_ids[:rows]
        self.output_rows[:scored] = batch.output_rows[:scored]
        if batch.slots is not None:
            self.slots[:rows] = batch.slots

    def states_of(self, spec: EngineSpec) -> NDArray[np.float32]:
        """The buffer for states, which most caches never need."""
        if self.states is None:
            self.states = np.zeros((len(self.token_ids), spec.model.state_size), np.float32)
        return self.states


class Rows:
    """Keys [layers, H_kv, P, D, 16] and values [layers, H_kv, D / 16, 16 P, 16] of some layers in P panels, as
    `cache_precision` stores numbers; scales, float32 [2, layers, H_kv, 16 P], of keys and of values where they are
    codes: see kernels/cache.h. structure: the C structure that points to them."""

    def __init__(self, spec: EngineSpec, layers: int, panels: int) -> None:
        model, stored, self.layers = spec.model, spec.cache_precision, layers
        heads, slots = (layers, model.num_kv_heads), panels * PANEL
        self.keys = np.zeros((*heads, panels, model.head_dim, PANEL), STORED[stored])
        self.values = np.zeros((*heads, whole_panels(model.head_dim) // PANEL, slots, PANEL), STORED[stored])
        self.scales = np.zeros((2, *heads, slots), np.float32) if stored in INTEGERS else None
        scales = (None, None) if self.scales is None else map(address, self.scales)
        form = FORMATS.index(stored or "fp32")
        self.structure = Cache(address(self.keys), address(self.values), *scales, None, slots, form)

    def extend(self, other: Rows, slots: int) -> None:
        """Copy the first slots of a smaller one."""
        panels = whole_panels(slots) // PANEL
        self.keys[:, :, :panels] = other.keys[:, :, :panels]
        self.values[:, :, :, :slots] = other.values[:, :, :, :slots]
        if self.scales is not None and other.scales is not None:
            self.scales[..., :slots] = other.scales[..., :slots]

    def take(self, other: Rows, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Copy rows of another one to these slots, as they lie in memory."""
        panels, places = (rows // PANEL, rows % PANEL), (slots // PANEL, slots % PANEL)
        self.keys[:, :, places[0], :, places[1]] = other.keys[:, :, panels[0], :, panels[1]]
        self.values[:, :, :, slots] = other.values[:, :, :, rows]
        if self.scales is not None and other.scales is not None:
            self.scales[..., slots] = other.scales[..., rows]

    def moved(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> Moved:
        return Moved.of(self.structure, self.layers, rows, slots)


class NearRows:
    """Rows of the layers with a window, in as many panels as hold what windows reach. Slots are numbered as those of
    the other layers. window: tokens that a row sees, itself included. held: bool [C], whether a slot's row is there."""

    def __init__(self, spec: EngineSpec, slots: int, panels: int = FIRST_CAPACITY // PANEL) -> None:
        self._spec, self.window = spec, spec.model.variant.window or 0
        self.held = np.zeros(slots, np.bool_)
        self._lies = np.full(slots // PANEL, -1, np.int32)  # the place of each panel of slots; -1: it has none
        self._rows, self._panels = Rows(spec, spec.num_windowed_layers, panels), panels
        self.structure = self._rows.structure
        self.structure.panels = address(self._lies)

    def lacks(self, slots: int) -> bool:
        """Whether so many further slots may find no panel."""
        return int((self._lies >= 0).sum()) + slots // PANEL + 2 > self._panels

    @property
    def is_full_size(self) -> bool:
        """Whether there is a place for every panel of slots."""
        return self._panels == len(self._lies)

    def keep(self, slots: NDArray[np.int64]) -> None:
        """Drop panels that have none of these slots."""
        needed = np.zeros(len(self._lies), np.bool_)
        needed[slots // PANEL] = True
        self._lies[~needed] = -1
        self.held.reshape(-1, PANEL)[~needed] = False

    def compacted(self, kept: NDArray[np.int64], slots: int, more: int = 0) -> NearRows:
        """The rows of the slots `kept`, in this order in the first of `slots` slots. more: panels to make room for, and
        for as many again; 0 where there is room enough."""
        held = np.flatnonzero(self.held[kept])
        panels = np.unique(held // PANEL)
        room = 2 * (len(panels) + more)
        room = max(FIRST_CAPACITY // PANEL, room if more else max(len(panels), min(room, self._panels)))
        near = NearRows(self._spec, slots, min(room, slots // PANEL))
        near._lies[panels] = np.arange(len(panels))
        near._rows.take(self._rows, self._lie(kept[held]), near._lie(held))
        near.held[held] = True
        return near

    def place(self, slots: NDArray[np.int64]) -> None:
        """Have a panel for each of these slots. The owner has made room, and says afterwards which are held."""
        panels = np.unique(slots // PANEL)
        missing = panels[self._lies[panels] < 0]
        if len(missing):
            self._lies[missing] = np.setdiff1d(np.arange(self._panels), self._lies)[: len(missing)]

    def moved(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> Moved:
        """See Moved, for rows that are held and slots that are placed."""
        return self._rows.moved(self._lie(rows), self._lie(slots))

    def _lie(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where slots lie in memory."""
        places: NDArray[np.int64] = self._lies[slots // PANEL] * np.int64(PANEL) + slots % PANEL
        return places

    def usable(self, path: NDArray[np.int64]) -> int:
        """See the protocol. A text may end before each of its missing rows, if enough rows are there after the last."""
        missing = np.flatnonzero(~self.held[path])
        before, ends = np.append(-1, missing), np.append(missing, len(path))
        return int(ends[(before < 0) | (ends - before >= self.window)].max())


class NativeKVCache(GrowingKVCache):
    """rows: of the layers that see everything. near: of those with a window."""

    places = True

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.inputs = Inputs(engine.spec.pass_widths[-1])
        super().__init__(engine.spec)

    @property
    def capacity(self) -> int:
        return min(self._slots, self._limit)

    def results(self, outputs: int) -> Results:
        """The buffers of a pass that scores `outputs` rows, allocated at the first use."""
        if outputs not in self._results:
            self._results[outputs] = self._engine.results(outputs, self)
        return self._results[outputs]

    def reserve(self, batch: TokenBatch) -> int:
        start = super().reserve(batch)
        self._place(self.slots_of(batch, start))
        return start

    def slots_of(self, batch: TokenBatch, start: int) -> NDArray[np.int64]:
        """The slots of a pass's rows. start: the first, if they follow each other."""
        return np.arange(start, start + batch.num_tokens) if batch.slots is None else batch.slots

    def reserve_near(self, slots: int) -> None:
        """See Storage."""
        if self.near is not None and self.near.lacks(slots) and not self.near.is_full_size:
            size = len(self.near.held)
            self.near = self.near.compacted(np.arange(size), size, slots // PANEL + 2)
            self._results.clear()  # they point to the rows

    def _place(self, slots: NDArray[np.int64]) -> None:
        if self.near is not None:
            self.reserve_near(len(slots))
            self.near.place(slots)

    def _allocate(self, capacity: int) -> None:
        windowed = self._spec.num_windowed_layers
        self._slots = whole_panels(capacity)
        self.rows = Rows(self._spec, self._spec.model.num_layers - windowed, self._slots // PANEL)
        self.near: NearRows | None = NearRows(self._spec, self._slots) if windowed else None
        self._results: dict[int, Results] = {}  # by the rows that a pass scores

    def _resize(self, capacity: int, used: int) -> None:
        rows, near = self.rows, self.near
        self._allocate(capacity)
        self.rows.extend(rows, used)
        self.near = None if near is None else near.compacted(np.arange(used), self._slots)

    def move(self, rows: NDArray[np.int64], first: int) -> None:
        slots = np.arange(first, first + len(rows))
        moved = [self.rows.moved(rows, slots)]
        if self.near is not None:
            held = self.near.held[rows]
            self._place(slots[held])
            moved.append(self.near.moved(rows[held], slots[held]))
        self._engine.move(moved)
        if self.near is not None:
            self.near.held[slots] = held

    def move_near(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """See Storage."""
        if self.near is not None:
            self._place(slots)
            self._engine.move([self.near.moved(rows, slots)])
            self.near.held[slots] = True

    def compact(self, slots: NDArray[np.int64]) -> None:
        kept = np.append(np.arange(self.length), self.length + slots)
        near = None if self.near is None else self.near.compacted(kept, self._slots)
        self._engine.move([self.rows.moved(kept, np.arange(len(kept)))])
        self.near, self.speculative = near, len(slots)
        self._results.clear()  # they point to the rows

    def _free(self) -> None:
        del self.rows, self.near, self._results
