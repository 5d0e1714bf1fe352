"""The jobs of one take: each is finished by itself, and what is left over is given back together.

A job is *held* while its claim is in force and it is not finished; *finished* once its end is on its way; or *lost*:
the claim has run out, or the store knows the job no more as claimed by it. Ends of jobs are told to the store at once
and waited for, except by a loop that moves on: that one learns from ``lost`` what came too late.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dibs.errors import InvalidOption, LeaseLost, StoreUnavailable, once_more
from dibs.hold import HELD, LOST
from dibs.job_hold import JobHold, finish
from dibs.jobs import BACK, DEAD, DONE, RETRY, Finished
from dibs.names import check_seconds
from dibs.new_jobs import as_json, error_text, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from dibs.door import Door
    from dibs.guarding import Talk
    from dibs.jobs import TakenJob
    from dibs.lane import JobAsk
    from dibs.load import Load
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps

# A failed job is tried again after a pause that doubles from the first of these to the last, give or take a quarter.
BACKOFF_MIN_S = 1.0
BACKOFF_MAX_S = 3600.0
BACKOFF_JITTER = 0.5
RESULT_BYTES_MAX = 2**20


class Claim:
    """What keeps a claim alive: its jobs and batch share it, and when nobody has any of them it is renewed no more."""

    __slots__ = ("__weakref__", "hold", "keep_s", "load", "queue", "session", "worked_from")

    def __init__(self, session: Session, hold: JobHold, queue: str, keep_s: float, load: Load) -> None:
        self.session = session
        self.load = load
        #: Since when its jobs are worked: those of one batch one after the other.
        self.worked_from = session.clock.now()
        self.hold = hold
        self.queue = queue
        #: For how long results are kept.
        self.keep_s = keep_s

    def here(self) -> bool:
        """False in a forked child, which holds nothing of it."""
        return self.session.pid == os.getpid()

    def send(
        self,
        jobs: Iterable[JobFacts],
        end: str,
        note: str | None = None,
        delay_s: float = 0.0,
        keep_s: float = 0.0,
        held_s: float | None = None,
    ) -> JobAsk | None:
        """Send the end of jobs on its way; None when none of them was held any more. Whoever calls starts the lane.

        held_s: for how long they were worked, if that is known better than here.
        """
        ask = finish(self.session, self.hold, [job.id for job in jobs], end, note, delay_s, keep_s)
        if ask is None:
            return None
        count = len(ask.request.ids)
        if end == BACK:
            self.load.count(returned=count)
            return ask
        if held_s is None:
            now = self.session.clock.now()
            held_s, self.worked_from = now - self.worked_from, now
        if end == RETRY:
            self.load.count(returned=count, held_s=held_s)
        else:
            self.load.count(ended=count, held_s=held_s)
        return ask

    def backoff_s(self, tries: int) -> float:
        """How long to wait before the next try."""
        pause = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(tries - 1, 30))
        return pause * (1 + BACKOFF_JITTER * (self.session.clock.jitter() - 0.5))

    def __del__(self) -> None:
        # Runs anywhere, also while the library holds its own mutex: it marks, and the renewer reads the mark.
        hold = self.hold
        if hold.state == HELD and self.here():
            hold.orphan = True


class JobFacts:
    """One claimed job."""

    __slots__ = ("_claim", "_row")

    def __init__(self, claim: Claim, row: TakenJob) -> None:
        self._claim = claim
        self._row = row

    @property
    def id(self) -> int:
        """What ``put`` returned for it."""
        return self._row.id

    @property
    def queue(self) -> str:
        """The queue it is of."""
        return self._claim.queue

    @property
    def payload(self) -> Any:
        """What was put: bytes, or what was JSON; raises ValueError for a payload that others put and that is none."""
        return unpacked(self._row.payload)

    @property
    def tries(self) -> int:
        """The number of this try, from 1."""
        return self._row.tries

    @property
    def max_tries(self) -> int | None:
        """After how many tries it is dead; None for no limit."""
        return self._row.max_tries or None

    @property
    def crashes(self) -> int:
        """How many of its tries ended without a word, with their worker."""
        return self._row.crashes

    @property
    def key(self) -> str | None:
        """Its unique key, if it has one."""
        return self._row.key

    @property
    def group(self) -> str | None:
        """Its group, if it has one."""
        return self._row.group

    @property
    def created_at(self) -> datetime:
        """When it was put, by the store's clock."""
        from datetime import datetime, timezone

        return datetime.fromtimestamp(self._row.created_at, timezone.utc)

    @property
    def fencing_token(self) -> int:
        """Greater than that of every earlier claim on this job; the same for all jobs of one take."""
        return self._hold.granted.fencing_token

    @property
    def held(self) -> bool:
        """Whether it is not finished and this process may still rely on its claim. No network, no thread."""
        return self.id in self._hold.live and self._session.is_held(self._hold)

    def remaining(self) -> float:
        """Seconds for which the claim can be relied on without another renewal; 0 when it is over."""
        return max(0.0, self._hold.trusted_until - self._session.clock.now()) if self.held else 0.0

    def check(self) -> None:
        """Raise LeaseLost unless it is held."""
        if not self.held:
            raise LeaseLost(self._why())

    @property
    def _hold(self) -> JobHold:
        return self._claim.hold

    @property
    def _session(self) -> Session:
        return self._claim.session

    def _is_lost(self) -> bool:
        if self.held:
            return False
        return self.id in self._hold.lost or (self.id in self._hold.live and self._hold.state == LOST)

    def _when_over(self, listener: Callable[[], None]) -> None:
        """Call it when the job is finished or lost, or at once; it takes no lock of dibs, and may be called twice."""
        with self._session.mutex:
            listeners = self._hold.live.get(self.id)
            if listeners is not None:
                listeners.append(listener)
        if listeners is None:
            listener()
        else:
            self._session.when_over(self._hold, listener)

    def _why(self) -> str:
        job = f"job {self.id} of {self.queue!r} (token {self.fencing_token})"
        if not self._claim.here():
            return f"{job} belongs to process {self._session.pid}, not to its fork"
        if self.id in self._hold.lost:
            return f"the claim on {job} was lost: the store no longer knows it; it was cancelled, or it had expired"
        if self._is_lost():
            return f"the claim on {job} was lost: {self._hold.reason}. Others may have taken it since."
        return f"{job} is finished"

    # -- its ends, in steps -----------------------------------------------------------------------------------------

    def _ending(self, end: str, note: str | None = None, delay_s: float = 0.0, keep_s: float = 0.0) -> Steps[None]:
        """Finish it, and wait for the answer; LeaseLost when it was not held any more. Nothing when it is finished."""
        if not self.held:
            if self._is_lost() or not self._claim.here():
                raise LeaseLost(self._why())
            return
        ask = self._claim.send([self], end, note, delay_s, keep_s)
        if ask is None:
            if self._is_lost():
                raise LeaseLost(self._why())
            return
        yield from _confirmed(self._session, ask)
        if ask.outcome.gone:
            self._claim.load.count(late=1)
            self._hold.lost.add(self.id)
            raise LeaseLost(self._why())

    def _done(self, result: Any = None) -> Steps[None]:
        keep_s = self._claim.keep_s
        return self._ending(DONE, result_text(result) if keep_s else None, keep_s=keep_s)

    def _failed(self, error: BaseException | str | None, retry_in: Seconds | None, dead: bool) -> Steps[None]:
        text = error_text(error)
        if dead:
            return self._ending(DEAD, text)
        return self._ending(RETRY, text, self._retry_s(retry_in))

    def _retry_s(self, retry_in: Seconds | None) -> float:
        return self._claim.backoff_s(self.tries) if retry_in is None else check_seconds("retry_in", retry_in)

    def _skipped(self) -> Steps[None]:
        return self._ending(BACK)

    def _extending(self, ttl: Seconds | None) -> Steps[None]:
        session, hold = self._session, self._hold
        ttl_s = None
        if ttl is not None:
            limits = session.address.capabilities
            ttl_s = check_seconds("ttl", ttl, least=limits.ttl_min_s, most=limits.ttl_max_s)
        self.check()
        ask = session.renew(hold, ttl_s)
        yield from _confirmed(session, ask)
        if not session.renewed(hold, ask) or not self.held:
            raise LeaseLost(self._why())

    def _done_within(self, door: Door, result: Any = None) -> Talk[None]:
        from dibs.door_jobs import finish_within

        self.check()
        keep_s = self._claim.keep_s
        yield from finish_within(self, door, result_text(result) if keep_s else None, keep_s)

    def __repr__(self) -> str:
        state = f"held for {self.remaining():.1f} s more" if self.held else "not held"
        return f"<{type(self).__name__} {self.id} of {self.queue!r}, try {self.tries}, {state}>"


def result_text(result: Any) -> str | None:
    """A result as it is kept; raises InvalidOption for what is no JSON."""
    if result is None:
        return None
    text = as_json("a result", result)
    if len(text.encode()) > RESULT_BYTES_MAX:
        raise InvalidOption(f"a result has at most {RESULT_BYTES_MAX:,} bytes")
    return text


def _confirmed(session: Session, ask: Any) -> Steps[None]:
    try:
        # No time-out here: the lane answers every ask by the end of its patience.
        yield session, ask, None
    except BaseException:  # what was queued is sent, whoever was interrupted
        session.lane.start()
        raise
    if ask.error is not None:
        raise once_more(ask.error)


J = TypeVar("J", bound=JobFacts)


class JobBatchFacts(Generic[J]):
    """The jobs of one take. Empty when there was nothing to be had."""

    __slots__ = ("_claim", "_current", "_jobs", "_left", "_margin_s", "_pending", "_rest")

    def __init__(self, claim: Claim | None, jobs: list[J], margin_s: float) -> None:
        self._claim = claim
        self._jobs = jobs
        self._rest = deque(jobs)
        self._current: J | None = None
        self._margin_s = margin_s
        self._pending: list[JobAsk] = []
        self._left: list[J] | None = None

    @property
    def won(self) -> list[J]:
        """The jobs that were claimed, in their order."""
        return list(self._jobs)

    @property
    def left(self) -> list[J]:
        """What is not finished. Once the batch has ended: what was given back unfinished."""
        return [job for job in self._jobs if job.held] if self._left is None else list(self._left)

    @property
    def lost(self) -> list[J]:
        """What was not held any more when it was to be worked, finished, or given back."""
        return [job for job in self._jobs if job._is_lost()]

    @property
    def token(self) -> int | None:
        """The fencing token of all its jobs; None of an empty batch."""
        return None if self._claim is None else self._claim.hold.granted.fencing_token

    @property
    def deadline(self) -> datetime | None:
        """When the claim ends unless it is renewed, by the store's clock; None of an empty batch."""
        if self._claim is None:
            return None
        from datetime import datetime, timezone

        hold = self._claim.hold
        at = hold.granted.acquired_at + hold.terms.ttl if hold.renewed_until is None else hold.renewed_until
        return datetime.fromtimestamp(at, timezone.utc)

    def remaining(self) -> float:
        """Seconds for which what is left can be relied on without another renewal; 0 when nothing is left."""
        return next((job.remaining() for job in self._jobs if job.held), 0.0)

    def _finish_soon(self, jobs: list[J]) -> None:
        """Send ``done`` for jobs on its way; what came too late is learned at the end."""
        if jobs and self._claim is not None:
            ask = self._claim.send(jobs, DONE, keep_s=self._claim.keep_s)
            if ask is not None:
                self._pending.append(ask)
                self._claim.session.lane.start()

    def _move_on(self) -> J | None:
        """Finish the job at hand; the next one, or None at the end, or when too little is left of the time."""
        self._move_past()
        while self._rest:
            job = self._rest[0]
            if job.held and job._hold.terms.renew is False and job.remaining() <= self._margin_s:
                break
            self._rest.popleft()
            if job.held:
                self._current = job
                return job
        return None

    def _move_past(self) -> None:
        """Finish the job at hand."""
        current, self._current = self._current, None
        if current is not None and current.held:
            self._finish_soon([current])

    def _finishing(self) -> Steps[None]:
        """Finish all that is left, in one call."""
        self._current = None
        self._rest.clear()
        jobs = [job for job in self._jobs if job.held]
        if jobs and self._claim is not None:
            ask = self._claim.send(jobs, DONE, keep_s=self._claim.keep_s)
            if ask is not None:
                self._pending.append(ask)
        yield from self._settling()
        lost = [job for job in jobs if job._is_lost()]
        if lost:
            raise LeaseLost(f"{len(lost)} of {len(jobs)} jobs were not held any more: {lost[0]._why()}")

    def _closing(self, error: BaseException | None) -> Steps[None]:
        """End of the block: what is left is given back; the job at hand fails with the error, if there is one."""
        claim, current = self._claim, self._current
        if claim is None or not claim.here():
            return
        self._current = None
        self._rest.clear()
        left = [job for job in self._jobs if job.held]
        if self._left is None:
            self._left = left
        try:
            if current is not None and current.held and isinstance(error, Exception):
                left = [job for job in left if job is not current]
                failed = claim.send([current], RETRY, error_text(error), current._retry_s(None))
                self._pending += [] if failed is None else [failed]
            ask = claim.send(left, BACK) if left else None
            self._pending += [] if ask is None else [ask]
        finally:
            claim.session.lane.start()
        try:
            yield from self._settling()
        except StoreUnavailable:
            if error is None:
                raise  # what was done may be done again: that must be known

    def _settling(self) -> Steps[None]:
        """Wait until the store has answered to every end, and learn what had been lost by then."""
        claim = self._claim
        unknown: BaseException | None = None
        while self._pending and claim is not None and claim.here():
            ask = self._pending[-1]
            if not ask.settled:
                yield claim.session, ask, None
            self._pending.pop()
            if type(ask.outcome) is Finished:
                claim.hold.lost.update(ask.outcome.gone)
                claim.load.count(late=len(ask.outcome.gone))
            elif ask.error is not None and ask.request.end == DONE:
                unknown = unknown or ask.error
        if unknown is not None:
            raise once_more(unknown)

    def __len__(self) -> int:
        return len(self._jobs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._jobs)} jobs, {len(self.left)} left>"
