"""One budget of draft tokens for all requests: in the time of a cost table, without engines and clocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from controllers import CHAIN, TREES, choices
from costs import passes, table
from fakes import FakeEngine, random_model

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.budget import DraftBudget, allocate, worth_most
from draftwood.runtime.speculation.planning.controller import Controller, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from draftwood.runtime.speculation.planning.drift import Drift
from draftwood.runtime.speculation.planning.estimate import Shapes
from draftwood.runtime.speculation.planning.history import History
from draftwood.runtime.speculation.planning.prices import Candidates, costs_at, table_of

# Milliseconds of SmolLM2-135M in int8 on two cores: of a pass, of each further row, and on the host.
SMALL = CostModel(passes(6.0, 0.65), passes(0.2, 0.03), HostCosts(0.13, 0.5, 0.06), HostCosts(0.19, 0.7, 0.15), {})
MEMORY_BOUND = CostModel(passes(100.0, 1.0), passes(5.0, 0.1), HostCosts(0.1, 0.5, 0.1), HostCosts(0.1, 0.5, 0.1), {})
COSTLY_DRAFT = CostModel(passes(6.0, 0.3), passes(3.0, 0.3), HostCosts(0.1, 0.5, 0.1), HostCosts(0.1, 0.5, 0.1), {})
MACHINES = {"small": SMALL, "memory-bound": MEMORY_BOUND, "costly draft": COSTLY_DRAFT}
COUNTS = (1, 4, 16, 32, 64)
CONTEXT = 60
PLAN = 0.05  # milliseconds of processor time of a new plan, as measured where most are of plain decoding


def seconds_of(costs: CostModel, plans: Sequence[RoundPlan]) -> float:
    """Of a round of all requests, whose passes are joint."""
    assert costs.draft is not None
    drafting = [plan for plan in plans if plan.depth]
    total = costs.target.at(sum(1 + plan.depth for plan in plans), CONTEXT)
    for depth in range(1, max((plan.depth for plan in drafting), default=0) + 1):
        rows = sum(plan.depth >= depth for plan in drafting) * (2 if depth == 1 else 1)
        total += costs.draft.at(rows, CONTEXT)
    host = sum(costs.greedy.round + costs.greedy.token * plan.depth for plan in drafting)
    return total + host + costs.greedy.plain * (len(plans) - len(drafting))


class Timed(Controller):
    """Adds up what its plans cost on the host, in milliseconds."""

    planning = 0.0

    def _new_plan(self, context: int, remaining: int, batch_size: int, unread: int) -> RoundPlan:
        self.planning += PLAN
        return super()._new_plan(context, remaining, batch_size, unread)


def speed(costs: CostModel, acceptances: Sequence[float], rounds: int = 150) -> float:
    """Tokens per second over those of plain decoding, of as many requests with chains of these acceptances, which know
    nothing before. The time of planning is included."""
    rng, budget, history = np.random.default_rng(0), DraftBudget(), History()
    controllers = [Timed(costs, CHAIN, True, history, budget) for _ in acceptances]
    tokens = seconds = 0.0
    for _ in range(rounds):
        batch_size = len(acceptances)
        plans = [each.held(1000, batch_size) or each.plan(CONTEXT, 1000, batch_size) for each in controllers]
        seconds += seconds_of(costs, plans)
        tokens += len(plans)
        for controller, plan, acceptance in zip(controllers, plans, acceptances, strict=True):
            if plan.depth:
                accepted = int(np.cumprod(rng.random(plan.depth) < acceptance).sum())
                tokens += accepted
                controller.observe(plan, list(range(1, accepted + 1)), choices(plan, accepted))
    seconds += sum(each.planning for each in controllers)
    plain = [RoundPlan(0, 0, 1.0, 0.0, 1.0, probe=False)] * len(acceptances)
    return tokens / seconds * seconds_of(costs, plain) / len(plain)


@pytest.mark.parametrize("acceptance", [0.2, 0.6])
@pytest.mark.parametrize("machine", MACHINES)
def test_speculation_is_never_slower_than_plain_decoding(machine: str, acceptance: float) -> None:
    """At any number of requests; the difference is what probes and the first guesses cost."""
    for count in COUNTS:
        rounds = 400 if count <= 16 else 200  # more requests learn faster
        assert speed(MACHINES[machine], [acceptance] * count, rounds) > 0.98, count


def test_speculation_pays_where_passes_are_bound_by_memory() -> None:
    assert all(speed(MEMORY_BOUND, [0.8] * count) > 1.3 for count in (1, 4, 16))


def test_rows_go_to_those_whose_drafts_are_accepted() -> None:
    """Requests of one kind each would get the same proposals from plans of their own."""
    budget = DraftBudget()
    controllers = [Controller(MEMORY_BOUND, CHAIN, True, History(), budget) for _ in range(16)]
    rng, depths = np.random.default_rng(1), np.zeros(16)
    for step in range(120):
        for index, controller in enumerate(controllers):
            plan = controller.plan(CONTEXT, 1000, 16)
            depths[index] += plan.depth if step >= 60 else 0
            if plan.depth:
                accepted = int(np.cumprod(rng.random(plan.depth) < (0.95 if index % 2 else 0.3)).sum())
                controller.observe(plan, list(range(1, accepted + 1)), choices(plan, accepted))
    assert depths[1::2].mean() > 2 * depths[::2].mean()
    assert speed(MEMORY_BOUND, [0.95, 0.3] * 8) > 1.3


def members(alphas: Sequence[float], deepest: int = 4) -> list[Candidates]:
    """Chains of up to `deepest` tokens."""
    depths, table = np.arange(deepest + 1), table_of(CHAIN, deepest, 1)
    return [Candidates(table, np.cumsum(alpha**depths), np.zeros(deepest + 1)) for alpha in alphas]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_choice_is_nearly_the_best_of_all(machine: str) -> None:
    """Of 5^4 combinations, by exhaustive search."""
    costs = MACHINES[machine]
    costs = CostModel(costs.target, costs.draft, HostCosts(0, 0, 0), HostCosts(0, 0, 0), {})
    for seed in range(3):
        wanted = members(np.random.default_rng(seed).uniform(0.1, 0.95, 4).tolist())

        def rate(depths: Sequence[int], wanted: Sequence[Candidates] = wanted) -> float:
            plans = [RoundPlan(depth, depth, 1.0, 0.0, 1.0, probe=False) for depth in depths]
            tokens = sum(float(candidates.tokens[depth]) for candidates, depth in zip(wanted, depths, strict=True))
            return tokens / seconds_of(costs, plans)

        best = max(rate(tuple(each)) for each in np.ndindex(5, 5, 5, 5))
        at = costs_at(costs, CONTEXT, 4)
        found = allocate(wanted, at)
        assert rate(found.numbers) > 0.97 * best
        assert found.speed_up == pytest.approx(rate(found.numbers) / rate([0] * 4), rel=1e-6)
        at_this_price = [worth_most(candidates, np.array([found.price]), at).item() for candidates in wanted]
        assert at_this_price == found.numbers


def test_a_request_stands_for_those_that_are_no_members() -> None:
    """Eight alike are planned as one that counts eight times. Prices find nearly what the best common choice yields."""
    costs = costs_at(MEMORY_BOUND, CONTEXT, 8)
    one = allocate(members([0.8]), costs)
    assert allocate(members([0.8]) * 8, costs) == one._replace(numbers=one.numbers * 8)
    assert allocate(members([0.8] * 8), costs).speed_up == pytest.approx(one.speed_up, rel=0.02)


def test_attention_to_others_counts_only_where_rows_are_read_by_all() -> None:
    seconds = (1.0, 1.0), (50.0, 50.0)
    spanning, own = (PassCosts((1, 64), (0, 1000), seconds, spans=spans) for spans in (True, False))
    rows = np.array([4])
    assert spanning.shared(rows, 100, 10) == pytest.approx(50.0)
    assert own.shared(rows, 100, 10) == pytest.approx(5.9)


def test_a_choice_stays_until_its_request_asks_again_and_ends_with_it() -> None:
    budget, (right, wrong) = DraftBudget(), members([0.9, 0.1])
    first = budget.choose("first", right, CONTEXT, 2, SMALL)
    second = budget.choose("second", right, CONTEXT, 2, SMALL)  # at the price of the first
    assert min(first.number, second.number) > 0 and budget.changes == 1
    again = budget.choose("first", wrong, CONTEXT, 2, SMALL)
    assert 0 < again.number < first.number and budget.changes == 2
    assert budget.choose("second", right, CONTEXT, 2, SMALL).number > 0 and budget.changes == 2
    budget.leave("second")
    assert budget.choose("first", wrong, CONTEXT, 1, SMALL).speed_up < again.speed_up
    budget.leave("first")
    assert not (budget._candidates or budget._choices or budget._served)


def test_a_text_that_ended_is_no_member() -> None:
    model, budget = random_model(0, 6), DraftBudget()
    engines, costs = (FakeEngine(model, 6), FakeEngine(model, 6, "draft")), table(1.0, 0.1)
    for room in (1, 3):
        decoder = SpeculativeDecoder(*engines, SpeculativeConfig(), 4096, (), costs, budget=budget)
        sampler = Sampler(SamplingParams(max_tokens=60, ignore_eos=True), [0, 1], (), 6)
        chunks = decoder.generate([0, 1], sampler, seeded_streams(0), SpecDecodeStats())
        assert len([*zip(range(room), chunks, strict=False)]) and budget._candidates
        chunks.close()  # type: ignore[attr-defined]  # a generator
        assert not budget._candidates


def test_the_choice_follows_what_shared_passes_take_at_present() -> None:
    """Rows that cost what a pass of their own would are not worth a draft, until the machine is as fast as before."""
    budget = DraftBudget(Drift(MEMORY_BOUND))
    assert budget.drift is not None

    def chosen(slower: float) -> int:
        for rows in (4, 12) * 20:
            seconds = float(MEMORY_BOUND.target.shared(np.array(rows), CONTEXT, 4)) * (slower if rows > 4 else 1)
            budget.observe_pass(rows, 4, CONTEXT, seconds)
        planner = Controller(MEMORY_BOUND, CHAIN, True, History(), budget)
        depth = planner.plan(CONTEXT, 1000, 4).depth
        planner.leave()
        return depth

    assert [chosen(slower) > 0 for slower in (1.0, 4.0, 1.0)] == [True, False, True]


@pytest.mark.parametrize("shapes", [CHAIN, TREES])
def test_a_plan_never_goes_beyond_the_end_of_the_text(shapes: Shapes) -> None:
    """Nor where the choice was made when there was more room."""
    controller = Controller(MEMORY_BOUND, shapes, True)
    for remaining in (9, 7, 5, 4, 3, 2, 1, 0):
        assert controller.plan(CONTEXT, remaining, 4).depth <= remaining


def test_the_number_of_a_choice_is_where_its_proposal_stands() -> None:
    """Chains and trees of 3 and 7 tokens."""
    found = table_of(Shapes((3, 7), 4, 2, True), 4, 2)
    assert len(found.tokens) == 1 + 2 * 3 * 4
    for source, kind, depth in np.ndindex(2, 3, 4):
        number, tokens = found.number(source, kind, depth + 1), (depth + 1, 3, 7)[kind]
        assert found.tokens[number] == tokens
        each = [2, *[1 if kind == 0 else 2] * depth]
        assert found.drafted[number].tolist() == each + [0] * (3 - depth)


@pytest.mark.parametrize(("batch_size", "holds"), [(11, False), (12, True), (20, True), (21, False)])
def test_a_plan_stays_while_nearly_as_many_requests_share_the_passes(batch_size: int, holds: bool) -> None:
    planner = Controller(MEMORY_BOUND, CHAIN, True)
    planner.plan(CONTEXT, 1000, 16)
    assert (planner.held(1000, batch_size) is not None) is holds
