"""FairQueue: turns, places and the queue, over any sequence of events."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.models.errors import ConfigError
from draftwood.runtime.decoding.queue import FairQueue, QueueFullError, is_within_share, max_client_places

T = TypeVar("T")


def turn(scheduler: FairQueue[T]) -> T:
    """Serve whose turn it is."""
    served = scheduler.running[0]
    scheduler.rotate(served)
    return served


def test_turns_go_round_and_a_newcomer_waits_for_one_round() -> None:
    scheduler: FairQueue[str] = FairQueue(max_running=3, max_waiting=1)
    for name in "ab":
        scheduler.submit(name)
    assert [turn(scheduler) for _ in range(3)] == ["a", "b", "a"]
    scheduler.submit("c")
    assert [turn(scheduler) for _ in range(4)] == ["b", "a", "c", "b"]


def test_places_are_given_in_order_of_arrival() -> None:
    scheduler: FairQueue[str] = FairQueue(max_running=1, max_waiting=3)
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
    scheduler: FairQueue[str] = FairQueue(max_running=1, max_waiting=200)
    for number in range(100):
        scheduler.submit(f"a{number}", "a")
    for name in ("b0", "b1", "c0"):
        scheduler.submit(name, name[0])
    scheduler.submit("d0", "d")
    scheduler.remove("b0")  # gave up: its client has another one
    served = []
    for _ in range(7):
        served.append(turn(scheduler))
        scheduler.remove(served[-1])
    assert served == ["a0", "a1", "b1", "c0", "d0", "a2", "a3"]


def test_users_take_turns_within_their_client_and_never_across() -> None:
    """Inventing users gains a client nothing, and naming another client's users takes nothing from it."""
    scheduler: FairQueue[str] = FairQueue(max_running=1, max_waiting=100)
    scheduler.submit("now", "a")
    for request in ("a1 first", "a1 second", "a1 third", "a2 first", "a3 first"):
        scheduler.submit(request, "a", request[:2])
    for request in ("b1 first", "a1 of b", "b1 second"):
        scheduler.submit(request, "b", request[:2])
    served = []
    while scheduler.running:
        served.append(turn(scheduler))
        scheduler.remove(served[-1])
    a_and_b = ["a1 first", "b1 first", "a2 first", "a1 of b", "a3 first", "b1 second", "a1 second", "a1 third"]
    assert served == ["now", *a_and_b]


def fill(scheduler: FairQueue[object], client: str | None, user: str | None = None) -> int:
    """How many requests of a client are taken until one is refused."""
    for count in range(1000):
        try:
            scheduler.submit(object(), client, user or f"user {count}")
        except QueueFullError as error:
            assert "retry later" in str(error)
            return count
    raise AssertionError("never full")


def test_no_client_fills_the_queue_alone() -> None:
    """It has half of it, the next one half of what is left; whom nobody told apart may have all."""
    scheduler: FairQueue[object] = FairQueue(max_running=3, max_waiting=64)
    assert [fill(scheduler, client) for client in "abcdef"] == [3 + 33, 16, 8, 4, 2, 1]
    assert scheduler.num_waiting == 64
    assert fill(scheduler, "g") == 0
    assert fill(FairQueue(max_running=3, max_waiting=64), None) == 3 + 64


@given(st.integers(0, 300))
def test_the_most_of_one_client_is_what_its_share_comes_to(places: int) -> None:
    held = 0
    while is_within_share(held, held, places):
        held += 1
    assert held == max_client_places(places)
    assert held < places or places < 3


@given(st.integers(1, 40), st.lists(st.integers(0, 5), max_size=120))
def test_whoever_has_least_gets_the_last_place(places: int, events: list[int]) -> None:
    """Whatever came before: while any place is free, a client that holds none gets one."""
    held = Counter[int]()
    for client in events:
        if is_within_share(held[client], held.total(), places):
            held[client] += 1
        assert held.total() <= places
        assert is_within_share(0, held.total(), places) == (held.total() < places)
        assert all(count <= max_client_places(places) for count in held.values())


def test_a_request_that_is_unknown_is_a_mistake() -> None:
    scheduler: FairQueue[str] = FairQueue(max_running=1, max_waiting=1)
    scheduler.submit("a")
    with pytest.raises(ValueError, match="neither running nor waiting"):
        scheduler.remove("b")


def test_without_a_queue_a_free_place_is_still_taken() -> None:
    scheduler: FairQueue[str] = FairQueue(max_running=1, max_waiting=0)
    scheduler.submit("a")
    with pytest.raises(QueueFullError):
        scheduler.submit("b")


@pytest.mark.parametrize("limits", [(0, 5), (-1, 5), (1, -1)])
def test_limits_under_which_nothing_runs_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="max_running"):
        FairQueue[str](*limits)


@given(
    st.integers(1, 4),
    st.integers(0, 8),
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "submit", "next", "remove"]),
            st.sampled_from([None, "a", "b", "c"]),
            st.integers(0, 9),
        ),
        max_size=60,
    ),
)
def test_limits_hold_and_nobody_starves(
    max_running: int, max_waiting: int, events: list[tuple[str, str | None, int]]
) -> None:
    scheduler: FairQueue[int] = FairQueue(max_running, max_waiting)
    inside: dict[int, str | None] = {}  # request -> client
    for number, (event, client, choice) in enumerate(events):
        if event == "submit":
            waiting = set(scheduler) - set(scheduler.running)
            held = 0 if client is None else sum(inside[each] == client for each in waiting)
            may = len(inside) < max_running or is_within_share(held, len(waiting), max_waiting)
            try:
                scheduler.submit(number, client, choice % 2)
                inside[number] = client
                assert may
            except QueueFullError:
                assert not may
        elif event == "remove" and inside:
            gone = sorted(inside)[choice % len(inside)]
            scheduler.remove(gone)
            del inside[gone]
        elif event == "next" and inside:
            turn(scheduler)
        assert sorted(scheduler) == sorted(inside) and len(scheduler) == len(inside)
        assert scheduler.num_running == min(max_running, len(inside))
    turns = Counter(turn(scheduler) for _ in range(3 * scheduler.num_running))
    assert set(turns.values()) <= {3}
