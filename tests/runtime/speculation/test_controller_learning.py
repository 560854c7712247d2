"""The controller: what it learns from verified rounds, and when it probes whether speculation pays again."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from controllers import CHAIN, DEAR_DRAFT, TREES, choices, settled
from costs import FREE, passes, table

from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.controller import Controller, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from draftwood.runtime.speculation.planning.estimate import SAVED_GUESS, AcceptanceEstimate, Shapes, VerifierChoice
from draftwood.runtime.speculation.planning.history import History
from draftwood.runtime.speculation.planning.prices import CONTEXT_STEP
from draftwood.runtime.speculation.verifier import sample_and_match, traversal_verification


def test_a_draft_that_is_never_right_is_asked_almost_never() -> None:
    plans = settled(table(1.0, 0.3), CHAIN, 0.0)
    spent = sum(plan.seconds for plan in plans)
    tokens = sum(1 for _ in plans)  # nothing is ever accepted
    assert spent / tokens < 1.05
    assert not plans[-1].depth or plans[-1].probe


def test_speculation_comes_back_when_the_draft_improves() -> None:
    controller = Controller(table(1.0, 0.3), CHAIN, greedy=True)
    for right in (False, True):
        plans = []
        for _ in range(400):
            plan = controller.plan(100, 1000)
            plans.append(plan)
            if plan.depth:
                accepted = plan.depth if right else 0
                controller.observe(plan, list(range(1, accepted + 1)), choices(plan, accepted))
        assert bool(plans[-1].depth and not plans[-1].probe) is right
        assert any(plan.probe for plan in plans)


def test_one_round_teaches_every_smaller_budget() -> None:
    """Row 4 at depth 2 is beyond a budget of 3, which would have got one token."""
    controller = Controller(table(), TREES, greedy=True)
    for _ in range(300):
        controller.observe(RoundPlan(3, 7, 1.0, 0.0, 1.0, False), [1, 4], [])
    (expected,) = (estimate.expected_accepted() for estimate in controller._estimates)
    assert expected[1, 2] == pytest.approx(1.0, abs=0.2)  # three tokens
    assert expected[2, 2] == pytest.approx(2.0, abs=0.3)  # seven
    assert expected[2, 2] - expected[1, 2] > 0.7


def test_a_probe_that_has_to_read_the_whole_prompt_is_rarer_and_none_ends_a_text() -> None:
    def rounds_to_probe(unread: int, room: int = 100) -> int | None:
        controller = Controller(table(1.0, 0.6), CHAIN, greedy=True)
        counts = (count for count in range(10_000) if controller.plan(5000, room, unread=unread).probe)
        return next(counts, None)

    rare, often = rounds_to_probe(5000), rounds_to_probe(1)
    assert rare is not None and often is not None and rare > 5 * often
    assert rounds_to_probe(5000, CHAIN.depth) is None
    assert rounds_to_probe(1, CHAIN.depth) is not None and rounds_to_probe(5000, CHAIN.depth + 1) is not None


@pytest.mark.parametrize("host", [FREE, HostCosts(0.021, 0.31, 0.1)])
@pytest.mark.parametrize(
    ("batch_size", "frontier", "row"),
    [(1, 1, 0.0), (3, 1, 0.43), (3, 1, 0.02), (1, 2, 0.0), (1, 100, 0.0)],
)
def test_a_probe_waits_until_it_has_been_saved_for(batch_size: int, frontier: int, row: float, host: HostCosts) -> None:
    """1 % of plain rounds' time, 0.4 % where they share passes, pays for its draft passes, and for what it delays the
    others beyond what it saves."""
    seconds = tuple((1 + slots / 1000, 1 + slots / 1000 + 63 * row) for slots in (0, 1000))
    target, draft = PassCosts((1, 64), (0, 1000), seconds, padded=False), passes(DEAR_DRAFT, row=0.1)
    controller = Controller(CostModel(target, draft, host, host, {}), CHAIN._replace(frontier=frontier), greedy=True)
    plans = [controller.plan(2 * CONTEXT_STEP, 100, batch_size)]
    while not plans[-1].probe:
        plans.append(controller.plan(2 * CONTEXT_STEP, 100, batch_size))
    probe, plain, host = plans[-1], plans[0].seconds, host if batch_size == 1 else host.shared
    assert plain == pytest.approx((1 + row * (batch_size - 1)) / batch_size + 0.128 + host.plain)
    delay = (row + host.token) * probe.size + host.round - host.plain - (probe.tokens - 1) * plain
    drafted = probe.depth * (DEAR_DRAFT + 0.1 * (min(frontier, 64) - 1))  # with at most the widest measured passes
    assert len(plans) == math.floor((100 if batch_size == 1 else 250) * (drafted + max(0.0, delay)) / plain) + 1


@pytest.mark.parametrize(("delay", "probes"), [(0.0, [300, 601]), (1.0, [400, 801])])
def test_probes_cost_1_percent_of_plain_rounds(
    delay: float, probes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe costs as much as 3 plain rounds, and what it delays others: it follows 300 of these, each time."""
    controller = Controller(table(1.0, DEAR_DRAFT), CHAIN, greedy=True)
    monkeypatch.setattr(controller, "_delay", lambda *round: delay)
    assert [count for count in range(900) if controller.plan(0, 100).probe] == probes


def taught(*seen: VerifierChoice) -> float:
    """What a tree of two choices for one token is expected to get, when only these choices were made."""
    estimate = AcceptanceEstimate(Shapes((2,), 1, 2, False))
    for choice in seen * 60:
        estimate.observe(None, 1, [], [choice])
    return float(estimate.expected_accepted()[0, 0])


def test_second_choices_count_where_they_were_offered() -> None:
    """A tree of two gets α + (1 - α) ρ of a token."""
    nothing, first, second, third = (
        VerifierChoice(None, 2),
        VerifierChoice(0, 2),
        VerifierChoice(1, 2),
        VerifierChoice(2, 3),
    )
    assert taught(second) > 0.8 and taught(first) > 0.8
    assert taught(nothing) < 0.15 and taught(third) < 0.15
    assert taught(nothing) < taught(nothing, nothing, nothing, second) < taught(nothing, second) < taught(second)
    # Where one choice was offered, nothing is known about the second one: ρ stays at its guess.
    assert taught(VerifierChoice(None, 1)) == pytest.approx(SAVED_GUESS, abs=0.12) and taught(nothing) < taught(
        VerifierChoice(None, 1)
    )


def test_the_first_choices_of_a_tree_teach_the_chain() -> None:
    """Trees whose first choices were accepted at two depths and rejected at the third: so would a chain's tokens be."""
    shapes = Shapes((3, 6), 3, 2, True)
    estimate = AcceptanceEstimate(shapes)
    first, nothing = VerifierChoice(0, 2), VerifierChoice(None, 2)
    for _ in range(60):
        estimate.observe(6, 3, [1, 2], [first, first, nothing])
    one, two, three = estimate.expected_accepted()[0]
    assert one > 0.9 and two - one > 0.85 and three - two < 0.2
    # What lies below a rejected first choice says nothing about a chain, so the prior stays.
    parted = AcceptanceEstimate(shapes)
    for _ in range(60):
        parted.observe(6, 3, [2, 4], [VerifierChoice(1, 2), first, nothing])
    one, two, _ = parted.expected_accepted()[0]
    assert one < 0.1 and two - one < 0.1 * one + 0.1


def test_a_request_starts_from_the_estimate_of_the_one_before() -> None:
    history = History()
    first = Controller(table(1.0, 0.4), CHAIN, greedy=True, history=history)
    plan = first.plan(0, 100)
    for _ in range(40):
        first.observe(plan, [], choices(plan, 0))
    fresh = Controller(table(1.0, 0.4), CHAIN, greedy=True)
    later = Controller(table(1.0, 0.4), CHAIN, greedy=True, history=history)
    assert fresh.plan(0, 100).depth > 0 == later.plan(0, 100).depth


def test_the_estimates_of_the_latest_shapes_are_kept() -> None:
    """A client that asks for ever other shapes fills no memory."""
    history = History()
    shapes = [CHAIN._replace(depth=depth) for depth in range(1, 66)]
    for each in (*shapes[:64], shapes[0], shapes[64]):
        history.estimate_for(each, True).observe(None, 1, [1], [VerifierChoice(0, 1)])
    fresh = [AcceptanceEstimate(each).expected_accepted()[0, 0] for each in shapes]

    def known(index: int, greedy: bool = True) -> bool:
        return bool(history.estimate_for(shapes[index], greedy).expected_accepted()[0, 0] > fresh[index])

    assert known(0) and known(2) and known(64)
    assert not known(0, greedy=False) and not known(1)


Shown = tuple[list[int], list[VerifierChoice]]  # accepted rows, and the verifier's choices


def test_a_text_departs_from_what_all_have_shown() -> None:
    """One among many texts whose draft is always right, where the others' is right in three of ten rounds: for it
    alone longer proposals are expected to succeed, beyond the depth that was tried."""
    history = History()
    right: Shown = ([1], [VerifierChoice(0, 1)])
    wrong: Shown = ([], [VerifierChoice(None, 1)])
    for number in range(40):
        usual = history.estimate_for(CHAIN, True)
        for turn in range(10):
            usual.observe(None, 1, *(right if (turn + number) % 10 < 3 else wrong))
    before = history.estimate_for(CHAIN, True).expected_accepted()[0]
    assert before[0] == pytest.approx(0.3, abs=0.03) and before[3] == pytest.approx(0.43, abs=0.06)
    special = history.estimate_for(CHAIN, True)
    for _ in range(20):
        special.observe(None, 1, *right)
    assert special.expected_accepted()[0, 0] > 0.55 and special.expected_accepted()[0, 3] > 1.1
    assert history.estimate_for(CHAIN, True).expected_accepted()[0, 0] < 0.38


@pytest.mark.parametrize(("drawn", "chosen"), [(0.8, 0.3), (0.3, 0.8), (0.8, 0.7), (0.7, 0.8)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_tokens_come_from_the_source_that_is_accepted_more_often(drawn: float, chosen: float, batch_size: int) -> None:
    """Rounds of one source say nothing about the other, so the worse one is tried now and then, more seldom the worse
    it is."""
    controller = Controller(table(1.0, 0.05), CHAIN._replace(depth=4), greedy=False, chooses=True)
    rng = np.random.default_rng(0)
    planned: list[bool] = []
    tried: list[bool] = []
    for turn in range(1200):
        plan = controller.plan(100, 1000, batch_size)
        if turn >= 400:
            (tried if plan.probe else planned).append(plan.chosen)
        accepted = int((np.cumprod(rng.random(plan.depth) < (chosen if plan.chosen else drawn))).sum())
        controller.observe(plan, list(range(1, accepted + 1)), choices(plan, accepted))
    better = chosen > drawn
    assert planned.count(better) > 0.9 * len(planned)
    assert tried.count(better) < 0.1 * len(tried)
    assert len(tried) / 800 < (0.03 if abs(chosen - drawn) > 0.2 else 0.07)


def test_only_the_settings_that_leave_it_open_choose_tokens_above_temperature_0() -> None:
    """A named verifier, the head and a rule that stops are for drawn tokens; a named grower is the user's choice."""
    costs, widths = replace(table(1.0, 0.05), greedy=FREE, sampled=HostCosts(0.0, 1.0, 0.0)), (1, 2, 4, 8)

    def chooses(config: SpeculativeConfig, greedy: bool = False) -> bool:
        """Drawn tokens are dear here."""
        controller = config.controller(costs, widths, greedy)
        assert controller is not None
        return controller.plan(0, 100).chosen

    assert chooses(SpeculativeConfig()) and not chooses(SpeculativeConfig(), greedy=True)
    open_ones = SpeculativeConfig(max_draft_len=3, frontier_width=2, max_total_draft_tokens=5)
    assert chooses(open_ones)
    for setting in (
        {"grow": "dyspec"},
        {"grow": "chain"},
        {"grow": "topk"},
        {"verify": "traversal"},
        {"verify": "match"},
        {"merge": "gsd"},
        {"stop_rule": "confidence"},
        {"stop_rule": "specdec++"},
        {"key": "head"},
    ):
        assert not chooses(SpeculativeConfig(**setting)), setting  # type: ignore[arg-type]  # each of its own type


def test_a_plan_of_chosen_tokens_is_verified_by_matching() -> None:
    """Within the configuration's frontier; a chain of them has one child a node."""
    config = SpeculativeConfig(frontier_width=3)
    tree = RoundPlan(4, 7, 1.0, 0.0, 1.0, probe=False, chosen=True)
    for plan, width in ((tree, 3), (tree._replace(size=4, chain=True), 1)):
        limited = config.within(*plan.limits)
        assert (limited.grow, limited.frontier_width, limited.max_draft_len) == ("topk", width, 4)
        assert limited.rules(greedy=False).verify is sample_and_match
    assert config.rules(greedy=False).verify is traversal_verification
