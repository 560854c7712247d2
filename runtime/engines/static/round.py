"""A round on the device: the draft grows a tree, the target scores it, the accepted path is committed. The host queues
all of it, or replays one graph, and waits once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ....models import bindings
from ....plugins.device_round.images import NODE_BLOCK, WORD_BLOCK
from ..layout import Layout, PassShape
from ..rounds import BEST, RoundDraws, RoundOutcome, RoundShape
from .device import CacheGeometry, Device, DeviceMemory, Stream
from .draws import (
    Buffers,
    Draws,
    Vocabulary,
    check_peaks,
    found_fields,
    given_fields,
    numbers_of,
    path_values,
    work_fields,
)

log = logging.getLogger("draftwood.engines")
PENDING = 2  # most tokens that the draft has not read after a round: the last accepted one, and the target's own
WORD = 4  # bytes that a thread of `commit` moves at a time
TABLE = ("tokens", "parents", "depths", "slots")  # of the nodes
PASS = ("input_ids", "position_ids", "sequences", "tree_mask", "write_indices", "output_rows")


class RoundPass(Protocol):
    """A pass whose inputs and outputs stay on the device."""

    shape: PassShape

    def address(self, name: str) -> int:
        """The address on the device of an input or output."""

    def bind(self) -> None: ...

    def enqueue(self, stream: Stream) -> None: ...

    def is_capturable(self, stream: Stream) -> bool: ...


class CachePlace(NamedTuple):
    """A cache, and of the outputs of its engine's passes K, the number of ranked tokens, and V, that of logits."""

    address: int
    geometry: CacheGeometry
    columns: int
    num_logits: int


class Names(NamedTuple):
    """The tokens of a trimmed draft's columns, int32, on the device; no columns of another draft's."""

    memory: DeviceMemory
    columns: int


class Round:
    """The rounds of one shape over one pair of caches: buffers of fixed addresses and, after the first run, a graph.

    The kernels are those of `plugins/device_round`, which say what the buffers hold.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        shape: RoundShape,
        draft: Sequence[RoundPass],
        target: RoundPass,
        caches: tuple[CachePlace, CachePlace],
        names: Names,
    ) -> None:
        """draft: the passes of the layers, the pending tokens' first. caches: the target's and the draft's."""
        self._device, self._stream, self._shape = device, stream, shape
        self._draft, self._target, self._caches, self._names = draft, target, caches, names
        depth, rows = shape.depth, shape.size + 1
        nodes = self._max_nodes = most_nodes(shape)
        table = {name: ("int32", (nodes,)) for name in (*TABLE, "rows")}
        lists = {"frontier": (depth + 1) * shape.width, "totals": depth + 1, "row_nodes": rows, "draft_rows": depth}
        vocabulary = Vocabulary(caches[0].num_logits, caches[1].num_logits, names.memory.address, names.columns)
        work = {"values": ("float64", (nodes,)), **table, **work_fields(shape, vocabulary)}
        self._given = Layout.packed({"state": ("int32", (2 + PENDING,)), **given_fields(shape)})
        self._work = Layout.packed(work | {name: ("int32", (count,)) for name, count in lists.items()})
        row = {name: ("int32", (rows,)) for name in ("row_tokens", "row_parents", "row_depths")}
        path = {"row_values": ("float64", (rows,)), "summary": ("int32", (4,)), "accepted": ("int32", (depth,))}
        self._result = Layout.packed({**path, **row, **found_fields(shape)})
        self._buffers = Buffers(device, stream, (self._given, self._work, self._result))
        self._at, self._launch = self._buffers.at, self._buffers.launch
        self._host_given = device.allocate_pinned(self._given.nbytes)
        self._host_found = device.allocate_pinned(self._result.nbytes)
        self._draws = None if shape.verify == BEST else Draws(shape, vocabulary, self._buffers)
        self._graph: Any | None = None
        self._may_capture = True

    def run(self, length: int, pending: Sequence[int], draws: RoundDraws | None = None) -> RoundOutcome:
        """Run a round and wait for it. length: the target's committed rows; the draft's are as many and one, without
        the pending tokens. Raises EngineError if a distribution is none."""
        given = self._given.views(self._host_given)
        given["state"][: 2 + len(pending)] = length, len(pending), *pending
        if draws is not None:
            given["draws"][:] = numbers_of(draws)
        if self._graph is None:
            for each in {id(each): each for each in (*self._draft, self._target)}.values():
                each.bind()
            self._enqueue()
        else:
            self._device.replay(self._graph, self._stream)
        self._device.synchronize(self._stream)
        if self._graph is None and self._may_capture:
            self._capture()
        return self._outcome()

    def _capture(self) -> None:
        """Capture the round as a graph, after its first run, as `StaticPass` does."""
        if all(each.is_capturable(self._stream) for each in (*self._draft, self._target)):
            self._graph = self._device.capture(self._enqueue, self._stream)
        self._may_capture = self._graph is not None
        if self._graph is None:
            log.warning("a round of %s cannot be captured as a CUDA graph; it is queued each time", self._shape)

    def _enqueue(self) -> None:
        """Queue the round: the state up, every pass and the kernels between them, the results back."""
        depth, size, width = self._shape[:3]
        first_pass, at = self._draft[0], self._at
        needed = max(field.offset + field.nbytes for field in self._given.fields.values())
        self._device.upload(at("state"), self._host_given[:needed], self._stream)
        table = at("values"), *map(at, TABLE)
        self._launch(
            "pending_inputs",
            (first_pass.shape.width, 1),
            (at("state"), *addresses(first_pass), at("frontier"), at("totals"), *table),
            (first_pass.shape.columns, width),
        )
        for layer, each in enumerate(self._draft):
            each.enqueue(self._stream)
            is_last = layer == depth - 1
            slot = -1 if is_last else layer * width
            if self._draws is not None and self._shape.is_drawn:
                self._draws.extend(layer, each, slot)
            else:
                ranking = each.address(bindings.TOP_IDS.name), each.address(bindings.TOP_LOGPROBS.name)
                lists = self._names.memory.address, at("frontier"), at("totals")
                numbers = self._caches[1].columns, layer, width, size, self._names.columns, slot
                self._launch("expand", (1, 1), (*ranking, *lists, *table), numbers)
            if not is_last:
                frontier = at("frontier") + (layer + 1) * width * WORD
                self._write_inputs(self._draft[layer + 1], frontier, "slots", width, 1, layer * width)
        tree = "totals", "values", "rows", "row_nodes"
        blocks = -(-max(self._max_nodes, size + 1) // NODE_BLOCK)
        self._launch("unroll", (blocks, 1), tuple(map(at, tree)), (depth, size))
        self._write_inputs(self._target, at("row_nodes"), "rows", size + 1, 0, 0)
        self._target.enqueue(self._stream)
        found = "summary", "accepted", "draft_rows", "row_tokens", "row_parents", "row_depths", "row_values"
        nodes = "row_nodes", "tokens", "parents", "depths", "values", "rows", "slots"
        best, columns = self._target.address(bindings.TOP_IDS.name), self._caches[0].columns
        if self._draws is not None:
            best, columns = self._draws.choose(self._target), 1
        self._launch("verify", (1, 1), (best, *map(at, (*nodes, *found))), (columns, size))
        counts = at("summary"), at("summary") + 2 * WORD
        for cache, sources, count in zip(self._caches, ("accepted", "draft_rows"), counts, strict=True):
            self._commit(cache, at(sources), count)
        self._device.download(self._host_found, at("row_values"), self._stream)

    def _write_inputs(self, each: RoundPass, nodes: int, columns_of: str, rows: int, read: int, first: int) -> None:
        table = tuple(map(self._at, ("tokens", "parents", "depths", columns_of)))
        pointers = (self._at("state"), nodes, *table, *addresses(each))
        self._launch("tree_inputs", (each.shape.width, 1), pointers, (rows, each.shape.columns, read, first))

    def _commit(self, cache: CachePlace, sources: int, count: int) -> None:
        """Queue the moves of accepted rows, whose number is on the device."""
        geometry = cache.geometry
        words = geometry.row_bytes // WORD
        sizes = geometry.tensor_bytes // WORD, geometry.heads, geometry.capacity, words
        grid = geometry.tensors * geometry.heads, -(-words // WORD_BLOCK)
        pointers = cache.address, self._at("state"), sources, count
        self._device.launch("commit", grid, (*pointers, *sizes), self._stream)

    def _outcome(self) -> RoundOutcome:
        found = self._result.views(self._host_found)
        count, next_token, num_scored, rows = found["summary"].tolist()
        tokens, parents, depths, values = (
            tuple(found[name][:rows].tolist()) for name in ("row_tokens", "row_parents", "row_depths", "row_values")
        )
        accepted = tuple(found["accepted"][:count].tolist())
        if self._draws is not None:
            check_peaks(found["row_peaks"][: len(found["shares"]) + rows])
        if self._shape.is_drawn:
            values = tuple(path_values(found["shares"]))
        return RoundOutcome(tokens, parents, depths, values, accepted, next_token, num_scored)


def addresses(each: RoundPass) -> tuple[int, ...]:
    """Of a pass's inputs."""
    return tuple(map(each.address, PASS))


def most_nodes(shape: RoundShape) -> int:
    """The most nodes of a tree that grows to this shape: `expand` admits at most `size` a layer."""
    return 1 + min(shape.width, shape.size) + (shape.depth - 1) * min(shape.width**2, shape.size)
