"""What a round with a drawn tree does on the device: the draft's draws, and verification by traversal or rejection. The
kernels in `plugins/device_round` say what the buffers hold."""

from __future__ import annotations

from ..rounds import BEST, MATCH, TRAVERSAL, RoundShape
from .draws import DOUBLE, Buffers, Draws, Fields, Scores, Vocabulary, num_blocks, num_scored

WORD = 4  # bytes of an int32 or a float32


def draws_for(shape: RoundShape, vocabulary: Vocabulary, buffers: Buffers) -> Draws | None:
    """What queues the draws of a shape; None at temperature 0."""
    if shape.verify == BEST:
        return None
    return (TreeDraws if shape.is_tree else Draws)(shape, vocabulary, buffers)


def tree_fields(shape: RoundShape, vocabulary: Vocabulary, nodes: int) -> Fields:
    """Buffers of a drawn tree of at most so many nodes, besides those of all draws."""
    if not shape.is_tree:
        return {}
    fields: dict[str, tuple[str, tuple[int, ...]]] = {name: ("float64", (nodes,)) for name in ("reach", "shares")}
    fields["ranks"] = "int32", (nodes,)
    if shape.verify == MATCH:
        return fields
    rows, scored, (target, draft) = shape.size + 1, num_scored(shape), vocabulary[:2]
    fields |= {"offers": ("int32", (scored,)), "offer_columns": ("int32", (scored, draft))}
    fields |= {"offer_weights": ("float64", (scored, draft)), "target_weights": ("float64", (rows, target))}
    fields |= {name: ("float64", (draft,)) for name in ("residual", "remaining")}
    fields |= {name: ("float64", (rows,)) for name in ("norms", "pis", "excess_totals", "chances")}
    blocks = num_blocks(target)
    return fields | {"rest": ("float64", (rows, blocks)), "excesses": ("float64", (blocks,)), "stop": ("int32", (1,))}


def tree_found_fields(shape: RoundShape) -> Fields:
    """uses: how many uniform numbers were used for the draft, and for tests."""
    return {"uses": ("int32", (2,))} if shape.is_tree else {}


class TreeDraws(Draws):
    """Queues the kernels of the rounds of one shape with a drawn tree."""

    def extend(self, layer: int, each: Scores, slot: int) -> None:
        """Draw a layer of the tree from a draft's rows. slot: of its first node in the draft's cache, -1 for none."""
        at, shape, (stride, columns, names, num_names) = self._at, self._shape, self._vocabulary
        rows, first = (1, 0) if layer == 0 else (shape.width, 1 + (layer - 1) * shape.width)
        weights, blocks = at("weights") + first * stride * DOUBLE, num_blocks(columns)
        row = self._row(each, self._draft_settings)
        self._weigh(row, rows, columns, (weights, names), (num_names, stride))
        if shape.verify != MATCH:
            sizes = ("offers", WORD), ("offer_weights", DOUBLE * columns), ("offer_columns", WORD * columns)
            lists = (at(name) + first * nbytes for name, nbytes in sizes)
            self._launch("gather", (rows, blocks), (*row, at("likely"), at("counts"), *lists), (columns, blocks, 1))
        table = map(at, ("tokens", "parents", "depths", "slots", "values", "frontier", "totals"))
        sites = map(at, ("reach", "ranks", "shares"))
        used = at("row_peaks") + first * WORD, at("uses")
        pointers = (row[1], row[3], weights, self._draft, self._estimates, names, *table, *sites, *used)
        numbers = columns, blocks, num_names, stride, layer, shape.width, shape.size, rows, slot
        self._launch("grow", (1, 1), pointers, numbers)

    def _verify(self, row: tuple[int, ...], row_peaks: int) -> None:
        at, shape, (columns, draft, names, num_names) = self._at, self._shape, self._vocabulary
        size, blocks, is_traversal = shape.size, num_blocks(columns), shape.verify == TRAVERSAL
        tree = tuple(map(at, ("row_nodes", "row_parents", "tokens", "slots")))
        drawn, refusals = at("weights"), tuple(map(at, ("norms", "masses", "pis", "excess_totals")))
        target, rest = at("target_weights"), at("rest")
        nodes = map(at, ("row_nodes", "rows", "parents", "slots"))
        pointers = (*row, drawn, *nodes, target, rest, at("row_parents"), row_peaks)
        self._launch("prepare", (size + 1, blocks), pointers, (columns, blocks))
        lists = map(at, ("offers", "offer_weights", "offer_columns"))
        scratch = at("residual"), at("remaining")
        numbers = columns, blocks, draft, num_names, size, int(is_traversal)
        pointers = (target, rest, *lists, names, *tree, *scratch, *refusals, at("chances"))
        self._launch("refuse", (1, 1), pointers, numbers)
        found = at("drawn"), at("uses") + WORD, at("stop")
        kernel = "traverse" if is_traversal else "reject"
        self._launch(kernel, (1, 1), (at("chances"), self._tests, *tree[:3], *found), (size,))
        left = (target, drawn, *tree, *refusals, at("stop"), at("excesses"))
        self._launch("remainder", (1, blocks), left, (columns, blocks, size))
        self._launch("settle", (1, 1), (*left, self._last, at("drawn")), (columns, blocks, size))
