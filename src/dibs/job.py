"""One claimed job: what its worker knows of it, and how it ends.

A job is *held* while its claim is in force and it is not finished; *finished* once its end is on its way; *lost*: the
claim has run out, or the store knows the job no more as claimed by it; or *given back* unfinished, to be worked again.
Ends of jobs are told to the store at once and waited for, except by a loop that moves on: that one learns from ``lost``
what came too late.
"""

from __future__ import annotations

import os
from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from dibs.dropped import quietly, watch
from dibs.errors import DibsError, LeaseLost
from dibs.hold import LOST
from dibs.job_hold import JobHold, finish
from dibs.jobs import BACK, DEAD, DONE, RETRY
from dibs.names import check_flag, check_seconds
from dibs.new_jobs import error_text, result_text, unpacked
from dibs.renewing import renew, renewed
from dibs.steps import sending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from dibs.ask import JobAsk
    from dibs.door import Door
    from dibs.guarding import Talk
    from dibs.jobs import TakenJob
    from dibs.load import Load
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps

J = TypeVar("J", bound="JobFacts")

# A failed job is tried again after a pause that doubles from the first of these to the last, give or take a quarter.
BACKOFF_MIN_S = 1.0
BACKOFF_MAX_S = 3600.0
BACKOFF_JITTER = 0.5
UNCOPIED = (
    "a claimed job cannot be pickled or copied: its worker is this process; give another its id and token "
    "(batch.leave())"
)


class Claim:
    """What keeps a claim alive: its jobs and batch share it, and when nobody has any of them it is renewed no more."""

    __slots__ = ("__weakref__", "hold", "keep_s", "load", "queue", "session", "worked_from")

    def __init__(self, session: Session, hold: JobHold, queue: str, keep_s: float, load: Load) -> None:
        self.session = session
        self.load = load
        #: Since when its jobs are worked: those of one batch one after the other. None where somebody else counts that.
        self.worked_from: float | None = session.clock.now()
        self.hold = hold
        watch(self, hold, session, quietly)
        self.queue = queue
        #: For how long results are kept.
        self.keep_s = keep_s

    def __reduce__(self) -> NoReturn:
        raise TypeError(UNCOPIED)

    def here(self) -> bool:
        """False in a forked child, which holds nothing of it."""
        return self.session.pid == os.getpid()

    def of_these(self, jobs: list[J]) -> list[J]:
        """Those that are held: as ``JobFacts.held``, and the clock is asked once for all of them."""
        live = self.hold.live
        return [job for job in jobs if job.id in live] if live and self.session.keeper.is_held(self.hold) else []

    def send(
        self,
        jobs: Iterable[JobFacts],
        end: str,
        note: str | None = None,
        delay_s: float = 0.0,
        keep_s: float = 0.0,
        *,
        lost: bool = False,
        sent: list[JobAsk] | None = None,
    ) -> JobAsk | None:
        """Send the end of jobs on its way; None when none of them was held any more. Whoever calls starts the lane."""
        ids = [job.id for job in jobs]
        ask = finish(self.session, self.hold, ids, end, note, delay_s, keep_s, lost=lost, sent=sent)
        if ask is None:
            return None
        count = len(ask.request.ids)
        if end == BACK:
            self.load.count(returned=count)
        elif end == RETRY:
            self.load.count(returned=count, held_s=self.worked_s())
        else:
            self.load.count(ended=count, held_s=self.worked_s())
        return ask

    def worked_s(self) -> float:
        """For how long the jobs that end now were worked, as far as it is counted here."""
        if self.worked_from is None:
            return 0.0
        now = self.session.clock.now()
        worked_s, self.worked_from = now - self.worked_from, now
        return worked_s


class JobFacts:
    """One claimed job."""

    __slots__ = ("__weakref__", "_claim", "_row")

    def __init__(self, claim: Claim, row: TakenJob) -> None:
        self._claim = claim
        self._row = row

    def __reduce__(self) -> NoReturn:
        # A copy would keep the claim, and be a second one to end it.
        raise TypeError(UNCOPIED)

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
        return self.id in self._hold.live and self._session.keeper.is_held(self._hold)

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

    def _when_over(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call it when the job is finished or lost, or at once; it takes no lock of dibs, and may be called twice.

        Returns what to call when nobody listens any more.
        """
        with self._session.mutex:
            listeners = self._hold.live.get(self.id)
            if listeners is not None:
                listeners.append(listener)
        if listeners is None:
            listener()
            return lambda: None
        unlisten = self._session.keeper.when_over(self._hold, listener)

        def forget() -> None:
            unlisten()
            with self._session.mutex, suppress(ValueError):
                listeners.remove(listener)

        return forget

    def _why(self) -> str:
        job = f"job {self.id} of {self.queue!r} (token {self.fencing_token})"
        if not self._claim.here():
            return f"{job} belongs to process {self._session.pid}, not to its fork"
        if self.id in self._hold.lost:
            return f"the claim on {job} was lost: it was cancelled, had expired, or was given back by run()"
        if self._is_lost():
            return f"the claim on {job} was lost: {self._hold.reason}. Others may have taken it since."
        end = self._hold.ends.get(self.id)
        if self.id in self._hold.within or (end is not None and end.request.end != BACK):
            return f"{job} is finished"
        if end is None and self.id not in self._hold.live:
            return f"{job} was left to whoever ends it by its id and token (queue.finish)"
        return f"{job} was given back: others may have taken it since"

    def _is_given_back(self) -> bool:
        """Whether nobody finished it: its batch or client was closed, it was skipped, or left to others."""
        if self.held or self._is_lost() or self.id in self._hold.within:
            return False
        end = self._hold.ends.get(self.id)
        return end is None or end.request.end == BACK

    # -- its ends, in steps -----------------------------------------------------------------------------------------

    def _ending(self, end: str, note: str | None = None, delay_s: float = 0.0, keep_s: float = 0.0) -> Steps[None]:
        """Finish it, unless it is finished, and wait for the answer; LeaseLost when it was not held any more."""
        try:
            first = self._claim.send([self], end, note, delay_s, keep_s) if self.held else None
            if self._is_lost() or not self._claim.here():
                raise LeaseLost(self._why())
            # What others may be at is not done by saying so late. (To skip what was given back is to say it twice.)
            if first is None and end != BACK and self._is_given_back():
                raise LeaseLost(self._why())
            # Whoever ends it again is told what came of the first end. (There is none when a transaction has ended it.)
            ask = first or self._hold.ends.get(self.id)
            if ask is not None:
                # No time-out here: the lane answers every ask by the end of its patience.
                yield from sending(self._session, lambda: ask if ask is first else ask.echo())
                if self._is_lost():
                    self._claim.load.count(late=first is not None)
                    raise LeaseLost(self._why())
        except DibsError:
            raise
        except BaseException:  # Ctrl-C on the way: what was queued is sent
            if self._claim.here():
                self._session.lane.start()
            raise

    def _done(self, result: Any = None) -> Steps[None]:
        keep_s = self._claim.keep_s
        return self._ending(DONE, result_text(result) if keep_s else None, keep_s=keep_s)

    def _failed(self, error: BaseException | str | None, retry_in: Seconds | None, dead: bool) -> Steps[None]:
        text = error_text(error)
        delay_s = self._retry_s(retry_in)
        return self._ending(DEAD, text) if check_flag("dead", dead) else self._ending(RETRY, text, delay_s)

    def _retry_s(self, retry_in: Seconds | None) -> float:
        return backoff_s(self._session, self.tries) if retry_in is None else check_seconds("retry_in", retry_in)

    def _skipped(self) -> Steps[None]:
        return self._ending(BACK)

    def _extending(self, ttl: Seconds | None) -> Steps[None]:
        session, hold = self._session, self._hold
        ttl_s = None
        if ttl is not None:
            limits = session.address.capabilities
            ttl_s = check_seconds("ttl", ttl, least=limits.ttl_min_s, most=limits.ttl_max_s)
        self.check()
        ask = yield from sending(session, lambda: renew(session, hold, ttl_s))
        if not renewed(session, hold, ask) or not self.held:
            raise LeaseLost(self._why())

    def _done_within(self, door: Door, result: Any = None) -> Talk[None]:
        from dibs.door_jobs import finish_within

        self.check()
        keep_s = self._claim.keep_s
        yield from finish_within(self, door, result_text(result) if keep_s else None, keep_s)
        self._claim.load.count(ended=1, held_s=self._claim.worked_s())

    def __repr__(self) -> str:
        state = f"held for {self.remaining():.1f} s more" if self.held else "not held"
        return f"<{type(self).__name__} {self.id} of {self.queue!r}, try {self.tries}, {state}>"


def backoff_s(session: Session, tries: int) -> float:
    """How long a job that has been tried so often waits for its next try."""
    pause = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(tries - 1, 30))
    return pause * (1 + BACKOFF_JITTER * (session.clock.jitter() - 0.5))
