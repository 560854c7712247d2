"""Prices: seconds of every proposal from which a round may choose, by the costs of passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...engines.base import read_only
from .budget import Offer
from .cost import HostCosts, PassCosts
from .estimate import Shapes


class Menu(NamedTuple):
    """The proposals of some shapes: arrays [kinds and sizes, depths]."""

    # Proposed tokens.
    tokens: NDArray[np.int64]
    # Draft passes, and the rows of each but the first, which has two: the root, and often the last accepted token.
    depths: NDArray[np.int64]
    frontier: NDArray[np.int64]


@lru_cache(maxsize=64)
def menu_of(shapes: Shapes) -> Menu:
    """Cached: most requests have the same shapes."""
    depths = np.broadcast_to(np.arange(1, shapes.depth + 1), shapes.grid)
    sizes = np.array([1] * shapes.chain + list(shapes.sizes))[:, None]
    tokens = np.broadcast_to(sizes, shapes.grid).copy()
    tokens[: int(shapes.chain)] = depths[0]
    tokens += shapes.given
    passes = depths if shapes.frontier else np.zeros_like(depths)
    return Menu(tokens, passes, np.broadcast_to(np.minimum(sizes, max(1, shapes.frontier)), shapes.grid))


class Prices(NamedTuple):
    """Seconds of every plan [sources x kinds and sizes, depths], and of a plain token. draft_alone: of a draft pass of
    1, 2, ... rows of a single request. longer: by which 0, 1, ... tokens of a single request make a shared pass of
    plain rows longer."""

    seconds: NDArray[np.float64]
    plain: float
    draft_alone: tuple[float, ...]
    longer: tuple[float, ...]


@lru_cache(maxsize=512)
def prices_of(
    target_costs: PassCosts,
    draft_costs: PassCosts | None,
    following_costs: PassCosts | None,
    hosts: tuple[HostCosts, ...],
    shapes: Shapes,
    context: int,
    read: int,
    sharing: int,
) -> Prices:
    """See Controller._price. hosts: of every source of tokens. following_costs: of draft passes behind the first one of
    a round. read: tokens of the context that the draft attends to. Cached, because requests that share passes have the
    same prices."""
    target, draft, widest = target_costs.shared(context, sharing), None, 0
    if draft_costs is not None and shapes.frontier:  # a prompt lookup has no draft passes
        draft, widest = draft_costs.shared(read, sharing), draft_costs.widths[-1]

    def part(together: Callable[[NDArray[Any]], NDArray[np.float64]], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return together(rows * sharing) / sharing

    def by_source(both_engines: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([both_engines + host.round + host.token * tokens for host in hosts])

    tokens, depths, frontier = menu_of(shapes)
    seconds = part(target, tokens + 1)
    plain = float(part(target, np.array(1))) + hosts[0].plain
    passes = target(np.arange(sharing, sharing + 1 + int(tokens.max(initial=0))))
    longer = tuple((passes - passes[0]).tolist())
    if draft is None:
        return Prices(read_only(by_source(seconds)), plain, (0.0,), longer)
    following = draft if following_costs is None else following_costs.shared(read, sharing)
    drafting = part(draft, np.array(2)) + (depths - 1) * part(following, frontier)
    alone = tuple(draft(np.arange(1, widest + 1)).tolist())
    return Prices(read_only(by_source(drafting + seconds)), plain, alone, longer)


@lru_cache(maxsize=512)
def passes_of(target_costs: PassCosts, context: int, rows: int) -> tuple[float, ...]:
    """Seconds of a single request's target passes of 1, 2, ... rows."""
    return tuple(target_costs.of(np.arange(1, rows + 1), context).tolist())


def offer_of(
    expected: Sequence[NDArray[np.float64]], shapes: Shapes, hosts: Sequence[HostCosts], reading: float
) -> Offer:
    """What a request could propose. expected, hosts: of every source of tokens: accepted tokens [kinds and sizes,
    depths], and time on the host. reading: seconds that the draft's reading adds for every token."""
    most = expected[0].shape[1]
    tokens, depths, frontier = (array[:, :most] for array in menu_of(shapes))
    of_source = [host.round + host.token * tokens + reading * (1 + e) for e, host in zip(expected, hosts, strict=True)]
    return Offer(
        np.concatenate(([1.0], *(1 + each.ravel() for each in expected))),
        np.concatenate(([1], *[tokens.ravel() + 1] * len(hosts))),
        np.concatenate(([0], *[depths.ravel()] * len(hosts))),
        np.concatenate(([1], *[frontier.ravel()] * len(hosts))),
        np.concatenate(([hosts[0].plain], *(each.ravel() for each in of_source))),
    )
