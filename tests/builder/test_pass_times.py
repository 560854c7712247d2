"""The seconds of passes and of the host: which are measured, how noise is taken out, and what plans make of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from controllers import CHAIN
from fakes import FakeEngine, random_model
from steps import counted, quiet

from draftwood.builder.pass_times import Pair, filled_cache, interpolated, measure_after, smoothed, spread, thinned_out
from draftwood.builder.profile import (
    CONTEXTS,
    EVERY,
    FAR_STEP,
    ROUNDS,
    STEP,
    TURNS,
    brief_contexts,
    measure,
    measure_host,
)
from draftwood.models.bindings import DRAFT, ROLES, TARGET
from draftwood.models.errors import ConfigError, EngineError
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.base import ForwardOutput, TokenBatch
from draftwood.runtime.speculation.planning.controller import Controller
from draftwood.runtime.speculation.planning.cost import HostCosts

PASS = "draftwood.builder.pass_times.time_pass"
CLOCK = "draftwood.runtime.speculation.stopwatch.perf_counter"


class Counting(FakeEngine):
    """Remembers the tokens before each pass, and its rows."""

    def score(self, batch: TokenBatch, cache: Any) -> ForwardOutput:
        self.seen.append((cache.length, batch.num_tokens))
        return super().score(batch, cache)

    @cached_property
    def seen(self) -> list[tuple[int, int]]:
        return []


def pair(longest: int = 200, size: int = 8, roles: tuple[str, ...] = ROLES) -> Pair:
    return Pair({role: Counting(random_model(0, size), size, role) for role in roles}, longest, {})


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, int, int], float]], None]:
    """Passes take what a function says of a role, the tokens before, and rows."""

    def patch(seconds: Callable[[str, int, int], float]) -> None:
        monkeypatch.setattr(PASS, lambda engine, cache, rows, *_: seconds(engine.spec.role, cache.length, rows))

    return patch


# Which passes


def test_every_width_is_measured_behind_every_context_that_fits(tiny_bundle: Path) -> None:
    bundle, left = EngineBundle.open(tiny_bundle), dict[str, int]()
    engines = {role: bundle.open_engine(role, threads=1) for role in ROLES}
    longest = bundle.manifest.max_length
    given = Pair(engines, longest, {"threads": 1})
    costs = measure(given, counted(left), contexts=(16, 8, 16), repeats=2)
    for role, passes in zip(ROLES, (costs.target, costs.draft), strict=True):
        assert passes is not None and passes.widths == engines[role].spec.widths and passes.contexts == (8, 16)
        assert all(list(row) == sorted(row) and row[0] > 0 for row in passes.seconds)
    assert costs.machine == {"threads": 1} and costs.spread is not None and costs.spread >= 1
    assert costs.greedy.round > 0 or costs.greedy.token > 0
    assert len(left) == 3 and set(left.values()) == {0}
    with pytest.raises(ConfigError, match="name shorter ones"):
        measure(given, quiet, contexts=(8, longest + 1))


def test_a_long_context_is_filled_without_computing_it(tiny_bundle: Path) -> None:
    engine = EngineBundle.open(tiny_bundle).open_engine(TARGET, threads=1)
    width = engine.spec.max_width
    cache = filled_cache(engine, width + 7)
    rows = cache.buffer[..., : width + 7, :]
    assert cache.length == width + 7 and rows[..., :width, :].any()
    assert (rows[..., width:, :] == rows[..., :7, :]).all()
    with pytest.raises(EngineError, match="cache slots"):
        cache.repeat(engine.spec.capacity + 1)
    cache.truncate(0)
    with pytest.raises(EngineError, match="at least one"):
        cache.repeat(8)


def test_a_build_measures_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything once, where the time is up at once, and the host in one turn; the shortest and the longest context."""
    assert [brief_contexts(length) for length in (10, 64, 1024)] == [(64,), (64,), (64, 512)]
    assert [brief_contexts(length) for length in (2048, 8000, 9000)] == [(64, 2048), (64, 1536, 8000), (64, 1536, 8192)]
    turns: dict[Any, list[float]] = {}
    monkeypatch.setattr("draftwood.builder.profile.host_rounds", lambda *of: turns.setdefault(of[2:], [1.0]))
    for seconds, repeats, passes in ((0, 9, 1), (0, 1, 1), (math.inf, 4, 5)):
        turns.clear()
        given, left = pair(), dict[str, int]()
        costs = measure(given, counted(left), (64,), repeats, seconds)
        assert costs.target.contexts == (64,) and costs.target.widths == given.engines[TARGET].spec.widths
        for role, engine in given.engines.items():
            before = [width for length, width in engine.seen if length == 64]  # type: ignore[attr-defined]
            assert before.count(engine.spec.max_width) == passes * (2 if role == DRAFT else 1)
        assert {turn for _, turn, *_ in turns} == set(range(1 if seconds == 0 else TURNS))
        assert left and not any(left.values())


def test_behind_further_contexts_a_build_measures_few_widths(timed: Any) -> None:
    """The others are between them. Here rows cost more, the longer the context is."""
    given, seen = pair(size=64), dict[tuple[str, int], set[int]]()

    def seconds(role: str, before: int, rows: int) -> float:
        seen.setdefault((role, before), set()).add(rows)
        return 1 + 0.1 * rows + 0.001 * rows * before

    timed(seconds)
    costs = measure(given, quiet, (8, 100), 2, 1.0)
    assert costs.draft is not None and costs.further is not None
    for role, costs_of in ((TARGET, costs.target), (DRAFT, costs.draft), (DRAFT, costs.further)):
        widths = given.engines[role].spec.widths
        assert costs_of.widths == widths and set(widths) >= seen[role, 8] == set(thinned_out(widths, STEP, EVERY))
        assert seen[role, 8] > seen[role, 100] == set(thinned_out(widths, FAR_STEP))
        assert costs_of.seconds[0] == pytest.approx([1 + 0.108 * width for width in widths], rel=0.01)
        assert costs_of.seconds[1] == pytest.approx([1 + 0.2 * width for width in widths], rel=0.05)


@pytest.mark.parametrize(("begun", "contexts", "repeated"), [(1, (8,), 1), (2, (8, 50), 3)])
def test_a_measurement_that_is_stopped_keeps_what_it_has(
    timed: Any, begun: int, contexts: tuple[int, ...], repeated: int
) -> None:
    """During the first context or the second one: every width is measured once, and no further context."""
    given, seen = pair(roles=(TARGET,)), Counter[tuple[int, int]]()

    def seconds(role: str, before: int, rows: int) -> float:
        seen[before, rows] += 1
        return 0.01 * rows

    timed(seconds)
    costs = measure(given, quiet, (8, 50, 90), 2, stopped=lambda: len({before for before, _ in seen}) >= begun)
    assert costs.target.contexts == contexts and costs.greedy.round >= costs.greedy.plain > 0
    most = [max(n for (at, rows), n in seen.items() if at == before and rows > 1) for before in contexts]
    assert most == [repeated, 1][: len(contexts)]


def test_some_widths_stand_for_all() -> None:
    assert thinned_out((1, 2, 3, 4, 5, 8, 16, 24, 64), 4) == (1, 4, 16, 64) and thinned_out((3,), 4) == (3,)
    assert thinned_out((1, 3, 5, 19, 21), 4) == (1, 5, 21) and thinned_out((1, 2), 4) == (1, 2)
    assert thinned_out(range(1, 17), 1.5, 4) == (1, 2, 3, 4, 6, 9, 14, 16)
    assert interpolated((1, 2, 3), (1, 3), (6.0, 20.0), []) == (6.5, 13.0, 20.0)
    assert interpolated((1, 2, 3), (1, 3), (6.0, 20.0), [(3.0, 4.0, 5.0), (0.0,) * 3]) == (6.0, 12.0, 20.0)
    assert interpolated((1, 2), (1, 2), [3.0, 4.0], [(1.0, 1.0)]) == (3.0, 4.0)


# Noise


def test_draft_passes_behind_another_one_are_measured_apart(timed: Any) -> None:
    """The first one of a round finds the caches full of the target's weights."""
    before = [""]

    def seconds(role: str, length: int, rows: int) -> float:
        cold, before[0] = before[0] != role, role
        return (0.2 if cold else 0.1) * (1.0 if role == DRAFT else 50.0)

    timed(seconds)
    costs = measure(pair(), quiet, (64,), repeats=3)
    assert costs.draft is not None and costs.further is not None
    assert {*costs.draft.seconds[0]} == {0.2} and {*costs.further.seconds[0]} == {0.1}


def test_what_rows_cost_does_not_depend_on_the_minute_of_their_measurement(timed: Any) -> None:
    """On a machine that becomes slower all the time, by a factor of two and more in the end."""
    given, passes = pair(), count()
    widths = given.engines[TARGET].spec.widths
    timed(lambda role, length, rows: (1 + 0.01 * next(passes)) * (10 + rows))
    found = measure_after(given, 8, widths, 9, lambda: None)[TARGET].seconds
    assert next(passes) > 150
    for width, seconds in zip(widths, found, strict=True):
        assert seconds / found[0] == pytest.approx((10 + width) / 11, rel=0.03)


def test_noise_makes_no_pass_cheaper_than_it_can_be() -> None:
    assert smoothed([1, 2, 4], [3.0, 2.0, 4.0]) == (2.5, 2.5, 4.0)  # a wider pass
    # 16 rows keep the cores busy, so 24 cannot take as long: they are taken to compute as many rows a second.
    assert smoothed([1, 8, 16, 24, 32, 64], [12, 20, 40, 40, 85, 160]) == (12, 20, 40, 60, 85, 160)
    assert smoothed([16, 24, 32, 48, 64], [40, 60, 80, 120, 320]) == (40, 60, 80, 120, 320)  # the widest one was slow
    assert smoothed([1, 16, 64], [10, 10.5, 11]) == (10, 10.5, 11)  # rows cost nothing where memory decides
    assert spread([2.0]) == 1 and spread([4.0, 1.0, 2.0, 3.0, 1.0]) == 3


def test_a_width_is_measured_again_until_its_share_of_the_time_is_over(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, clock, seen = pair(roles=(TARGET,)), [0.0], list[int]()

    def seconds(role: str, length: int, rows: int) -> float:
        clock[0] += 0.01 * rows
        seen.append(rows)
        return 0.01 * rows

    timed(seconds)
    monkeypatch.setattr("draftwood.builder.pass_times.perf_counter", lambda: clock[0])
    monkeypatch.setattr("draftwood.builder.pass_times.wait", lambda seconds: None)
    widths = given.engines[TARGET].spec.widths
    found = measure_after(given, 64, widths, 9, lambda: None, 0.045)[TARGET]
    assert {width: seen.count(width) for width in widths[1:]} == {width: 1 + (width < 4) for width in widths[1:]}
    assert found.seconds == pytest.approx([0.01 * width for width in widths]) and {*found.spreads} == {1.0}


def test_an_interruption_does_not_change_the_time_on_the_measure_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes the processor for a long time, once, at any moment: the tree's tokens keep their price."""
    given = pair()

    def measured(interrupted: int) -> HostCosts:
        reads = count()
        monkeypatch.setattr(CLOCK, lambda: (read := next(reads)) + 1000 * (read > interrupted))
        return measure_host(given, 1, 12, lambda: None)[0]

    undisturbed = measured(10**9)
    assert undisturbed.round > undisturbed.plain > 0
    assert all(measured(moment) == undisturbed for moment in range(10, 200, 7))


def test_kinds_of_rounds_meet_the_same_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host that becomes slower all the time, to five times as slow: rounds above temperature 0 cost as much more
    than those at 0 as on a steady one."""
    given = pair()

    def ratio(slower: float) -> float:
        steps = count()
        monkeypatch.setattr(CLOCK, lambda: (step := next(steps)) + slower * step * step)
        greedy, sampled = measure_host(given, TURNS, ROUNDS, lambda: None)
        assert next(steps) > 1000
        return sampled.round / greedy.round

    assert ratio(0.001) == pytest.approx(ratio(0.0), rel=0.2)


# What plans make of it


def test_a_plan_behind_a_long_text_uses_what_was_measured_there(timed: Any) -> None:
    """Up to 1,536 tokens rows cost nothing, after 8,000 each costs more than a pass: a line would not say so."""
    timed(lambda role, length, rows: 0.01 if role == DRAFT else 1.0 + length / 8000 + 4 * rows * (length > 4000))
    whole, short = measure(pair(8000), quiet, repeats=1), measure(pair(8000), quiet, CONTEXTS, repeats=1)
    assert whole.target.contexts == (*CONTEXTS, 8000) and whole.target.at(4, 8000) == pytest.approx(18.0)
    assert short.target.at(4, 8000) == pytest.approx(2.0)
    free = HostCosts(0.0, 0.0, 0.0)
    plans = [
        Controller(replace(costs, greedy=free), CHAIN, greedy=True).plan(context, 100)
        for costs, context in ((short, 8000), (whole, 8000), (whole, 1024))
    ]
    assert [plan.depth > 0 for plan in plans] == [True, False, True]


def test_a_table_knows_whether_passes_are_filled_up_to_a_width() -> None:
    given = pair()
    for engine, backend in zip(given.engines.values(), ("native", "onnxruntime"), strict=True):
        engine.spec = replace(engine.spec, backend=backend)
    costs = measure(given, quiet, contexts=(8,), repeats=1)
    assert not costs.target.padded and costs.draft is not None and costs.draft.padded
