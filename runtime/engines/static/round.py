"""A round on the device: the draft grows a tree, the target scores it, the accepted path is committed, for one or
several texts together. The host queues all of it, or replays one graph, and waits once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import exp
from typing import Any, NamedTuple, Protocol

from ....models import bindings
from ....plugins.device_round.images import NODE_BLOCK, PENDING, STATE, WORD_BLOCK
from ..layout import Layout, PassShape
from ..rounds import RoundDraws, RoundOutcome, RoundShape
from .device import Device, DeviceMemory, Stream
from .drawn_trees import draws_for, tree_fields, tree_found_fields
from .draws import Buffers, Vocabulary, check_peaks, found_fields, given_fields, numbers_of, work_fields
from .memory import CachePart

log = logging.getLogger("draftwood.engines")
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
    """The parts of a cache, and of its engine's passes K, the number of ranked tokens, V, that of logits, and N, the
    most texts."""

    parts: Sequence[CachePart]
    columns: int
    num_logits: int
    sequences: int = 1


class TextPlace(NamedTuple):
    """length: the target's committed rows; the draft's are as many and one, without the pending tokens. target, draft:
    in each cache the first slot of the committed rows, and the slot of the masks' first column."""

    length: int
    pending: Sequence[int]
    target: tuple[int, int]
    draft: tuple[int, int]

    @property
    def numbers(self) -> tuple[int, ...]:
        """A row of "state"."""
        unused = (0,) * (PENDING - len(self.pending))
        return self.length, len(self.pending), *self.pending, *unused, *self.target, *self.draft


class Names(NamedTuple):
    """The tokens of a trimmed draft's columns, int32, on the device; no columns of another draft's."""

    memory: DeviceMemory
    columns: int


class Round:
    """The rounds of one shape and number of texts over one pair of caches: buffers of fixed addresses and, after the
    first run, a graph.

    The kernels are those of `plugins/device_round`, which say what the buffers hold.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        shape: RoundShape,
        draft: Sequence[RoundPass],
        targets: Sequence[RoundPass],
        caches: tuple[CachePlace, CachePlace],
        names: Names,
        texts: int = 1,
    ) -> None:
        """draft: the passes of the layers, the pending tokens' first, each with the rows of all texts. targets: passes
        with the rows of as many texts as fit, one after the other. caches: the target's and the draft's. texts: 1 above
        temperature 0."""
        self._device, self._stream, self._shape, self._texts = device, stream, shape, texts
        self._draft, self._targets, self._caches, self._names = draft, targets, caches, names
        depth, rows = shape.depth, shape.size + 1
        nodes = self._max_nodes = most_nodes(shape)
        lists = {"frontier": (depth + 1) * shape.width, "totals": depth + 1, "row_nodes": rows, "moves": 2}
        lists |= {"target_rows": depth + 1, "draft_rows": PENDING + depth}
        counts = dict.fromkeys((*TABLE, "rows"), nodes) | lists
        vocabulary = Vocabulary(caches[0].num_logits, caches[1].num_logits, names.memory.address, names.columns)
        work = {"values": ("float64", (texts, nodes)), **work_fields(shape, vocabulary)}
        work |= tree_fields(shape, vocabulary, nodes)
        self._given = Layout.packed({"state": ("int32", (texts, STATE)), **given_fields(shape)})
        self._work = Layout.packed(work | {name: ("int32", (texts, count)) for name, count in counts.items()})
        row = {name: ("int32", (texts, rows)) for name in ("row_tokens", "row_parents", "row_depths")}
        path = {"row_values": ("float64", (texts, rows)), "summary": ("int32", (texts, 4))}
        path["accepted"] = "int32", (texts, depth)
        self._result = Layout.packed({**path, **row, **found_fields(shape), **tree_found_fields(shape)})
        self._buffers = Buffers(device, stream, (self._given, self._work, self._result))
        self._at, self._launch = self._buffers.at, self._buffers.launch
        self._host_given = device.allocate_pinned(self._given.nbytes)
        self._host_found = device.allocate_pinned(self._result.nbytes)
        self._draws = draws_for(shape, vocabulary, self._buffers)
        self._graph: Any | None = None
        self._may_capture = True

    def run(self, texts: Sequence[TextPlace], draws: RoundDraws | None = None) -> list[RoundOutcome]:
        """Run a round of these texts and wait for it. Raises EngineError if a distribution is none."""
        given = self._given.views(self._host_given)
        given["state"][:] = [text.numbers for text in texts]
        if draws is not None:
            given["draws"][:] = numbers_of(draws)
        if self._graph is None:
            for each in self._passes:
                each.bind()
            self._enqueue()
        else:
            self._device.replay(self._graph, self._stream)
        self._device.synchronize(self._stream)
        if self._graph is None and self._may_capture:
            self._capture()
        return [self._outcome(text, len(place.pending)) for text, place in enumerate(texts)]

    @property
    def _passes(self) -> list[RoundPass]:
        """Each pass once."""
        return list({id(each): each for each in (*self._draft, *self._targets)}.values())

    def _capture(self) -> None:
        """Capture the round as a graph, after its first run, as `StaticPass` does."""
        if all(each.is_capturable(self._stream) for each in self._passes):
            self._graph = self._device.capture(self._enqueue, self._stream)
        self._may_capture = self._graph is not None
        if self._graph is None:
            log.warning("a round of %s cannot be captured as a CUDA graph; it is queued each time", self._shape)

    def _enqueue(self) -> None:
        """Queue the round: the state up, every pass and the kernels between them, the results back."""
        depth, size, width = self._shape[:3]
        first_pass, at, texts, nodes = self._draft[0], self._at, self._texts, self._max_nodes
        needed = max(field.offset + field.nbytes for field in self._given.fields.values())
        self._device.upload(at("state"), self._host_given[:needed], self._stream)
        table = at("values"), *map(at, TABLE)
        lists = at("draft_rows"), at("frontier"), at("totals")
        numbers = first_pass.shape.columns, width, nodes, depth + 1, PENDING + depth, first_pass.shape.outputs
        self._launch(
            "pending_inputs",
            (first_pass.shape.width, 1),
            (at("state"), *addresses(first_pass), *lists, *table),
            (*numbers, texts, self._caches[1].sequences),
        )
        for layer, each in enumerate(self._draft):
            each.enqueue(self._stream)
            is_last = layer == depth - 1
            first = (PENDING + layer * width) * texts
            slot = -1 if is_last else first
            if self._draws is not None and self._shape.is_drawn:
                self._draws.extend(layer, each, slot)
            else:
                ranking = each.address(bindings.TOP_IDS.name), each.address(bindings.TOP_LOGPROBS.name)
                names = self._names.memory.address, at("frontier"), at("totals")
                offers = self._caches[1].columns, layer, width, size, self._names.columns, slot
                ranked = width if layer else 1
                self._launch("expand", (texts, 1), (*ranking, *names, *table), (*offers, nodes, depth + 1, ranked))
            if not is_last:
                frontier = at("frontier") + (layer + 1) * width * WORD
                columns = width, self._draft[layer + 1].shape.columns, 1, first, (depth + 1) * width, nodes, 0
                self._write_inputs(self._draft[layer + 1], frontier, "slots", columns, 0, texts)
        tree = "totals", "values", "rows", "row_nodes"
        blocks = -(-max(nodes, size + 1) // NODE_BLOCK)
        self._launch("unroll", (blocks, texts), tuple(map(at, tree)), (depth, size, nodes))
        first = 0
        for each in self._targets:
            count = min(texts - first, each.shape.width // (size + 1))
            self._verify(each, first, count)
            first += count
        self._commit(1, 0, texts)
        self._device.download(self._host_found, at("row_values"), self._stream)

    def _verify(self, target: RoundPass, first: int, texts: int) -> None:
        """Queue the target's pass for `texts` texts from `first` on, verification, and the commit of its cache."""
        depth, size, at = self._shape.depth, self._shape.size, self._at
        rows = size + 1
        columns = rows, target.shape.columns, 0, 0, rows, self._max_nodes, rows
        self._write_inputs(target, at("row_nodes", first), "rows", columns, first, texts)
        target.enqueue(self._stream)
        best, ranked = target.address(bindings.TOP_IDS.name), self._caches[0].columns
        if self._draws is not None:
            best, ranked = self._draws.choose(target), 1
        values = "shares" if self._shape.is_tree else "values"
        tree = "row_nodes", "tokens", "parents", "depths", values, "rows", "slots", "state"
        found = "summary", "accepted", "target_rows", "draft_rows", "moves"
        pointers = (
            at(name, first) for name in (*tree, *found, "row_tokens", "row_parents", "row_depths", "row_values")
        )
        numbers = ranked, size, depth, self._max_nodes, PENDING + depth
        self._launch("verify", (texts, 1), (best, *pointers), numbers)
        self._commit(0, first, texts)

    def _write_inputs(
        self, each: RoundPass, nodes: int, columns_of: str, numbers: tuple[int, ...], first: int, texts: int
    ) -> None:
        """Queue the inputs of a pass over nodes of `texts` texts from `first` on. numbers: of `tree_inputs`."""
        state, *table = (self._at(name, first) for name in ("state", "tokens", "parents", "depths", columns_of))
        sequences = self._caches[numbers[2]].sequences
        pointers = (state, nodes, *table, *addresses(each))
        self._launch("tree_inputs", (each.shape.width, 1), pointers, (*numbers, texts, sequences))

    def _commit(self, side: int, first: int, texts: int) -> None:
        """Queue the moves of accepted rows, whose number is on the device. side: 0 for the target, 1 for the draft."""
        sources = ("target_rows", "draft_rows")[side]
        for _, geometry, address, dropped in self._caches[side].parts:
            words = geometry.row_bytes // WORD
            sizes = geometry.tensor_bytes // WORD, geometry.heads, geometry.capacity, words
            grid = geometry.tensors * geometry.heads, texts * -(-words // WORD_BLOCK)
            pointers = (self._at(name, first) for name in ("state", sources, "moves"))
            numbers = *sizes, self._work.fields[sources].shape[1], side
            self._launch("commit", grid, (address, dropped, *pointers), numbers)

    def _outcome(self, text: int, num_pending: int) -> RoundOutcome:
        found = self._result.views(self._host_found)
        count, next_token, num_scored, rows = found["summary"][text].tolist()
        tokens, parents, depths, values = (
            tuple(found[name][text, :rows].tolist())
            for name in ("row_tokens", "row_parents", "row_depths", "row_values")
        )
        accepted = tuple(found["accepted"][text, :count].tolist())
        written = [*(tokens[row] for row in accepted), next_token]
        uses: tuple[int, ...] = ()
        if self._draws is not None:
            check_peaks(found["row_peaks"][: len(found["row_peaks"]) - (self._shape.size + 1) + rows])
        if self._shape.is_tree:  # of which they are shares
            shares, uses = values[1:], tuple(found["uses"].tolist())
        elif self._shape.is_drawn:
            shares = tuple(found["shares"].tolist())
        else:
            shares = tuple(exp(value - values[parent]) for value, parent in zip(values[1:], parents[1:], strict=True))
        used, depth = self._shape.num_draws(count, *uses), self._shape.depth
        rows_drafted = num_pending + (depth - 1) * self._shape.width
        tree = tokens, parents, depths, (1.0, *shares)
        return RoundOutcome(*tree, accepted, written, num_scored, used, depth, rows_drafted)


def addresses(each: RoundPass) -> tuple[int, ...]:
    """Of a pass's inputs."""
    return tuple(map(each.address, PASS))


def most_nodes(shape: RoundShape) -> int:
    """The most nodes of a tree that grows to this shape: `expand` admits at most `size` a layer."""
    if shape.is_drawn:
        return 1 + shape.depth * shape.most_drawn
    return 1 + min(shape.width, shape.size) + (shape.depth - 1) * min(shape.width**2, shape.size)
