"""The seconds of passes and of the host: how they are measured, and freed of noise."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, random_model
from steps import quiet

from draftwood.builder.pass_times import Pair, filled_cache, interpolated, measure_after, smoothed, thinned_out
from draftwood.builder.profile import ROUNDS, TURNS, measure, measure_host
from draftwood.models.bindings import DRAFT, ROLES, TARGET
from draftwood.models.errors import EngineError
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.speculation.planning.cost import HostCosts


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


def test_draft_passes_behind_another_one_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a round finds the caches full of the target's weights."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}
    before = [""]

    def timed(engine: FakeEngine, cache: Any, width: int) -> float:
        cold, before[0] = before[0] != engine.spec.role, engine.spec.role
        return (0.2 if cold else 0.1) * (1.0 if engine.spec.role == DRAFT else 50.0)

    monkeypatch.setattr("draftwood.builder.pass_times.time_pass", timed)
    costs = measure(Pair(engines, 200, {}), quiet, (64,), repeats=3)
    assert costs.draft is not None and costs.further is not None
    assert {*costs.draft.seconds[0]} == {0.2} and {*costs.further.seconds[0]} == {0.1}


def test_what_rows_cost_does_not_depend_on_the_minute_of_their_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that becomes slower all the time, by a factor of two and more in the end."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}
    passes = count()

    def timed(engine: FakeEngine, cache: Any, width: int) -> float:
        return (1 + 0.01 * next(passes)) * (10 + width)

    monkeypatch.setattr("draftwood.builder.pass_times.time_pass", timed)
    found = measure_after(Pair(engines, 200, {}), 8, engines[TARGET].spec.widths, 9, lambda: None)[TARGET].seconds
    assert next(passes) > 150
    for width, seconds in zip(engines[TARGET].spec.widths, found, strict=True):
        assert seconds / found[0] == pytest.approx((10 + width) / 11, rel=0.03)


def test_noise_makes_no_pass_cheaper_than_it_can_be() -> None:
    assert smoothed([1, 2, 4], [3.0, 2.0, 4.0]) == (2.5, 2.5, 4.0)  # a wider pass
    # 16 rows keep the cores busy, so 24 cannot take as long: they are taken to compute as many rows a second.
    assert smoothed([1, 8, 16, 24, 32, 64], [12, 20, 40, 40, 85, 160]) == (12, 20, 40, 60, 85, 160)
    assert smoothed([16, 24, 32, 48, 64], [40, 60, 80, 120, 320]) == (40, 60, 80, 120, 320)  # the widest one was slow
    assert smoothed([1, 16, 64], [10, 10.5, 11]) == (10, 10.5, 11)  # rows cost nothing where memory decides


def test_a_width_is_measured_again_until_its_share_of_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, clock, seen = {TARGET: FakeEngine(random_model(0, 8), 8, TARGET)}, [0.0], list[int]()

    def timed(engine: FakeEngine, cache: Any, width: int) -> float:
        clock[0] += 0.01 * width
        seen.append(width)
        return 0.01 * width

    monkeypatch.setattr("draftwood.builder.pass_times.perf_counter", lambda: clock[0])
    monkeypatch.setattr("draftwood.builder.pass_times.time_pass", timed)
    monkeypatch.setattr("draftwood.builder.pass_times.wait", lambda seconds: None)
    widths = engines[TARGET].spec.widths
    found = measure_after(Pair(engines, 200, {}), 64, widths, 9, lambda: None, 0.045)[TARGET]
    assert {width: seen.count(width) for width in widths[1:]} == {width: 1 + (width < 4) for width in widths[1:]}
    assert found.seconds == pytest.approx([0.01 * width for width in widths]) and {*found.spreads} == {1.0}


def test_some_widths_stand_for_all() -> None:
    assert thinned_out((1, 2, 3, 4, 5, 8, 16, 24, 64)) == (1, 4, 16, 64) and thinned_out((3,)) == (3,)
    assert thinned_out((1, 3, 5, 19, 21)) == (1, 5, 21) and thinned_out((1, 2)) == (1, 2)
    assert interpolated((1, 2, 3), (1, 3), (6.0, 20.0), [(3.0, 4.0, 5.0), (0.0,) * 3]) == (6.0, 12.0, 20.0)
    assert interpolated((1, 2), (1, 2), [3.0, 4.0], [(1.0, 1.0)]) == (3.0, 4.0)


def test_an_interruption_does_not_change_the_time_on_the_measure_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes the processor for a long time, once, at any moment: the tree's tokens keep their price."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}

    def measured(interrupted: int) -> HostCosts:
        reads = count()

        def clock() -> int:
            read = next(reads)
            return read + 1000 * (read > interrupted)

        monkeypatch.setattr("draftwood.runtime.speculation.stopwatch.perf_counter", clock)
        return measure_host(Pair(engines, 200, {}), 1, 12, lambda: None)[0]

    undisturbed = measured(10**9)
    assert undisturbed.round > undisturbed.plain > 0
    assert all(measured(moment) == undisturbed for moment in range(10, 200, 7))


def test_kinds_of_rounds_meet_the_same_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host that becomes slower all the time, to five times as slow: rounds above temperature 0 cost as much more
    than those at 0 as on a steady one."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}

    def ratio(slower: float) -> float:
        steps = count()

        def clock() -> float:
            step = next(steps)
            return step + slower * step * step

        monkeypatch.setattr("draftwood.runtime.speculation.stopwatch.perf_counter", clock)
        greedy, sampled = measure_host(Pair(engines, 200, {}), TURNS, ROUNDS, lambda: None)
        assert next(steps) > 1000
        return sampled.round / greedy.round

    assert ratio(0.001) == pytest.approx(ratio(0.0), rel=0.2)
