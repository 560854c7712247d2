"""Loop: the one driver of every text, be it a stream, a list or a server's requests. It runs the passes that texts wait
for, those of one engine together; texts join and leave between passes (continuous batching)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from threading import Condition, current_thread, main_thread
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ...models.bindings import DRAFT
from ..engines.base import ForwardOutput, Pass
from ..engines.passes import Steps
from ..engines.shared.memory import CacheBudget, OutOfMemoryError
from ..engines.shared.pool import PooledEngine, PooledKVCache
from .chunk import TokenChunk
from .scheduler import Scheduler
from .stats import SpecDecodeStats

MAX_RUNNING = 8  # texts at a time, unless told otherwise
UNBOUNDED = CacheBudget(None, 0, 0)


class Chunk(Protocol):
    """What one round adds to a text, in whatever form its reader wants it."""

    @property
    def finish_reason(self) -> str | None:
        """None while more follows."""


C = TypeVar("C", bound=Chunk)
J = TypeVar("J", bound="Job[Any]")


@dataclass(eq=False, slots=True, kw_only=True)
class Job(Generic[C]):
    """A text on its way through a loop, which alone advances `steps`.

    write: makes of each round's tokens what the reader gets. num_slots: of each model's cache, which the text may come
    to fill. cache_salt: the text shares cache rows with texts of an equal one only.
    """

    steps: Steps[TokenChunk]
    write: Callable[[TokenChunk], C]
    num_slots: int = 0
    cache_salt: str | None = None
    wanted: Pass | None = None  # the pass that the text waits for; None before it has started
    started: bool = False
    ended: bool = False
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)  # the ones that `steps` keeps
    number: int = 0  # in the order in which jobs joined their loop


class JobEvent(NamedTuple, Generic[J, C]):
    """What happened to a job: it started, where chunk and error are None; or its next chunk, the last one of a text
    that has ended; or the error that ended it."""

    job: J
    chunk: C | None = None
    error: BaseException | None = None


class Loop(Generic[J, C]):
    """What goes wrong in a text's round ends that text alone.

    A text starts when the caches of all that have started leave room for those it may come to fill; until then it
    waits, and no later text starts before it. One thread calls `step`; others may add jobs, and read `scheduler`, while
    they hold `changed`.
    """

    def __init__(
        self, scheduler: Scheduler[J], pools: Sequence[PooledEngine] = (), budget: CacheBudget = UNBOUNDED
    ) -> None:
        """pools: the engines whose caches the texts share. budget: what the texts may fill of these caches."""
        self.scheduler = scheduler
        self.changed = Condition()
        self._pools = pools
        self._budget = budget
        self._room = budget.slots  # less while memory is short
        self._freed = False  # whether unused memory was given back since a pass last went well
        self._num_started = 0
        self._num_added = 0

    @property
    def num_sharing(self) -> int:
        """How many texts' passes run together just now."""
        return max(1, self._num_started)

    def add(self, job: J, client: Hashable = None, user: Hashable = None) -> None:
        """Queue a job, see Scheduler.submit. Raises QueueFullError."""
        with self.changed:
            self.scheduler.submit(job, client, user)
            self._num_added += 1
            job.number = self._num_added
            self.changed.notify_all()

    def remove(self, job: J) -> None:
        """End a job, wherever it is: its caches are free, and its place goes to the next one."""
        job.ended, job.wanted = True, None
        with suppress(BaseException):  # a generator that objects to its end
            job.steps.close()
        with self.changed:
            self.scheduler.remove(job)

    def run(self, jobs: Sequence[J]) -> Generator[tuple[J, C], None, None]:
        """The chunks of these jobs, as they come. Raises what goes wrong in any of them, and then, or when the caller
        wants no more chunks, ends all."""
        try:
            for job in jobs:
                self.add(job)
            while self.scheduler.num_running:
                for job, chunk, error in self.step():
                    if error is not None:
                        raise error
                    if chunk is not None:
                        yield job, chunk
        finally:
            for job in self.scheduler:
                self.remove(job)

    def step(self) -> Iterator[JobEvent[J, C]]:
        """Run the next pass, for as many of those who wait for it as it holds; what comes of it, job by job."""
        running = self.scheduler.running
        for job in self._startable(running):
            if not job.started:
                job.started = True
                yield JobEvent(job)
                yield from self._advance(job, None)
            yield from self._recall(job)
        served = select_joint([job for job in running if job.wanted is not None])
        passes = [job.wanted for job in served if job.wanted is not None]
        if not passes:
            return
        try:
            outputs = passes[0].engine.forward(passes)
        except BaseException as error:
            if is_interrupt(error):
                raise
            if isinstance(error, MemoryError) and passes[0].engine in self._pools:
                yield from self._free_memory()
            else:  # perhaps one job's fault: each on its own shows whose
                for job, wanted in zip(served, passes, strict=True):
                    yield from self._run_alone(job, wanted)
            return
        self._freed = False
        for job, output in zip(served, outputs, strict=True):
            self._rotate(job)
            yield from self._advance(job, output)

    def _startable(self, running: Sequence[J]) -> list[J]:
        """Those that have started, and those that fit beside them, in the order they were admitted."""
        started = [job for job in running if job.started]
        if not started and self._room != self._budget.slots:  # there may be more memory than when it ran out
            self._set_room(self._budget.slots)
        free = None if self._room is None else self._room - sum(job.num_slots for job in started)
        for job in running:
            if not job.started:
                if free is not None:
                    free -= job.num_slots
                    if free < 0:
                        break
                started.append(job)
        self._num_started = len(started)
        return started

    def _advance(self, job: J, answer: ForwardOutput | None) -> Iterator[JobEvent[J, C]]:
        """Let a job go on until it waits for its next pass, or ends."""
        while not job.ended:
            try:
                step = job.steps.send(answer)
                chunk: C | None = None if isinstance(step, Pass) else job.write(step)
            except BaseException as error:  # whatever it is, it is this job's alone
                yield self._fail(job, error)
                return
            if isinstance(step, Pass):
                if isinstance(step.cache, PooledKVCache):
                    step.cache.salt = job.cache_salt
                job.wanted = step
                return
            answer = None
            if chunk is not None and chunk.finish_reason is not None:
                self.remove(job)
            yield JobEvent(job, chunk)

    def _recall(self, job: J) -> Iterator[JobEvent[J, C]]:
        """Let a job go on for as long as it waits for rows that its pool has already."""
        while (wanted := job.wanted) is not None and isinstance(wanted.engine, PooledEngine):
            try:
                rest = wanted.engine.recall(wanted)
            except MemoryError as error:  # nobody knows how far it came
                yield self._fail(job, error)
                return
            if rest is wanted:
                return
            if wanted.engine.spec.role != DRAFT:
                job.stats.num_cached_tokens += wanted.batch.num_tokens - (rest.batch.num_tokens if rest else 0)
            job.wanted = rest
            if rest is None:
                yield from self._advance(job, None)

    def _run_alone(self, job: J, wanted: Pass) -> Iterator[JobEvent[J, C]]:
        self._rotate(job)
        try:
            output = wanted.run()
        except BaseException as error:  # whatever it is, it is this job's alone
            yield self._fail(job, error)
            return
        yield from self._advance(job, output)

    def _rotate(self, job: J) -> None:
        job.wanted = None
        with self.changed:
            self.scheduler.rotate(job)

    def _fail(self, job: J, error: BaseException) -> JobEvent[J, C]:
        """End a job by what went wrong in its round. Raises the error where it is the user's wish to stop."""
        self.remove(job)
        if is_interrupt(error):
            raise error
        return JobEvent(job, None, error)

    def _free_memory(self) -> Iterator[JobEvent[J, C]]:
        """Memory ran out in a shared pass, which has changed nothing. First the rows of ended texts go. If that was not
        enough, caches grow no more until all jobs have ended, and of those that then do not fit, the last to come end.
        """
        if not self._freed:
            self._freed = True
            with suppress(MemoryError):
                for pool in self._pools:
                    pool.release()
            return
        self._freed = False
        started = [job for job in self.scheduler.running if job.wanted]
        self._set_room(min(pool.allocated for pool in self._pools) - self._budget.padding)
        taken = 0
        for number, job in enumerate(sorted(started, key=lambda job: job.number)):
            taken += job.num_slots
            if taken > (self._room or 0) or (number == 0 and len(started) == 1):
                yield self._fail(
                    job, OutOfMemoryError("memory ran out in the middle of this text: send it again later")
                )

    def _set_room(self, slots: int | None) -> None:
        """From now on jobs fill so many slots at most."""
        self._room = slots
        for pool in self._pools:
            pool.set_limit(None if slots is None else slots + self._budget.padding)


def select_joint(waiting: Sequence[J]) -> list[J]:
    """The jobs to serve with the next pass: of the first engine that any job waits for, as many in turn as it computes
    at the cost of one. The draft comes first: jobs that draft then reach the target at the same time."""
    passes = [(job, job.wanted) for job in waiting if job.wanted is not None]
    if len(passes) < 2:
        return [job for job, _ in passes]
    engine = next((wanted.engine for _, wanted in passes if wanted.engine.spec.role == DRAFT), passes[0][1].engine)
    mine = [(job, wanted) for job, wanted in passes if wanted.engine is engine]
    return [job for job, _ in mine[: engine.num_joint([wanted for _, wanted in mine])]]


def drive(job: Job[C]) -> Iterator[C]:
    """The chunks of one text, every pass run as soon as it is asked for."""
    loop: Loop[Job[C], C] = Loop(Scheduler(1, 0))
    with closing(loop.run([job])) as chunks:
        for _, chunk in chunks:
            yield chunk


def is_interrupt(error: BaseException) -> bool:
    """Whether a user wants the program to stop. Python says so in the main thread only: elsewhere it is a fault."""
    return isinstance(error, KeyboardInterrupt) and current_thread() is main_thread()
