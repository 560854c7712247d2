"""What the controller's plans yield against every fixed choice, in the time of a cost table: no clock, no engines.

    python -m benchmarks.planning.simulated [bundles/demo-110m] --tokens 80 --texts 24

A text is known beforehand by the rank at which the draft names each next token: first with the chosen probability, and
next in half of the remaining cases at every further rank. A tree is the most valuable nodes under these chances, as the
growers make it; drawn trees are taken to be accepted alike, so temperature enters through time on the host alone.
Requests at a time are taken to be in step: each pays its part of a pass, a proposal that nobody else makes all of it.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from draftwood.runtime.cost import CostModel, HostCosts, PassCosts, read_costs
from draftwood.runtime.speculation.acceptance import Choice, Shapes
from draftwood.runtime.speculation.controller import Controller, Experience, Plan

ACCEPTANCES = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95)
LENGTHS = (1, 2, 3, 4, 6, 8, 10)
SIZES = (1, 3, 7, 11, 15)
BOTH = Shapes(SIZES, 10, 4, True, 0)
NEXT = 0.5  # how often a token that was not found yet is at the next rank
PROMPT = 64
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
Tree = Mapping[tuple[int, ...], int]  # path of ranks -> row


def machine(draft: float, row: float, host: float = 0.05) -> CostModel:
    """A machine in units of a target pass of one row: `row` for each further row, `draft` of it a draft pass, a share
    `host` of it a round's time outside the engines."""

    def passes(once: float) -> PassCosts:
        return PassCosts(WIDTHS, (0,), (tuple(once * (1 + row * (width - 1)) for width in WIDTHS),))

    greedy, sampled = HostCosts(host / 4, host, host / 40), HostCosts(host / 2, 1.5 * host, host / 12)
    return CostModel(passes(1.0), passes(draft), greedy, sampled, {})


MACHINES = {
    "cheap draft": machine(0.05, 0.06),
    "costly draft": machine(0.3, 0.06),
    "flat target": machine(0.1, 0.005),
    "steep target": machine(0.1, 0.2),
}


class Spent(NamedTuple):
    """Tokens of a text, and the seconds they took."""

    tokens: int
    seconds: float


@lru_cache(maxsize=4096)
def tree_of(acceptance: float, depth: int, size: int, chain: bool) -> Tree:
    """Rows of a proposal, in order of value."""
    rows: dict[tuple[int, ...], int] = {}
    heap: list[tuple[float, tuple[int, ...], float]] = [(-acceptance, (0,), 1.0)]  # value, path, its parent's value
    while heap and len(rows) < (depth if chain else size):
        value, path, above = heapq.heappop(heap)
        rows[path] = len(rows) + 1
        if len(path) < depth:
            heapq.heappush(heap, (value * acceptance, (*path, 0), -value))
        if not chain and path[-1] + 1 < BOTH.frontier:
            rank = path[-1] + 1
            chance = (1 - acceptance) * NEXT * (1 - NEXT) ** (rank - 1)
            heapq.heappush(heap, (-above * chance, (*path[:-1], rank), above))
    return rows


def accepted(tree: Tree, ranks: NDArray[np.int64]) -> tuple[list[int], list[Choice]]:
    """The rows that the text follows, and what verification chose along them."""
    rows: list[int] = []
    choices: list[Choice] = []
    path: tuple[int, ...] = ()
    for rank in (*ranks.tolist(), -1):
        offered = sum((*path, child) in tree for child in range(BOTH.frontier))
        found = (*path, rank) in tree
        if offered:
            choices.append(Choice(rank if found else None, offered))
        if not found:
            break
        path = (*path, rank)
        rows.append(tree[path])
    return rows, choices


def texts(acceptance: float, tokens: int, count: int) -> Iterator[NDArray[np.int64]]:
    """The rank at which the draft names each token: the same for every configuration."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        yield np.where(rng.random(tokens) < acceptance, 0, rng.geometric(NEXT, tokens))


def seconds_of(costs: CostModel, greedy: bool, plan: Plan, sharing: int, context: int, everybody: bool) -> float:
    """What a round takes. everybody: all who share its passes make the same plan."""
    host = costs.greedy if greedy else costs.sampled
    if not plan.depth:
        return costs.target.at(sharing, context) / sharing + host.plain
    frontier, tokens = (1, plan.depth) if plan.chain else (min(BOTH.frontier, plan.size), plan.size)
    others = sharing if everybody else 1
    drafting = costs.draft.at(2 * others, context) + (plan.depth - 1) * costs.draft.at(frontier * others, context)
    rows = (tokens + 1) * sharing if everybody else tokens + sharing
    plain = 0.0 if everybody else costs.target.at(sharing, context) * (1 - 1 / sharing)
    verify = (costs.target.at(rows, context) - plain) / others
    return drafting / others + verify + host.round + host.token * tokens


def fixed(
    costs: CostModel, greedy: bool, acceptance: float, ranks: NDArray[np.int64], plan: Plan, sharing: int
) -> Spent:
    """One text, the same proposal in every round."""
    position, seconds = 0, 0.0
    while position < len(ranks):
        depth = min(plan.depth, len(ranks) - position - 1)
        limited = plan._replace(depth=depth)
        tree = tree_of(acceptance, depth, plan.size, plan.chain) if depth else {}
        rows = accepted(tree, ranks[position:])[0] if depth else []
        seconds += seconds_of(costs, greedy, limited, sharing, PROMPT + position, everybody=True)
        position += len(rows) + 1
    return Spent(len(ranks), seconds)


def planned(
    costs: CostModel, greedy: bool, acceptance: float, ranks: NDArray[np.int64], experience: Experience, sharing: int
) -> Spent:
    """One text by the controller, the draft's reading of the prompt included where speculation is not tried at once."""
    controller = Controller(costs, BOTH, greedy, experience)
    position, seconds = 0, 0.0
    read = controller.worth_reading(PROMPT, len(ranks) - 1, sharing)
    unread = 1 if read else PROMPT
    while position < len(ranks):
        context = PROMPT + position
        plan = controller.plan(context, len(ranks) - position - 1, sharing, unread)
        seconds += seconds_of(costs, greedy, plan, sharing, context, everybody=not plan.probe)
        if not plan.depth:
            position, unread = position + 1, unread + 1
            continue
        if unread > BOTH.depth:
            seconds += costs.draft.at(unread, context)
        rows, choices = accepted(tree_of(acceptance, plan.depth, plan.size, plan.chain), ranks[position:])
        controller.observe(plan, rows, choices)
        position, unread = position + len(rows) + 1, 1
    return Spent(len(ranks), seconds)


def choices_in_hindsight() -> dict[str, Plan]:
    """Plain decoding, every chain, every tree of a usual depth."""
    plain = {"plain": Plan(0, 0, 1.0, 0.0, 1.0, probe=False)}
    chains = {f"K = {length}": Plan(length, length, 0.0, 0.0, 0.0, False, chain=True) for length in LENGTHS}
    trees = {f"tree {size}": Plan(4, size, 0.0, 0.0, 0.0, False) for size in SIZES[1:]}
    return plain | chains | trees


def speeds(
    costs: CostModel, greedy: bool, acceptance: float, tokens: int, count: int, sharing: int = 1
) -> dict[str, float]:
    """Tokens per second of all texts together, over plain decoding."""
    ranks = list(texts(acceptance, tokens, count))
    experience = Experience()
    seconds = {
        name: sum(fixed(costs, greedy, acceptance, each, plan, sharing).seconds for each in ranks)
        for name, plan in choices_in_hindsight().items()
    }
    alone = sum(planned(costs, greedy, acceptance, each, Experience(), sharing).seconds for each in ranks)
    by_cost = sum(planned(costs, greedy, acceptance, each, experience, sharing).seconds for each in ranks)
    seconds |= {"first request": alone, "by cost": by_cost}
    return {name: seconds["plain"] / value for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", help="whose measured costs to use beside the made-up ones")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--sharing", type=int, default=1)
    parser.add_argument("--sampled", action="store_true", help="time on the host as at temperature 1")
    add_output(parser, "planning_simulated", required=False)
    args = parser.parse_args()
    machines = dict(MACHINES)
    measured = read_costs(args.bundle) if args.bundle is not None else None
    if measured is not None:
        machines[args.bundle.name] = measured
    simulated: dict[str, dict[str, dict[str, float]]] = {}
    for name, costs in machines.items():
        result = Table("acceptance", "best fixed", "", "by cost", "/ best", "first request", "/ best", title=name)
        for acceptance in ACCEPTANCES:
            found = speeds(costs, not args.sampled, acceptance, args.tokens, args.texts, args.sharing)
            rounded = {choice: round(speed, 3) for choice, speed in found.items()}
            simulated.setdefault(name, {})[str(acceptance)] = rounded
            own, first = found.pop("by cost"), found.pop("first request")
            best = max(found, key=lambda key: found[key])
            cells = [
                best,
                *(f"{value:.2f}" for value in (found[best], own, own / found[best], first, first / found[best])),
            ]
            result.add_row(str(acceptance), *cells)
        Console().print(result)
    if args.output is not None:
        settings = {"tokens": args.tokens, "texts": args.texts, "sharing": args.sharing, "sampled": args.sampled}
        write_results(args.output, args.name, {**settings, "speed_over_plain": simulated})


if __name__ == "__main__":
    main()
