"""What a queue does, in steps for either face: putting, taking, and what operators see and mend.

A queue is a name; its jobs are the store's (``dibs.jobs``). Nothing is kept here.
"""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from dibs.ask import JobAsk
from dibs.errors import InvalidOption, JobExists, StoreUnavailable, Unsupported
from dibs.job import Claim, JobFacts
from dibs.job_batch import JobBatchFacts
from dibs.jobs import GROUP_LIMIT_MAX, STATES, TAKE_MAX, KeyTaken, Put, PutDone
from dibs.load import WINDOW_S, Load
from dibs.lock import answered, heard_in_time
from dibs.names import check_name, check_seconds, check_stop, check_timeout
from dibs.new_jobs import PutOptions, check_priority, check_tries, new_jobs
from dibs.pauses import QUEUE
from dibs.queue_records import QueueDepth, queue_key, shown_depth, shown_job
from dibs.steps import acting, look_pauses, sending, within
from dibs.taking import wish_for_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from dibs.advice import Advice, QueueStats
    from dibs.clock import Deadline
    from dibs.desk import Desk
    from dibs.door import Door
    from dibs.guarding import Talk
    from dibs.jobs import Jobs, JobStore, TakenJob
    from dibs.names import Seconds
    from dibs.once_keys import Key
    from dibs.queue_records import JobRecord
    from dibs.session import Session
    from dibs.steps import Steps

# How many jobs a list shows unless told otherwise.
LIST_DEFAULT = 100
LIST_MAX = 10_000
# A batch whose claim is not renewed is left by its loop when less than this part of the ttl is left.
MARGIN_PART = 0.1
# Whoever works without end looks this often whether to stop.
TURN_S = 0.5
# What was cancelled is shown for this long at least: who waits for it is not to believe that it was done.
CANCELLED_KEPT_S = 60.0

J = TypeVar("J", bound=JobFacts)
B = TypeVar("B", bound=JobBatchFacts[Any])


class QueueCore(Generic[J, B]):
    """A queue of one client."""

    __slots__ = ("_key", "_make_batch", "_make_job", "desk", "group_limit", "keep_s", "max_tries", "name", "priority",
                 "terms")  # fmt: skip

    def __init__(
        self,
        desk: Desk,
        name: str,
        ttl: Seconds | None,
        renew: bool,
        max_hold: Seconds | None,
        max_tries: int | None,
        priority: int,
        group_limit: int | None,
        keep_results: Seconds,
        make_job: Callable[[Claim, TakenJob], J],
        make_batch: Callable[[Claim | None, list[J], float], B],
    ) -> None:
        """Check what a caller gave; raises InvalidName and InvalidOption before any I/O, and Unsupported."""
        self.terms = desk.terms(ttl, renew, 0, False, 0, max_hold, None, "raise", None)
        self.name = check_name(name)
        if desk.address.observed:
            raise Unsupported("no queues with takeover='observe': who has a job is kept by the store's clock")
        if not desk.address.capabilities.queue:
            raise Unsupported(
                f"{desk.address.capabilities.store} keeps no queues; PostgreSQL, MySQL/MariaDB, Redis and SQLite do. "
                "Claims on items of your own are possible everywhere: client.claims(…)"
            )
        self.max_tries = check_tries(max_tries) or None
        self.priority = check_priority(priority)
        self.group_limit = 0 if group_limit is None else whole("group_limit", group_limit, GROUP_LIMIT_MAX)
        self.keep_s = check_seconds("keep_results", keep_results)
        self.desk = desk
        self._key = queue_key(desk.namespace, self.name)
        self._make_job = make_job
        self._make_batch = make_batch

    @property
    def pause_name(self) -> str:
        """What the queue is called where operators pause and resume."""
        return QUEUE + self.name

    # -- putting ----------------------------------------------------------------------------------------------------

    def _put(self, payloads: Iterable[Any], options: PutOptions) -> tuple[Put, list[int]]:
        jobs, places = new_jobs(payloads, options)
        return Put(self._key, os.urandom(12).hex(), jobs, options.on_conflict), places

    def put_options(
        self,
        delay: Seconds | None,
        at: datetime | None,
        priority: int | None,
        group: Key | None,
        max_tries: int | None,
        on_conflict: str,
    ) -> PutOptions:
        """What counts for all jobs of a put, with the queue's defaults."""
        priority = self.priority if priority is None else priority
        tries = self.max_tries if max_tries is None else max_tries
        return PutOptions(delay, at, priority, group, tries, on_conflict)

    def putting(self, payloads: Iterable[Any], options: PutOptions) -> Steps[list[int]]:
        """Put jobs, all or none; their ids."""
        request, places = self._put(payloads, options)
        if not places:
            return []
        session = self.desk.session()
        ask = JobAsk(request, session.clock.now() + session.patience_s)
        ask.weight = sum(len(job.payload) for job in request.jobs)
        yield from sending(session, lambda: session.send(ask))  # whoever does not wait has put it all the same
        return self._ids(ask.outcome, request, places)

    def putting_within(self, door: Door, payloads: Iterable[Any], options: PutOptions) -> Talk[list[int]]:
        """The same in the caller's own transaction."""
        from dibs.door_jobs import put_within

        request, places = self._put(payloads, options)
        if not places:
            return []
        return self._ids((yield from put_within(self.desk.session(), door, request)), request, places)

    def _ids(self, outcome: PutDone | KeyTaken, request: Put, places: list[int]) -> list[int]:
        """The ids of the jobs that stand for each payload."""
        if isinstance(outcome, PutDone):
            if len(outcome.ids) == len(request.jobs) and all(outcome.ids):
                return [outcome.ids[place] for place in places]
            # The first answer was lost, and the second tells only of what was put then and is there still.
            told = "1 job was put" if len(request.jobs) == 1 else f"{len(request.jobs):,} jobs were put"
            raise StoreUnavailable(f"{told}, but the answer with the ids was lost")
        what = "is being worked" if outcome.claimed else "waits for a worker"
        raise JobExists(
            f"job {outcome.id} of {self.name!r} has the key {outcome.key!r} and {what}; on_conflict='keep' leaves it, "
            "'replace' replaces one that waits",
            key=outcome.key,
            id=outcome.id,
            claimed=outcome.claimed,
        )

    # -- taking -----------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        """What is counted of it in this process."""
        session = self.desk.session()
        load = session.loads.get(self.name)
        if load is None:
            load = session.loads.setdefault(self.name, Load(session, self.desk.namespace, self.name, WINDOW_S))
        return load

    def advising(self) -> Steps[Advice]:
        """How many workers it needs."""
        from dibs.advice import advising

        return advising(self.desk, self.name, WINDOW_S, self.depth)

    def counting(self) -> Steps[QueueStats]:
        """What its takers have counted."""
        from dibs.advice import counting

        return counting(self.desk, self.name)

    def taking(self, owner: object, n: int, limit_s: float | None, workers: int = 1, waited_s: float = 0.0) -> Steps[B]:
        """Claim up to ``n`` jobs, for so many workers; an empty batch if there were none within ``limit_s`` seconds.

        Who has found nothing for ``waited_s`` seconds before is used to waiting.
        """
        session, load = self.desk.session(), self.load()
        load.taker(owner, workers)
        load.tell()
        ask = wish_for_jobs(session, self._key, n, self.group_limit, self.terms, owner, blocking=limit_s != 0)
        ask.waited_s = waited_s
        try:
            session.submit(ask)
            settled = yield session, ask, session.request_timeout_s + session.patience_s if limit_s == 0 else limit_s
            if not settled and limit_s:
                settled = yield from heard_in_time(session, ask, limit_s)
            hold = answered(session, ask, settled)
            if hold is None:
                load.count(asked=1, empty=1, raced=ask.raced)
                session.withdraw(ask)
                return self._make_batch(None, [], 0.0)
            batch = self._batch(session, hold, load)
            had = len(batch)
            take_s = session.clock.now() - hold.t0
            load.count(asked=1, won=1, taken=had, short=had < n, raced=ask.raced, take_s=take_s)
            return batch
        except BaseException:
            session.withdraw(ask)
            raise

    def _batch(self, session: Session, hold: Any, load: Load) -> B:
        claim = Claim(session, hold, self.name, self.keep_s, load)
        jobs = [self._make_job(claim, row) for row in hold.taken.jobs]
        batch = self._make_batch(claim, jobs, self.terms.ttl * MARGIN_PART)
        hold.given = True
        return batch

    # -- see and mend -----------------------------------------------------------------------------------------------

    def _acting(self, act: Callable[[Jobs, Deadline], Any]) -> Steps[Any]:
        return acting(self.desk.session(), lambda store, by: act(cast("JobStore", store).jobs, by))

    def depth(self) -> Steps[QueueDepth]:
        found = yield from self._acting(lambda jobs, by: jobs.depths(self._key, self._key + "\x01", by))
        return shown_depth(found[0]) if found else QueueDepth(self.name, 0, 0, 0, 0, 0.0)

    def jobs(self, state: str, limit: int) -> Steps[list[JobRecord]]:
        if state not in STATES:
            raise InvalidOption(f"state is one of {', '.join(STATES)}, not {state!r}")
        whole("limit", limit, LIST_MAX)
        found = yield from self._acting(lambda jobs, by: jobs.jobs_in(self._key, state, limit, by))
        return [shown_job(job) for job in found]

    def job(self, job: int) -> Steps[JobRecord | None]:
        (job,) = check_ids([job])
        found = yield from self._acting(lambda jobs, by: jobs.find(self._key, job, by))
        return None if found is None else shown_job(found)

    def cancelling(self, ids: Sequence[int]) -> Steps[list[int]]:
        ids, keep_s = check_ids(ids), max(self.keep_s, CANCELLED_KEPT_S)
        return (yield from self._acting(lambda jobs, by: jobs.cancel(self._key, ids, keep_s, by)))  # type: ignore[no-any-return]

    def requeuing(self, ids: Sequence[int]) -> Steps[int]:
        which = check_ids(ids) or None
        return (yield from self._acting(lambda jobs, by: jobs.revive(self._key, which, by)))  # type: ignore[no-any-return]

    def purging(self, ids: Sequence[int], older_than: Seconds) -> Steps[int]:
        which, seconds = check_ids(ids) or None, check_seconds("older_than", older_than)
        return (yield from self._acting(lambda jobs, by: jobs.forget(self._key, which, seconds, by)))  # type: ignore[no-any-return]

    def waiting_for(self, job: int, timeout: Seconds | None) -> Steps[JobRecord | None]:
        """Look until the job has ended; None when it has left, or nothing came of it in time (see ``Queue.wait``)."""
        limit_s = check_timeout(timeout)
        session = self.desk.session()
        clock = session.clock
        until = None if limit_s is None else clock.now() + limit_s
        pauses = look_pauses()
        while True:
            found = yield from within(session.time_left(until), self.job(job))
            if found is None or found.state in ("done", "dead", "cancelled"):
                return found
            now = clock.now()
            if session.closed:
                raise StoreUnavailable("this dibs client was closed while waiting", maybe_applied=False)
            if until is not None and now >= until:
                raise TimeoutError(f"job {job} of {self.name!r} is {found.state} after {limit_s:g} s")
            pause_s = next(pauses)
            yield session, session.pause(), pause_s if until is None else min(pause_s, until - now)


class Patience:
    """For how long somebody who works without end looks for jobs at a time: in turns, and not for ever."""

    def __init__(self, idle: Seconds | None, stop: Any) -> None:
        self._idle_s = None if idle is None else check_seconds("idle", idle)
        # How long there was no work, neither to take nor in hand.
        self._unused_s = 0.0
        #: How long there was nothing to take.
        self.waited_s = 0.0
        # Nothing was found by the last take, which did not wait.
        self._asked_last = False
        #: Whether it is time to stop.
        self.stopped = check_stop(stop)

    def look_s(self) -> float | None:
        """How long to look for jobs now; None when it is over."""
        if self.stopped():
            return None
        if self._idle_s is None:
            return TURN_S
        left_s = max(0.0, self._idle_s - self._unused_s)
        return None if not left_s and self._asked_last else min(TURN_S, left_s)

    def saw(self, jobs: int, looked_s: float, in_hand: int = 0) -> None:
        """So many jobs were found after so much time at most, beside those in hand."""
        self.waited_s = 0.0 if jobs else self.waited_s + looked_s
        self._unused_s = 0.0 if jobs or in_hand else self._unused_s + looked_s
        # Whoever waits asks when the wait begins, and then perhaps no more: what was put since, and was told to nobody,
        # is found by a take that does not wait, when the time is over.
        self._asked_last = not (jobs or in_hand or looked_s)


class LeftInTheMiddle(Exception):
    """Kept with a job whose loop was left while it was being worked."""


def left_in_the_middle(error: BaseException) -> BaseException:
    """What the job at hand has failed with. A generator that is closed does not know why: it may have been an error."""
    if isinstance(error, GeneratorExit):
        return LeftInTheMiddle("the loop over the stream was left while this job was at hand, by break or an error")
    return error


def check_n(n: object) -> int:
    """How many jobs to take; raises InvalidOption."""
    return whole("n", n, TAKE_MAX)


def whole(what: str, number: object, most: int, least: int = 1) -> int:
    """A whole number; raises InvalidOption."""
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise InvalidOption(f"{what} is a whole number from {least} to {most:,}, not {number!r}")
    return number


def check_ids(ids: Iterable[object]) -> list[int]:
    """Ids of jobs; raises InvalidOption."""
    checked = []
    for job in ids:
        if isinstance(job, list | tuple | set):
            raise InvalidOption("the ids of jobs are given one by one: write a * in front of several, cancel(*ids)")
        if isinstance(job, bool) or not isinstance(job, int) or not 0 < job < 2**63:
            raise InvalidOption(f"the id of a job is the whole number that put() returned, not {job!r}")
        checked.append(job)
    return checked


def listing_queues(desk: Desk, prefix: str) -> Steps[list[QueueDepth]]:
    """The queues that have jobs, by name."""
    if not isinstance(prefix, str):
        raise InvalidOption(f"prefix is a str, not {type(prefix).__name__}")
    if prefix:
        prefix = check_name(prefix)
    if not desk.address.capabilities.queue:
        return []
    key = queue_key(desk.namespace, prefix)
    before = key + "\U0010ffff" * 64
    depths = yield from acting(desk.session(), lambda store, by: cast("JobStore", store).jobs.depths(key, before, by))
    return [shown_depth(depth) for depth in depths]
