"""Controller: a chain or a tree, how deep and how wide, or nothing in the next round, by what passes cost here.

    speed(kind, d, n) = (1 + E[accepted | kind, depth d, n tokens]) / (draft passes + target pass + host)

The costs are a stored table (`runtime/cost.py`); the acceptance is learned while requests run, see `acceptance.py`.

A plan, the kind of proposal included, is made before its round, from the stored table, what earlier rounds accepted,
and how many others share its passes; never from what this round will draw: the output keeps its distribution. How many
share, and what other requests accepted, depends on who else happens to be served, so a sampled request with a seed is
told that it is alone and has an `Experience` of its own: it keeps its text as long as the table stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cost import CostModel, PassCosts
from .acceptance import AcceptanceEstimate, Choice, Shapes

PROBE_LOSS = 0.01  # share of plain decoding's time that looking whether speculation pays again may cost
REMEMBERED = 64  # kinds of request whose latest estimate is kept: clients choose what they are
SHARED_SPEED_UP = 1.05  # that a proposal must promise where passes are shared
CONTEXT_STEP = 64  # costs are looked up anew after so many tokens
PLAIN_DEPTH = 0


class Plan(NamedTuple):
    """One round's limits; depth 0 decodes plainly. tokens, seconds: what the round is expected to yield and to take.
    speed_up: expected of the best proposal over plain decoding. probe: it is made although that is less than one, to
    see whether it still is. chain: propose a chain of `depth` tokens, whatever else the configuration grows. reason: of
    a plain round, the figures that decided."""

    depth: int
    size: int
    tokens: float
    seconds: float
    speed_up: float
    probe: bool
    chain: bool = False
    reason: str = ""


class Experience:
    """What the requests of one model leave to the next: the latest estimates, and plain rounds since the last look
    whether speculation pays. Only ever a guess, so that requests on several threads may mix theirs."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: dict[tuple[Shapes, bool], AcceptanceEstimate] = {}
        self.plain_rounds = 0

    def recall(self, shapes: Shapes, greedy: bool) -> AcceptanceEstimate:
        """What a new request may expect."""
        latest = self._latest.get((shapes, greedy))
        return AcceptanceEstimate(shapes) if latest is None else latest.carried()

    def note(self, shapes: Shapes, greedy: bool, estimate: AcceptanceEstimate) -> None:
        """Of the request that runs; what was not heard of for longest is forgotten."""
        with self._lock:
            self._latest.pop((shapes, greedy), None)
            self._latest[shapes, greedy] = estimate
            if len(self._latest) > REMEMBERED:
                del self._latest[next(iter(self._latest))]


class Controller:
    """The plans of one request."""

    def __init__(self, costs: CostModel, shapes: Shapes, greedy: bool, experience: Experience | None = None) -> None:
        """experience: of earlier requests; none for a request that must not depend on them."""
        self._costs, self._shapes, self._greedy = costs, shapes, greedy
        self._host = costs.greedy if greedy else costs.sampled
        self._experience = Experience() if experience is None else experience
        self._estimate = self._experience.recall(shapes, greedy)
        self._priced = (-1, 0)  # for which context and sharing
        self._seconds = np.zeros(shapes.grid)
        self._plain_seconds = 0.0
        self._draft_alone: list[float] = []  # seconds of a draft pass of 1, 2, ... rows that nobody shares
        self._found: dict[int, Plan] = {}  # the best of each depth, as long as nothing is learned

    def plan(self, context: int, room: int, sharing: int = 1, unread: int = 1) -> Plan:
        """The next round's limits behind `context` committed tokens; at most `room` deep. sharing: requests whose
        passes run together: the more there are, the dearer is a row. unread: tokens the draft would read first."""
        self._price(context, sharing)
        plain = Plan(PLAIN_DEPTH, 0, 1.0, self._plain_seconds, 1.0, probe=False)
        if room < 1:
            return plain
        best = self._best(room)
        catching_up = self._catching_up(unread)
        if self._pays(best, room, catching_up, sharing):
            return best
        self._experience.plain_rounds += 1
        # Nobody else drafts when one request looks: its draft passes are its own.
        loss = catching_up + best.depth * self._draft_alone[min(self._shapes.frontier, len(self._draft_alone)) - 1]
        allowed = self._experience.plain_rounds * PROBE_LOSS * self._plain_seconds
        if allowed > loss and allowed > loss + self._held_up(best, context, sharing):
            self._experience.plain_rounds = 0
            return best._replace(probe=True)
        return plain._replace(speed_up=best.speed_up, reason=self._why_not(best, room, unread, sharing))

    def worth_reading(self, context: int, room: int, sharing: int) -> bool:
        """Whether the draft is to read the prompt of `context` tokens, for a text of `room` tokens behind it."""
        self._price(context, sharing)
        return room > 0 and self._pays(self._best(room), room, self._catching_up(context), sharing)

    def observe(self, plan: Plan, accepted: Sequence[int], choices: Sequence[Choice]) -> None:
        """Learn from a verified round: what it, and every smaller proposal, got. accepted: rows of its tree. choices:
        of the verifier along them."""
        self._found.clear()
        self._estimate.observe(None if plan.chain else plan.size, plan.depth, accepted, choices)
        self._experience.note(self._shapes, self._greedy, self._estimate)

    def _pays(self, plan: Plan, room: int, catching_up: float, sharing: int) -> bool:
        """Whether it is expected to be faster than plain decoding, and among others clearly so: a table measured alone
        does not know what their rows, and those rejected, do to a pass."""
        clearly = sharing == 1 or plan.speed_up > SHARED_SPEED_UP
        return clearly and self._saves(plan, room) > catching_up

    def _why_not(self, plan: Plan, room: int, unread: int, sharing: int) -> str:
        """What `_pays` found wanting. Times are counted in plain tokens: costs may stand for sizes of models."""
        promise = f"a proposal promises {plan.speed_up:.2f} times plain speed"
        if sharing > 1 and plan.speed_up <= SHARED_SPEED_UP:
            return f"{promise} and {sharing} requests share the passes, where more than {SHARED_SPEED_UP:.2f} is asked"
        if not (reading := self._catching_up(unread)):
            return promise
        saved, reading = self._saves(plan, room) / self._plain_seconds, reading / self._plain_seconds
        saving = f"{promise}, which saves the time of {max(0.0, saved):.1f} tokens over the {room} that may follow"
        return f"{saving}, but the draft would first read {unread} tokens, in the time of {reading:.1f}"

    def _saves(self, plan: Plan, room: float) -> float:
        """Seconds that such rounds save over a text of `room` tokens."""
        return (self._plain_seconds - plan.seconds / plan.tokens) * room

    def _held_up(self, plan: Plan, context: int, sharing: int) -> float:
        """Seconds that a proposal which nobody else makes adds to a pass that all wait for, beyond what it yields."""
        tokens = plan.size + self._shapes.given
        passes, host = self._costs.target, self._host
        longer = passes.at(sharing + tokens, context * sharing) - passes.at(sharing, context * sharing)
        longer += host.round + host.token * tokens - host.plain
        return max(0.0, longer - (plan.tokens - 1) * self._plain_seconds)

    def _catching_up(self, unread: int) -> float:
        """Seconds in which the draft reads what it missed, perhaps the whole prompt: once, and in a pass of its own.
        A few tokens are part of every round."""
        widest = len(self._draft_alone)
        missed = self._draft_alone[min(unread, widest) - 1] * max(1.0, unread / widest)
        return missed if unread > self._shapes.depth else 0.0

    def _best(self, room: int) -> Plan:
        """The proposal of most tokens per second."""
        most = min(room, self._shapes.depth)
        if most not in self._found:
            expected, every = 1 + self._estimate.accepted()[:, :most], self._seconds[:, :most]
            row, column = divmod(int((expected / every).argmax()), most)
            depth, tokens, seconds = column + 1, float(expected[row, column]), float(every[row, column])
            chain = self._shapes.chain and row == 0
            size = depth if chain else self._shapes.sizes[row - self._shapes.chain]
            speed_up = tokens * self._plain_seconds / seconds
            self._found[most] = Plan(depth, size, tokens, seconds, speed_up, probe=False, chain=chain)
        return self._found[most]

    def _price(self, context: int, sharing: int) -> None:
        """Seconds [kinds and sizes, depths] of every plan, and of a plain token, behind so many committed ones: this
        request's part of passes in which all have as many rows as itself, and its own time on the host."""
        priced = context // CONTEXT_STEP, sharing
        if priced == self._priced:
            return
        self._priced, shapes, spanned = priced, self._shapes, context * sharing  # attention reads everybody's rows
        self._found.clear()

        def part(passes: PassCosts, rows: NDArray[np.int64]) -> NDArray[np.float64]:
            return passes.of(rows * sharing, spanned) / sharing

        self._plain_seconds = float(part(self._costs.target, np.array(1))) + self._host.plain
        self._draft_alone = self._costs.draft.of(np.arange(1, self._costs.draft.widths[-1] + 1), spanned).tolist()
        depths = np.arange(1, shapes.depth + 1)
        sizes = np.array([1] * shapes.chain + list(shapes.sizes))
        tokens = np.broadcast_to(sizes[:, None], shapes.grid).copy()
        tokens[: int(shapes.chain)] = depths
        tokens += shapes.given
        first = part(self._costs.draft, np.array(2))  # the root, and often the last accepted token
        further = part(self._costs.draft, np.minimum(sizes, shapes.frontier))
        verify = part(self._costs.target, tokens + 1) + self._host.round + self._host.token * tokens
        self._seconds = first + (depths - 1) * further[:, None] + verify
