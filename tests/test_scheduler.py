"""Scheduler: turns, places and the queue, over any sequence of events."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.models.errors import ConfigError
from draftwood.runtime.scheduler import QueueFullError, Scheduler

T = TypeVar("T")


def turn(scheduler: Scheduler[T]) -> T:
    """Serve whose turn it is."""
    served = scheduler.running[0]
    scheduler.served(served)
    return served


def test_turns_go_round_and_a_newcomer_waits_for_one_round() -> None:
    scheduler: Scheduler[str] = Scheduler(max_running=3, max_waiting=1)
    for name in "ab":
        scheduler.submit(name)
    assert [turn(scheduler) for _ in range(3)] == ["a", "b", "a"]
    scheduler.submit("c")
    assert [turn(scheduler) for _ in range(4)] == ["b", "a", "c", "b"]


def test_places_are_given_in_order_of_arrival() -> None:
    scheduler: Scheduler[str] = Scheduler(max_running=1, max_waiting=3)
    for name in "abcd":
        scheduler.submit(name)
    with pytest.raises(QueueFullError, match="1 requests are running and 3 waiting"):
        scheduler.submit("e")
    scheduler.remove("c")  # gave up while it waited
    served = []
    while scheduler.running:
        served.append(turn(scheduler))
        scheduler.remove(served[-1])
    assert served == ["a", "b", "d"]


def test_clients_that_wait_get_places_in_turn() -> None:
    """A hundred requests of one client delay another's single one by one of them."""
    scheduler: Scheduler[str] = Scheduler(max_running=1, max_waiting=103)
    for number in range(100):
        scheduler.submit(f"a{number}", "a")
    for name in ("b0", "b1", "c0"):
        scheduler.submit(name, name[0])
    with pytest.raises(QueueFullError):
        for number in range(2):
            scheduler.submit(f"d{number}", "d")
    scheduler.remove("b0")  # gave up: its client has another one
    served = []
    for _ in range(7):
        served.append(turn(scheduler))
        scheduler.remove(served[-1])
    assert served == ["a0", "a1", "b1", "c0", "d0", "a2", "a3"]


def test_without_a_queue_a_free_place_is_still_taken() -> None:
    scheduler: Scheduler[str] = Scheduler(max_running=1, max_waiting=0)
    scheduler.submit("a")
    with pytest.raises(QueueFullError):
        scheduler.submit("b")


@pytest.mark.parametrize("limits", [(0, 5), (-1, 5), (1, -1)])
def test_limits_under_which_nothing_runs_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="max_running"):
        Scheduler[str](*limits)


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from(["submit", "submit", "next", "remove"]), st.integers(0, 9)), max_size=60),
)
def test_limits_hold_and_nobody_starves(max_running: int, max_waiting: int, events: list[tuple[str, int]]) -> None:
    scheduler: Scheduler[int] = Scheduler(max_running, max_waiting)
    inside: list[int] = []
    for number, (event, choice) in enumerate(events):
        if event == "submit":
            full = len(inside) == max_running + max_waiting
            try:
                scheduler.submit(number, choice % 3)
                inside.append(number)
                assert not full
            except QueueFullError:
                assert full
        elif event == "remove" and inside:
            scheduler.remove(inside.pop(choice % len(inside)))
        elif event == "next" and inside:
            turn(scheduler)
        assert sorted(scheduler) == sorted(inside) and len(scheduler) == len(inside)
        assert scheduler.num_running == min(max_running, len(inside))
    turns = Counter(turn(scheduler) for _ in range(3 * scheduler.num_running))
    assert set(turns.values()) <= {3}
