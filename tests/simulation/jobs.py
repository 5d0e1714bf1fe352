"""Queues in a world: programs that put jobs and work them. What may not happen there, ``job_books`` says."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from dibs.errors import JobFailed, LeaseLost, StoreUnavailable
from dibs.jobs import DONE, Put, PutDone
from dibs.queue import Job, JobBatch, Queue
from dibs.queue_core import QueueCore
from tests.simulation.job_books import Books, JobChecker
from tests.simulation.network import LATE_MAX_S, Network
from tests.simulation.process import Process
from tests.simulation.programs import Host, Interruptions
from tests.simulation.scenario import CROWD_SWITCHED, SWITCHED_S, Result, close_client, finished
from tests.simulation.world import Interrupted, World, new_world

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.job_hold import JobHold
    from tests.simulation.world import Task

TTLS_S = (0.5, 1.0, 1.0, 2.0)
QUEUE = "mails"
GROUPS = ("ann", "ann", "bob", None)
# A claim that nobody has any more is over after this.
FREE_AFTER_S = max(TTLS_S) + LATE_MAX_S + 6.0


class _Quiet:
    """In the place of ``dibs.load.Load``, which would tell the store of itself."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **counted: None


class JobProgram:
    """One thread of a process, which puts jobs and works them."""

    #: Without a limit, now and then.
    WAITS = True
    #: One world of so many has interruptions: the others stay the worlds that they were.
    INTERRUPTED_EACH = 4

    def __init__(
        self,
        host: Host,
        checker: JobChecker,
        name: str,
        work_max_s: float,
        cancels: bool,
        interruptions: Interruptions | None = None,
    ) -> None:
        self.host = host
        self.name = name
        self.task: Task | None = None
        self._checker = checker
        self._work_max_s = work_max_s
        self._cancels = cancels
        self._interruptions = interruptions
        self._interrupted_at = -1
        loads: Any = host.session.loads
        loads.setdefault(QUEUE, _Quiet())

    def __call__(self) -> None:
        rand = self.host.world.random
        for _ in range(2 + int(3 * rand())):
            if self.host.session.closed:
                break
            try:
                self._interrupted_at = -1 if self._interruptions is None else int(3 * rand())
                self._round()
            except (StoreUnavailable, LeaseLost) as error:
                self.host.world.note(self.host.process.name, "hears: %s", str(error))
            except Interrupted:
                self.host.world.note(self.host.process.name, "is interrupted")
            self._calm()
            self.host.process.clock.sleep(0.3 * rand() ** 2)  # of virtual time, as everywhere here

    def _calm(self) -> None:
        if self._interruptions is not None:
            assert self.task is not None
            self._interruptions.over(self.task)

    def _maybe_interrupt(self, at: int) -> None:
        """As soon as this part of a round begins, or later."""
        if self._interruptions is not None and self._interrupted_at == at:
            assert self.task is not None
            self._interruptions.maybe(self.task)

    def _core(self, make_job: Any, make_batch: Any) -> QueueCore[Any, Any]:
        rand, limit = self.host.world.random, self._checker.group_limit
        ttl, renew = TTLS_S[int(rand() * len(TTLS_S))], rand() < 0.7
        results = 60.0 if rand() < 0.3 else 0.0
        options = (ttl, renew, self.host.world.max_hold(), None, 0, limit or None, results)
        return QueueCore(self.host.desk, QUEUE, *options, make_job, make_batch)

    def _group(self) -> str | None:
        return GROUPS[int(self.host.world.random() * len(GROUPS))] if self._checker.group_limit else None

    def _some_known(self) -> list[int]:
        """Some of the last jobs that were put by anybody."""
        known = list(self._checker.books)[-5:]
        return [job for job in known if self.host.world.random() < 0.4]

    def _round(self) -> None:
        rand, checker, process = self.host.world.random, self._checker, self.host.process
        queue = Queue(self._core(Job, JobBatch))
        self._maybe_interrupt(0)
        if rand() < 0.6:
            checker.was_put(queue.put_many(range(1 + int(3 * rand())), group=self._group()))
        if self._cancels and rand() < 0.3:
            queue.cancel(*self._some_known())
        if self.host.world.seed % 8 == 6 and rand() < 0.3:  # the others stay the worlds that they were
            self._wait_for_one(queue)
        if rand() < 0.25:
            self._maybe_interrupt(1)
            self._work_stream(queue)
            return
        timeout = (0.0, None if rand() < 0.2 else 2.0 * rand())[rand() < 0.6]
        self._maybe_interrupt(1)
        since = self.host.world.now
        try:
            batch = queue.take(1 + int(3 * rand()), timeout=timeout)
        finally:
            checker.has_waited(self.host, timeout, since)
        taken = batch._jobs  # no call of dibs, in which a Ctrl-C could come before the block begins
        self._given(taken)
        if rand() < 0.5:
            hold = taken[0]._hold if taken else None
            try:
                with batch:
                    for job in batch:
                        process.clock.sleep(self._work_max_s * rand())
                        if rand() < 0.1:
                            break
                        self._end(job)
            finally:
                if hold is not None:
                    checker.is_left(hold)
            return
        process.clock.sleep(self._work_max_s * rand())
        if rand() < 0.2:
            batch.done()
        for job in batch.won:
            process.clock.sleep(self._work_max_s * rand())
            self._end(job)
        if rand() < 0.3:
            batch.release()

    def _wait_for_one(self, queue: Queue) -> None:
        """For the end of a job that anybody has put."""
        rand, checker, since = self.host.world.random, self._checker, self.host.world.now
        known = list(checker.books)[-5:]
        if not known:
            return
        job, timeout = known[int(rand() * len(known))], 3.0 * rand()
        try:
            queue.wait(job, timeout=timeout)
            checker.has_ended(job, well=True)
        except JobFailed:
            checker.has_ended(job, well=False)
        except TimeoutError:
            self.host.world.note(self.name, "has waited for job %d in vain", job)
        finally:
            checker.has_waited(self.host, timeout, since)

    def _work_stream(self, queue: Queue) -> None:
        world, checker, process = self.host.world, self._checker, self.host.process
        rand = world.random
        until = world.now + 3.0 * rand()
        passed: list[Job] = []
        hand: JobHold | None = None
        idle_s = 2.0 * rand() if rand() < 0.5 else None
        with closing(queue.stream(1 + int(3 * rand()), idle=idle_s, stop=lambda: world.now > until)) as jobs:
            try:
                for job in jobs:
                    hand = job._hold
                    self._given([job])
                    process.clock.sleep(self._work_max_s * rand())
                    if rand() < 0.1:
                        break
                    self._end(job)
                    if job.id not in hand.ends:
                        passed.append(job)
                else:
                    checker.streamed(passed)
            finally:
                if hand is not None:
                    checker.is_left(hand)

    def _given(self, jobs: list[Job]) -> None:
        self._checker.given(self.host.process, jobs)

    def _end(self, job: Job) -> None:
        rand = self.host.world.random
        self._maybe_interrupt(2)
        chance = rand()
        if chance < 0.1:
            job.extend(None if rand() < 0.5 else TTLS_S[int(rand() * len(TTLS_S))])
            self.host.process.clock.sleep(2.0 * max(TTLS_S) * rand())  # of virtual time, and longer than it may have
        if chance < 0.6:
            for _ in range(1 + (rand() < 0.2)):
                self._done(job)
        elif chance < 0.7:
            job.fail("no", retry_in=rand(), dead=rand() < 0.1)
        elif chance < 0.8:
            job.skip()

    def _done(self, job: Job) -> None:
        outcome = "unknown"
        try:
            job.done()
            outcome = "done"
        except LeaseLost:
            outcome = "lost"
        except StoreUnavailable:
            pass
        end = job._hold.ends.get(job.id)  # it may have been skipped before, or lost
        if end is not None and end.request.end == DONE and not self.host.session.closed:
            self._checker.said(job, outcome, end.trouble is not None)


class SharedJobProgram(JobProgram):
    """One that ends also what other threads of its process have taken, while they do."""

    def _round(self) -> None:
        rand, jobs = self.host.world.random, self.host.jobs
        self._mine: list[Job] = []
        if jobs and rand() < 0.6:
            for _ in range(1 + int(2 * rand())):
                if jobs:
                    self._end(jobs[int(rand() * len(jobs))])
            return
        try:
            super()._round()
        finally:
            for job in self._mine:
                jobs.remove(job)
            self._mine.clear()

    def _given(self, jobs: list[Job]) -> None:
        super()._given(jobs)
        self._mine += jobs
        self.host.jobs += jobs


def simulate_jobs(seed: int, does: type[JobProgram] = JobProgram, *, signals: bool = False) -> Result:
    """Run one scenario with queues to its end; ``signals`` as in ``scenario.simulate``. Raises BrokenPromise."""
    with new_world(seed) as world:
        return simulate_in(world, does, JobChecker(world), signals=signals)


def simulate_in(world: World, does: type[JobProgram], checker: JobChecker, *, signals: bool = False) -> Result:
    """Run one scenario of such programs to its end."""
    rand = world.random
    network = checker.network = Network(world, checker)
    horizon = 4.0 + 4.0 * rand()
    world.step_max_s = 0.001 * rand() ** 3
    world.switch_part = (0.02, 0.1, 0.4)[int(rand() * 3)]
    network.latency_max_s = (0.002, 0.03, 0.2)[int(rand() * 3)]
    network.hints = ("signal", "look", "none")[int(rand() * 3)]
    network.hints_lost_part = (0.0, 0.3, 1.0)[int(rand() * 3)]
    request_timeout_s = 0.3 + 2.0 * rand() ** 2
    timeouts = (request_timeout_s, request_timeout_s + 2.0 * rand())
    interrupts = signals or world.seed % does.INTERRUPTED_EACH == 1 % does.INTERRUPTED_EACH
    quiet = interrupts and world.seed % (2 if signals else 8) == 1
    if rand() < 0.7 and not quiet:
        network.fault_part = (0.05, 0.15, 0.4)[int(rand() * 3)]
        network.faults_until = horizon
        if rand() < 0.3:
            start = horizon * rand()
            network.outages.append((start, start + 3.0 * rand()))
    if rand() < 0.3 and not quiet:
        network.freeze_part = 0.1
        network.faults_until = horizon
    pauses, crashes, cuts, closes = (rand() < part and not quiet for part in (0.5, 0.4, 0.4, 0.2))
    in_time = request_timeout_s > 3 * network.latency_max_s
    checker.calm = in_time and not (network.fault_part or network.freeze_part or pauses or crashes or cuts or closes)
    checker.prompt = checker.calm and not world.switched
    checker.in_order = checker.calm and not world.switched and network.latency_max_s < 0.1
    checker.slack_s += 8 * network.latency_max_s + (SWITCHED_S if world.switched else 0.0)
    cancels = rand() < 0.3
    checker.group_limit = (0, 0, 1, 1, 2)[int(rand() * 5)]
    work_max_s = (0.05, 0.4, 1.5)[int(rand() * 3)]
    programs: list[Task] = []
    for number in range(2 + int(2 * rand())):
        rate = (0.95, 1.05, 0.95 + 0.1 * rand())[int(rand() * 3)]
        process = Process(world, f"p{number}", rate, 1000.0 * rand())
        host = Host(world, network, process, timeouts)
        for thread in range(1 + int(2 * rand()) + (CROWD_SWITCHED if world.switched else 0)):
            interruptions = Interruptions(world, 0.3, 0.3 if signals else 0.0) if interrupts else None
            program = does(host, checker, f"{process.name}.{thread}", work_max_s, cancels, interruptions)
            program.task = world.start(process, program.name, program)
            programs.append(program.task)
        if pauses:
            world.at(horizon * rand(), process.pause, 0.1 + 4.0 * rand() ** 2, rand() < 0.4)
        if cuts and rand() < 0.6:
            start = horizon * rand()
            network.cuts.append((process, start, start + 4.0 * rand(), rand() < 0.5))
        if world.seed % 8 == 5 and rand() < 0.7:  # the others stay the worlds that they were
            world.at(horizon * rand() ** 2, process.starve, 0.2 + 3.0 * rand())
        if crashes and rand() < 0.4:
            world.at(horizon * rand(), process.crash)
        if closes and rand() < 0.5:
            world.at(horizon * rand(), close_client, world, host)
    if does.WAITS:
        world.at(horizon, _put_some, network, checker)
    world.run_to_the_end_of(programs)
    return finished(world, checker, FREE_AFTER_S)


def _put_some(network: Network, checker: JobChecker) -> None:
    """Whoever waits without a limit is given something in the end."""
    world = network.world
    from dibs.clock import Deadline
    from dibs.jobs import NewJob

    request = Put(f"default~queue:{QUEUE}", f"more-{world.now}", (NewJob("1"), NewJob("2"), NewJob("3")))
    outcome = network.memory.jobs.act((request,), Deadline(None, 0.0))[0]  # type: ignore[arg-type]
    assert isinstance(outcome, PutDone)
    for job in outcome.ids:
        checker.books.setdefault(job, Books(None, 0))
    network.tell((request.name,))
    if world.now < 40.0:
        world.at(world.now + 1.0, _put_some, network, checker)
