"""Speed of planned rounds against plain decoding and fixed chains, replayed from real proposals in the time of a cost
table.

    python -m benchmarks.planning.replay bundles/smollm2 --output benchmarks/results

No engine runs and no clock is read: `traces.py` has recorded what the draft proposes before every token of real texts,
and how much of it the target accepts. Requests that share passes run in step: all draft passes before the target's, as
in `decoding/loop.py`. The time is divided into its parts, so that a loss has a name.

--slower-rounds: what a round with a proposal takes beyond the table, in milliseconds, unknown to the planning.
--faster-plain: share of the table's time that a narrow pass takes, likewise. Both show what wrong costs lead to.
--drifting: memory and processor get slower and faster every second, as on a shared host.
A trace of drawn texts (`--trace`) is replayed with the host's costs above temperature 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.planning.traces import LIMITS, Place, Trace, read_traces
from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.models.errors import BundleError
from draftwood.runtime.bundle.costs import read_costs
from draftwood.runtime.speculation.planning.budget import DraftBudget, Offer
from draftwood.runtime.speculation.planning.controller import Controller, RoundPlan
from draftwood.runtime.speculation.planning.cost import CostModel, PassCosts
from draftwood.runtime.speculation.planning.drift import Drift, scaled
from draftwood.runtime.speculation.planning.experience import Experience

TRACE = Path(__file__).with_name("smollm2_trace.json")
DRAWN_TRACE = Path(__file__).with_name("smollm2_trace_drawn.json")  # at temperature 0.7
CLIENTS = (1, 4, 16, 32, 64)
CHAINS = (1, 2, 3, 4)
# Seconds of processor time: of a new plan, of an offer with its part of a choice for all, and of a round of a request
# that may draft but does not, beyond that of a request without a draft. More than `host.py` measures with stand-ins for
# the engines, whose passes leave the caches of the processor alone: 5, 7.5 and 3 microseconds.
PLAN, OFFER, HELD = 35e-6, 20e-6, 5e-6
PLAIN = RoundPlan(0, 0, 1.0, 0.0, 1.0, probe=False)
# Of real over stored seconds, one pair after the other: factors of reading weights, and of rows' products.
PHASES = ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (0.6, 1.0), (2.0, 2.7))
PHASE_SECONDS = 2.0
SETTLED = 16  # rows from which on a pass takes the table's time in any case


class Machine(NamedTuple):
    """The real costs, which hold for so many seconds one after the other."""

    phases: tuple[CostModel, ...]
    seconds: float = 1.0

    def at(self, time: float) -> CostModel:
        return self.phases[int(time / self.seconds) % len(self.phases)]


class Timed(Controller):
    """Adds up what its plans take on the host."""

    planning = 0.0

    def held(self, remaining: int, sharing: int) -> RoundPlan | None:
        self.planning += HELD
        return super().held(remaining, sharing)

    def _new_plan(self, context: int, remaining: int, sharing: int, unread: int) -> RoundPlan:
        self.planning += PLAN
        return super()._new_plan(context, remaining, sharing, unread)

    def offer(self) -> Offer:
        self.planning += OFFER
        return super().offer()


class Planner(NamedTuple):
    """What a request asks for its plans. plan: by context, remaining, sharing and unread tokens. reads: whether the
    draft reads the prompt at once, by the same. controller, budget: None for fixed proposals."""

    plan: Callable[[int, int, int, int], RoundPlan]
    reads: Callable[[int, int, int, int], bool]
    controller: Timed | None
    budget: DraftBudget | None = None


def chain_of(length: int) -> Callable[[], Planner]:
    """Always a chain of this length; plain decoding for 0."""

    def plan(context: int, remaining: int, sharing: int, unread: int) -> RoundPlan:
        depth = min(length, remaining)
        return PLAIN._replace(depth=depth, size=depth, chain=True) if depth > 0 else PLAIN

    return lambda: Planner(plan, lambda *_: length > 0, None)


def by_cost(costs: CostModel, greedy: bool = True, draft_context: int | None = None) -> Callable[[], Planner]:
    """The default settings: the requests of one engine, which learn from each other."""
    experience, budget = Experience(Drift(costs)), DraftBudget(Drift(costs))
    widths = [width for width in costs.target.widths if width <= LIMITS.max_total_draft_tokens + 1]

    def make() -> Planner:
        controller = Timed(costs, LIMITS._shapes(widths), greedy, experience, budget, draft_context)

        def plan(context: int, remaining: int, sharing: int, unread: int) -> RoundPlan:
            held = controller.held(remaining, sharing)
            return held or controller.plan(context, remaining, sharing, unread)

        return Planner(plan, controller.worth_reading, controller, budget)

    return make


@dataclass
class Account:
    """Tokens, rounds of each kind, and seconds by part. prompts: the target's passes over prompts; reading: the
    draft's. plain: what plain rounds would have taken, on the host and in the target's passes; rows: by what proposals
    make these passes longer; draft: its passes, without the tokens that it missed before (catching up); host: of
    proposals; planning."""

    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / sum(self.seconds.values())


@dataclass
class Text:
    """A request in the middle of its text. unread: committed tokens that the draft has not read, the root included."""

    trace: Trace
    planner: Planner
    position: int = 0
    unread: int = 1

    @property
    def context(self) -> int:
        return self.trace.prompt + self.position

    @property
    def left(self) -> int:
        return len(self.trace.places) - self.position


def replay(traces: Sequence[Trace], make: Callable[[], Planner], real: Machine, clients: int, each: int) -> Account:
    """So many clients ask for `each` texts one after the other."""
    account = Account()
    waiting = [[traces[(number + turn) % len(traces)] for turn in range(each)] for number in range(clients)]
    running: list[Text | None] = [None] * clients
    while True:
        new = []
        for number, queue in enumerate(waiting):
            if running[number] is None and queue:
                new.append(Text(queue.pop(0), make()))
                running[number] = new[-1]
        texts = [text for text in running if text is not None]
        if not texts:
            return account
        costs = real.at(sum(account.seconds.values()))
        begin(new, len(texts), costs, account)
        step(texts, costs, account)
        for number, text in enumerate(running):
            if text is not None and not text.left:
                if text.planner.controller is not None:
                    text.planner.controller.leave()
                    account.seconds["planning"] += text.planner.controller.planning
                running[number] = None


def begin(new: Sequence[Text], sharing: int, costs: CostModel, account: Account) -> None:
    """Read the prompts of new texts."""
    if not new:
        return
    assert costs.draft is not None
    rows = sum(text.trace.prompt - 1 for text in new)
    account.seconds["prompts"] += costs.target.at(max(1, rows), 0)
    read = 0
    for text in new:
        length = text.trace.prompt
        text.unread = length
        if text.planner.reads(length, text.left - 1, sharing, length):
            read += length - 1
            text.unread = 1
    if read:
        account.seconds["reading"] += costs.draft.at(read, 0)


def step(texts: Sequence[Text], costs: CostModel, account: Account) -> None:
    """A round of all texts, whose passes are joint."""
    assert costs.draft is not None and costs.following is not None, "a pair is replayed"
    host = costs.greedy if isinstance(texts[0].trace.places[0], Place) else costs.sampled
    sharing, context = len(texts), sum(text.context for text in texts) // len(texts)
    plans = [
        text.planner.plan(text.context, text.left - 1, sharing, text.unread) if text.left > 1 else PLAIN
        for text in texts
    ]
    drafting = [(text, plan) for text, plan in zip(texts, plans, strict=True) if plan.depth]
    for depth in range(1, max((plan.depth for plan in plans), default=0) + 1):
        if depth == 1:
            late = sum(text.unread for text, _ in drafting if text.unread > 2)
            rows = sum(text.unread for text, _ in drafting)
            whole = costs.draft.at(rows, context)
            usual = costs.draft.at(rows - late, context) if rows > late else 0.0
            account.seconds["catching up"] += whole - usual
            account.seconds["draft"] += usual
        else:
            rows = sum(
                1 if plan.chain else min(LIMITS.frontier_width, plan.size)
                for _, plan in drafting
                if plan.depth >= depth
            )
            account.seconds["draft"] += costs.following.at(rows, context)
    tokens = [min(plan.size, LIMITS.frontier_width) if plan.depth == 1 else plan.size for plan in plans]
    passes = costs.target.shared(context, sharing)
    extra = sum(tokens) if drafting else 0
    account.seconds["plain"] += float(passes(np.array(sharing)))
    account.seconds["rows"] += float(passes(np.array(sharing + extra)) - passes(np.array(sharing)))
    account.seconds["plain"] += host.plain * sharing
    planner, seconds = texts[0].planner, float(passes(np.array(sharing + extra)))
    if sharing == 1 and planner.controller is not None:
        planner.controller.observe_pass(1 + extra, seconds)
    elif planner.budget is not None:
        planner.budget.observe_pass(sharing + extra, sharing, context, seconds)
    for text, plan, size in zip(texts, plans, tokens, strict=True):
        account.rounds["probe" if plan.probe else "speculative" if plan.depth else "plain"] += 1
        taken = 0
        if plan.depth:
            account.seconds["host"] += host.round + host.token * size - host.plain
            found = text.trace.places[text.position].verify(plan.depth, plan.size, plan.chain)
            taken = len(found.rows)
            account.accepted += taken
            account.drafted += size
            if text.planner.controller is not None:
                text.planner.controller.observe(plan, found.rows, found.choices)
            text.unread = 1 + (taken == plan.depth)
        else:
            text.unread += 1
        kept = min(taken + 1, text.left)
        account.tokens += kept
        text.position += kept


def drifting(costs: CostModel) -> Machine:
    """A machine whose speed changes. A pass takes the longer one of two times: of reading all weights, as its narrowest
    one does, and of its rows' products, of which its widest one consists."""

    def phase(memory: float, rows: float) -> CostModel:
        target = costs.target
        wide = np.asarray(target.widths) * (target.seconds[0][-1] / target.widths[-1] / target.seconds[0][0])
        slower = np.maximum(memory, rows * wide) / np.maximum(1.0, wide)
        draft, further = (
            None if each is None else scaled(each, np.array([memory])) for each in (costs.draft, costs.further)
        )
        return replace(costs, target=scaled(target, slower), draft=draft, further=further)

    return Machine(tuple(phase(*factors) for factors in PHASES), PHASE_SECONDS)


def distorted(costs: CostModel, slower: float, faster: float) -> Machine:
    """What a round really takes. slower: seconds of every round with a proposal. faster: share of the time of the
    narrowest pass; that of wider ones approaches the table's."""

    def narrow(passes: PassCosts) -> PassCosts:
        saved = (1 - faster) * np.maximum(0.0, 1 - (np.asarray(passes.widths) - 1) / SETTLED)
        rows = np.asarray(passes.seconds)
        return replace(passes, seconds=tuple(map(tuple, (rows - saved * rows[:, :1]).tolist())))

    greedy = replace(costs.greedy, round=costs.greedy.round + slower)
    sampled = replace(costs.sampled, round=costs.sampled.round + slower)
    return Machine((replace(costs, target=narrow(costs.target), greedy=greedy, sampled=sampled),))


def compare(traces: Sequence[Trace], known: CostModel, real: Machine, clients: int, each: int) -> dict[str, Any]:
    """Speeds over plain decoding, and where the time of the planned rounds goes, as shares."""
    plain = replay(traces, chain_of(0), real, clients, each).speed
    greedy = isinstance(traces[0].places[0], Place)
    own = replay(traces, by_cost(known, greedy), real, clients, each)
    chains = {f"chain of {k}": replay(traces, chain_of(k), real, clients, each).speed / plain for k in CHAINS}
    whole = sum(own.seconds.values())
    return {
        "plain_tokens_per_second": round(plain, 1),
        "planned": round(own.speed / plain, 4),
        **{name: round(speed, 4) for name, speed in chains.items()},
        "rounds": dict(own.rounds),
        "tokens_per_round": round(own.tokens / own.rounds.total(), 3),
        "share_of_time": {part: round(seconds / whole, 4) for part, seconds in own.seconds.items()},
    }


def make_table(found: dict[str, dict[str, Any]]) -> Table:
    parts = ("plain", "rows", "draft", "host", "reading", "catching up", "planning")
    result = Table("requests", "planned", *(f"chain of {k}" for k in CHAINS), "drafting", *parts)
    for clients, row in found.items():
        drafting = 1 - row["rounds"].get("plain", 0) / sum(row["rounds"].values())
        speeds = [f"{row[name]:.3f}" for name in ("planned", *(f"chain of {k}" for k in CHAINS))]
        shares = [f"{100 * row['share_of_time'].get(part, 0.0):.1f} %" for part in parts]
        result.add_row(clients, *speeds, f"{100 * drafting:.0f} %", *shares)
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path, help="its measured costs are the time")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--texts", type=int, default=4, help="of each client, one after the other")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--drifting", action="store_true")
    parser.add_argument("--slower-rounds", type=float, default=0.0)
    parser.add_argument("--faster-plain", type=float, default=1.0)
    add_output(parser, "planning_replay", required=False)
    args = parser.parse_args()
    traces, known = read_traces(args.trace), read_costs(args.bundle)
    if known is None:
        raise BundleError(f"{args.bundle} has no costs: run draftwood profile first")
    real = drifting(known) if args.drifting else distorted(known, args.slower_rounds / 1000, args.faster_plain)
    found = {str(clients): compare(traces, known, real, clients, args.texts) for clients in args.clients}
    Console(width=140).print(make_table(found))
    if args.output is not None:
        names = ("slower_rounds", "faster_plain", "drifting")
        settings = {
            "bundle": args.bundle.name,
            "trace": args.trace.name,
            **{name: getattr(args, name) for name in names},
        }
        write_results(args.output, args.name, settings | {"requests": found})


if __name__ == "__main__":
    main()
