"""Speed of the controller's plans against every fixed proposal, simulated in the time of a cost table.

    python -m benchmarks.planning.simulated [bundles/demo-110m] --tokens 80 --texts 24

No engine runs and no clock is read. A text is a list of ranks: the rank that the draft gives to each next token. It is
0 with the chosen probability; every further rank has half of the remaining probability. A tree holds the nodes of the
largest probability, as the growers build it. Sampled trees are assumed to be accepted as greedy ones are, so that
temperature matters for the time on the host only. Concurrent requests are assumed to run in step: each pays its share
of a shared pass, and all of a pass that only it needs.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from draftwood.runtime.bundle.costs import read_costs
from draftwood.runtime.speculation.planning.controller import Controller, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from draftwood.runtime.speculation.planning.estimate import Shapes, VerifierChoice
from draftwood.runtime.speculation.planning.experience import Experience

ACCEPTANCES = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95)
LENGTHS = (1, 2, 3, 4, 6, 8, 10)
TREE_SIZES = (1, 3, 7, 11, 15)
SHAPES = Shapes(TREE_SIZES, 10, 4, True, 0)
NEXT_RANK_SHARE = 0.5  # probability of the next rank, given that the token has none of the ranks before
PROMPT = 64
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
Tree = Mapping[tuple[int, ...], int]  # path of ranks -> row


def make_costs(draft: float, row: float, host: float = 0.05) -> CostModel:
    """Costs of a made-up machine, on which a target pass of one row takes 1.

    draft: time of a draft pass of one row. row: share of a pass that each further row adds. host: time of a round
    outside the engines.
    """

    def passes(once: float) -> PassCosts:
        return PassCosts(WIDTHS, (0,), (tuple(once * (1 + row * (width - 1)) for width in WIDTHS),))

    greedy, sampled = HostCosts(host / 4, host, host / 40), HostCosts(host / 2, 1.5 * host, host / 12)
    return CostModel(passes(1.0), passes(draft), greedy, sampled, {})


MACHINES = {
    "cheap draft": make_costs(0.05, 0.06),
    "costly draft": make_costs(0.3, 0.06),
    "flat target": make_costs(0.1, 0.005),
    "steep target": make_costs(0.1, 0.2),
}


@lru_cache(maxsize=4096)
def grow_tree(acceptance: float, depth: int, size: int, chain: bool) -> Tree:
    """A proposal: the row of each path, in the order of value."""
    rows: dict[tuple[int, ...], int] = {}
    heap: list[tuple[float, tuple[int, ...], float]] = [(-acceptance, (0,), 1.0)]  # value, path, the parent's value
    while heap and len(rows) < (depth if chain else size):
        value, path, above = heapq.heappop(heap)
        rows[path] = len(rows) + 1
        if len(path) < depth:
            heapq.heappush(heap, (value * acceptance, (*path, 0), -value))
        if not chain and path[-1] + 1 < SHAPES.frontier:
            rank = path[-1] + 1
            chance = (1 - acceptance) * NEXT_RANK_SHARE * (1 - NEXT_RANK_SHARE) ** (rank - 1)
            heapq.heappush(heap, (-above * chance, (*path[:-1], rank), above))
    return rows


def follow_text(tree: Tree, ranks: NDArray[np.int64]) -> tuple[list[int], list[VerifierChoice]]:
    """The accepted rows of a tree, and what verification chose at each of their parents."""
    rows: list[int] = []
    choices: list[VerifierChoice] = []
    path: tuple[int, ...] = ()
    for rank in (*ranks.tolist(), -1):
        offered = sum((*path, child) in tree for child in range(SHAPES.frontier))
        found = (*path, rank) in tree
        if offered:
            choices.append(VerifierChoice(rank if found else None, offered))
        if not found:
            break
        path = (*path, rank)
        rows.append(tree[path])
    return rows, choices


def draw_texts(acceptance: float, tokens: int, count: int) -> Iterator[NDArray[np.int64]]:
    """Texts as ranks of their tokens; the same ones in every call."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        yield np.where(rng.random(tokens) < acceptance, 0, rng.geometric(NEXT_RANK_SHARE, tokens))


def price_round(costs: CostModel, greedy: bool, plan: RoundPlan, sharing: int, context: int, everybody: bool) -> float:
    """Seconds of a round. everybody: all requests that share its passes have the same plan."""
    assert costs.draft is not None, "a pair is simulated"
    host = costs.greedy if greedy else costs.sampled
    if not plan.depth:
        return costs.target.at(sharing, context) / sharing + host.plain
    frontier, tokens = (1, plan.depth) if plan.chain else (min(SHAPES.frontier, plan.size), plan.size)
    others = sharing if everybody else 1
    drafting = costs.draft.at(2 * others, context) + (plan.depth - 1) * costs.draft.at(frontier * others, context)
    rows = (tokens + 1) * sharing if everybody else tokens + sharing
    plain = 0.0 if everybody else costs.target.at(sharing, context) * (1 - 1 / sharing)
    verify = (costs.target.at(rows, context) - plain) / others
    return drafting / others + verify + host.round + host.token * tokens


def simulate_fixed(
    costs: CostModel, greedy: bool, acceptance: float, ranks: NDArray[np.int64], plan: RoundPlan, sharing: int
) -> float:
    """Seconds of a text with the same proposal in every round."""
    position, seconds = 0, 0.0
    while position < len(ranks):
        depth = min(plan.depth, len(ranks) - position - 1)
        limited = plan._replace(depth=depth)
        tree = grow_tree(acceptance, depth, plan.size, plan.chain) if depth else {}
        rows = follow_text(tree, ranks[position:])[0] if depth else []
        seconds += price_round(costs, greedy, limited, sharing, PROMPT + position, everybody=True)
        position += len(rows) + 1
    return seconds


def simulate_controller(
    costs: CostModel, greedy: bool, acceptance: float, ranks: NDArray[np.int64], experience: Experience, sharing: int
) -> float:
    """Seconds of a text that the controller plans. They include the time in which the draft reads the prompt, if that
    happens after the first round."""
    controller = Controller(costs, SHAPES, greedy, experience)
    position, seconds = 0, 0.0
    read = controller.worth_reading(PROMPT, len(ranks) - 1, sharing, PROMPT)
    unread = 1 if read else PROMPT
    while position < len(ranks):
        context = PROMPT + position
        plan = controller.plan(context, len(ranks) - position - 1, sharing, unread)
        seconds += price_round(costs, greedy, plan, sharing, context, everybody=not plan.probe)
        if not plan.depth:
            position, unread = position + 1, unread + 1
            continue
        if unread > SHAPES.depth and costs.draft is not None:
            seconds += costs.draft.at(unread, context)
        rows, choices = follow_text(grow_tree(acceptance, plan.depth, plan.size, plan.chain), ranks[position:])
        controller.observe(plan, rows, choices)
        position, unread = position + len(rows) + 1, 1
    return seconds


def list_fixed_plans() -> dict[str, RoundPlan]:
    """Plain decoding, chains of all LENGTHS, and trees of all TREE_SIZES."""
    plain = {"plain": RoundPlan(0, 0, 1.0, 0.0, 1.0, probe=False)}
    chains = {f"K = {length}": RoundPlan(length, length, 0.0, 0.0, 0.0, False, chain=True) for length in LENGTHS}
    trees = {f"tree {size}": RoundPlan(4, size, 0.0, 0.0, 0.0, False) for size in TREE_SIZES[1:]}
    return plain | chains | trees


def simulate_speeds(
    costs: CostModel, greedy: bool, acceptance: float, tokens: int, count: int, sharing: int = 1
) -> dict[str, float]:
    """Speed over plain decoding of all texts together, by plan.

    "by cost" is the controller with the experience of the texts before, "first request" the one without any.
    """
    ranks = list(draw_texts(acceptance, tokens, count))
    experience = Experience()
    seconds = {
        name: sum(simulate_fixed(costs, greedy, acceptance, each, plan, sharing) for each in ranks)
        for name, plan in list_fixed_plans().items()
    }
    alone = sum(simulate_controller(costs, greedy, acceptance, each, Experience(), sharing) for each in ranks)
    by_cost = sum(simulate_controller(costs, greedy, acceptance, each, experience, sharing) for each in ranks)
    seconds |= {"first request": alone, "by cost": by_cost}
    return {name: seconds["plain"] / value for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", help="simulate with its measured costs, too")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--sharing", type=int, default=1)
    parser.add_argument("--sampled", action="store_true", help="host times of sampling, not of greedy decoding")
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
            found = simulate_speeds(costs, not args.sampled, acceptance, args.tokens, args.texts, args.sharing)
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
