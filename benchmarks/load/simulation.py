"""A discrete-event simulation of AsyncLLM replicas under load, fed by a measured table of what passes cost.

It follows `runtime/async_llm.py`: the real Scheduler admits requests and keeps their turns; a pass takes as many of
those who wait for it, in turn, as its rows hold, the draft's passes first; requests join and leave between passes.
What it assumes instead of measuring:
- a proposal is a chain whose tokens are accepted independently, with one probability; its depth is the one that
  promises most tokens per second at the current sharing, as the controller's would be once it knows that probability;
- attention spans a pool as full of garbage as it gets: the committed rows of everybody who runs over LIVE_SHARE. Beyond
  the longest measured context a pass grows as it does between the two longest;
- no two prompts have anything in common, routing takes no time, and handing out tokens takes none of the engine's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import isnan, nan
from typing import Literal, NamedTuple

import numpy as np

from draftwood.runtime.batching import MAX_RUNNING
from draftwood.runtime.cost import CostModel, HostCosts, PassCosts
from draftwood.runtime.engines.pool import LIVE_SHARE
from draftwood.runtime.scheduler import Scheduler

CONTEXT_STEP = 32  # costs are looked up anew after so many slots
MAX_DEPTH = 8  # of a proposal
ENDLESS = 10**9  # places to wait: a simulation shows how long the queue gets, it turns nobody away
WARM_UP = 0.1  # share of the requests that find the queue shorter than it will be, and are not counted

Routing = Literal["round-robin", "least-loaded"]


@dataclass(frozen=True, slots=True)
class Serving:
    """What serves. acceptance: chance of a drafted token; None decodes plainly."""

    costs: CostModel
    acceptance: float | None = None
    replicas: int = 1
    max_running: int = MAX_RUNNING
    routing: Routing = "least-loaded"


@dataclass(slots=True, eq=False)
class Request:
    """Sizes in tokens, times in seconds. then: what the same client sends as soon as it has this answer."""

    arrived: float
    prompt: int
    output: int
    then: Request | None = None
    started: float = nan
    first: float = 0.0
    finished: float = 0.0
    produced: int = 0
    unread: int = field(init=False)  # of the prompt, by the target; its last token is the first round's root
    unread_draft: int = field(init=False)  # committed tokens, root included
    depth: int | None = None  # of this round's proposal, once it is planned
    drafted: int = 0

    def __post_init__(self) -> None:
        self.unread, self.unread_draft = self.prompt - 1, self.prompt

    @property
    def context(self) -> int:
        return self.prompt - 1 - self.unread + self.produced


class Wanted(NamedTuple):
    """The pass a request waits for. last: its round is over after it."""

    request: Request
    draft: bool
    rows: int
    last: bool


class Replica:
    """One AsyncLLM."""

    def __init__(self, serving: Serving, rng: np.random.Generator) -> None:
        self._acceptance, self._host, self._rng = serving.acceptance or 0.0, serving.costs.greedy, rng
        self._target, self._draft = PassPrices(serving.costs.target), PassPrices(serving.costs.draft)
        self._planner = Planner(serving.acceptance, self._target, self._draft, self._host)
        self.scheduler: Scheduler[Request] = Scheduler(serving.max_running, ENDLESS)
        self._served: list[Wanted] = []

    @property
    def busy(self) -> bool:
        return bool(self._served)

    def begin(self, now: float) -> float | None:
        """Start the next pass; when it will have ended, None when there is nothing to do."""
        running = self.scheduler.running
        if not running:
            return None
        for request in running:
            request.started = now if isnan(request.started) else request.started
        wanted = [self._wanted(request, len(running)) for request in running]
        drafting = [each for each in wanted if each.draft]
        mine = drafting or wanted
        passes = self._draft if drafting else self._target
        self._served = mine[: fitting([each.rows for each in mine], passes.widest)]
        rows = sum(each.rows for each in self._served)
        duration = passes.seconds(rows, sum(request.context for request in running))
        duration += sum(self._host_seconds(each) for each in self._served)
        return now + duration

    def end(self, now: float) -> list[Request]:
        """Finish the pass; the requests that are complete with it."""
        complete = []
        for each in self._served:
            request = each.request
            self.scheduler.served(request)
            if each.draft:
                request.unread_draft -= min(each.rows, request.unread_draft)
                request.drafted += not request.unread_draft  # a pass that leaves nothing unread drafts a token
            elif not each.last:
                request.unread -= each.rows
            else:
                self._advance(request, now)
                if request.produced == request.output:
                    request.finished = now
                    self.scheduler.remove(request)
                    complete.append(request)
        self._served = []
        return complete

    def _wanted(self, request: Request, sharing: int) -> Wanted:
        if request.unread:
            return Wanted(request, False, min(request.unread, self._target.widest), last=False)
        if request.depth is None:
            room = request.output - request.produced - 1
            request.depth = self._planner.depth(sharing, request.context, room)
            request.drafted = 0
        if request.drafted < request.depth:
            return Wanted(request, True, min(max(1, request.unread_draft), self._draft.widest), last=False)
        return Wanted(request, False, 1 + request.depth, last=True)

    def _host_seconds(self, each: Wanted) -> float:
        if not each.last:
            return 0.0
        drafted = each.request.drafted
        return self._host.round + self._host.token * drafted if drafted else self._host.plain

    def _advance(self, request: Request, now: float) -> None:
        """A round is verified."""
        assert request.depth is not None
        accepted = 0
        while accepted < request.depth and self._rng.random() < self._acceptance:
            accepted += 1
        # The draft has not read the root, nor the last token it proposed; after a plain round it lags further behind.
        request.unread_draft += 1 if accepted < request.depth or not request.depth else 2
        request.produced += accepted + 1
        request.first = request.first or now
        request.depth = None


def fitting(rows: Sequence[int], room: int) -> int:
    """How many, from the first on, share a pass of `room` rows."""
    for index, each in enumerate(rows):
        room -= each
        if room < 0:
            return index
    return len(rows)


class PassPrices:
    """PassCosts over a pool."""

    def __init__(self, costs: PassCosts) -> None:
        self.costs, self.widest = costs, costs.widths[-1]
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, rows: int, committed: int) -> float:
        """Of a pass of so many rows when all who run have so many committed ones together."""
        key = rows, int(committed / LIVE_SHARE) // CONTEXT_STEP * CONTEXT_STEP
        if key not in self._known:
            self._known[key] = self.costs.at(*key)
        return self._known[key]


def expected(acceptance: float, depth: int) -> float:
    """Tokens of a round."""
    return sum(acceptance**power for power in range(depth + 1))


class Planner:
    """The depth with most tokens per second when all who share a pass propose the same."""

    def __init__(self, acceptance: float | None, target: PassPrices, draft: PassPrices, host: HostCosts) -> None:
        self._acceptance, self._target, self._draft, self._host = acceptance, target, draft, host
        self._known: dict[tuple[int, int, int], int] = {}

    def depth(self, sharing: int, context: int, room: int) -> int:
        """context: committed tokens of each. room: tokens wanted beyond the round's own one."""
        if self._acceptance is None:
            return 0
        key = sharing, context // CONTEXT_STEP * CONTEXT_STEP, min(room, MAX_DEPTH, self._target.widest // sharing - 1)
        if key not in self._known:
            speeds = [expected(self._acceptance, depth) / self._seconds(*key[:2], depth) for depth in range(key[2] + 1)]
            self._known[key] = int(np.argmax(speeds)) if speeds else 0
        return self._known[key]

    def _seconds(self, sharing: int, context: int, depth: int) -> float:
        """What a round costs each of those who share it."""
        committed = sharing * context
        verify = self._target.seconds(sharing * (1 + depth), committed) / sharing
        if not depth:
            return verify + self._host.plain
        first, further = (self._draft.seconds(rows * sharing, committed) / sharing for rows in (2, 1))
        return verify + first + (depth - 1) * further + self._host.round + self._host.token * depth


def simulate(serving: Serving, requests: Iterable[Request], seed: int = 0) -> list[Request]:
    """Serve these and those that follow them. Returns all in order of arrival, with their times."""
    rng = np.random.default_rng(seed)
    replicas = [Replica(serving, rng) for _ in range(serving.replicas)]
    order = count()  # of events at the same time
    turn = count()
    events: list[tuple[float, int, Request | Replica]] = [(each.arrived, next(order), each) for each in requests]
    heapq.heapify(events)
    complete: list[Request] = []
    while events:
        now = events[0][0]
        while events and events[0][0] == now:  # who arrives together may share the first pass
            event = heapq.heappop(events)[2]
            if isinstance(event, Request):
                replicas[chosen(serving.routing, replicas, next(turn))].scheduler.submit(event)
                continue
            for each in event.end(now):
                complete.append(each)
                if each.then is not None:
                    each.then.arrived = now
                    heapq.heappush(events, (now, next(order), each.then))
        for replica in replicas:
            if not replica.busy and (end := replica.begin(now)) is not None:
                heapq.heappush(events, (end, next(order), replica))
    return sorted(complete, key=lambda request: request.arrived)


def chosen(routing: Routing, replicas: Sequence[Replica], turn: int) -> int:
    if routing == "round-robin":
        return turn % len(replicas)
    # Equally loaded ones take turns: the first would get more than its share.
    return min(
        range(len(replicas)),
        key=lambda index: (len(replicas[index].scheduler), (index - turn) % len(replicas)),
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Log-normal lengths in tokens. spread: standard deviation over the mean; 0: all are alike."""

    prompt: float
    output: float
    spread: float = 0.0
    longest: int = 1024

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        variance = np.log1p(self.spread**2)
        factors = np.exp(rng.normal(-variance / 2, np.sqrt(variance), 2)) if self.spread else np.ones(2)
        prompt, output = (int(np.clip(round(size), 1, self.longest)) for size in factors * (self.prompt, self.output))
        return prompt, output


def poisson(sizes: Sizes, rate: float, number: int, seed: int = 0) -> Iterator[Request]:
    """Requests that arrive independently, `rate` per second."""
    rng, now = np.random.default_rng(seed), 0.0
    for _ in range(number):
        now += rng.exponential(1 / rate)
        yield Request(now, *sizes.draw(rng))


def closed(sizes: Sequence[Sequence[tuple[int, int]]]) -> list[Request]:
    """Clients that each send the next request when they have the last answer. sizes: of each client's requests."""
    firsts = []
    for each in sizes:
        following: deque[Request] = deque()
        for prompt, output in reversed(each):
            following.appendleft(Request(0.0, prompt, output, following[0] if following else None))
        firsts.append(following[0])
    return firsts


class Figures(NamedTuple):
    """Seconds, tokens and requests; of those after the warm-up."""

    tokens_per_second: float
    first_token_p50: float
    first_token_p99: float
    per_token_p50: float
    per_token_p99: float
    request_mean: float
    wait_mean: float  # until a place was free and a pass began


def figures(requests: Sequence[Request], warm_up: float = WARM_UP) -> Figures:
    """requests: in order of arrival, complete."""
    counted = requests[int(len(requests) * warm_up) :]
    first = np.array([each.first - each.arrived for each in counted])
    later = np.array([(each.finished - each.first) / max(1, each.output - 1) for each in counted])
    return Figures(
        tokens_per_second=sum(each.output for each in requests)
        / (max(each.finished for each in requests) - requests[0].arrived),
        first_token_p50=float(np.quantile(first, 0.5)),
        first_token_p99=float(np.quantile(first, 0.99)),
        per_token_p50=float(np.quantile(later, 0.5)),
        per_token_p99=float(np.quantile(later, 0.99)),
        request_mean=float(np.mean([each.finished - each.arrived for each in counted])),
        wait_mean=float(np.mean([each.started - each.arrived for each in counted])),
    )
