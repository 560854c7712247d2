"""Plans against every fixed choice, in simulated time; and that choosing the kind of a proposal changes no text."""

from __future__ import annotations

from typing import Any

import enumeration
import pytest
from costs import table
from enumeration import decoded, pair, total_variation

from benchmarks.planning.simulated import MACHINES, simulate_speeds
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Proposal
from draftwood.runtime.engines.passes import Passes
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.graph.token_tree import unroll
from draftwood.runtime.speculation.planning.controller import REMEMBERED, Controller, Experience
from draftwood.runtime.speculation.planning.cost import HostCosts
from draftwood.runtime.speculation.planning.estimate import Shapes, VerifierChoice

SMALL = SpeculativeConfig(max_draft_len=2, max_total_draft_tokens=3, frontier_width=2)
KINDS = table(1.0, 0.1, host=HostCosts(0.0, 0.0, 0.05))  # every round proposes something


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("name", MACHINES)
def test_plans_are_hardly_slower_than_the_best_fixed_choice(name: str, greedy: bool) -> None:
    for acceptance in (0.3, 0.6, 0.8, 0.95):
        found = simulate_speeds(MACHINES[name], greedy, acceptance, tokens=80, count=8)
        own = found.pop("by cost")
        del found["first request"]
        assert own > 0.97
        assert own > 0.95 * max(found.values())


@pytest.mark.parametrize("name", MACHINES)
def test_a_full_machine_is_hardly_slowed_down(name: str) -> None:
    for acceptance in (0.3, 0.8):
        assert simulate_speeds(MACHINES[name], True, acceptance, tokens=64, count=8, sharing=16)["by cost"] > 0.97


def test_the_kind_follows_the_acceptance() -> None:
    """A chain where first choices are nearly always right, a tree where the second one often is."""
    chains = []
    for alpha in (0.95, 0.4):
        experience, shapes = Experience(), Shapes((3, 7, 15), 8, 4, True, 0)
        controller = Controller(MACHINES["flat target"], shapes, True, experience)
        controller._estimate._chances[:] = (1000, 1000 * alpha), (1000, 600)
        chains.append(controller.plan(0, 100).chain)
    assert chains == [True, False]


def test_the_next_request_starts_where_the_last_one_ended() -> None:
    experience, shapes = Experience(), Shapes((), 8, 1, True, 0)
    first = Controller(table(1.0, 0.4), shapes, True, experience)
    for _ in range(20):
        first.observe(first.plan(0, 100)._replace(depth=4, size=4, chain=True), [], [])
    assert (
        Controller(table(1.0, 0.4), shapes, True, experience).plan(0, 100).depth
        < Controller(table(1.0, 0.4), shapes, True).plan(0, 100).depth
    )


def test_kinds_of_request_are_forgotten_when_there_are_too_many() -> None:
    """Any client may ask for kinds of its own; those heard of last stay."""
    experience = Experience()
    shapes = [Shapes((), 8, 1, True, given) for given in range(10 * REMEMBERED)]
    for each in shapes:
        experience.estimate_for(each, True).observe(None, 8, [], [VerifierChoice(None, 1)])
        experience.estimate_for(shapes[0], True)
    assert len(experience._general) == REMEMBERED
    known = [shape for shape in shapes if (shape, True) in experience._general]
    assert known == [shapes[0], *shapes[1 - REMEMBERED :]]


PARAMS = SamplingParams(max_tokens=4)


def test_choosing_the_kind_changes_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2, with rounds of both kinds among all outcomes."""
    kinds: set[bool] = set()
    plan = Controller.plan

    def noted(self: Controller, *args: Any) -> Any:
        made = plan(self, *args)
        if made.depth:  # what was committed may decide, too: here its length does
            made = made._replace(chain=args[0] > len(enumeration.PROMPT))
            kinds.add(made.chain)
        return made

    monkeypatch.setattr(Controller, "plan", noted)
    for seed in range(2):
        target, draft = pair(seed, 2)
        found = decoded(target, draft, SMALL, PARAMS, KINDS)
        assert total_variation(found, decoded(target, None, None, PARAMS)) < 1e-12
    assert kinds == {True, False}


class Anticipating(SpeculativeDecoder):
    """Draws a tree, and makes it a chain of one because of what was drawn."""

    def _propose(self, *args: Any) -> Passes[Proposal]:
        proposal = yield from super()._propose(*args)
        tree = proposal.tree
        biased = len(tree) > 2 and tree.token_ids[2]
        return proposal._replace(tree=unroll(proposal.graph, 1, 99)) if biased else proposal


def test_choosing_the_kind_after_drawing_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumeration, "SpeculativeDecoder", Anticipating)
    target, draft = pair(0, 3)
    drawn = SpeculativeConfig("dyspec", max_draft_len=2, max_total_draft_tokens=3, frontier_width=2, budget="fixed")
    params = SamplingParams(max_tokens=3)
    biased = decoded(target, draft, drawn, params)
    assert total_variation(biased, decoded(target, None, None, params)) > 1e-3
