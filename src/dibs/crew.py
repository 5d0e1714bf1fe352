"""What workers of one process have in hand: how many jobs to take next, who works which, and how they end.

``dibs.workers`` runs handlers in threads and ``dibs.aio.workers`` in tasks; what is decided is decided here. A job is
*waiting* (claimed, not begun), *running*, or ended. Jobs are taken beyond the number of workers only while these are
quick: as many as ended in the last moment, so that a slow handler keeps no other process's jobs waiting.

A job whose claim has expired often, because its worker ended without a word, is worked *alone*: nothing else runs in
this process meanwhile, and nothing is taken. If it ends this process as well, it takes nobody with it.

``crew.mutex`` guards the counts. What the store says to an end is heard in the claim lane, under the session's mutex;
so the session's is never taken under this one.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Any
from dibs.absence import AWAY_S, Absence
from dibs.errors import DibsError, InvalidOption, LeaseLost, StoreUnavailable
from dibs.jobs import BACK, CRASHES_MAX, DEAD, DONE, RETRY, TAKE_MAX
from dibs.names import check_seconds
from dibs.new_jobs import error_text, result_text
from dibs.queue_core import TURN_S, Patience, whole
from dibs.steps import acting

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.ask import Ask
    from dibs.job import JobFacts
    from dibs.names import Seconds
    from dibs.queue_core import QueueCore
    from dibs.session import Session
    from dibs.steps import Steps

WORKERS_MAX = 1_000
# "Quick" is counted over this time.
PACE_S = 0.1

log = logging.getLogger("dibs")


class Crew:
    """The workers of one ``run``. ``start`` is given each job that is to be worked now; it must not block."""

    def __init__(
        self,
        core: QueueCore[Any, Any],
        workers: int,
        prefetch: int,
        drain_timeout: Seconds,
        idle: Seconds | None,
        stop: Any,
    ) -> None:
        self.workers = whole("workers", workers, WORKERS_MAX)
        self._prefetch = whole("prefetch", prefetch, TAKE_MAX, 0)
        self.drain_s = check_seconds("drain_timeout", drain_timeout)
        self.start: Callable[[JobFacts], None] = lambda job: None
        #: How many were done, how many tries failed, and how many ended too late.
        self.done = self.failed = self.late = 0
        #: Asked to stop, besides ``stop``.
        self.stopping = False
        self._core = core
        self._patience = Patience(idle, stop)
        self._session: Session = core.desk.session()
        self.clock = self._session.clock
        self.mutex = self.clock.mutex()
        self._waiting: deque[JobFacts] = deque()
        self._dropped: dict[JobFacts, None] = {}
        # And since when. By claim, not by id: a job that was lost may be taken again before its handler has ended.
        self._running: dict[JobFacts, float] = {}
        self._alone = False
        self._ended = self._ended_before = 0
        self._counted_from = self._session.clock.now()
        self._turn: Ask | None = None
        # When it was last looked whose handlers go on although their jobs are lost, and since when each was seen to.
        self._looked_at = self._counted_from
        self._lost_since: dict[JobFacts, float] = {}
        self._absence = Absence(self._session, lambda text: log.warning("queue %r: %s", core.name, text))

    # -- taking -----------------------------------------------------------------------------------------------------

    def dispatching(self, owner: object) -> Steps[None]:
        """Take jobs and have them worked until it is time to stop."""
        patience, core = self._patience, self._core
        while not self.stopping and not self._session.closed and (look_s := patience.look_s()) is not None:
            self._tell_of_lost()
            room = self.room()
            if not room:
                yield from self.turn(TURN_S, self.room)
                continue
            try:
                batch = yield from core.taking(owner, room, look_s, self.workers, patience.waited_s)
            except StoreUnavailable as error:
                if self._session.closed:
                    break
                if not self._absence.borne(error):
                    raise
                yield from self.turn(AWAY_S)
                continue
            try:
                self.add(batch._jobs)
            except BaseException:  # a signal that comes before they are known here
                batch._give_up()
                raise
            self._absence.over()
            in_hand = self.in_hand()
            patience.saw(len(batch), look_s, in_hand)
            if in_hand and not batch._jobs and look_s < TURN_S:  # no asking without a pause while a job takes its time
                yield from self.turn(TURN_S - look_s, lambda: not self.in_hand())

    def _tell_of_lost(self) -> None:
        """Say which handlers go on long after their jobs were lost: they keep workers busy, perhaps for ever."""
        now = self._session.clock.now()
        if now - self._looked_at < TURN_S:
            return
        self._looked_at = now
        since = {job: self._lost_since.get(job, now) for job in self.running() if job._is_lost()}
        for job, lost_at in since.items():
            if now - lost_at >= self._core.terms.ttl:
                log.warning("a handler goes on, and keeps one of %d workers busy: %s", self.workers, job._why())
                since[job] = float("inf")
        self._lost_since = since

    def turn(self, seconds: float, enough: Callable[[], object] = bool) -> Steps[None]:
        """Sleep for so long, or until a job ends; not at all if that was enough already."""
        ask = self._turn = self._session.pause()
        if not enough():  # looked at when whoever ends a job knows whom to wake
            yield self._session, ask, seconds
        self._turn = None

    def room(self) -> int:
        """How many jobs to take now."""
        with self.mutex:
            if self._alone:
                return 0
            now = self._session.clock.now()
            if now - self._counted_from >= PACE_S:
                stale = now - self._counted_from >= 2 * PACE_S
                self._ended_before, self._ended = (0 if stale else self._ended), 0
                self._counted_from = now
            quick = min(self._prefetch, max(self._ended, self._ended_before))
            waiting = len(self._waiting)
            if waiting > quick // 2:
                return 0
            return min(TAKE_MAX, max(0, self.workers + quick - waiting - len(self._running)))

    def in_hand(self) -> int:
        """How many jobs are waiting or running."""
        with self.mutex:
            return len(self._waiting) + len(self._running)

    def add(self, jobs: list[JobFacts]) -> None:
        """These have been claimed."""
        for job in jobs:
            job._claim.worked_from = None  # several are worked at a time: each is counted by itself
        with self.mutex:
            self._waiting.extend(jobs)
            if max([job.crashes for job in jobs], default=0) >= CRASHES_MAX:
                self._alone = True
        self._begin()

    def _begin(self) -> None:
        """Have as many worked as may be."""
        while True:
            with self.mutex:
                if not self._waiting:
                    return
                job = self._waiting[0]
                limit = 1 if job.crashes >= CRASHES_MAX else self.workers
                if len(self._running) >= limit:
                    return
                self._running[job] = self._session.clock.now()  # first, so that no signal comes in between
                self._waiting.popleft()
            if job.held:
                self.start(job)
                continue
            with self.mutex:  # it waited for too long, or was cancelled: others may be at it
                del self._running[job]
                self.late += 1
                self._see_if_alone()

    def _see_if_alone(self) -> None:
        """One less is running, or was to be: it may be that nothing is worked alone any more. Under the mutex."""
        if self._alone and not self._running and max([job.crashes for job in self._waiting], default=0) < CRASHES_MAX:
            self._alone = False

    # -- ends -------------------------------------------------------------------------------------------------------

    def over(self, job: JobFacts) -> None:
        """A handler has returned, whatever became of its job: the next may begin."""
        with self.mutex:
            began = self._running.pop(job, self._session.clock.now())
            self._ended += 1
            self._see_if_alone()
        job._claim.load.count(held_s=self._session.clock.now() - began)
        self._begin()
        turn = self._turn
        if turn is not None and self.room():
            turn.settle(None)

    def missed(self, job: JobFacts) -> None:
        """It was to begin, and was over by then."""
        with self.mutex:
            self.late += 1
        self.over(job)

    def succeeded(self, job: JobFacts, result: Any) -> None:
        """A handler has returned: its job is done, unless it has finished that itself, or tried to in vain."""
        claim, note = job._claim, None
        refused = job._hold.refused.get(job.id)
        if refused is not None and job.held:
            self._failed(job, refused, refused.rpartition("\n")[2])
            return
        if claim.keep_s:
            try:
                note = result_text(result)
            except InvalidOption as error:
                log.warning("job %d of %r is done; its result is not kept: %s", job.id, job.queue, error)
        if job.held or job._is_lost():
            self._end(job, DONE, note, 0.0, claim.keep_s)
        elif self._count_own_end(job):
            pass
        elif job._is_given_back():  # by the end of the client
            self._too_late(job._why())
        else:  # the handler has ended it in a transaction of its own
            with self.mutex:
                self.done += 1

    def raised(self, job: JobFacts, error: BaseException) -> None:
        """A handler has raised: its job has failed, unless it has finished that itself before, or lost it."""
        if job._is_lost():
            self._too_late(str(error) if isinstance(error, LeaseLost) else f"{job._why()} (it raised {_shown(error)})")
            return
        if not job.held:
            log.warning("a handler raised %s when its job had ended already: %s", _shown(error), job._why())
            self._count_own_end(job)
            return
        self._failed(job, error_text(error), _shown(error))

    def _failed(self, job: JobFacts, text: str, shown: str) -> None:
        with self.mutex:
            self.failed += 1
        left = "no try is left" if job.max_tries is not None and job.tries >= job.max_tries else "it is tried again"
        log.warning("job %d of %r failed on try %d, %s: %s", job.id, job.queue, job.tries, left, shown)
        self._end(job, RETRY, text, job._retry_s(None))

    def give_back(self, job: JobFacts) -> None:
        """Nobody works it any more; its handler may have ended it, and was waiting for the store's answer."""
        if job.held:
            self._end(job, BACK)
        else:
            self._count_own_end(job)

    def _count_own_end(self, job: JobFacts) -> bool:
        """Count the end that a handler has sent by itself, when the store answers; False if there is none."""
        ask = job._hold.ends.get(job.id)
        if ask is not None:
            ask.echo().listen(self._told, [ask])
        return ask is not None

    def _end(self, job: JobFacts, end: str, note: str | None = None, delay_s: float = 0.0, keep_s: float = 0.0) -> None:
        ask = job._claim.send([job], end, note, delay_s, keep_s)
        if ask is None:
            self._too_late(job._why())
            return
        ask.listen(self._told, [ask])
        self._session.lane.start()

    def _too_late(self, why: str) -> None:
        with self.mutex:
            self.late += 1
        log.warning("a try has come to nothing: %s", why)

    def _told(self, letter: list[Ask]) -> None:
        """What the store said to an end. Called in the claim lane, under its mutex, or at once; perhaps twice."""
        if not letter:
            return
        ask = letter.pop()
        gone = getattr(ask.outcome, "gone", ())
        with self.mutex:
            if ask.error is None and not gone:
                self.done += ask.request.end == DONE
            elif ask.request.end in (DONE, DEAD):
                self.late += 1
                self._core.load().count(late=1)

    # -- the end of it all ------------------------------------------------------------------------------------------

    def drop_waiting(self) -> None:
        """Give back what nobody has begun."""
        with self.mutex:
            self._dropped.update(dict.fromkeys(self._waiting))  # until that is done: a Ctrl-C has it done again
            self._waiting.clear()
            self._alone = False
        self._send_back(list(self._dropped))
        self._dropped.clear()

    def draining(self) -> Steps[None]:
        """Wait for what is running, for up to the drain time."""
        until = self._session.clock.now() + self.drain_s
        while self._running and not self._session.closed:
            left_s = until - self._session.clock.now()
            if left_s <= 0:
                break
            yield from self.turn(min(TURN_S, left_s))

    def running(self) -> list[JobFacts]:
        """What is being worked."""
        with self.mutex:
            return list(self._running)

    def settling(self) -> Steps[None]:
        """Wait until the store has heard of every end."""
        if not self._session.closed:
            with suppress(DibsError):  # an answer like another
                yield from acting(self._session, lambda store, deadline: None)

    def _send_back(self, jobs: list[JobFacts], *, lost: bool = False) -> None:
        by_claim: dict[Any, list[JobFacts]] = {}
        for job in jobs:
            by_claim.setdefault(job._claim, []).append(job)
        for claim, some in by_claim.items():
            claim.send(some, BACK, lost=lost)
        self._session.lane.start()

    def abandon(self, jobs: list[JobFacts]) -> None:
        """Give back what is running still: nobody waits for it any more, and whoever works it has lost it."""
        self._send_back(jobs, lost=True)


def _shown(error: BaseException) -> str:
    """An error in a line of the log. A __repr__ of the caller's own that fails must not end the worker."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 - it is anybody's
        import traceback

        return "".join(traceback.format_exception_only(error)).strip()
