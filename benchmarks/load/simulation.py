"""A discrete-event simulation of AsyncLLM replicas under load, by SimPy, from a measured table of pass costs.

The simulation follows `runtime/requests/async_llm.py`. The real Scheduler admits requests and decides whose turn it
is. A pass takes as many of the waiting requests as its rows hold, in the scheduler's order; passes of the draft come
first. Requests join and leave between passes. The simulation assumes the following instead of measuring it:
- A proposal is a chain. Each of its tokens is accepted independently with one probability. Its depth is the one that
  promises the most tokens per second at the current number of requests: the controller's choice once it knows that
  probability.
- Attention spans a pool that holds as much garbage as it may: the committed rows of all running requests, divided by
  LIVE_SHARE. Beyond the longest measured context, the cost of a pass grows as it does between the two longest ones.
- No two prompts have a common beginning. Routing and handing out tokens take no time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from math import isnan, nan
from typing import Literal, NamedTuple

import numpy as np
from simpy import Environment, Event

from draftwood.runtime.decoding.queue import FairQueue
from draftwood.runtime.decoding.scheduler import MAX_RUNNING
from draftwood.runtime.engines.shared.pool import LIVE_SHARE
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts

CONTEXT_STEP = 32  # slots; a longer context changes the cost of a pass in steps of this size
MAX_DEPTH = 8  # of a proposal
ENDLESS = 10**9  # length of the waiting queue: the simulation rejects no request
WARM_UP = 0.1  # share of the requests, the first to arrive, that the summary leaves out: their queue is still short

Routing = Literal["round-robin", "least-loaded"]
Events = Generator[Event, None, None]  # a SimPy process: it yields the events that it waits for


@dataclass(frozen=True, slots=True)
class Serving:
    """The replicas that serve. acceptance: probability that a draft token is accepted; None: plain decoding."""

    costs: CostModel
    acceptance: float | None = None
    replicas: int = 1
    max_running: int = MAX_RUNNING
    routing: Routing = "least-loaded"


@dataclass(slots=True, eq=False)
class Request:
    """One request and what became of it. Sizes are in tokens, times in seconds.

    arrived: the earliest time at which its client sends it; afterwards the time at which it was sent.
    """

    arrived: float
    prompt: int
    output: int
    started: float = nan
    first: float = 0.0
    finished: float = 0.0
    produced: int = 0
    unread: int = field(init=False)  # prompt tokens for the target to read; the prompt's last one is the first root
    unread_draft: int = field(init=False)  # committed tokens for the draft to read, the root included
    depth: int | None = None  # of this round's proposal, once it is planned
    drafted: int = 0

    def __post_init__(self) -> None:
        self.unread, self.unread_draft = self.prompt - 1, self.prompt

    @property
    def context(self) -> int:
        """Committed tokens."""
        return self.prompt - 1 - self.unread + self.produced


class NextPass(NamedTuple):
    """The pass that a request waits for. verifies: the pass ends the request's round."""

    request: Request
    draft: bool
    rows: int
    verifies: bool


class Replica:
    """One AsyncLLM, as a SimPy process."""

    def __init__(self, serving: Serving, rng: np.random.Generator, environment: Environment) -> None:
        self._acceptance, self._host, self._rng = serving.acceptance or 0.0, serving.costs.greedy, rng
        assert serving.costs.draft is not None, "a pair is simulated"
        self._target, self._draft = PassPrices(serving.costs.target), PassPrices(serving.costs.draft)
        self._planner = Planner(serving.acceptance, self._target, self._draft, self._host)
        self._environment, self._wake = environment, environment.event()
        self._complete: dict[Request, Event] = {}
        self.scheduler: FairQueue[Request] = FairQueue(serving.max_running, ENDLESS)
        environment.process(self._run())

    def submit(self, request: Request) -> Event:
        """Take a request. Returns the event of its last token."""
        self.scheduler.submit(request)
        if not self._wake.triggered:
            self._wake.succeed()
        self._complete[request] = self._environment.event()
        return self._complete[request]

    def _run(self) -> Events:
        """Execute passes one after the other; sleep while there is no request."""
        while True:
            yield self._wake
            # Requests that arrive at this instant share the pass: first all passes end, then their clients go on.
            for _ in range(2):
                yield self._environment.timeout(0)
            shared = self._choose_pass()
            yield self._environment.timeout(self._seconds(shared))
            for each in shared:
                self._finish_pass(each)
            if not self.scheduler.running:
                self._wake = self._environment.event()

    def _choose_pass(self) -> list[NextPass]:
        """The requests that share the next pass."""
        running = self.scheduler.running
        for request in running:
            request.started = self._environment.now if isnan(request.started) else request.started
        waiting = [self._next_pass(request, len(running)) for request in running]
        waiting = [each for each in waiting if each.draft] or waiting
        passes = self._draft if waiting[0].draft else self._target
        return waiting[: count_fitting([each.rows for each in waiting], passes.widest)]

    def _seconds(self, shared: Sequence[NextPass]) -> float:
        """Duration of a pass and of the work on the host after it."""
        passes = self._draft if shared[0].draft else self._target
        committed = sum(request.context for request in self.scheduler.running)
        duration = passes.seconds(sum(each.rows for each in shared), committed)
        return duration + sum(self._host_seconds(each) for each in shared)

    def _finish_pass(self, each: NextPass) -> None:
        request = each.request
        self.scheduler.rotate(request)
        if each.draft:
            request.unread_draft -= min(each.rows, request.unread_draft)
            request.drafted += not request.unread_draft  # a pass that leaves nothing unread drafts a token
        elif not each.verifies:
            request.unread -= each.rows
        else:
            self._verify(request)
            if request.produced == request.output:
                request.finished = self._environment.now
                self.scheduler.remove(request)
                self._complete.pop(request).succeed()

    def _next_pass(self, request: Request, sharing: int) -> NextPass:
        if request.unread:
            return NextPass(request, False, min(request.unread, self._target.widest), verifies=False)
        if request.depth is None:
            wanted = request.output - request.produced - 1
            request.depth = self._planner.depth(sharing, request.context, wanted)
            request.drafted = 0
        if request.drafted < request.depth:
            return NextPass(request, True, min(max(1, request.unread_draft), self._draft.widest), verifies=False)
        return NextPass(request, False, 1 + request.depth, verifies=True)

    def _host_seconds(self, each: NextPass) -> float:
        if not each.verifies:
            return 0.0
        drafted = each.request.drafted
        return self._host.round + self._host.token * drafted if drafted else self._host.plain

    def _verify(self, request: Request) -> None:
        """Draw how many tokens of the proposal are accepted, and commit them."""
        assert request.depth is not None
        accepted = 0
        while accepted < request.depth and self._rng.random() < self._acceptance:
            accepted += 1
        # The draft has not read the root, nor the last token it proposed; after a plain round it lags further behind.
        request.unread_draft += 1 if accepted < request.depth or not request.depth else 2
        request.produced += accepted + 1
        request.first = request.first or self._environment.now
        request.depth = None


def count_fitting(rows: Sequence[int], width: int) -> int:
    """How many entries of `rows`, from the first on, fit together into a pass of `width` rows."""
    return sum(total <= width for total in accumulate(rows))


class PassPrices:
    """Prices of passes over a pool that all running requests share."""

    def __init__(self, costs: PassCosts) -> None:
        self.costs, self.widest = costs, costs.widths[-1]
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, rows: int, committed: int) -> float:
        """Seconds of a pass of `rows` rows. committed: committed tokens of all running requests together."""
        key = rows, int(committed / LIVE_SHARE) // CONTEXT_STEP * CONTEXT_STEP
        if key not in self._known:
            self._known[key] = self.costs.at(*key)
        return self._known[key]


def expected_tokens(acceptance: float, depth: int) -> float:
    """Mean number of tokens that a round with a chain of `depth` tokens yields."""
    return sum(acceptance**power for power in range(depth + 1))


class Planner:
    """Chooses the depth with the most tokens per second, if all requests that share a pass propose that depth."""

    def __init__(self, acceptance: float | None, target: PassPrices, draft: PassPrices, host: HostCosts) -> None:
        self._acceptance, self._target, self._draft, self._host = acceptance, target, draft, host
        self._known: dict[tuple[int, int, int], int] = {}

    def depth(self, sharing: int, context: int, wanted: int) -> int:
        """The best depth. sharing: number of requests. context: committed tokens of each. wanted: tokens that the
        request still needs beyond the one that every round yields."""
        if self._acceptance is None:
            return 0
        key = (
            sharing,
            context // CONTEXT_STEP * CONTEXT_STEP,
            min(wanted, MAX_DEPTH, self._target.widest // sharing - 1),
        )
        if key not in self._known:
            speeds = [
                expected_tokens(self._acceptance, depth) / self._seconds(*key[:2], depth) for depth in range(key[2] + 1)
            ]
            self._known[key] = int(np.argmax(speeds)) if speeds else 0
        return self._known[key]

    def _seconds(self, sharing: int, context: int, depth: int) -> float:
        """Each request's share of the seconds of a round."""
        committed = sharing * context
        verify = self._target.seconds(sharing * (1 + depth), committed) / sharing
        if not depth:
            return verify + self._host.plain
        first, further = (self._draft.seconds(rows * sharing, committed) / sharing for rows in (2, 1))
        return verify + first + (depth - 1) * further + self._host.round + self._host.token * depth


def simulate(serving: Serving, clients: Iterable[Sequence[Request]], seed: int = 0) -> list[Request]:
    """Serve the requests of all clients. A client sends its next request when it has the answer to the last one, but
    not before the request's time of arrival. Returns all requests in the order of arrival, with their times."""
    environment, rng = Environment(), np.random.default_rng(seed)
    replicas = [Replica(serving, rng, environment) for _ in range(serving.replicas)]
    turns = count()
    complete: list[Request] = []

    def run_client(requests: Sequence[Request]) -> Events:
        for request in requests:
            if request.arrived > environment.now:
                yield environment.timeout(request.arrived - environment.now)
            request.arrived = environment.now
            yield replicas[choose_replica(serving.routing, replicas, next(turns))].submit(request)
            complete.append(request)

    for requests in clients:
        environment.process(run_client(requests))
    environment.run()
    return sorted(complete, key=lambda request: request.arrived)


def choose_replica(routing: Routing, replicas: Sequence[Replica], turn: int) -> int:
    """Index of the replica that serves request number `turn`."""
    if routing == "round-robin":
        return turn % len(replicas)
    # Equally loaded replicas take turns; otherwise the first would get more than its share.
    return min(
        range(len(replicas)),
        key=lambda index: (len(replicas[index].scheduler), (index - turn) % len(replicas)),
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Log-normal lengths in tokens. prompt, output: means. spread: standard deviation divided by the mean; 0: all
    requests have the mean lengths."""

    prompt: float
    output: float
    spread: float = 0.0
    longest: int = 1024

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        variance = np.log1p(self.spread**2)
        factors = np.exp(rng.normal(-variance / 2, np.sqrt(variance), 2)) if self.spread else np.ones(2)
        prompt, output = (int(np.clip(round(size), 1, self.longest)) for size in factors * (self.prompt, self.output))
        return prompt, output


def draw_poisson(sizes: Sizes, rate: float, number: int, seed: int = 0) -> Iterator[Request]:
    """Requests that arrive independently, `rate` per second on average."""
    rng, now = np.random.default_rng(seed), 0.0
    for _ in range(number):
        now += rng.exponential(1 / rate)
        yield Request(now, *sizes.draw(rng))


class LoadSummary(NamedTuple):
    """Throughput over all requests, and latencies in seconds over the requests after the warm-up.

    wait_mean: from the arrival to the start of a request's first pass.
    """

    tokens_per_second: float
    first_token_p50: float
    first_token_p99: float
    per_token_p50: float
    per_token_p99: float
    request_mean: float
    wait_mean: float


def summarise(requests: Sequence[Request], warm_up: float = WARM_UP) -> LoadSummary:
    """requests: complete ones, in the order of arrival. warm_up: share of them that the latencies leave out."""
    counted = requests[int(len(requests) * warm_up) :]
    first_p50, first_p99 = np.percentile([each.first - each.arrived for each in counted], (50, 99))
    later = [(each.finished - each.first) / max(1, each.output - 1) for each in counted]
    later_p50, later_p99 = np.percentile(later, (50, 99))
    seconds = max(each.finished for each in requests) - requests[0].arrived
    return LoadSummary(
        tokens_per_second=sum(each.output for each in requests) / seconds,
        first_token_p50=float(first_p50),
        first_token_p99=float(first_p99),
        per_token_p50=float(later_p50),
        per_token_p99=float(later_p99),
        request_mean=float(np.mean([each.finished - each.arrived for each in counted])),
        wait_mean=float(np.mean([each.started - each.arrived for each in counted])),
    )
