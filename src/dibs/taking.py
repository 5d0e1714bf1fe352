"""A take on its way: one caller's wish for jobs, until some are claimed, or nothing is waited for any more.

It waits like a wish for a name does (``dibs.waiting``): the takes of one process and queue stand in line, the first of
them asks, and sleeps until a hint, a due time, or a poll when there is nothing.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.ask import JOBS, Ask, JobAsk
from dibs.errors import StoreUnavailable
from dibs.job_hold import JobHold
from dibs.jobs import BACK, HINT_EVERY_S, Finish, Take, Taken
from dibs.layout import laid_out
from dibs.store import Held
from dibs.waiting import LOOK_AGAIN_S
from dibs.wishes import WISH, AcquireAsk

if TYPE_CHECKING:
    from dibs.session import Session
    from dibs.terms import Terms

assert LOOK_AGAIN_S >= 2 * HINT_EVERY_S


@laid_out(f"{WISH} raced waited_s")
class TakeAsk(AcquireAsk):
    """A wish for jobs. Settled with a JobHold, or with Held."""

    kind = JOBS
    #: How often a hint called it for nothing.
    raced = 0

    def __init__(self, request: Take, terms: Terms, owner: object, session: Session, blocking: bool) -> None:
        super().__init__(request, terms, owner, session, blocking)
        if request.group_limit:
            self.line = f"{request.name}\0{request.group_limit}"

    def may_be_known(self) -> bool:
        return self.t0 is not None

    def received(self, outcome: Any) -> None:
        if type(outcome) is Taken:
            self._claimed(outcome)
        elif type(outcome) is Held:
            asked_at, self.t0 = self.t0, None  # the claim certainly has nothing
            self.raced += self.hinted
            # Of what was put since it was asked, so soon after a hint, none was sent: that one stands for it, even if
            # another take was called by it, or nobody was waiting then.
            if asked_at is not None and asked_at - self._session.waiting.hinted_at(self.request.name) < HINT_EVERY_S:
                self.hinted = True
            super().received(outcome)
        else:
            self.failed(outcome)

    def _claimed(self, taken: Taken) -> None:
        """Make a hold of what was claimed, unless that took so long that it can no longer be trusted."""
        session, request, t0 = self._session, self.request, self.t0
        if self.dropped or self.settled or t0 is None:
            return
        now = session.clock.now()
        if now < t0 + self.terms.trust_s and not session.closed:
            # Kept on the ask, so that an answer given out twice (after a Ctrl-C) makes one hold.
            hold = self.hold
            if hold is None:
                hold = self.hold = JobHold(request.name, request.claim_id, taken, self.terms, self.owner, t0)
            session.renewer.track(hold, t0)
            if self.blocking:
                session.waiting.leave_line(self)
            self.settle(hold)
            return
        session.lane.put(giving_back(session, request, taken))
        if session.closed:
            self.failed(StoreUnavailable("this dibs client was closed", maybe_applied=False))
        else:
            self.failed(StoreUnavailable("the store's answer took longer than the ttl of the jobs it gave"))

    def undoing(self) -> Ask:
        """What takes back a take that was sent and perhaps granted: it is told what it has, and gives that back."""
        return Undo(self.request, self._session)


class Undo(JobAsk):
    """Asks what a claim was granted, and gives that back."""

    owed = True

    def __init__(self, request: Take, session: Session) -> None:
        super().__init__(request._replace(n=0, wake=None), session.clock.now() + session.patience_s)
        self._session = session

    def received(self, outcome: Any) -> None:
        if type(outcome) is Taken:
            self._session.lane.put(giving_back(self._session, self.request, outcome))
        self.settle(outcome)


def giving_back(session: Session, request: Take, taken: Taken) -> JobAsk:
    """What gives back all that a take was granted."""
    ids = tuple(job.id for job in taken.jobs)
    back = JobAsk(Finish(request.name, ids, taken.fencing_token, BACK), session.clock.now() + session.patience_s)
    back.owed = True
    return back


def wish_for_jobs(
    session: Session, key: str, n: int, group_limit: int, terms: Terms, owner: object, *, blocking: bool
) -> TakeAsk:
    """Make the ask; nothing happens before ``Session.submit``."""
    # A weak reference (dibs.owners) keeps its hash, but gives none when it is first asked after its thread or task is
    # gone: then nobody could look for what that holds.
    hash(owner)
    wake = session.client_id if blocking else None
    request = Take(key, session.new_claim(), n, terms.ttl, session.holder, group_limit, wake)
    return TakeAsk(request, terms, owner, session, blocking)
