"""The time outside the engines: what disturbs its measurement, and what does not."""

from __future__ import annotations

from itertools import count

import pytest
from fakes import FakeEngine, random_model

from draftwood.builder.host_times import ROUNDS, TURNS, measure_host
from draftwood.builder.pass_times import Pair
from draftwood.models.bindings import ROLES
from draftwood.runtime.speculation.planning.cost import HostCosts


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
