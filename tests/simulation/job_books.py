"""What may not happen to a job: the checker keeps books of its own on each, one request to the store after the other.

Who was granted it last and until when, how often it was tried, and how it ended. It believes neither the store nor the
programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dibs.hold import HELD, LOST
from dibs.jobs import BACK, CANCELLED, DEAD, DONE, READY, Extend, Finish, Finished, Put, PutDone, Take, Taken
from dibs.queue import Job
from dibs.store import Held
from tests.simulation.checker import BACKOFF_S, OVER_EVERY, POLL_S, Checker, is_held
from tests.simulation.process import Process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.job import JobFacts
    from dibs.job_hold import JobHold
    from dibs.jobs import Extended, JobOutcome, JobRequest
    from dibs.session import Session
    from dibs.wishes import AcquireAsk
    from tests.simulation.network import Call
    from tests.simulation.programs import Host, SimSession
    from tests.simulation.world import World


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
        there = self.job in hold.live and not (self.process.dead or hold.orphan)
        return there and is_held(self.process, self.session, hold)


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
        #: Whose claim was told to have done a job.
        self.told_done: dict[int, str] = {}
        #: Since when jobs that are claimed are not in hand any more, by the tokens of their claims.
        self._gone_since: dict[tuple[int, int], float] = {}
        #: What programs were given: not the jobs themselves, since programs may drop them; and what of it is not over.
        self.in_hand: list[InHand] = []
        self._at_work: list[InHand] = []
        #: Claims of theirs that were lost.
        self._lost: set[JobHold] = set()
        #: Who waits for jobs, and since when; and since when each job is there for whoever asks.
        self._waiting: list[tuple[SimSession, AcquireAsk, float]] = []
        self._ready_since: dict[int, float] = {}
        self._next_look_for_takers = 0.0

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
        if isinstance(request, Extend) and request.ttl <= 0:
            self.world.broken(f"max_hold is over of what has token {request.fencing_token}, and it is renewed")
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
        given = [InHand(process, job._session, job._hold, job.id) for job in jobs]
        self.in_hand += given
        self._at_work += given

    def is_left(self, hold: JobHold) -> None:
        """The block or the stream is over whose jobs these were: soon nobody has them under this claim.

        (But for what was lost, which is left to its ttl: whoever had it was at work.)
        """
        if self.calm:
            claimed = [(job, books.token) for job, books in self.books.items() if books.claim_id == hold.claim_id]
            self.world.at(self.world.now + self.slack_s, self._look_if_free, hold, claimed)

    def waits(self, session: SimSession, ask: AcquireAsk) -> None:
        self._waiting.append((session, ask, self.world.now))
        self._next_look_for_takers = 0.0

    def has_waited(self, host: Host, timeout: float | None, since: float) -> None:
        """A take is back, or who waited for the end of a job."""
        world, process, session = self.world, host.process, host.session
        if timeout is None or session.closed or world.switched or process.troubled_at >= since:
            return
        took_s = world.now - since
        limit_s = timeout or session.patience_s  # one that does not wait is asked again where its answer is lost
        if took_s > (limit_s + session.request_timeout_s) / process.rate + self.slack_s:
            world.broken(
                f"P11 a wait of {timeout:.2f} s took {took_s:.2f} s, with requests that time out after "
                f"{session.request_timeout_s:.2f} s"
            )

    def has_ended(self, job: int, *, well: bool) -> None:
        """Whoever waited for a job is told so."""
        books = self.books[job]
        told = (DONE,) if well else (DEAD, CANCELLED, "")
        if books.end not in told or books.live(self.world.now):
            how = "is done" if well else "has failed"
            self.world.broken(f"P17 somebody is told that job {job} {how}, which is {books.end or 'at work'}")

    def streamed(self, jobs: Sequence[JobFacts]) -> None:
        """A stream has ended by itself that went on from each of these, unfinished: all are done, or told lost."""
        for job in jobs:
            books = self.books[job.id]
            if books.end == CANCELLED or job._session.closed:
                continue
            mine = books.ended_with == job.fencing_token and books.end == DONE
            if self.calm and mine == job._is_lost():
                self.world.broken(f"P18 a stream went on from {job!r}, which is {books.end or 'not done'}")

    def _look_if_free(self, hold: JobHold, claimed: list[tuple[int, int]]) -> None:
        if hold.state == LOST or hold.lost:
            return
        for job, token in claimed:
            books = self.books[job]
            if books.claimed and books.token == token and books.expires_at > self.world.now:
                self.world.broken(f"P9 who had job {job} has left it, and {books.claim_id} still holds it")

    def said(self, job: Job, outcome: str, repeated: bool) -> None:
        """done() of a job returned, or raised; ``repeated``: after a first attempt whose answer was lost."""
        books, who = self.books[job.id], job._hold.claim_id
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
        elif outcome == "unknown" and self.calm and self._is_quick() and not repeated:
            self.world.broken(f"P18 {who} is not told what became of {job!r}, in peace and quiet")

    # -- every step -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        if self.world.now >= self._next_look_for_takers and not self.world.switched:
            self._next_look_for_takers = self.world.now + 0.1
            self._look_for_takers()
        if self.AT_ONCE and self.calm and self.world.now >= self._next_look:
            self._next_look = self.world.now + 0.1
            self._look_for_what_nobody_has()
            self.lanes.look(self.slack_s)
        holding: dict[int, InHand] = {}
        groups: dict[str, set[int]] = {}
        if self.world.steps % OVER_EVERY == 0:
            self._at_work = self.in_hand.copy()
        for one in self._at_work.copy():
            held = one.held()
            if one.hold.state == LOST and one.hold not in self._lost:
                self._lost.add(one.hold)
                # (A request of it that was late may have been granted others.)
                told = {job.id for job in one.hold.taken.jobs}
                kept = any(
                    books.claim_id == one.hold.claim_id and books.claimed and books.expires_at > self.world.now
                    for job, books in self.books.items()
                    if job in told and job not in one.hold.ends
                )
                self._look_why_lost(one.process, one.session, one.hold, kept)
            other = holding.setdefault(one.job, one) if held else one
            if other is not one:
                who = f"{other.hold.claim_id} and {one.hold.claim_id}"
                self.world.broken(f"P1 job {one.job} is held by {who} at the same moment")
            if not held:
                if one.hold.state != HELD:
                    self._at_work.remove(one)
                continue
            if one.process.clock.boot() > one.hold.ends_at:
                self.world.broken(f"max_hold of {one.hold.claim_id} is over, and it is held")
            books = self.books[one.job]
            if books.end == CANCELLED and books.expires_at <= self.world.now:
                self.world.broken(f"P18 job {one.job} was cancelled, and {one.hold.claim_id} goes on with it")
            if self.group_limit and books.group is not None and books.ended_with is None:
                together = groups.setdefault(books.group, set())
                together.add(one.job)
                if len(together) > self.group_limit:
                    self.world.broken(f"groups: {together} of {books.group} are held at the same moment")

    def _look_for_takers(self) -> None:
        """P7, P12: a job that is there, and that somebody waits for, is taken."""
        now, jobs = self.world.now, self._network().memory.jobs
        self._waiting = [
            (session, ask, since)
            for session, ask, since in self._waiting
            if not (ask.settled or ask.dropped or session.closed)
        ]
        ready = {
            job.id: self._ready_since.get(job.id, now)
            for job in (self._network().shelf.jobs.values() if self._is_wanted() else ())
            if job.state(now) == READY and jobs._has_its_turn(job, self.group_limit, (), now)
        }
        self._ready_since = ready
        network = self._network()
        limit_s = POLL_S + self.slack_s
        if self.prompt and network.told_s is not None:
            limit_s = network.told_s + 4 * network.latency_max_s
        for session, ask, since in self._waiting:
            process = session.process
            if process.dead or process.paused:
                continue
            for job, ready_since in ready.items():
                quiet_since = max(ready_since, since, process.troubled_at, self.world.trouble_until + BACKOFF_S)
                if now - quiet_since > limit_s:
                    self.world.broken(
                        f"P12 {ask.request.claim_id} waits, and job {job} is there since {ready_since:.3f}, in peace "
                        f"and quiet for {now - quiet_since:.2f} s"
                    )

    def _is_wanted(self) -> bool:
        """Whether anybody is to have what is there."""
        return bool(self._waiting)

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
        self.lanes.finish()
        jobs = self._network().shelf.jobs
        now = self.world.now
        for job in self.acknowledged:
            if job not in jobs and self.books[job].end not in (DONE, CANCELLED):
                self.world.broken(f"P17 job {job} was put, is not done, and is not there any more")
        for job, row in jobs.items():
            if row.claim_id is not None and row.ended is None and (row.expires_at or 0.0) > now:
                self.world.broken(f"P7 job {job} is still claimed by {row.claim_id}, whom nobody has")
