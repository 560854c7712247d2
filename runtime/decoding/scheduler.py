"""Scheduler: runs the requests of a stream, a list of prompts, a conversation or a server, pass by pass.

Passes of several requests over the same engine run as one. Requests start and end between passes (continuous
batching).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing, suppress
from threading import Condition, current_thread, main_thread
from time import perf_counter
from typing import Any, Generic

import numpy as np

from ...models.bindings import DRAFT
from ..engines.base import Engine, ForwardOutput, Pass
from ..engines.rounds import RoundOutcome, Work
from ..engines.shared.memory import CacheBudget, OutOfMemoryError
from ..speculation.planning.budget import DraftBudget
from .chunk import TokenChunk
from .prefill import PrefillLimit, count_rows
from .queue import FairQueue
from .request import AnyRequest, C, Event, Request

MAX_RUNNING = 32  # default number of requests that run at a time
MAX_TURNS = 8  # the same on engines that join no passes: more would take memory and save no time
UNBOUNDED = CacheBudget(None, 0, 0)


class Scheduler(Generic[C]):
    """Runs requests pass by pass. An error in a request's round ends that request only.

    A request starts when the free cache slots suffice for the `num_slots` that it can need; while it waits for slots,
    so do those after it. One thread calls `step`. Other threads may add requests and read `queue` while they hold
    `changed`.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int = 0,
        target: Engine | None = None,
        draft: Engine | None = None,
        pools: Sequence[Engine] = (),
        slots: CacheBudget = UNBOUNDED,
        prefill: PrefillLimit | None = None,
        drafts: DraftBudget | None = None,
    ) -> None:
        """target, draft: the engines of its requests. pools: those of them whose caches are its own. slots: those of
        these caches that the requests may use together. prefill: how long running texts wait for prompts; None: as
        long as it takes. drafts: the budget of draft tokens; None: one that follows no clock."""
        self.queue: FairQueue[Request[C]] = FairQueue(max_running, max_waiting)
        self.changed = Condition()
        self.target, self.draft, self.slots = target, draft, slots
        self.drafts = DraftBudget() if drafts is None else drafts
        self.batch_size = 1  # requests that share passes at present
        self.pools = pools
        self._prefill = prefill
        self._slot_limit = slots.slots  # for all requests; smaller than `slots` after memory ran out
        self._freed = False  # whether unused memory was freed since the last successful pass
        self._num_added = 0

    def add(self, request: Request[C], client: Hashable = None, user: Hashable = None) -> None:
        """Queue a request, see FairQueue.submit. Raises QueueFullError."""
        with self.changed:
            self.queue.submit(request, client, user)
            self._num_added += 1
            request.number = self._num_added
            self.changed.notify_all()

    def remove(self, request: Request[C]) -> None:
        """End a running or waiting request: close its caches and free its place."""
        request.ended, request.next_pass = True, None
        with suppress(BaseException):  # the generator may raise when it is closed
            request.steps.close()
        with self.changed:
            self.queue.remove(request)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def run(
        self, requests: Sequence[Request[C]], stopped: Callable[[], bool] | None = None
    ) -> Generator[tuple[Request[C], C], None, None]:
        """Yield the chunks of these requests as they are computed. The first error of one is raised. It ends all
        requests, as do the end of the iteration by the caller, and `stopped`, called before each pass, with True."""
        try:
            for request in requests:
                self.add(request)
            while self.queue.running and not (stopped is not None and stopped()):
                for request, chunk, error in self.step():
                    if error is not None:
                        raise error
                    if chunk is not None:
                        yield request, chunk
        finally:
            for request in self.queue:
                self.remove(request)

    def step(self) -> Iterator[Event[C]]:
        """Run the next pass, joined for as many requests as fit into it; yields what happened, request by request."""
        running = list(self.queue.running)
        work = running[0].next_pass if len(running) == self.batch_size == 1 and running[0].running else None
        if work is not None and not work.is_chunk:
            served = running  # nothing to prepare, to select or to join
        else:
            yield from self._start(running)
            served = select_joint([request for request in running if request.next_pass is not None], self._prefill)
        works: Any = [request.next_pass for request in served if request.next_pass is not None]
        if not works:
            return
        start = perf_counter()
        try:
            outputs = works[0].engine.forward(works)
        except BaseException as error:
            yield from self._recover(served, works, error)
            return
        self._freed = False
        # Those that came meanwhile share the next pass, which plans must know.
        self.batch_size = max(self.batch_size, len(self.queue.running))
        if len(running) > 1:
            self._note(served, running, works, perf_counter() - start)
        for request, output in zip(served, outputs, strict=True):
            yield from self._advance(request, output)

    def _start(self, running: Sequence[Request[C]]) -> Iterator[Event[C]]:
        """Start the waiting requests for which there are free slots, in the order of admission. Of the next passes over
        prompts, rows that a cache holds are taken over, and those that others would wait for are split."""
        started = [request for request in running if request.started]
        if not started and self._slot_limit != self.slots.slots:  # memory may be free again
            self._set_slot_limit(self.slots.slots)
        free = None if self._slot_limit is None else self._slot_limit - sum(each.num_slots for each in started)
        for request in running:
            if not request.started:
                if free is not None:
                    free -= request.num_slots
                    if free < 0:
                        break
                started.append(request)
        self.batch_size = max(1, len(started))
        for request in started:
            if not request.started:
                request.started = True
                yield Event(request)
                yield from self._resume(request, None)
            yield from self._recall(request)
            self._split(request, running)

    def _note(self, served: list[Request[C]], running: Sequence[Request[C]], works: list[Work], took: float) -> None:
        """Learn from a pass that requests may share: what it took, and how long running texts waited for prompts."""
        writing = [request for request in served if request.writes]
        if works[0].engine.spec.role != DRAFT and works[0].num_outputs and len(writing) == len(served):
            context = sum(each.cache.length for each in works) // len(works)
            self.drafts.observe_pass(count_rows(works), len(works), context, took)
        if self._prefill is not None and len(writing) < len(served):
            texts, prompts = ([each.next_pass for each in served if each.writes == kind] for kind in (True, False))
            added = self._prefill.added([each for each in texts if each], [each for each in prompts if each])
            for request in running:
                request.waited += added if request.writes else 0.0

    def _split(self, request: Request[C], running: Sequence[Request[C]]) -> None:
        """Split a request's pass over a prompt that would keep running texts waiting."""
        work = request.next_pass
        if not isinstance(work, Pass) or request.writes or request.rest is not None or self.batch_size == 1:
            return
        spec, texts = work.engine.spec, any(other.running for other in running)
        most = self._prefill.most_rows(spec, work.cache.length) if self._prefill and texts else spec.max_width
        if work.num_rows > most and work.num_outputs == 1:
            request.next_pass, request.rest = work.split(most)

    def _recall(self, request: Request[C]) -> Iterator[Event[C]]:
        """Advance a request over the rows of its next passes that its engine's cache already holds."""
        while isinstance(work := request.next_pass, Pass):
            try:
                rest = work.engine.recall(work)
            except MemoryError as error:  # the state of the request's cache is unknown
                yield self._fail(request, error)
                return
            if rest is work:
                return
            if work.engine.spec.role != DRAFT:
                request.stats.num_cached_tokens += work.num_rows - (rest.num_rows if rest else 0)
            request.next_pass = rest
            if rest is None and request.rest is not None:
                request.next_pass, request.rest = request.rest, None
            elif rest is None:
                yield from self._resume(request, None)

    def _advance(self, request: Request[C], output: ForwardOutput | RoundOutcome) -> Iterator[Event[C]]:
        """Give a request the output of its pass. It then runs after all other running requests."""
        request.next_pass = None
        if len(self.queue.running) > 1:
            with self.changed:
                self.queue.rotate(request)
        states = output.states if isinstance(output, ForwardOutput) else None
        if request.rest is not None:
            request.next_pass, request.rest = request.rest, None
            request.states += [] if states is None else [states.copy()]
            return
        if request.states and states is not None and isinstance(output, ForwardOutput):
            output = output._replace(states=np.concatenate((*request.states, states)))
            request.states = []
        yield from self._resume(request, output)

    def _resume(self, request: Request[C], answer: ForwardOutput | RoundOutcome | None) -> Iterator[Event[C]]:
        """Resume a request until it wants its next pass or ends. answer: the output of its last pass."""
        while not request.ended:
            try:
                step = request.steps.send(answer)
                chunk = request.write(step) if isinstance(step, TokenChunk) else None
            except BaseException as error:  # any error of a request's own code ends this request only
                yield self._fail(request, error)
                return
            if not isinstance(step, TokenChunk):
                request.next_pass = step
                return
            answer = None
            request.running, request.waited = True, 0.0
            if chunk is not None and chunk.finish_reason is not None:
                self.remove(request)
            yield Event(request, chunk)

    def _recover(self, served: list[Request[C]], works: list[Work], error: BaseException) -> Iterator[Event[C]]:
        """After an error of a shared pass, which has changed nothing: free memory if it ran out, else run each pass by
        itself to find out which request caused the error."""
        if is_interrupt(error):
            raise error
        if isinstance(error, MemoryError) and self.pools:
            if not self._freed:
                self._freed = True
                with suppress(MemoryError):
                    for pool in self.pools:
                        pool.release()
                return
            ended = list(self._end_latest(works[0]))
            yield from ended
            if ended:
                return
        for request, work in zip(served, works, strict=True):
            try:
                output = work.run()
            except BaseException as own:  # any error of this pass ends this request only
                yield self._fail(request, out_of_memory() if isinstance(own, MemoryError) else own)
            else:
                yield from self._advance(request, output)

    def _end_latest(self, failed: Work) -> Iterator[Event[C]]:
        """End the latest requests that do not fit into the present size of an engine's cache, because a pass failed
        again. The caches grow no further until all requests have ended."""
        self._freed = False
        running = list(self.queue.running)  # a copy: other threads add requests meanwhile
        started = [request for request in running if request.next_pass]
        if not isinstance(failed, Pass) or failed.engine.allocated is None:
            return
        self._set_slot_limit(failed.engine.allocated - self.slots.padding)
        taken = 0
        for place, request in enumerate(sorted(started, key=lambda each: each.number)):
            taken += request.num_slots
            if taken > (self._slot_limit or 0) or (place == 0 and len(started) == 1):
                yield self._fail(request, out_of_memory())

    def _set_slot_limit(self, slots: int | None) -> None:
        self._slot_limit = slots
        for pool in self.pools:
            pool.set_limit(None if slots is None else slots + self.slots.padding)

    def _fail(self, request: Request[C], error: BaseException) -> Event[C]:
        """End a request because of an error. Raises the error if it is the user's interrupt."""
        self.remove(request)
        if is_interrupt(error):
            raise error
        return Event(request, None, error)


def select_joint(waiting: Sequence[AnyRequest], prefill: PrefillLimit | None = None) -> list[AnyRequest]:
    """The requests of the next pass: those at the front of `waiting` that want the same engine, as many as the engine
    joins into one pass. The draft engine has priority over the target, so drafting requests reach the target together.
    prefill: lets prompts wait for running texts."""
    passes = [(request, request.next_pass) for request in waiting if request.next_pass is not None]
    if len(passes) < 2:
        return [request for request, _ in passes]
    if prefill is not None and any(request.writes for request, _ in passes):
        waited = max(request.waited for request, _ in passes if request.writes)
        admitted = prefill.admit([(work, request.writes) for request, work in passes], waited)
        passes = [each for each, is_admitted in zip(passes, admitted, strict=True) if is_admitted]
    engine = next((work.engine for _, work in passes if work.engine.spec.role == DRAFT), passes[0][1].engine)
    mine = [(request, work) for request, work in passes if work.engine is engine]
    together: Any = [work for _, work in mine]
    return [request for request, _ in mine[: engine.num_joint(together)]]


def drive(request: Request[C]) -> Iterator[C]:
    """Yield the chunks of a single request, in a scheduler of its own."""
    scheduler: Scheduler[C] = Scheduler(1)
    with closing(scheduler.run([request])) as chunks:
        for _, chunk in chunks:
            yield chunk


def out_of_memory() -> OutOfMemoryError:
    return OutOfMemoryError("memory ran out in the middle of this text: send it again later")


def is_interrupt(error: BaseException) -> bool:
    """Whether the error ends the process: a KeyboardInterrupt by the user, or the SystemExit of another signal. Python
    raises them for signals in the main thread only, so elsewhere they count as ordinary errors."""
    return isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread()
