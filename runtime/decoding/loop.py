"""Loop: runs the passes of all jobs, for a single stream, a list of prompts or a server. Passes of several jobs over
the same engine run as one pass. Jobs start and end between passes (continuous batching)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from threading import Condition, current_thread, main_thread
from time import perf_counter
from typing import Generic

from ...models.bindings import DRAFT
from ..engines.base import EngineSpec, ForwardOutput, Pass
from ..engines.shared.memory import CacheBudget, OutOfMemoryError
from ..engines.shared.pool import PooledEngine
from ..engines.shared.sequence import PooledKVCache
from .job import C, J, Job, JobEvent
from .pace import Pace, count_rows
from .scheduler import Scheduler

MAX_RUNNING = 32  # default number of jobs that run at a time
MAX_TURNS = 8  # jobs at a time on engines that join no passes: more of them would take memory and save no time
UNBOUNDED = CacheBudget(None, 0, 0)
Watch = Callable[[int, int, int, float], None]  # see Loop


class Loop(Generic[J, C]):
    """Decodes jobs pass by pass. An error in a job's round ends that job only.

    A job starts when the free cache slots suffice for the `num_slots` that it can need. A job that waits for slots also
    blocks the jobs behind it. One thread calls `step`. Other threads may add jobs and read `scheduler` while they hold
    `changed`.
    """

    def __init__(
        self,
        scheduler: Scheduler[J],
        pools: Sequence[PooledEngine] = (),
        budget: CacheBudget = UNBOUNDED,
        pace: Pace | None = None,
        watch: Watch | None = None,
    ) -> None:
        """pools: the engines whose caches the jobs share. budget: the slots of these caches that the jobs may use.
        pace: how long running texts wait for prompts; None: as long as it takes. watch: called after each pass of the
        target that texts share, without prompts: its rows, the number of texts, their committed tokens on average, and
        its seconds."""
        self._pace = pace
        self._watch = watch
        for pool in pools:
            pool.most_rows = partial(self._most_rows, pool.spec)
        self.scheduler = scheduler
        self.changed = Condition()
        self._pools = pools
        self._budget = budget
        self._slot_limit = budget.slots  # slots for all jobs; smaller than the budget after memory ran out
        self._freed = False  # whether unused memory was freed since the last successful pass
        self._num_started = 0
        self._num_added = 0

    @property
    def num_sharing(self) -> int:
        """How many jobs share passes at present."""
        return max(1, self._num_started)

    def add(self, job: J, client: Hashable = None, user: Hashable = None) -> None:
        """Submit a job to the scheduler, see Scheduler.submit. Raises QueueFullError."""
        with self.changed:
            self.scheduler.submit(job, client, user)
            self._num_added += 1
            job.number = self._num_added
            self.changed.notify_all()

    def remove(self, job: J) -> None:
        """End a running or waiting job: close its caches and free its place."""
        job.ended, job.next_pass = True, None
        with suppress(BaseException):  # the generator may raise when it is closed
            job.steps.close()
        with self.changed:
            self.scheduler.remove(job)

    def run(self, jobs: Sequence[J], stopped: Callable[[], bool] = lambda: False) -> Generator[tuple[J, C], None, None]:
        """Yield the chunks of these jobs in the order of their computation. The first error of a job is raised. An
        error, or the end of the iteration by the caller, ends all jobs; so does `stopped`, which is called before each
        pass, when it returns True."""
        try:
            for job in jobs:
                self.add(job)
            while self.scheduler.num_running and not stopped():
                for job, chunk, error in self.step():
                    if error is not None:
                        raise error
                    if chunk is not None:
                        yield job, chunk
        finally:
            for job in self.scheduler:
                self.remove(job)

    def step(self) -> Iterator[JobEvent[J, C]]:
        """Run the next pass, joined for as many jobs as fit into it; yields the resulting events, job by job."""
        running = self.scheduler.running
        if len(running) == 1 and not self._pools and running[0].next_pass is not None:
            self._num_started = 1
            yield from self._run_alone(running[0], running[0].next_pass)  # nothing to select or to join
            return
        for job in self._select_started(running):
            if not job.started:
                job.started = True
                yield JobEvent(job)
                yield from self._advance(job, None)
            if job.next_pass is not None and isinstance(job.next_pass.engine, PooledEngine):
                yield from self._recall(job)
                self._shorten(job)
        served = select_joint([job for job in running if job.next_pass is not None], self._pace)
        passes = [job.next_pass for job in served if job.next_pass is not None]
        if not passes:
            return
        engine, start = passes[0].engine, perf_counter()
        try:
            outputs = engine.forward(passes)
        except BaseException as error:
            if is_interrupt(error):
                raise
            if isinstance(error, MemoryError) and self._pools:
                if not self._freed:
                    self._release()
                    return
                ended = list(self._end_latest(engine)) if isinstance(engine, PooledEngine) else []
                yield from ended
                if ended:
                    return
            # One job may have caused the error: run each pass by itself to find out which.
            for job, wanted in zip(served, passes, strict=True):
                yield from self._run_alone(job, wanted)
            return
        watched = engine.spec.role != DRAFT and not engine.runs_rounds and all(job.writes for job in served)
        if self._watch is not None and watched:
            context = sum(each.cache.length for each in passes) // len(passes)
            self._watch(count_rows(passes), len(passes), context, perf_counter() - start)
        self._freed = False
        self._count_pause(served, running)
        for job, output in zip(served, outputs, strict=True):
            self._rotate(job)
            yield from self._advance(job, output)

    def _most_rows(self, spec: EngineSpec, read: int, scored: bool = False) -> int:
        """Rows of a chunk of a prompt behind `read` tokens: as many as there are where no text waits for it."""
        if self._pace is None or not any(job.running for job in self.scheduler.running):
            return spec.max_width
        return self._pace.most_rows(spec, read, scored)

    def _count_pause(self, served: Sequence[J], running: Sequence[J]) -> None:
        """Note how long the running texts have waited for the prompts of a pass."""
        if self._pace is None:
            return
        texts, prompts = ([job.next_pass for job in served if job.next_pass and job.writes == kind] for kind in (1, 0))
        added = self._pace.added(texts, prompts)
        for job in running:
            if job.writes:
                job.waited += added

    def _shorten(self, job: J) -> None:
        """Split the job's pass over a prompt, if it was made as wide as it is before there were texts that wait."""
        wanted = job.next_pass
        if wanted is None or job.writes or not isinstance(wanted.engine, PooledEngine):
            return
        most = self._most_rows(wanted.engine.spec, wanted.cache.length)
        if wanted.batch.num_tokens > most and len(wanted.batch.output_rows) == 1 and job.rest is None:
            job.next_pass, job.rest = wanted.engine.split(wanted, most)

    def _select_started(self, running: Sequence[J]) -> list[J]:
        """The started jobs, followed by the waiting jobs for which there are free slots, in the order of admission."""
        started = [job for job in running if job.started]
        if not started and self._slot_limit != self._budget.slots:  # memory may be free again
            self._set_slot_limit(self._budget.slots)
        free = None if self._slot_limit is None else self._slot_limit - sum(job.num_slots for job in started)
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
        """Advance a job until it requests its next pass or ends. answer: the output of its last pass."""
        if job.rest is not None:
            job.next_pass, job.rest = job.rest, None
            return
        while not job.ended:
            try:
                step = job.steps.send(answer)
                chunk: C | None = None if isinstance(step, Pass) else job.write(step)
            except BaseException as error:  # any error of a job's own code ends this job only
                yield self._fail(job, error)
                return
            if isinstance(step, Pass):
                if isinstance(step.cache, PooledKVCache):
                    step.cache.salt = job.cache_salt
                job.next_pass = step
                return
            answer = None
            job.running, job.waited = True, 0.0
            if chunk is not None and chunk.finish_reason is not None:
                self.remove(job)
            yield JobEvent(job, chunk)

    def _recall(self, job: J) -> Iterator[JobEvent[J, C]]:
        """Advance a job over the rows of its next passes that its pool already holds."""
        while (wanted := job.next_pass) is not None and isinstance(wanted.engine, PooledEngine):
            try:
                rest = wanted.engine.recall(wanted)
            except MemoryError as error:  # the state of the job's cache is unknown
                yield self._fail(job, error)
                return
            if rest is wanted:
                return
            if wanted.engine.spec.role != DRAFT:
                job.stats.num_cached_tokens += wanted.batch.num_tokens - (rest.batch.num_tokens if rest else 0)
            job.next_pass = rest
            if rest is None:
                yield from self._advance(job, None)

    def _run_alone(self, job: J, wanted: Pass) -> Iterator[JobEvent[J, C]]:
        """Run one job's pass by itself and advance the job."""
        self._rotate(job)
        try:
            output = wanted.run()
        except MemoryError:
            yield self._fail(job, out_of_memory())
            return
        except BaseException as error:  # any error of this pass ends this job only
            yield self._fail(job, error)
            return
        yield from self._advance(job, output)

    def _rotate(self, job: J) -> None:
        """Clear a job's pass and move the job to the end of the running jobs."""
        job.next_pass = None
        if self.scheduler.num_running > 1:
            with self.changed:
                self.scheduler.rotate(job)

    def _fail(self, job: J, error: BaseException) -> JobEvent[J, C]:
        """End a job because of an error in its round. Raises the error if it is the user's interrupt."""
        self.remove(job)
        if is_interrupt(error):
            raise error
        return JobEvent(job, None, error)

    def _release(self) -> None:
        """Free memory after an allocation failed in a shared pass, which has changed nothing: the rows of ended
        texts."""
        self._freed = True
        with suppress(MemoryError):
            for pool in self._pools:
                pool.release()

    def _end_latest(self, full: PooledEngine) -> Iterator[JobEvent[J, C]]:
        """End the latest jobs that do not fit into the present size of a pool's cache, because the next pass failed,
        too. The caches grow no further until all jobs have ended."""
        self._freed = False
        started = [job for job in self.scheduler.running if job.next_pass]
        self._set_slot_limit(full.allocated - self._budget.padding)
        taken = 0
        for number, job in enumerate(sorted(started, key=lambda job: job.number)):
            taken += job.num_slots
            if taken > (self._slot_limit or 0) or (number == 0 and len(started) == 1):
                yield self._fail(job, out_of_memory())

    def _set_slot_limit(self, slots: int | None) -> None:
        """Set the most slots that all jobs together may use."""
        self._slot_limit = slots
        for pool in self._pools:
            pool.set_limit(None if slots is None else slots + self._budget.padding)


def select_joint(waiting: Sequence[J], pace: Pace | None = None) -> list[J]:
    """The jobs of the next pass: those at the front of `waiting` that request the same engine, as many as the engine
    joins into one pass. The draft engine has priority over the target, so drafting jobs reach the target together.
    pace: lets prompts wait for running texts."""
    passes = [(job, job.next_pass) for job in waiting if job.next_pass is not None]
    if len(passes) < 2:
        return [job for job, _ in passes]
    if pace is not None and any(job.writes for job, _ in passes):
        waited = max(job.waited for job, _ in passes if job.writes)
        admitted = set(pace.admit([(job, wanted, job.writes) for job, wanted in passes], waited))
        passes = [(job, wanted) for job, wanted in passes if job in admitted]
    engine = next((wanted.engine for _, wanted in passes if wanted.engine.spec.role == DRAFT), passes[0][1].engine)
    mine = [(job, wanted) for job, wanted in passes if wanted.engine is engine]
    return [job for job, _ in mine[: engine.num_joint([wanted for _, wanted in mine])]]


def drive(job: Job[C]) -> Iterator[C]:
    """Yield the chunks of a single job, in a loop of its own."""
    loop: Loop[Job[C], C] = Loop(Scheduler(1, 0))
    with closing(loop.run([job])) as chunks:
        for _, chunk in chunks:
            yield chunk


def out_of_memory() -> OutOfMemoryError:
    return OutOfMemoryError("memory ran out in the middle of this text: send it again later")


def is_interrupt(error: BaseException) -> bool:
    """Whether the error ends the process: a KeyboardInterrupt by the user, or the SystemExit of another signal. Python
    raises them for signals in the main thread only, so elsewhere they count as ordinary errors."""
    return isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread()
