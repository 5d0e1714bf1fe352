"""Worlds of workers: ``queue.run`` in threads and in tasks, and what may not happen beside what may not happen to jobs.

A program puts some jobs and has them worked by a crew of its own, until there are none, it is told to stop, or it is
interrupted. Handlers return, raise, end their jobs themselves, or want the whole crew to end.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import dibs.aio.workers
import dibs.crew
import dibs.workers
from dibs.aio.queue import AsyncJob, AsyncJobBatch
from dibs.crew import Crew
from dibs.hold import LOST
from dibs.jobs import DONE, Finish
from dibs.queue import Job, JobBatch, Queue
from dibs.queue_core import QueueCore
from tests.simulation.checker import BACKOFF_S
from tests.simulation.job_books import JobChecker
from tests.simulation.jobs import QUEUE, TTLS_S, JobProgram, simulate_in
from tests.simulation.loop import SimLoop
from tests.simulation.world import Interrupted, new_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dibs.job import JobFacts
    from dibs.job_hold import JobHold
    from dibs.jobs import Extend, Extended, Finished
    from tests.simulation.programs import SimSession
    from tests.simulation.scenario import Result
    from tests.simulation.world import Task, World

WORKERS_MAX = 3
# Whoever has a worker to spare looks for jobs this often, having perhaps paused for as long.
LOOKED_WITHIN_S = 2 * 0.5 / 0.95


class Failed(Exception):
    """What a handler may raise."""


class Quit(BaseException):
    """What a handler may raise that wants everything to end, as SystemExit is."""


class SimpleQueue:
    """As ``queue.SimpleQueue``, in the world of whoever runs."""

    world: World

    def __init__(self) -> None:
        self._things: list[Any] = []
        self._waiters: list[Task] = []

    def put(self, thing: Any) -> None:
        self._things.append(thing)
        if self._waiters:
            self.world.wake(self._waiters.pop(0))
        self.world.seam()

    def get(self) -> Any:
        world = self.world
        world.seam()
        while not self._things:
            task = world.current
            assert task is not None
            self._waiters.append(task)
            world.block(None)
        return self._things.pop(0)


class _NoSignals:
    """In the place of ``dibs.worker_signals.Signals``: the world's threads are none that signals reach."""

    def __init__(self, crew: Crew) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


@contextmanager
def workers_world(seed: int) -> Iterator[World]:
    """A world, to its very end, in which what workers wait for, and what they log, is its own."""
    log = mock.Mock()
    with (
        mock.patch.object(dibs.workers, "SimpleQueue", SimpleQueue),
        mock.patch.object(dibs.workers, "Signals", _NoSignals),
        mock.patch.object(dibs.aio.workers, "Signals", _NoSignals),
        mock.patch.object(dibs.crew, "log", log),
        new_world(seed) as world,
    ):
        SimpleQueue.world = world
        log.warning = lambda text, *args: world.note("log", text, *args)
        yield world


class WorkerProgram(JobProgram):
    """One thread of a process, which has jobs worked."""

    WAITS = False
    INTERRUPTED_EACH = 1
    _checker: WorkerChecker

    def _round(self) -> None:
        host, checker = self.host, self._checker
        rand, world = host.world.random, host.world
        options = (TTLS_S[int(rand() * len(TTLS_S))], rand() < 0.7, world.max_hold(), int(4 * rand()) or None, 0)
        results = 60.0 if rand() < 0.3 else 0.0
        queue = Queue(QueueCore(host.desk, QUEUE, *options, checker.group_limit or None, results, Job, JobBatch))
        if rand() < 0.8:
            checker.was_put(queue.put_many(range(1 + int(5 * rand()))))
        until = world.now + 3.0 * rand() if rand() < 0.3 else float("inf")
        in_tasks = rand() < 0.5
        core: QueueCore[Any, Any] = queue._core
        if in_tasks:
            core = QueueCore(host.desk, QUEUE, *options, checker.group_limit or None, results, AsyncJob, AsyncJobBatch)
        workers = 1 + int(WORKERS_MAX * rand())
        drain_s = (0.0, 0.5, 30.0)[int(rand() * 3)]
        crew = Crew(core, workers, (0, 1, 100)[int(rand() * 3)], drain_s, 0.1 + rand(), lambda: world.now > until)
        world.note(host.process.name, "begins to work with %d %s", workers, "tasks" if in_tasks else "threads")
        shift = Shift(self, checker, workers)
        checker.at_work.append(AtWork(crew, shift, host.session, world.now))
        if not in_tasks and self._interruptions is not None:
            assert self.task is not None
            self._interruptions.maybe(self.task)
        try:
            done = self._in_tasks(crew, shift) if in_tasks else dibs.workers.run_in_threads(crew, shift.handle)
            world.note(host.process.name, "has done %d", done)
        except Quit:
            world.note(host.process.name, "is told to quit")
        except RuntimeError as error:
            if not host.process.starved_until:
                raise
            world.note(host.process.name, "has no threads for workers: %s", str(error))
        except (Interrupted, asyncio.CancelledError):
            shift.interrupted = True
            world.note(host.process.name, "is interrupted")
        finally:
            self._calm()
            shift.over_at = world.now
            checker.is_over(crew, shift)

    def _in_tasks(self, crew: Crew, shift: Shift) -> int:
        rand = self.host.world.random
        cancel_after_s = 2.0 * rand() ** 2 if rand() < 0.3 else None
        done: list[int] = []

        async def work() -> None:
            task = asyncio.current_task()
            assert task is not None
            timer = None
            if cancel_after_s is not None:
                timer = asyncio.get_running_loop().call_later(cancel_after_s, task.cancel)
            try:
                done.append(await dibs.aio.workers.run_in_tasks(crew, shift.handle_in_task))
            finally:
                if timer is not None:
                    timer.cancel()

        SimLoop(self.host.world, self.host.process).work([work()])
        return done[0]


class AtWork:
    """A crew that works, and since when it has had a worker to spare and was given no job."""

    def __init__(self, crew: Crew, shift: Shift, session: SimSession, now: float) -> None:
        self.crew = crew
        self._shift = shift
        self._begun = 0
        self.session = session
        self.spare_since = now

    def spares_one(self, now: float) -> bool:
        """Whether it is to have another job."""
        crew, process = self.crew, self.session.process
        busy = crew._alone or len(crew._waiting) + len(crew._running) >= crew.workers or process.dead or process.paused
        begun, self._begun = self._begun, len(self._shift.worked)
        if busy or begun != self._begun or crew.stopping or self.session.closed or crew._patience.look_s() is None:
            self.spare_since = now
            return False
        return True


class Shift:
    """What one crew's handlers do."""

    def __init__(self, program: WorkerProgram, checker: WorkerChecker, workers: int) -> None:
        self._program = program
        self._checker = checker
        self._world = program.host.world
        self._process = program.host.process
        self._workers = workers
        #: How many of its handlers run.
        self.running = 0
        #: Its jobs with their tokens, and its claims.
        self.worked: set[tuple[int, int]] = set()
        self.claims: dict[str, JobHold] = {}
        #: By a Ctrl-C or a cancellation: then it does not wait for every answer.
        self.interrupted = False
        #: When ``run`` was back.
        self.over_at: float | None = None

    def _begin(self, job: JobFacts) -> float:
        """A handler is called; for how long it will work."""
        self._checker.given(self._process, [job])  # type: ignore[list-item]
        self.worked.add((job.id, job.fencing_token))
        self.claims[job._hold.claim_id] = job._hold
        self.running += 1
        if self.running > self._workers:
            self._world.broken(f"workers: {self.running} handlers run at a time, of {self._workers}")
        if self.over_at is not None and self._world.now - self.over_at > self._checker.slack_s:
            self._world.broken(f"workers: a handler of job {job.id} is begun when all is over")
        work_s: float = self._program._work_max_s * self._world.random() ** 2
        return work_s * 4 if self._world.seed % 8 == 2 else work_s  # the others stay the worlds that they were

    def handle(self, job: Job) -> Any:
        """In a thread."""
        try:
            self._process.clock.sleep(self._begin(job))
            chance = self._world.random()
            if chance < 0.1:
                job.done()
            elif chance < 0.2:
                job.skip()
            return self._end(chance)
        finally:
            self.running -= 1

    async def handle_in_task(self, job: AsyncJob) -> Any:
        """In a task."""
        try:
            await asyncio.sleep(self._begin(job))
            chance = self._world.random()
            if chance < 0.1:
                await job.done()
            elif chance < 0.2:
                await job.skip()
            return self._end(chance)
        finally:
            self.running -= 1

    def _end(self, chance: float) -> object:
        if 0.2 < chance < 0.4:
            raise Failed
        if chance > 0.98:
            raise Quit
        return "result"


class WorkerChecker(JobChecker):
    """What ``queue.run`` promises."""

    AT_ONCE = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        #: What was done: jobs, and under which token.
        self._done: set[tuple[int, int]] = set()
        self.at_work: list[AtWork] = []

    def _is_wanted(self) -> bool:
        return bool(self._waiting or self.at_work)

    def _look_for_takers(self) -> None:
        super()._look_for_takers()
        now = self.world.now
        for at in self.at_work:
            in_time = at.session.request_timeout_s > 3 * self._network().latency_max_s
            if not (at.spares_one(now) and in_time):
                continue
            process = at.session.process
            quiet_since = max(at.spare_since, process.troubled_at, self.world.trouble_until + BACKOFF_S)
            for job, ready_since in self._ready_since.items():
                idle_s = now - max(quiet_since, ready_since)
                if idle_s > LOOKED_WITHIN_S + self.slack_s:
                    self.world.broken(
                        f"P12 a worker of {process.name} has nothing to do for {idle_s:.2f} s, and job {job} is there"
                    )

    def _changed(self, request: Extend | Finish, outcome: Extended | Finished) -> None:
        super()._changed(request, outcome)
        if isinstance(request, Finish) and request.end == DONE:
            self._done.update((job, request.fencing_token) for job in set(request.ids).difference(outcome.gone))

    def is_over(self, crew: Crew, shift: Shift) -> None:
        """run() is back."""
        self.at_work = [at for at in self.at_work if at.crew is not crew]
        done, exact = len(self._done & shift.worked), self.in_order and not shift.interrupted
        # (What handlers are ending just as they are abandoned, nobody counts.)
        if crew.done > done or (exact and not shift.running and crew.done < done):
            self.world.broken(f"workers: {crew.done} are said to be done, and {done} are")
        for job, row in self._network().shelf.jobs.items():
            in_force = row.ended is None and (row.expires_at or 0.0) > self.world.now
            hold = shift.claims.get(row.claim_id or "")
            # (What was lost is left to its ttl: whoever had it was at work, and that counts as a try.)
            if exact and in_force and hold is not None and hold.state != LOST:
                self.world.broken(f"workers: run is over, and job {job} is still claimed by {row.claim_id}")


def simulate_workers(seed: int, *, signals: bool = False) -> Result:
    """Run one scenario with workers to its end; ``signals`` as in ``scenario.simulate``. Raises BrokenPromise."""
    with workers_world(seed) as world:
        return simulate_in(world, WorkerProgram, WorkerChecker(world), signals=signals)
