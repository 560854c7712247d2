"""Plans of recorded proposals against every fixed choice; and that choosing the kind of a proposal changes no text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import enumeration
import pytest
from costs import table
from enumeration import decoded, pair, total_variation

from benchmarks.planning.replay import (
    CHAINS,
    DRAWN_TRACE,
    TRACE,
    USUAL_TRACE,
    ByCost,
    FixedChain,
    Machine,
    distorted,
    drifting,
    replay,
    with_lookups,
)
from benchmarks.planning.traces import read_traces
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Proposal
from draftwood.runtime.engines.passes import Works
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.graph.token_tree import unroll
from draftwood.runtime.speculation.planning.controller import Controller
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts

SMALL = SpeculativeConfig(max_draft_len=2, max_total_draft_tokens=3, frontier_width=2)
KINDS = table(1.0, 0.1, host=HostCosts(0.0, 0.0, 0.05))  # every round proposes something


PARAMS = SamplingParams(max_tokens=4)


def test_choosing_the_kind_changes_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2, with chains and trees of drawn and of chosen tokens among all outcomes."""
    kinds: set[tuple[bool, bool]] = set()
    plan = Controller.plan

    def noted(self: Controller, *args: Any) -> Any:
        made = plan(self, *args)
        if made.depth:  # what was committed may decide, too: here its length does
            chain = args[0] > len(enumeration.PROMPT)
            made = made._replace(chain=chain, chosen=chain == bool(seed))
            kinds.add((made.chain, made.chosen))
        return made

    monkeypatch.setattr(Controller, "plan", noted)
    for seed in range(2):
        target, draft = pair(seed, 2)
        found = decoded(target, draft, SMALL, PARAMS, KINDS)
        assert total_variation(found, decoded(target, None, None, PARAMS)) < 1e-12
    assert kinds == set(product((False, True), repeat=2))


class Anticipating(SpeculativeDecoder):
    """Draws a tree, and makes it a chain of one because of what was drawn."""

    def _propose(self, *args: Any) -> Works[Proposal]:
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


# SmolLM2-135M in int8 with the demo's draft on two quiet cores: milliseconds by rows of a pass.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
TARGET_MS = (5.0, 5.3, 5.6, 5.9, 6.0, 6.2, 6.5, 6.8, 8.5, 10.6, 19.6, 39.8)
DRAFT_MS = (0.23, 0.23, 0.23, 0.24, 0.25, 0.27, 0.28, 0.28, 0.37, 0.46, 0.85, 1.8)
PASSES = [PassCosts(ROWS, (64,), (tuple(ms / 1000 for ms in each),), False, False) for each in (TARGET_MS, DRAFT_MS)]
MEASURED = CostModel(PASSES[0], PASSES[1], HostCosts(8e-5, 2.7e-4, 1.3e-5), HostCosts(1.5e-4, 6.4e-4, 4.8e-5), {})


@pytest.mark.parametrize(("faster", "slower"), [(1.0, 0.0), (0.9, 5e-4)])
def test_planned_rounds_of_real_texts_are_as_fast_as_the_best_fixed_chain(faster: float, slower: float) -> None:
    """By a planner that begins without any history: where the table is right, and where plain passes take 0.9 of its
    time and rounds with proposals 0.5 ms more."""
    traces, real = read_traces(TRACE), distorted(MEASURED, slower, faster)
    plain, *chains = (replay(traces, FixedChain(k), real) for k in (0, *CHAINS))
    speed = replay(traces, ByCost(MEASURED), real)
    assert speed > 0.98 * max(plain, *chains)


@pytest.mark.parametrize("trace", [TRACE, DRAWN_TRACE])
def test_planned_rounds_follow_a_machine_whose_speed_changes(trace: Path) -> None:
    """At temperature 0 and 0.7, while memory and processor get slower and faster: hardly slower than the best fixed
    chain in hindsight."""
    traces, real = 3 * read_traces(trace), drifting(MEASURED)
    plain, *chains = (replay(traces, FixedChain(k), real) for k in (0, *CHAINS))
    speed = replay(traces, ByCost(MEASURED, trace == TRACE), real)
    assert speed > 1.05 * plain and speed > 0.96 * max(chains)


# Qwen2.5-Coder-1.5B in the blocks of its file with its 0.5B sister in int4 and 32,768 tokens, on two cores of a Zen 4.
USUAL_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
USUAL_MS = (34.4, 35.2, 35.9, 37.7, 39.0, 45.9, 58.7, 76.2, 102.0, 152.0, 199.0, 397.0)
USUAL_DRAFT_MS = (8.8, 9.3, 9.7, 10.0, 10.9, 12.2, 16.6, 22.3, 29.6, 42.2, 57.6, 114.0)
BUSY_MS, BUSY_DRAFT_MS = ([begin + row * each for each in USUAL_ROWS] for begin, row in ((200.0, 4.0), (80.0, 20.0)))


def usual(target: Sequence[float], draft: Sequence[float]) -> CostModel:
    of, for_draft = (
        PassCosts(USUAL_ROWS, (64,), (tuple(ms / 1000 for ms in each),), False, False) for each in (target, draft)
    )
    return CostModel(of, for_draft, HostCosts(1.5e-4, 4e-4, 1.5e-5), HostCosts(3e-4, 9e-4, 5e-5), {})


def test_an_ordinary_draft_is_worth_its_price_on_every_kind_of_text() -> None:
    """Texts of 64 tokens, mixed: code, mathematics, conversation, prose, source files, other languages, forms, random
    words. Medians of each kind over plain decoding, the prompts included; and after a first text, where the table was
    measured beside other work and is six times too high."""
    real = usual(USUAL_MS, USUAL_DRAFT_MS)
    kinds = [text["kind"] for text in json.loads(USUAL_TRACE.read_text(encoding="utf-8"))["texts"]]
    traces = read_traces(USUAL_TRACE)
    for costs, least in ((real, 1.05), (usual(BUSY_MS, BUSY_DRAFT_MS), 0.97)):
        planner, found = ByCost(costs), dict[str, list[float]]()
        for kind, trace in sorted(zip(kinds, traces, strict=True), key=lambda each: each[1].places[0]):
            planner.seconds = 0.0
            speed = replay([trace], planner, Machine((real,)))
            found.setdefault(kind, []).append(speed / replay([trace], FixedChain(0), Machine((real,))))
        slowest = min(median(each) for each in found.values())
        assert slowest > least, found


@pytest.mark.parametrize("rows", [USUAL_MS, USUAL_MS[:1] * len(USUAL_MS)])
def test_a_lookup_beside_a_chain_gains_nothing(rows: Sequence[float]) -> None:
    """Even if rows were free: where it is worth its price, it is worth more in the chain's place, without a draft."""
    costs = usual(rows, USUAL_DRAFT_MS)
    for depth in CHAINS:
        alone, beside = (with_lookups(costs, depth, branches) for branches in (False, True))
        assert 0.99 * alone < beside < 1.01 * alone
