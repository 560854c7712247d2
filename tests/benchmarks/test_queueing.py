"""The queueing simulation against formulas: waiting, shared passes, speculation, routing, and how many replicas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from costs import passes, table
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.load import queueing
from benchmarks.load.queueing import Bounds, Workload, count_replicas, find_knee, find_sustainable_rate
from benchmarks.load.simulation import (
    LoadSummary,
    PassPrices,
    Planner,
    Request,
    Routing,
    Serving,
    Sizes,
    draw_poisson,
    expected_tokens,
    simulate,
    summarise,
)
from draftwood.runtime.bundle.costs import write_costs
from draftwood.runtime.speculation.planning.cost import HostCosts, PassCosts


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_waiting_for_a_single_place_is_lindleys_and_pollaczek_and_khinchines(spread: float) -> None:
    """One request at a time, a second per pass: an M/D/1 queue, and an M/G/1 one."""
    rate = 0.6 / 8
    requests = list(draw_poisson(Sizes(1, 8, spread), rate, 10_000, seed=1))
    service = np.array([request.output + (request.prompt > 1) for request in requests], float)
    waits = [0.0]
    for taken, between in zip(service, np.diff([request.arrived for request in requests]), strict=False):
        waits.append(max(0.0, waits[-1] + taken - between))
    served = simulate(Serving(table(), max_running=1), [[each] for each in requests])
    assert np.allclose([each.started - each.arrived for each in served], waits)
    formula = rate * (service**2).mean() / (2 * (1 - rate * service.mean()))
    assert np.mean(waits) == pytest.approx(formula, rel=0.05)


@pytest.mark.parametrize("clients", [1, 2, 8])
def test_those_who_run_share_their_passes(clients: int) -> None:
    host = HostCosts(0.25, 0.0, 0.0)
    serving = Serving(table(row=0.125, host=host))
    found = summarise(simulate(serving, [[Request(0.0, 1, 16)] for _ in range(clients)]), warm_up=0)
    assert found.tokens_per_second == pytest.approx(clients / (1 + 0.125 * (clients - 1) + 0.25 * clients))
    assert found.per_token_p50 == pytest.approx(clients / found.tokens_per_second)


def test_a_prompt_is_read_in_the_widest_passes_and_delays_the_others() -> None:
    long, short = Request(0.0, 129, 1), Request(0.5, 1, 2)  # 128 rows are two passes, then one for the root
    simulate(Serving(table()), [[long], [short]])
    assert short.first == 2, "its turn comes first then, and leaves no room for 64 rows"
    assert (long.first, short.finished) == (4, 4), "the second chunk takes the third pass, both share the fourth"


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
def test_one_client_gets_the_speed_of_the_planned_rounds(acceptance: float) -> None:
    costs = table(draft=0.05)
    assert costs.draft is not None
    depth = Planner(acceptance, PassPrices(costs.target), PassPrices(costs.draft), costs.greedy).depth(1, 500, 999)
    served = simulate(Serving(costs, acceptance), [[Request(0.0, 1, 8000)]])[0]
    planned = expected_tokens(acceptance, depth) / (1 + 0.05 * depth)
    assert depth > 1 and served.output / served.finished == pytest.approx(planned, rel=0.04)


def test_a_client_sends_its_next_request_when_it_has_the_answer_and_not_before_its_time() -> None:
    first, second, third = Request(0.0, 1, 4), Request(0.0, 1, 2), Request(50.0, 1, 1)
    assert simulate(Serving(table()), [[first, second, third]]) == [first, second, third]
    assert [(each.arrived, each.started, each.finished) for each in (first, second, third)] == [
        (0, 0, 4),
        (4, 4, 6),
        (50, 50, 51),
    ]


def test_a_round_that_does_not_pay_is_plain() -> None:
    costs = table(draft=0.9)
    plain, speculative = (simulate(Serving(costs, each), [[Request(0.0, 9, 40)]])[0].finished for each in (None, 0.3))
    assert plain == speculative


def test_passes_grow_beyond_the_longest_measured_context() -> None:
    prices = PassPrices(PassCosts((1, 2), (100, 200), ((1.0, 1.5), (1.25, 2.0))))
    assert prices.seconds(1, 60) == pytest.approx(1.0, abs=0.02)
    assert prices.seconds(2, 600) == pytest.approx(2.0 + 0.005 * 800, rel=0.02)
    assert PassPrices(passes(1.0)).seconds(1, 10**6) == 1.0, "one context says nothing about growth"


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 150), st.integers(1, 20)), min_size=1, max_size=30),
    st.sampled_from([None, 0.0, 0.7]),
    st.integers(1, 3),
    st.sampled_from(["round-robin", "least-loaded"]),
)
def test_every_request_is_served_once_and_in_order(
    sizes: list[tuple[float, int, int]], acceptance: float | None, replicas: int, routing: Routing
) -> None:
    serving = Serving(table(row=0.02), acceptance, replicas, 3, routing)
    served = simulate(serving, [[Request(*size)] for size in sizes])
    assert sorted((each.arrived, each.prompt, each.output) for each in served) == sorted(sizes)
    for each in served:
        assert each.arrived <= each.started < each.first <= each.finished
        assert each.produced == each.output and each.first - each.started > 0.999 + (each.prompt - 1) // 64


def test_the_shortest_queue_is_no_worse_than_taking_turns() -> None:
    requests = Sizes(1, 20, spread=1.5), 0.17, 1500
    shortest = Serving(table(), max_running=1, replicas=4)
    in_turn = replace(shortest, routing="round-robin")
    waits = [
        summarise(simulate(serving, [[each] for each in draw_poisson(*requests)])).wait_mean
        for serving in (shortest, in_turn)
    ]
    assert waits[0] < 0.7 * waits[1]


def test_replicas_are_as_many_as_the_bounds_need() -> None:
    load, serving = Workload(Sizes(1, 10), 150, seed=0), Serving(table(), max_running=1)
    bounds = Bounds(first_token=30.0, per_token=1.01)
    alone = find_sustainable_rate(serving, load, bounds, load.saturation(serving))
    assert load.saturation(serving) == pytest.approx(0.1, rel=0.01) and 0.05 < alone < 0.09
    needed = count_replicas(serving, load, bounds, 0.3)
    assert needed is not None and 3 < needed <= 0.3 / alone + 1
    assert bounds.hold(load.at(replace(serving, replicas=needed), 0.3))
    assert not bounds.hold(load.at(replace(serving, replicas=needed - 1), 0.3))
    assert count_replicas(serving, load, bounds._replace(per_token=0.5), 0.3) is None, "no pass is that fast"
    assert find_sustainable_rate(serving, load, bounds._replace(per_token=0.5), 1.0) == 0


def test_the_knee_is_where_power_is_greatest() -> None:
    point = LoadSummary(10.0, 0, 0, 0, 0, request_mean=1.0, wait_mean=0)
    sweep = {1.0: point, 2.0: point._replace(tokens_per_second=20, request_mean=1.5), 3.0: point._replace(wait_mean=9)}
    assert find_knee(sweep) == 2.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    costs = table(0.01, 0.1, row=0.0005)
    write_costs(replace(costs, machine={"cores": 2}), tmp_path)
    return tmp_path


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "8",
        "--requests",
        "20",
        "--max-running",
        "2",
        "--replicas",
        "1",
        "2",
    ]
    queueing.main([str(folder), *small, "--target-rate", "90", "--json", "--output", str(folder / "out")])
    printed = json.loads(capsys.readouterr().out)
    assert printed["modes"].keys() == printed["target"]["replicas"].keys() == {"plain", "speculative"}
    one, two = (printed["modes"]["plain"][replicas]["saturated_requests_per_second"] for replicas in "12")
    assert two == pytest.approx(2 * one, abs=0.002)
    (file,) = (folder / "out").glob("load_queueing_20*.json")
    assert json.loads(file.read_text())["table"]["machine"] == {"cores": 2}
    assert "</svg>" in file.with_suffix(".svg").read_text()
    queueing.main([str(folder), *small])
    assert "saturated" in capsys.readouterr().out


def test_a_bundle_without_costs_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="draftwood profile"):
        queueing.main([str(tmp_path)])


def test_a_measured_load_is_simulated_beside_it(folder: Path) -> None:
    row = {"tokens_per_second": 50.0, "first_token_p50": 0.1, "per_token_p50": 0.02}
    measured = {"max_tokens": 16, "requests": {"1": {"plain": row}, "4": {"plain": row}}}
    serving = {"plain": Serving(table(0.01))}
    found = queueing.compare_with_measured(serving, [1, 1], measured)
    assert found["1"]["plain"]["tokens_per_second"] == [100.0, 50.0] and found["1"]["plain"]["deviation"] == 1.0
    assert found["4"]["plain"]["tokens_per_second"] == [400.0, 50.0]
