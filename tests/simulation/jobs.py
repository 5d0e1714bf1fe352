"""Queues in a world: programs that put jobs and work them, and what may not happen to a job.

The checker keeps books of its own on every job, from what the store does one request after the other: who was granted
it last and until when, how often it was tried, and how it ended. It believes neither the store nor the programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dibs.errors import LeaseLost, StoreUnavailable
from dibs.jobs import BACK, CANCELLED, DEAD, DONE, Extend, Finish, Finished, Put, PutDone, Take, Taken
from dibs.queue import Job, JobBatch, Queue
from dibs.queue_core import QueueCore
from dibs.store import Held
from tests.simulation.checker import Checker
from tests.simulation.network import LATE_MAX_S, Network
from tests.simulation.process import Process
from tests.simulation.programs import Host, Interruptions
from tests.simulation.scenario import Result, close_client, finished
from tests.simulation.world import Interrupted, World, new_world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.job_hold import JobHold
    from dibs.jobs import Extended, JobOutcome, JobRequest
    from dibs.session import Session
    from tests.simulation.network import Call
    from tests.simulation.world import Task

TTLS_S = (0.5, 1.0, 1.0, 2.0)
QUEUE = "mails"
GROUPS = ("ann", "ann", "bob", None)
# A claim that nobody has any more is over after this.
FREE_AFTER_S = max(TTLS_S) + LATE_MAX_S + 6.0


class Books:
    """What the checker knows of one job."""

    def __init__(self, group: str | None, max_tries: int) -> None:
        self.group = group
        self.max_tries = max_tries
        self.claim_id = ""
        self.token = 0
        self.granted_at = 0.0
        #: By a call whose caller was interrupted, or had given up.
        self.late = False
        self.expires_at = 0.0
        self.claimed = False
        self.tries = 0
        #: The token with which it was done or called dead; 0 of one that was cancelled.
        self.ended_with: int | None = None
        self.end = ""

    def live(self, now: float) -> bool:
        """Whether it has not ended; without a try left it ends with its last claim."""
        in_force = self.claimed and self.expires_at > now
        return self.ended_with is None and (in_force or not self.max_tries or self.tries < self.max_tries)


class InHand(NamedTuple):
    """A job that a program was given."""

    process: Process
    session: Session
    hold: JobHold
    job: int

    def held(self) -> bool:
        """The shipped answer, for who has not dropped it."""
        hold = self.hold
        return self.job in hold.live and not (self.process.dead or hold.orphan) and self.session.keeper.is_held(hold)


class JobChecker(Checker):
    #: What is taken is given to a program at once. (A crew may keep it until a worker is free.)
    AT_ONCE = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.books: dict[int, Books] = {}
        #: How many jobs of a group may be worked at a time; 0: groups mean nothing in this world.
        self.group_limit = 0
        #: The ids of each put; and those of acknowledged ones.
        self.puts: dict[str, tuple[int, ...]] = {}
        self.acknowledged: list[int] = []
        #: Who was told that a job is done.
        self.told_done: dict[int, str] = {}
        #: Since when jobs that are claimed are not in hand any more, by the tokens of their claims.
        self._gone_since: dict[tuple[int, int], float] = {}
        #: What programs were given: not the jobs themselves, since programs may drop them.
        self.in_hand: list[InHand] = []

    # -- the store ------------------------------------------------------------------------------------------------

    def applied_to_jobs(self, call: Call, request: JobRequest, outcome: JobOutcome) -> None:
        if isinstance(request, Put):
            assert isinstance(outcome, PutDone)
            first = self.puts.setdefault(request.put_id, outcome.ids)
            over = all(self.books[job].ended_with is not None for job in first if job in self.books)
            if not (set(outcome.ids) <= set(first) or over):
                self.world.broken(f"P17 a put of {first} that is repeated puts {outcome.ids}")
            for job, new in zip(outcome.ids, request.jobs, strict=False):
                self.books.setdefault(job, Books(new.group, new.max_tries))
        elif isinstance(request, Take):
            if isinstance(outcome, Taken):
                self._taken(call, request, outcome)
            else:
                assert type(outcome) is Held
        else:
            self._changed(request, outcome)  # type: ignore[arg-type]

    def _taken(self, call: Call, request: Take, outcome: Taken) -> None:
        now = self.world.now
        for job in outcome.jobs:
            books = self.books[job.id]
            in_force = books.claimed and books.expires_at > now
            if books.claim_id != request.claim_id or not in_force:
                if books.ended_with is not None:
                    self.world.broken(f"P17 job {job.id}, which is {books.end}, is handed out to {request.claim_id}")
                if in_force:
                    self.world.broken(f"P5 job {job.id} of {books.claim_id} is handed out to {request.claim_id}")
                if outcome.fencing_token <= books.token:
                    self.world.broken(f"P2 job {job.id} has token {outcome.fencing_token} after {books.token}")
                self._has_its_turn(job.id, books)
                books.tries += 1
                books.granted_at, books.late = now, call.over
                self.grants += 1
                for other in self.in_hand:
                    if other.job == job.id and other.held():
                        self.world.broken(f"P5 job {job.id} is granted while {other.hold.claim_id} is trusted")
            elif outcome.fencing_token != books.token:
                self.world.broken(f"P2 {request.claim_id} had token {books.token}, is told {outcome.fencing_token}")
            books.claim_id, books.token, books.claimed = request.claim_id, outcome.fencing_token, True
            books.expires_at = max(books.expires_at if in_force else 0.0, now + request.ttl)
            if job.tries != books.tries:
                self.world.broken(f"P19 job {job.id} is on try {job.tries} and was granted {books.tries} times")

    def _has_its_turn(self, job: int, books: Books) -> None:
        """Of a group, only the first that have not ended are handed out, as many as the limit says."""
        if self.group_limit and books.group is not None:
            now = self.world.now
            ahead = [
                other for other, its in self.books.items() if other < job and its.group == books.group and its.live(now)
            ]
            if len(ahead) >= self.group_limit:
                self.world.broken(
                    f"groups: job {job} of {books.group} is handed out before {ahead}, {self.group_limit} at a time"
                )

    def applied_cancel(self, cancelled: Sequence[int]) -> None:
        for job in cancelled:
            books = self.books[job]
            if books.ended_with is not None:
                self.world.broken(f"P17 job {job}, which is {books.end}, is cancelled")
            books.claimed, books.ended_with, books.end = False, 0, CANCELLED

    def _changed(self, request: Extend | Finish, outcome: Extended | Finished) -> None:
        now = self.world.now
        for job in set(request.ids).difference(outcome.gone):
            books = self.books[job]
            if not books.claimed or books.token != request.fencing_token or books.expires_at <= now:
                what = request.end if isinstance(request, Finish) else "extended"
                self.world.broken(
                    f"P18 job {job} is {what} with token {request.fencing_token}; its last is {books.token}"
                )
            if isinstance(request, Extend):
                books.expires_at = max(books.expires_at, now + request.ttl)
                continue
            books.claimed = False
            if request.end == BACK:
                books.tries -= 1
            elif request.end in (DONE, DEAD):
                books.ended_with, books.end = request.fencing_token, request.end

    # -- the programs ---------------------------------------------------------------------------------------------

    def was_put(self, ids: list[int]) -> None:
        """A put returned."""
        self.acknowledged += ids

    def given(self, process: Process, jobs: list[Job]) -> None:
        """A take returned these."""
        self.in_hand += [InHand(process, job._session, job._hold, job.id) for job in jobs]

    def block_is_left(self, claims: list[tuple[int, int]]) -> None:
        """A block is over, in which there were these jobs with these tokens: soon nobody has them by those."""
        if self.calm and not self.anywhere:
            self.world.at(self.world.now + self.slack_s, self._look_if_free, claims)

    def _look_if_free(self, claims: list[tuple[int, int]]) -> None:
        for job, token in claims:
            books = self.books[job]
            if books.claimed and books.token == token and books.expires_at > self.world.now:
                self.world.broken(f"P9 the block of job {job} is left, and {books.claim_id} still holds it")

    def said(self, who: str, job: Job, outcome: str, repeated: bool) -> None:
        """done() of a job returned, or raised; ``repeated``: after a first attempt whose answer was lost."""
        books = self.books[job.id]
        mine = books.ended_with == job.fencing_token and books.end == DONE
        if outcome == "done":
            if repeated and books.end == CANCELLED:
                return  # that is not told apart: see ``EndAsk``
            if not mine:
                self.world.broken(f"P18 {who} is told that {job!r} is done, and it is not done by that token")
            if self.told_done.setdefault(job.id, who) != who:
                self.world.broken(f"P18 {who} and {self.told_done[job.id]} are told that job {job.id} is done")
        elif outcome == "lost" and mine:
            self.world.broken(f"P18 {who} is told that {job!r} was lost, and it is done")

    # -- every step -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        if self.AT_ONCE and self.calm and not self.anywhere and self.world.now >= self._next_look:
            self._next_look = self.world.now + 0.1
            self._look_for_what_nobody_has()
        holding: dict[int, InHand] = {}
        groups: dict[str, set[int]] = {}
        for one in self.in_hand:
            held = one.held()
            other = holding.setdefault(one.job, one) if held else one
            if other is not one:
                who = f"{other.hold.claim_id} and {one.hold.claim_id}"
                self.world.broken(f"P1 job {one.job} is held by {who} at the same moment")
            if not held:
                continue
            books = self.books[one.job]
            if books.end == CANCELLED and books.expires_at <= self.world.now:
                self.world.broken(f"P18 job {one.job} was cancelled, and {one.hold.claim_id} goes on with it")
            if self.group_limit and books.group is not None and books.ended_with is None:
                together = groups.setdefault(books.group, set())
                together.add(one.job)
                if len(together) > self.group_limit:
                    self.world.broken(f"groups: {together} of {books.group} are held at the same moment")

    def _look_for_what_nobody_has(self) -> None:
        """P9: what an interrupted program was granted, or has left, is given back, and not left to its ttl."""
        now = self.world.now
        had = {one.hold.claim_id: one for one in self.in_hand}
        for job, books in self.books.items():
            if not books.claimed or books.expires_at <= now or now - books.granted_at < self.slack_s:
                continue
            one = had.get(books.claim_id)
            if one is None and not books.late:
                what = f"job {job}, which {books.claim_id} was granted at {books.granted_at:.4f}"
                self.world.broken(f"P9 nobody has {what}")
            elif one is None:
                pass  # that comes after what gives it back, and ends by its ttl
            elif job not in one.hold.live and now > self.slack_s + self._gone_since.setdefault((job, books.token), now):
                self.world.broken(f"P9 job {job} is not in hand any more, and {books.claim_id} still holds it")

    def finish(self) -> None:
        jobs = self._network().shelf.jobs
        now = self.world.now
        for job in self.acknowledged:
            if job not in jobs and self.books[job].end not in (DONE, CANCELLED):
                self.world.broken(f"P17 job {job} was put, is not done, and is not there any more")
        for job, row in jobs.items():
            if row.claim_id is not None and row.ended is None and (row.expires_at or 0.0) > now:
                self.world.broken(f"P7 job {job} is still claimed by {row.claim_id}, whom nobody has")


class _Quiet:
    """In the place of ``dibs.load.Load``, which would tell the store of itself."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **counted: None


class JobProgram:
    """One thread of a process, which puts jobs and works them."""

    #: Without a limit, now and then.
    WAITS = True

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
            if self._interruptions is not None:
                assert self.task is not None
                self._interruptions.over(self.task)
            self.host.process.clock.sleep(0.3 * rand() ** 2)  # of virtual time, as everywhere here

    def _maybe_interrupt(self, at: int) -> None:
        """As soon as this part of a round begins, or later."""
        if self._interruptions is not None and self._interrupted_at == at:
            assert self.task is not None
            self._interruptions.maybe(self.task)

    def _round(self) -> None:
        rand, checker, process = self.host.world.random, self._checker, self.host.process
        ttl, renew = TTLS_S[int(rand() * len(TTLS_S))], rand() < 0.7
        options = (ttl, renew, None, None, 0, checker.group_limit or None, 60.0 if rand() < 0.3 else 0.0)
        queue = Queue(QueueCore(self.host.desk, QUEUE, *options, Job, JobBatch))
        self._maybe_interrupt(0)
        if rand() < 0.6:
            group = GROUPS[int(rand() * len(GROUPS))] if checker.group_limit else None
            checker.was_put(queue.put_many(range(1 + int(3 * rand())), group=group))
        if self._cancels and rand() < 0.3:
            known = list(checker.books)[-5:]
            queue.cancel(*(job for job in known if rand() < 0.4))
        timeout = (0.0, None if rand() < 0.2 else 2.0 * rand())[rand() < 0.6]
        self._maybe_interrupt(1)
        batch = queue.take(1 + int(3 * rand()), timeout=timeout)
        checker.given(process, batch.won)
        if rand() < 0.5:
            claims = [(job.id, job.fencing_token) for job in batch.won]
            try:
                with batch:
                    for job in batch:
                        process.clock.sleep(self._work_max_s * rand())
                        if rand() < 0.1:
                            break
                        self._end(job)
            finally:
                checker.block_is_left(claims)
            return
        process.clock.sleep(self._work_max_s * rand())
        if rand() < 0.2:
            batch.done()
        for job in batch.won:
            process.clock.sleep(self._work_max_s * rand())
            self._end(job)
        if rand() < 0.3:
            batch.release()

    def _end(self, job: Job) -> None:
        rand = self.host.world.random
        self._maybe_interrupt(2)
        chance = rand()
        if chance < 0.1:
            job.extend(None if rand() < 0.5 else TTLS_S[int(rand() * len(TTLS_S))])
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
            self._checker.said(self.name, job, outcome, end.trouble is not None)


def simulate_jobs(seed: int, *, signals: bool = False) -> Result:
    """Run one scenario with queues to its end; ``signals`` as in ``scenario.simulate``. Raises BrokenPromise."""
    with new_world(seed) as world:
        return simulate_in(world, JobProgram, JobChecker(world), signals=signals)


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
    interrupts = does is JobProgram and (signals or world.seed % 4 == 1)  # the others stay the worlds that they were
    quiet = interrupts and world.seed % 8 == 1
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
    checker.calm = not (network.fault_part or network.freeze_part or pauses or crashes or cuts or closes)
    checker.in_order = checker.calm and network.latency_max_s < 0.1
    checker.slack_s += 8 * network.latency_max_s
    checker.anywhere = signals
    cancels = rand() < 0.3
    checker.group_limit = (0, 0, 1, 1, 2)[int(rand() * 5)]
    work_max_s = (0.05, 0.4, 1.5)[int(rand() * 3)]
    programs: list[Task] = []
    for number in range(2 + int(2 * rand())):
        rate = (0.95, 1.05, 0.95 + 0.1 * rand())[int(rand() * 3)]
        process = Process(world, f"p{number}", rate, 1000.0 * rand())
        host = Host(world, network, process, timeouts)
        for thread in range(1 + int(2 * rand())):
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
    world.run(lambda: all(task.over or task.process.dead for task in programs))
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
    if world.now < 40.0:
        world.at(world.now + 1.0, _put_some, network, checker)
