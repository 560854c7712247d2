"""The controller: what it plans, what it learns, and that it never looks ahead."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
import pytest
from costs import FREE, passes, table
from enumeration import PROMPT, decoded, pair, total_variation
from fakes import FakeEngine, mixture, random_model

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler, SamplingParams
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.controller import SHARED_SPEED_UP, Controller, Experience, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from draftwood.runtime.speculation.planning.estimate import SAVED_GUESS, AcceptanceEstimate, Shapes, VerifierChoice

CHAIN = Shapes((), 12, 1, True, 0)
TREES = Shapes((1, 3, 7, 15), 8, 4, False, 0)
DEAR_DRAFT = 3.0  # passes of the target


def choices(plan: RoundPlan, accepted: int) -> list[VerifierChoice]:
    """Along a chain of which so many tokens were accepted."""
    return [*[VerifierChoice(0, 1)] * accepted, *[VerifierChoice(None, 1)] * (accepted < plan.depth)]


def settled(costs: CostModel, shapes: Shapes, alpha: float, rounds: int = 400) -> list[RoundPlan]:
    """Plans of a request whose draft's chain is accepted with probability alpha per token, at random."""
    controller, rng = Controller(costs, shapes, greedy=True), np.random.default_rng(0)
    plans = []
    for _ in range(rounds):
        plan = controller.plan(100, 1000)
        plans.append(plan)
        if plan.depth:
            accepted = int((np.cumprod(rng.random(plan.depth) < alpha)).sum())
            controller.observe(plan, list(range(1, accepted + 1)), choices(plan, accepted))
    return plans


def chain_speed(alpha: float, depth: int, draft: float) -> float:
    """Expected speed of a chain over plain decoding, in closed form (Leviathan et al., 2211.17192, theorem 3.8)."""
    return (1 - alpha ** (depth + 1)) / (1 - alpha) / (1 + depth * draft)


@pytest.mark.parametrize("draft", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.9])
def test_the_chain_is_about_as_long_as_theory_wants(alpha: float, draft: float) -> None:
    plans = settled(table(1.0, draft), CHAIN, alpha)[100:]
    best = max(1.0, *(chain_speed(alpha, depth, draft) for depth in range(1, 13)))
    got = [chain_speed(alpha, plan.depth, draft) if plan.depth else 1.0 for plan in plans]
    assert np.mean(got) > 0.95 * best


def test_a_draft_that_is_never_right_is_asked_almost_never() -> None:
    plans = settled(table(1.0, 0.3), CHAIN, 0.0)
    spent = sum(plan.seconds for plan in plans)
    tokens = sum(1 for _ in plans)  # nothing is ever accepted
    assert spent / tokens < 1.05
    assert not plans[-1].depth or plans[-1].probe


def test_a_draft_dearer_than_what_it_can_save_is_never_asked() -> None:
    assert not any(plan.depth and not plan.probe for plan in settled(table(1.0, DEAR_DRAFT), CHAIN, 1.0))


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


def test_the_size_follows_the_price_of_rows() -> None:
    """Free rows are all used; rows as dear as passes are not."""

    def size(row: float) -> int:
        controller = Controller(table(1.0, 0.01, row), TREES, greedy=True)
        for _ in range(200):
            plan = controller.plan(0, 100)
            accepted = [row for row in (1, 4, 9) if row <= plan.size][: plan.depth]
            controller.observe(plan, accepted, [])
        return plan.size

    assert size(0.0) == 15
    assert size(0.9) <= 1


def test_one_round_teaches_every_smaller_budget() -> None:
    """Row 4 at depth 2 is beyond a budget of 3, which would have got one token."""
    controller = Controller(table(), TREES, greedy=True)
    for _ in range(300):
        controller.observe(RoundPlan(3, 7, 0.0, 0.0, 0.0, False), [1, 4], [])
    expected = controller._estimate.expected_accepted()
    assert expected[1, 2] == pytest.approx(1.0, abs=0.2)  # three tokens
    assert expected[2, 2] == pytest.approx(2.0, abs=0.3)  # seven
    assert expected[2, 2] - expected[1, 2] > 0.7


def test_tokens_of_a_lookup_come_on_top_of_a_budget() -> None:
    """Rows 1 to 4 were given, rows 5 to 16 are the chain: all of it accepted is all a budget of 12 could get."""
    looked_up = CHAIN._replace(given=4)
    controller = Controller(table(1.0, 0.1), looked_up, greedy=True)
    for _ in range(300):
        controller.observe(
            RoundPlan(12, 12, 0.0, 0.0, 0.0, False, chain=True), list(range(5, 17)), [VerifierChoice(0, 1)] * 12
        )
    assert controller._estimate.expected_accepted()[0, -1] == pytest.approx(12, abs=1)


def test_a_probe_that_has_to_read_the_whole_prompt_is_rarer() -> None:
    def rounds_to_probe(unread: int) -> int:
        controller = Controller(table(1.0, 0.6), CHAIN, greedy=True)
        for count in range(10_000):
            if controller.plan(5000, 100, unread=unread).probe:
                return count
        raise AssertionError("speculation is never tried again")

    assert rounds_to_probe(5000) > 5 * rounds_to_probe(1)


@pytest.mark.parametrize("host", [FREE, HostCosts(0.021, 0.31, 0.1)])
@pytest.mark.parametrize(
    ("sharing", "given", "frontier", "row"),
    [(1, 0, 1, 0.0), (3, 0, 1, 0.43), (3, 2, 1, 0.43), (3, 0, 1, 0.02), (1, 0, 2, 0.0), (1, 0, 100, 0.0)],
)
def test_a_probe_waits_until_it_has_been_saved_for(
    sharing: int, given: int, frontier: int, row: float, host: HostCosts
) -> None:
    """1 % of plain rounds' time pays for its draft passes, and for what it delays the others beyond what it saves."""
    seconds = tuple((1 + slots / 1000, 1 + slots / 1000 + 63 * row) for slots in (0, 1000))
    target, draft = PassCosts((1, 64), (0, 1000), seconds, padded=False), passes(DEAR_DRAFT, row=0.1)
    controller = Controller(
        CostModel(target, draft, host, host, {}), CHAIN._replace(given=given, frontier=frontier), greedy=True
    )
    plans = [controller.plan(100, 100, sharing)]
    while not plans[-1].probe:
        plans.append(controller.plan(100, 100, sharing))
    probe, plain = plans[-1], plans[0].seconds
    assert plain == pytest.approx((1 + row * (sharing - 1)) / sharing + 0.1 + host.plain)
    delay = (row + host.token) * (probe.size + given) + host.round - host.plain - (probe.tokens - 1) * plain
    drafted = probe.depth * (DEAR_DRAFT + 0.1 * (min(frontier, 64) - 1))  # with at most the widest measured passes
    assert len(plans) == math.floor(100 * (drafted + max(0.0, delay)) / plain) + 1


@pytest.mark.parametrize(("delay", "probes"), [(0.0, [300, 601]), (1.0, [400, 801])])
def test_probes_cost_1_percent_of_plain_rounds(
    delay: float, probes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe costs as much as 3 plain rounds, and what it delays others: it follows 300 of these, each time."""
    controller = Controller(table(1.0, DEAR_DRAFT), CHAIN, greedy=True)
    monkeypatch.setattr(controller, "_delay", lambda *round: delay)
    assert [count for count in range(900) if controller.plan(0, 100).probe] == probes


def test_a_plain_round_is_priced_as_one() -> None:
    """Where many share a pass, time on the host decides: a plain round has less of it."""
    host = HostCosts(plain=0.01, round=0.3, token=0.02)
    costs = table(1.0, 0.02, row=0.06, host=host)
    alone, busy = (Controller(costs, TREES, greedy=True).plan(0, 100, sharing) for sharing in (1, 16))
    assert alone.depth > 0 and busy.depth == 0


def scaled(costs: CostModel, factor: float) -> CostModel:
    """The same machine, by a clock of another unit."""

    def passes(each: PassCosts) -> PassCosts:
        return replace(each, seconds=tuple(tuple(cost * factor for cost in row) for row in each.seconds))

    greedy, sampled = (HostCosts(*(cost * factor for cost in astuple(host))) for host in (costs.greedy, costs.sampled))
    return CostModel(passes(costs.target), passes(costs.draft), greedy, sampled, {})


@pytest.mark.parametrize("factor", [0.004, 30.0])
@pytest.mark.parametrize("shapes", [CHAIN, TREES])
def test_plans_do_not_depend_on_the_unit_of_costs(shapes: Shapes, factor: float) -> None:
    """Plain decoding costs something else than 1, and a speed-up is still a quotient."""
    costs = table(1.0, 0.1, row=0.03, host=HostCosts(0.02, 0.05, 0.004))
    for alpha in (0.2, 0.8):
        one, other = (settled(each, shapes, alpha, 120) for each in (costs, scaled(costs, factor)))
        for plan, same in zip(one, other, strict=True):
            assert (plan.depth, plan.size, plan.chain, plan.probe) == (same.depth, same.size, same.chain, same.probe)
            assert same.seconds == pytest.approx(factor * plan.seconds)
            assert (same.tokens, same.speed_up) == pytest.approx((plan.tokens, plan.speed_up))
        for plan in other:
            if plan.depth:
                assert plan.speed_up == pytest.approx(plan.tokens * factor * 1.02 / plan.seconds)


def test_a_shared_pass_is_left_to_others_unless_a_proposal_clearly_pays() -> None:
    """On a clock where plain decoding costs 0.01, the expected speed-up is between 1 and SHARED_SPEED_UP."""
    costs = scaled(table(1.0, 0.555), 0.01)
    alone, busy = (Controller(costs, CHAIN, greedy=True).plan(0, 100, sharing) for sharing in (1, 4))
    assert 1 < busy.speed_up <= SHARED_SPEED_UP and busy.depth == 0 and alone.depth > 0
    assert busy.reason == (
        f"a proposal promises {busy.speed_up:.2f} times plain speed, "
        "but more than 1.05 is needed when 4 requests share the passes"
    )


def test_what_reading_the_prompt_costs_is_said_where_it_decides() -> None:
    """The figures contradict nothing: the time that is saved is less than the time that reading takes."""
    costs = scaled(table(1.0, 0.2), 0.01)
    plan = Controller(costs, CHAIN, greedy=True).plan(5000, 9, unread=5000)
    assert plan.depth == 0 and plan.speed_up > 1.2
    found = re.fullmatch(
        r"a proposal promises ([\d.]+) times plain speed, which saves the time of ([\d.]+) tokens over the 9 that may "
        r"follow, but the draft would first read 5000 tokens, in the time of ([\d.]+)",
        plan.reason,
    )
    assert found
    promised, saved, reading = map(float, found.groups())
    assert promised == pytest.approx(plan.speed_up, abs=0.01)
    assert saved == pytest.approx(9 * (1 - 1 / plan.speed_up), abs=0.06) and saved < reading
    assert reading == pytest.approx(0.2 * 5000 / 64, abs=0.1)
    stats = SpecDecodeStats()
    stats.record_plan(plan)
    assert stats.switches[0].reason == f"decoding plainly because {plan.reason}"


def test_a_draft_that_is_too_dear_is_the_whole_reason() -> None:
    plan = Controller(scaled(table(1.0, DEAR_DRAFT), 7.0), CHAIN, greedy=True).plan(100, 100)
    assert plan.depth == 0 and plan.speed_up < 1
    assert plan.reason == f"a proposal promises {plan.speed_up:.2f} times plain speed"


def taught(*seen: VerifierChoice) -> float:
    """What a tree of two choices for one token is expected to get, when only these choices were made."""
    estimate = AcceptanceEstimate(Shapes((2,), 1, 2, False, 0))
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


def test_a_speed_up_as_small_as_the_limit_does_not_pay_when_two_share_a_pass() -> None:
    controller = Controller(table(), CHAIN, greedy=True)
    plan = controller.plan(0, 100)._replace(speed_up=SHARED_SPEED_UP)
    assert [controller._pays(plan, 100, 0.0, sharing) for sharing in (1, 2)] == [True, False]
    assert "1.05 is needed when 2 requests share" in controller._reason_for_plain(plan, 100, 1, 2)


def test_the_time_to_read_a_prompt_is_that_of_its_passes() -> None:
    """Of passes with 16 rows for 9 tokens, and twice the widest one for 128; 8 tokens are read in any round."""
    controller = Controller(CostModel(passes(1.0), passes(0.5, row=0.1), FREE, FREE, {}), TREES, greedy=True)
    controller.plan(0, 100)
    assert [controller._reading_time(unread) for unread in (8, 9, 64, 128)] == pytest.approx([0, 2.0, 6.8, 13.6])


def test_a_prompt_is_read_if_there_is_room_for_a_proposal() -> None:
    controller = Controller(table(), CHAIN, greedy=True)
    assert [controller.worth_reading(1, room, 1) for room in (-1, 0, 1)] == [False, False, True]


def test_a_request_starts_from_the_estimate_of_the_one_before() -> None:
    experience = Experience()
    first = Controller(table(1.0, 0.4), CHAIN, greedy=True, experience=experience)
    plan = first.plan(0, 100)
    for _ in range(40):
        first.observe(plan, [], choices(plan, 0))
    fresh = Controller(table(1.0, 0.4), CHAIN, greedy=True)
    later = Controller(table(1.0, 0.4), CHAIN, greedy=True, experience=experience)
    assert fresh.plan(0, 100).depth > 0 == later.plan(0, 100).depth


@pytest.mark.parametrize(("chain", "row", "size"), [(False, 4.0, 1), (True, 4.0, 1), (False, 0.0, 15), (True, 0.0, 15)])
def test_a_chain_is_planned_only_where_it_may_be_chosen(chain: bool, row: float, size: int) -> None:
    """Where rows are dear, one token; where they are free, the largest tree."""
    controller = Controller(table(1.0, 0.01, row), TREES._replace(chain=chain), greedy=True)
    controller.plan(0, 100)
    best = controller._best(100)
    assert (best.size, best.chain) == (size, chain and size == 1)


def test_no_plan_is_deeper_than_there_is_room() -> None:
    controller = Controller(table(1.0, 0.001), CHAIN, greedy=True)
    assert [controller.plan(0, room).depth for room in (0, 1, 2)] == [0, 1, 2]


def test_costs_follow_the_context() -> None:
    costs = table(1.0, 0.1)
    dearer = PassCosts(costs.draft.widths, (0, 1000), (costs.draft.seconds[0], (9.0,) * len(costs.draft.widths)))
    longer = CostModel(costs.target, dearer, FREE, FREE, {})
    controller = Controller(longer, CHAIN, greedy=True)
    assert controller.plan(0, 100).depth > 0 and controller.plan(1000, 100).depth == 0
    assert controller.plan(64, 100).speed_up < controller.plan(63, 100).speed_up == controller.plan(0, 100).speed_up


def test_greedy_and_sampled_texts_have_host_costs_of_their_own() -> None:
    costs = replace(table(), greedy=HostCosts(0.5, 0.0, 0.0), sampled=HostCosts(0.25, 0.0, 0.0))
    for greedy, seconds in ((True, 1.5), (False, 1.25)):
        assert Controller(costs, CHAIN, greedy).plan(0, 0) == RoundPlan(0, 0, 1.0, seconds, 1.0, probe=False)


def test_as_many_tokens_as_a_round_may_accept_are_read_for_nothing() -> None:
    """One round saves less than the time of a draft pass of its own."""
    controller = Controller(table(1.0, 0.5), CHAIN._replace(depth=1), greedy=True)
    assert controller.plan(0, 1) == controller.plan(0, 1, unread=1)
    assert [controller.plan(0, 1, unread=unread).depth for unread in (1, 2)] == [1, 0]


def test_the_estimates_of_the_latest_shapes_are_kept() -> None:
    """A client that asks for ever other shapes fills no memory."""
    experience = Experience()
    shapes = [CHAIN._replace(depth=depth) for depth in range(1, 66)]
    for each in (*shapes[:64], shapes[0], shapes[64]):
        estimate = AcceptanceEstimate(each)
        estimate.observe(None, 1, [1], [VerifierChoice(0, 1)])
        experience.store(each, True, estimate)
    known = [experience.estimate_for(each, True)._offered.any() for each in shapes]
    assert known == [True, False, *[True] * 63]
    assert not experience.estimate_for(shapes[0], greedy=False)._offered.any()


def test_proposals_shrink_as_more_requests_share_a_pass() -> None:
    """A row is nearly free alone and dear in a full pass: speculation must not slow a busy machine down."""
    costs = table(1.0, 0.02, row=0.06)

    def settled_size(sharing: int) -> int:
        controller = Controller(costs, TREES, greedy=True)
        for _ in range(200):
            plan = controller.plan(0, 100, sharing)
            if plan.depth:
                accepted = [row for row in (1, 4) if row <= plan.size][: plan.depth]
                controller.observe(plan, accepted[: 1 + (plan.size > 3)], [VerifierChoice(0, 2)] * len(accepted))
        return controller.plan(0, 100, sharing).size

    sizes = [settled_size(sharing) for sharing in (1, 4, 16)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def rounds(
    config: SpeculativeConfig, costs: CostModel | None, agreement: float, max_tokens: int = 200
) -> SpecDecodeStats:
    """So many tokens of a draft that is the target itself to the degree `agreement`."""
    truth = random_model(0, 6)
    draft = FakeEngine(mixture(truth, random_model(1, 6), agreement), 6, "draft")
    decoder = SpeculativeDecoder(FakeEngine(truth, 6), draft, config, 4096, (), costs)
    stats, params = SpecDecodeStats(), SamplingParams(max_tokens=max_tokens)
    for _ in decoder.generate(PROMPT, Sampler(params, PROMPT, (), 6), seeded_streams(0), stats):
        pass
    return stats


def test_the_stats_tell_what_was_expected_and_why_it_switched() -> None:
    chain = SpeculativeConfig("chain")
    good, bad = rounds(chain, table(1.0, 0.35), 1.0), rounds(chain, table(1.0, 0.6), 0.0)
    assert good.switches == [] and good.expected_tokens_per_second > 1
    assert good.mean_acceptance_length > 3
    assert not bad.switches[0].speculating and "decoding plainly" in bad.switches[0].reason
    assert bad.num_drafts < 0.2 * bad.target_passes
    assert rounds(SpeculativeConfig("chain", budget="fixed"), table(), 1.0).expected_seconds == 0
    assert rounds(SpeculativeConfig("chain"), None, 1.0).expected_seconds == 0


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_last_token_without_room_for_a_proposal_is_no_switch(max_tokens: int) -> None:
    assert rounds(SpeculativeConfig("chain", max_draft_len=2), table(1.0, 0.1), 1.0, max_tokens).switches == []


def test_a_draft_not_worth_asking_does_not_read_the_prompt() -> None:
    truth = random_model(0, 6)
    draft = FakeEngine(truth, 6, "draft")
    decoder = SpeculativeDecoder(
        FakeEngine(truth, 6), draft, SpeculativeConfig("chain"), 4096, (), table(1.0, DEAR_DRAFT)
    )
    params = SamplingParams(max_tokens=20)
    for _ in decoder.generate(PROMPT, Sampler(params, PROMPT, (), 6), seeded_streams(0), SpecDecodeStats()):
        pass
    assert draft.passes == 0


LOSSLESS = {
    "auto": SpeculativeConfig(max_draft_len=2, max_total_draft_tokens=3, frontier_width=2),
    "chain": SpeculativeConfig("chain", max_draft_len=2),
    "topk": SpeculativeConfig("topk", max_draft_len=2, max_total_draft_tokens=3, frontier_width=2),
    "k-ary": SpeculativeConfig("k-ary", branching=(2, 1), max_total_draft_tokens=4),
    "dyspec-threshold": SpeculativeConfig("dyspec-threshold", max_draft_len=2, max_total_draft_tokens=3),
}
# Prices at which one accepted or rejected token changes the next plan.
NEAR = (table(1.0, 0.55), table(1.0, 0.5, 0.05), table(1.0, 0.55, host=HostCosts(0.0, 0.0, 0.01)))


@pytest.mark.parametrize("name", LOSSLESS)
def test_planning_changes_no_distribution(name: str) -> None:
    """I2 with plans made from what earlier rounds accepted: every random outcome, as without speculation."""
    params = SamplingParams(max_tokens=4)
    for seed, costs in enumerate(NEAR):
        target, draft = pair(seed, 2)
        expected = decoded(target, None, None, params)
        found = decoded(target, draft, LOSSLESS[name], params, costs)
        assert total_variation(found, expected) < 1e-12


def test_these_prices_do_make_plans_differ() -> None:
    """Without that the proof above would prove nothing."""
    controller = Controller(NEAR[0], CHAIN, greedy=False)
    first = controller.plan(10, 100)
    later: list[Sequence[int]] = []
    for accepted in ([], list(range(1, first.depth + 1))):
        controller = Controller(NEAR[0], CHAIN, greedy=False)
        controller.observe(controller.plan(10, 100), accepted, choices(first, len(accepted)))
        later.append(controller.plan(10, 100)[:2])
    assert later[0] != later[1]
