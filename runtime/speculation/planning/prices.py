"""Prices: what a request may propose, and the seconds of rounds that share passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...engines.base import read_only
from .cost import CostModel, HostCosts, PassCosts
from .estimate import Shapes

PLAIN = 0  # the first choice of every table
CONTEXT_STEP = 64  # tokens of context after which costs are looked up again, for contexts of a multiple of so many


class ProposalTable(NamedTuple):
    """The choices of some shapes, arrays [C]: plain decoding, then all proposals [sources, kinds and sizes, depths]."""

    # Proposed tokens.
    tokens: NDArray[np.int64]
    # Rows of each of the draft's passes [C, D], 0 for none. The first one reads the root, and often the last accepted
    # token.
    drafted: NDArray[np.int64]
    shapes: Shapes
    # Greatest depth.
    most: int
    sources: int

    def number(self, source: int, kind: int, depth: int) -> int:
        """The number of a choice. kind: 0 is the chain, if there is one; then the sizes of trees follow."""
        return 1 + (source * self.shapes.grid[0] + kind) * self.most + depth - 1


@lru_cache(maxsize=32)  # of up to 1 MiB
def table_of(shapes: Shapes, most: int, sources: int) -> ProposalTable:
    """Cached: most requests have the same shapes."""
    grid = (shapes.grid[0], most)
    depths, sizes = np.arange(1, most + 1), np.array([1] * shapes.chain + list(shapes.sizes))[:, None]
    tokens = np.broadcast_to(sizes, grid).copy()
    tokens[: int(shapes.chain)] = depths
    each = np.where(depths == 1, 2, np.minimum(sizes, max(1, shapes.frontier)))  # of every pass of a kind
    drafted = np.where(depths <= depths[:, None], each[:, None], 0) * bool(shapes.frontier)
    return ProposalTable(
        read_only(np.concatenate(([0], *[tokens.ravel()] * sources))),
        read_only(np.concatenate((np.zeros((1, most), np.int64), *[drafted.reshape(-1, most)] * sources))),
        shapes,
        most,
        sources,
    )


class Candidates(NamedTuple):
    """Arrays [C] beside their table. tokens: expected of the round. host: seconds outside both engines."""

    table: ProposalTable
    tokens: NDArray[np.float64]
    host: NDArray[np.float64]


def candidates_of(
    expected: Sequence[NDArray[np.float64]], shapes: Shapes, most: int, hosts: Sequence[HostCosts], reading: float
) -> Candidates:
    """expected, hosts: of every source of tokens: accepted tokens [kinds and sizes, depths], and time on the host.
    reading: seconds that the draft's reading adds for every token."""
    table = table_of(shapes, most, len(hosts))
    tokens = np.concatenate(([1.0], *(1 + each[:, :most].ravel() for each in expected)))
    count = shapes.grid[0] * most
    rounds = [host.round + host.token * table.tokens[1 : count + 1] for host in hosts]
    host = np.concatenate(([hosts[0].plain], *rounds))
    host[1:] += reading * tokens[1:]
    return Candidates(table, tokens, host)


class Costs(NamedTuple):
    """The costs of passes, and where they apply."""

    target: PassCosts
    # Of the draft's first pass of a round, and of those that follow it.
    draft: PassCosts | None
    following: PassCosts | None
    # Committed tokens, a multiple of CONTEXT_STEP; and of them those that the draft attends to.
    context: int
    read: int
    # Requests that share passes.
    batch_size: float

    def seconds(self, rows: NDArray[Any], drafted: NDArray[Any]) -> NDArray[np.float64]:
        """Seconds of K rounds. rows [K]: of the target's pass. drafted [K, D]: of the draft's passes, 0 for none."""
        seconds = self.target.shared(rows, self.context, self.batch_size)
        if self.draft is None or self.following is None or not drafted.shape[1]:
            return seconds
        least = np.maximum(drafted, 1)
        first = self.draft.shared(least[:, :1], self.read, self.batch_size)
        each = np.concatenate((first, self.following.shared(least[:, 1:], self.read, self.batch_size)), axis=1)
        total: NDArray[np.float64] = seconds + np.where(drafted > 0, each, 0.0).sum(1)
        return total


def costs_at(costs: CostModel, context: int, batch_size: float, draft_context: int | None = None) -> Costs:
    """The costs after `context` committed tokens. draft_context: the most tokens that the draft attends to."""
    context = context // CONTEXT_STEP * CONTEXT_STEP
    read = context if draft_context is None else min(context, draft_context)
    return Costs(costs.target, costs.draft, costs.following, context, read, batch_size)


@lru_cache(maxsize=512)
def even_seconds(costs: Costs, shapes: Shapes, most: int, sources: int) -> NDArray[np.float64]:
    """Seconds [C] of a request's part of the passes of a round in which all requests make the same choice. Cached,
    because requests that share passes have the same costs."""
    table = table_of(shapes, most, sources)
    rows, drafted = costs.batch_size * (1 + table.tokens), costs.batch_size * table.drafted
    return read_only(costs.seconds(rows, drafted) / costs.batch_size)


class Prices(NamedTuple):
    """Seconds of a single request's rows."""

    # Of its part of a pass of plain rows.
    plain: float
    # Of a draft pass of 1, 2, ... rows.
    draft_alone: tuple[float, ...]
    # By which 0, 1, ... further rows make a shared pass of plain rows longer.
    longer: tuple[float, ...]
    # The same where every request has so many, of which this one pays its part.
    even: tuple[float, ...]


@lru_cache(maxsize=512)
def prices_of(costs: Costs, most: int, drafts: bool) -> Prices:
    """most: further rows. drafts: whether there are draft passes."""
    number = costs.batch_size
    further = np.arange(1 + most)
    passes = costs.target.shared(number + further, costs.context, number)
    even = costs.target.shared(number * (1 + further), costs.context, number) / number
    alone = (0.0,)
    if costs.draft is not None and drafts:
        alone = tuple(costs.draft.shared(np.arange(1, costs.draft.widths[-1] + 1), costs.read, number).tolist())
    longer, even = ((each - each[0]).tolist() for each in (passes, even))
    return Prices(float(passes[0]) / number, alone, tuple(longer), tuple(even))


@lru_cache(maxsize=512)
def row_seconds(costs: Costs) -> tuple[float, float]:
    """The seconds of another row of the target's pass, and of one of the draft's."""
    rows, number = np.array([1, 2]) * costs.batch_size, costs.batch_size
    target = np.diff(costs.target.shared(rows, costs.context, number)) / number
    draft = 0.0 if costs.draft is None else np.diff(costs.draft.shared(rows, costs.read, number)).item() / number
    return target.item(), draft


@lru_cache(maxsize=512)
def stored_seconds(target: PassCosts, context: int, rows: int) -> tuple[float, ...]:
    """Seconds of a single request's target passes of 1, 2, ... rows."""
    return tuple(target.of(np.arange(1, rows + 1), context).tolist())
