"""The controller: which proposal it plans for known costs, and which reason it gives for plain decoding."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from controllers import CHAIN, DEAR_DRAFT, TREES, plan_each_round, scaled, settled
from costs import FREE, passes, table
from enumeration import PROMPT
from fakes import FakeEngine, mixture, random_model

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.calibration import Calibration
from draftwood.runtime.speculation.planning.controller import SHARED_BEGIN, SHARED_SPEED_UP, Controller, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from draftwood.runtime.speculation.planning.estimate import Shapes, VerifierChoice


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


def test_a_draft_dearer_than_what_it_can_save_is_never_asked() -> None:
    assert not any(plan.depth and not plan.probe for plan in settled(table(1.0, DEAR_DRAFT), CHAIN, 1.0))


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


def test_a_plain_round_is_priced_as_one() -> None:
    """Where many share a pass, time on the host decides: a plain round has less of it."""
    host = HostCosts(plain=0.01, round=0.3, token=0.02)
    costs = table(1.0, 0.02, row=0.06, host=host)
    alone, busy = (Controller(costs, TREES, greedy=True).plan(0, 100, batch_size) for batch_size in (1, 16))
    assert alone.depth > 0 and busy.depth == 0


def test_draft_passes_behind_the_first_one_have_their_own_price() -> None:
    costs = table(1.0, 0.3, row=0.01)
    warm = replace(costs, further=passes(0.1))
    cold, cheap = (Controller(each, CHAIN, greedy=True).plan(0, 100) for each in (costs, warm))
    assert cheap.depth > cold.depth > 0
    assert cheap.seconds == pytest.approx(1.0 + 0.01 * cheap.depth + 0.3 + 0.1 * (cheap.depth - 1))
    with pytest.raises(ValueError, match="widths and contexts"):
        replace(costs, further=PassCosts((1, 64), (0,), ((0.1, 0.1),)))


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
    costs = scaled(table(1.0, 0.47), 0.01)
    alone, busy = (Controller(costs, CHAIN, greedy=True).plan(0, 100, batch_size) for batch_size in (1, 4))
    assert 1 < busy.speed_up <= SHARED_SPEED_UP and busy.depth == 0 and alone.depth > 0
    assert busy.reason == (
        f"a proposal promises {busy.speed_up:.2f} times plain speed, "
        "but more than 1.10 is needed when 4 requests share the passes"
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


def test_where_two_share_a_pass_a_text_must_clearly_end_sooner_with_the_draft_s_reading() -> None:
    controller = Controller(table(), CHAIN, greedy=True)
    plan, plain = controller.plan(0, 100), controller._plain_seconds
    as_small = plan._replace(tokens=0.999 * SHARED_SPEED_UP, seconds=plain, speed_up=0.999 * SHARED_SPEED_UP)
    assert [controller._pays(as_small, 100, 0.0, batch_size) for batch_size in (1, 2)] == [True, False]
    assert "1.10 is needed when 2 requests share" in controller._reason_for_plain(as_small, 100, 1, 2)
    faster = as_small._replace(tokens=1.1 * SHARED_BEGIN)
    assert [controller._pays(faster, 100, 10 * plain, batch_size) for batch_size in (1, 2)] == [True, False]
    assert controller._pays(faster, 1000, 10 * plain, 2)
    reason = controller._reason_for_plain(faster, 100, 64, 2)
    assert "1.30 is needed when 2 requests" in reason and "and the draft would first read 64 tokens" in reason


def test_the_time_to_read_a_prompt_is_that_of_its_passes() -> None:
    """Of passes with 16 rows for 9 tokens, and twice the widest one for 128; 8 tokens are read in any round."""
    controller = Controller(CostModel(passes(1.0), passes(0.5, row=0.1), FREE, FREE, {}), TREES, greedy=True)
    controller.plan(0, 100)
    assert [controller._reading_time(unread) for unread in (8, 9, 64, 128)] == pytest.approx([0, 2.0, 6.8, 13.6])


def test_a_prompt_is_read_if_there_is_room_for_a_proposal() -> None:
    controller = Controller(table(), CHAIN, greedy=True)
    assert [controller.worth_reading(1, room, 1, 1) for room in (-1, 0, 1)] == [False, False, True]


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
    assert costs.draft is not None
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
    controller = Controller(table(1.0, 0.45), CHAIN._replace(depth=1), greedy=True)
    assert controller.plan(0, 1) == controller.plan(0, 1, unread=1)
    assert [controller.plan(0, 1, unread=unread).depth for unread in (1, 2)] == [1, 0]


def test_proposals_shrink_as_more_requests_share_a_pass() -> None:
    """A row is nearly free alone and dear in a full pass: speculation must not slow a busy machine down."""
    costs = table(1.0, 0.02, row=0.06)

    def settled_size(batch_size: int) -> int:
        controller = Controller(costs, TREES, greedy=True)
        for _ in range(200):
            plan = controller.plan(0, 100, batch_size)
            if plan.depth:
                accepted = [row for row in (1, 4) if row <= plan.size][: plan.depth]
                controller.observe(plan, accepted[: 1 + (plan.size > 3)], [VerifierChoice(0, 2)] * len(accepted))
        return controller.plan(0, 100, batch_size).size

    sizes = [settled_size(batch_size) for batch_size in (1, 4, 16)]
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


@pytest.mark.parametrize("chosen", [False, True])
def test_chosen_tokens_teach_nothing_about_drawn_ones(chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of drawn tokens' acceptance grows DySpec's trees."""
    learned: list[int] = []
    plan = Controller.plan
    plan_each_round(monkeypatch)
    monkeypatch.setattr(Controller, "plan", lambda *args: plan(*args)._replace(chosen=chosen))
    monkeypatch.setattr(Calibration, "update", lambda self, tree, accepted: learned.append(len(tree)))
    stats = rounds(SpeculativeConfig(), table(1.0, 0.1), 1.0, 40)
    assert stats.num_drafts and bool(learned) is not chosen
    assert bool(stats.num_chosen) is chosen
