"""The jobs of one take: each is finished by itself, and what is left over is given back together.

A loop over a batch that moves on finishes the job before without waiting for the store, and learns from ``lost`` what
came too late; the end of the batch waits for the answers to everything.
"""

from __future__ import annotations

from collections import deque

from dibs._typing import TYPE_CHECKING, Generic, NoReturn, TypeVar
from dibs.errors import LeaseLost, once_more
from dibs.job import UNCOPIED, Claim, JobFacts
from dibs.job_hold import forsake, tell
from dibs.jobs import BACK, DONE, RETRY, Finished
from dibs.new_jobs import error_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from dibs.ask import JobAsk
    from dibs.steps import Steps

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

    def __reduce__(self) -> NoReturn:
        raise TypeError(UNCOPIED)

    @property
    def won(self) -> list[J]:
        """The jobs that were claimed, in their order."""
        return list(self._jobs)

    @property
    def left(self) -> list[J]:
        """What is not finished. Once the batch has ended: what was given back unfinished."""
        # The end of a claim may be noticed only when a job is given back.
        return self._held() if self._left is None else [job for job in self._left if not job._is_lost()]

    @property
    def lost(self) -> list[J]:
        """What was not held any more when it was to be worked, finished, or given back."""
        claim = self._claim
        if claim is None or (not claim.hold.lost and (not claim.hold.live or claim.session.keeper.is_held(claim.hold))):
            return []
        return [job for job in self._jobs if job._is_lost()]

    def _held(self) -> list[J]:
        return [] if self._claim is None else self._claim.of_these(self._jobs)

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

    def leave(self) -> None:
        """Leave what is left claimed until the claim ends: it is neither renewed nor given back. Sends nothing.

        Until then any process that knows a job's id and token can end it: ``queue.finish``.
        """
        claim = self._claim
        if claim is not None and claim.here():
            self._current = None
            self._rest.clear()
            forsaken: dict[int, list[Callable[[], None]]] = {}
            forsake(claim.session, claim.hold, [job.id for job in self._held()], forsaken)
            tell(forsaken)

    def _send(self, jobs: list[J], end: str, note: str | None = None, delay_s: float = 0.0) -> None:
        """Send the end of jobs on its way; what came too late is learned at the end."""
        claim = self._claim
        if jobs and claim is not None:
            try:
                claim.send(jobs, end, note, delay_s, claim.keep_s if end == DONE else 0.0, sent=self._pending)
                claim.session.lane.start()
            except BaseException:  # Ctrl-C, also in front of the first line of that
                claim.session.lane.start()
                raise

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
        """Finish the job at hand; it has failed if a transaction has refused to end it, and nobody said it again."""
        current, self._current = self._current, None
        if current is not None and current.held:
            error = current._hold.refused.get(current.id)
            if error is None:
                self._send([current], DONE)
            else:
                self._send([current], RETRY, error, current._retry_s(None))

    def _finishing(self) -> Steps[None]:
        """Finish all that is left, in one call."""
        claim = self._claim
        if claim is None:
            return
        if not claim.here():
            raise LeaseLost(self._jobs[0]._why())
        jobs = self._held()
        closed = self._left
        if not closed and not jobs:
            closed = [job for job in self._jobs if job.id in claim.hold.live and job._is_given_back()]
        if closed:  # by the end of the block, or with the client
            raise LeaseLost(f"{len(closed)} of {len(self._jobs)} jobs were not finished in time: {closed[0]._why()}")
        self._current = None
        self._rest.clear()
        try:
            if jobs:
                claim.send(jobs, DONE, keep_s=claim.keep_s, sent=self._pending)
            yield from self._settling()
        except BaseException:  # Ctrl-C on the way: what was queued is sent
            claim.session.lane.start()
            raise
        for end in [claim.hold.ends.get(job.id) for job in self._jobs]:
            if end is not None and end.error is not None and end.request.end == DONE:
                raise once_more(end.error)  # also told to who calls it again
        lost = self.lost
        if lost:
            raise LeaseLost(f"{len(lost)} of {len(self._jobs)} jobs were not held any more: {lost[0]._why()}")

    def _closing(self, error: BaseException | None) -> Steps[None]:
        """End of the block: what is left is given back; the job at hand fails with the error, if there is one."""
        claim, current = self._claim, self._current
        if claim is None or not claim.here():
            return
        left = self._held()
        failing = current if current in left and isinstance(error, Exception) else None
        if failing is not None:
            left.remove(failing)
        self._close(left)
        if failing is not None and isinstance(error, Exception):
            self._send([failing], RETRY, error_text(error), failing._retry_s(None))
        self._send(left, BACK)
        unknown = yield from self._settling()
        if unknown is not None and error is None:
            raise once_more(unknown)  # what was done may be done again: that must be known

    def _close(self, left: list[J]) -> None:
        self._current = None
        self._rest.clear()
        if self._left is None:
            self._left = left

    def _give_up(self) -> None:
        """After a Ctrl-C on the way out: give back what is held yet, and wait for nothing."""
        if self._claim is not None and self._claim.here():
            left = self._held()
            self._close(left)
            self._send(left, BACK)

    def _settling(self) -> Steps[BaseException | None]:
        """Wait until the store has answered to every end, and learn what had been lost by then.

        Why it is unknown whether something is done, if it is.
        """
        claim = self._claim
        unknown: BaseException | None = None
        while claim is not None and claim.here():
            ask = next(iter(self._pending), None)
            if ask is None:
                break
            if not ask.settled:
                yield claim.session, ask.echo(), None
            if ask.error is not None and ask.request.end == DONE:
                unknown = unknown or ask.error
            try:
                self._pending.remove(ask)
            except ValueError:
                continue  # another thread was waiting for it, too, and has counted it
            if type(ask.outcome) is Finished:
                claim.load.count(late=len(ask.outcome.gone))
        return unknown

    def __len__(self) -> int:
        return len(self._jobs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._jobs)} jobs, {len(self.left)} left>"
