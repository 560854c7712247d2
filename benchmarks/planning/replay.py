"""Speed of planned rounds against plain decoding and fixed chains, replayed from real proposals in the time of a cost
table.

No engine runs and no clock is read: `traces.py` says what the draft proposes before every token of real texts, and how
much of it the target accepts. Requests run one after the other. `tests/benchmarks/test_planning.py` replays right
costs, wrong ones, and those of a machine whose speed changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.planning.traces import LIMITS, DrawnPlace, Place, Trace, Verified
from draftwood.runtime.speculation.planning.controller import Controller, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, PassCosts
from draftwood.runtime.speculation.planning.drift import Drift, scaled
from draftwood.runtime.speculation.planning.history import History
from draftwood.runtime.speculation.planning.lookups import LookupEstimate, Match, best_lookup

TRACE = Path(__file__).with_name("smollm2_trace.json")
DRAWN_TRACE = Path(__file__).with_name("smollm2_trace_drawn.json")  # at temperature 0.7
USUAL_TRACE = Path(__file__).with_name("qwen_trace.json")  # of a target and its smaller sister, eight kinds of text
LOOKUPS = Path(__file__).with_name("qwen_lookups.json")  # of the same pair, before every token of 16 texts
CHAINS = (1, 2, 3, 4)
# Seconds of processor time: of a new plan, and of a round of a request that may draft but does not, beyond that of a
# request without a draft.
PLAN, HELD = 35e-6, 5e-6
PLAIN = RoundPlan(0, 0, 1.0, 0.0, 1.0, probe=False)
# Of real over stored seconds, one pair after the other: factors of reading weights, and of rows' products.
PHASES = ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (0.6, 1.0), (2.0, 2.7))
PHASE_SECONDS = 2.0
SETTLED = 16  # rows from which on a pass takes the table's time in any case


class Machine(NamedTuple):
    """The real costs, which hold for so many seconds one after the other."""

    phases: tuple[CostModel, ...]
    seconds: float = 1.0

    def at(self, time: float) -> CostModel:
        return self.phases[int(time / self.seconds) % len(self.phases)]


class Passes(NamedTuple):
    """The draft's passes of a round: rows of each, and the seconds of all."""

    rows: list[int]
    seconds: float


class Planner(Protocol):
    """What decides about proposals. seconds: that planning has taken on the host."""

    seconds: float

    def begin(self, prompt: int, left: int) -> bool:
        """A request begins. Whether its draft reads the prompt at once."""
        ...

    def plan(self, context: int, left: int, unread: int) -> RoundPlan: ...

    def observe(self, plan: RoundPlan, found: Verified, rows: int, seconds: float, drafted: Passes) -> None:
        """What a round has shown, and what its target pass of so many rows took, and the draft's."""
        ...


class FixedChain:
    """Always a chain of this length; plain decoding for 0."""

    seconds = 0.0

    def __init__(self, length: int) -> None:
        self._length = length

    def begin(self, prompt: int, left: int) -> bool:
        return self._length > 0

    def plan(self, context: int, left: int, unread: int) -> RoundPlan:
        depth = min(self._length, left)
        return PLAIN._replace(depth=depth, size=depth, chain=True) if depth else PLAIN

    def observe(self, plan: RoundPlan, found: Verified, rows: int, seconds: float, drafted: Passes) -> None:
        pass


class ByCost:
    """The default settings: requests of one engine, which learn from each other."""

    def __init__(self, costs: CostModel, greedy: bool = True) -> None:
        widths = [width for width in costs.target.widths if width <= LIMITS.max_total_draft_tokens + 1]
        self._settings = costs, LIMITS._shapes(widths), greedy, History(Drift(costs))
        self.seconds = 0.0

    def begin(self, prompt: int, left: int) -> bool:
        self._controller = Controller(*self._settings)
        return self._controller.worth_reading(prompt, left, 1, prompt)

    def plan(self, context: int, left: int, unread: int) -> RoundPlan:
        self.seconds += HELD
        if (held := self._controller.held(left, 1)) is not None:
            return held
        self.seconds += PLAN
        return self._controller.plan(context, left, 1, unread)

    def observe(self, plan: RoundPlan, found: Verified, rows: int, seconds: float, drafted: Passes) -> None:
        self._controller.observe_pass(rows, seconds)
        if plan.depth:
            self._controller.observe_draft(*drafted)
            self._controller.observe(plan, found.rows, found.choices)


def replay(traces: Sequence[Trace], planner: Planner, real: Machine) -> float:
    """Tokens per second of these texts one after the other."""
    seconds = planner.seconds
    for trace in traces:
        costs, left = real.at(seconds), len(trace.places)
        assert costs.draft is not None, "a pair is replayed"
        seconds += costs.target.at(max(1, trace.prompt - 1), 0)
        unread = trace.prompt  # committed tokens that the draft has not read, the root included
        if planner.begin(trace.prompt, left - 1):
            seconds += costs.draft.at(trace.prompt - 1, 0)
            unread = 1
        while left:
            context, place = trace.prompt + len(trace.places) - left, trace.places[-left]
            plan = planner.plan(context, left - 1, unread) if left > 1 else PLAIN
            spent, found = run_round(plan, place, context, unread, real.at(seconds), planner)
            seconds += spent
            taken = len(found.rows)
            unread = 1 + (taken == plan.depth) if plan.depth else unread + 1
            left -= min(taken + 1, left)
    return sum(len(trace.places) for trace in traces) / (seconds + planner.seconds)


def run_round(
    plan: RoundPlan, place: Place | DrawnPlace, context: int, unread: int, costs: CostModel, planner: Planner
) -> tuple[float, Verified]:
    """Seconds of a round, and what was accepted. unread: tokens that the draft reads in its first pass."""
    assert costs.draft is not None and costs.following is not None
    host = costs.greedy if isinstance(place, Place) else costs.sampled
    size = min(plan.size, LIMITS.frontier_width) if plan.depth == 1 else plan.size
    seconds = float(costs.target.at(1 + size, context))
    if not plan.depth:
        planner.observe(plan, Verified([], []), 1, seconds, Passes([], 0.0))
        return seconds + host.plain, Verified([], [])
    found = place.verify(plan.depth, plan.size, plan.chain)
    rows = [unread] + [1 if plan.chain else min(LIMITS.frontier_width, plan.size)] * (plan.depth - 1)
    draft = costs.draft.at(unread, context) + sum(costs.following.at(each, context) for each in rows[1:])
    planner.observe(plan, found, 1 + size, seconds, Passes(rows, draft))
    return seconds + draft + host.round + host.token * size, found


def with_lookups(costs: CostModel, depth: int, branches: bool) -> float:
    """Tokens per second of chains of `depth` tokens, and of prompt lookups in their place where these are expected to
    bring more. branches: or beside the chain, in its pass, as if one were right independently of the other."""
    assert costs.draft is not None and costs.following is not None
    # Of each place: right tokens of the longest chain; the n-gram of a lookup, its tokens, and the right ones.
    texts = json.loads(LOOKUPS.read_text(encoding="utf-8"))["texts"]
    passes = [float(costs.target.at(1 + size, 0)) + costs.greedy.token * size for size in range(64)]
    drafted = float(costs.draft.at(2, 0) + (depth - 1) * costs.following.at(1, 0))
    right_chains = np.array([place[0] for places in texts for place in places])
    in_chain = np.array([(right_chains >= each).mean() for each in range(1, 1 + depth)])
    speed, general = (1 + in_chain.sum()) / (passes[depth] + drafted), LookupEstimate()
    tokens, seconds = 0, 0.0
    for places in texts:
        own, at = LookupEstimate(general), 0
        while at < len(places):
            longest, ngram, found, right = places[at]
            chained = min(longest, depth)
            # What each choice is expected to bring beyond chains in the same time; its tokens and seconds.
            choices = [(0.0, 1 + chained, passes[depth] + drafted)]
            expected = own.expected(ngram, found) if found else []
            if found:
                best = best_lookup(expected, passes[1 : 1 + found], speed)
                choices.append((best.tokens - speed * best.seconds, 1 + min(best.depth, right), best.seconds))
                own.observe(Match(ngram, [1] * found), [1] * right + [0])
            for size in range(1, 1 + branches * found):
                both = float((np.diff(expected[:size], prepend=0)[:depth] * in_chain[:size]).sum())
                value = 1 + in_chain.sum() + expected[size - 1] - both
                value -= speed * (passes[depth + size - round(both)] + drafted)
                longer = passes[depth + size - min(chained, size, right)] + drafted
                choices.append((value, 1 + max(chained, min(size, right)), longer))
            _, gained, spent = max(choices)
            tokens, seconds, at = tokens + gained, seconds + spent, at + gained
    return tokens / seconds


def drifting(costs: CostModel) -> Machine:
    """A machine whose speed changes. A pass takes the longer one of two times: of reading all weights, as its narrowest
    one does, and of its rows' products, of which its widest one consists."""

    def phase(memory: float, rows: float) -> CostModel:
        target = costs.target
        wide = np.asarray(target.widths) * (target.seconds[0][-1] / target.widths[-1] / target.seconds[0][0])
        slower = np.maximum(memory, rows * wide) / np.maximum(1.0, wide)
        draft, further = (
            None if each is None else scaled(each, np.array([memory])) for each in (costs.draft, costs.further)
        )
        return replace(costs, target=scaled(target, slower), draft=draft, further=further)

    return Machine(tuple(phase(*factors) for factors in PHASES), PHASE_SECONDS)


def distorted(costs: CostModel, slower: float, faster: float) -> Machine:
    """What a round really takes. slower: seconds of every round with a proposal. faster: part of the time of the
    narrowest pass; that of wider ones approaches the table's."""

    def narrow(passes: PassCosts) -> PassCosts:
        saved = (1 - faster) * np.maximum(0.0, 1 - (np.asarray(passes.widths) - 1) / SETTLED)
        rows = np.asarray(passes.seconds)
        return replace(passes, seconds=tuple(map(tuple, (rows - saved * rows[:, :1]).tolist())))

    greedy = replace(costs.greedy, round=costs.greedy.round + slower)
    sampled = replace(costs.sampled, round=costs.sampled.round + slower)
    return Machine((replace(costs, target=narrow(costs.target), greedy=greedy, sampled=sampled),))
