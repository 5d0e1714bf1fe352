"""What a holder itself asks for the lease it has: another ttl, or fewer permits; and what the answers mean.

How leases are kept without being asked for is the renewal lane's business (``dibs.renewer``).
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.ask import Ask, JobAsk
from dibs.hold import GONE_REASON, HELD, RELEASED
from dibs.store import ANY_SLOT, GONE, Acquire, Granted, Release
from dibs.trust import local_deadline

if TYPE_CHECKING:
    from dibs.hold import Hold
    from dibs.session import Session


def renew(session: Session, hold: Hold, ttl: float | None) -> Ask:
    """Ask for a renewal now; ``renewed`` makes sense of the answer."""
    with session.mutex:
        now = session.clock.now()
        wanted = min(hold.ttl if ttl is None else ttl, hold.ends_at - now)
        ask = (JobAsk if hold.of_jobs else Ask)(hold.renewal(wanted), now + session.patience_s)
        if wanted > 0:
            _queue(session, hold, ask)
        else:  # its max_hold has ended since somebody looked whether it is held
            ask.settle(None)
        return ask


def renewed(session: Session, hold: Hold, ask: Ask) -> bool:
    """Apply the answer to a renewal asked for by the holder; False when the lease is lost."""
    if ask.t0 is None:  # it was over, and nothing was sent
        return not session.keeper.expire(hold)
    with session.mutex:
        expires_at = hold.renewed_by(ask.outcome)
    if expires_at is None:
        session.keeper.lose(hold, GONE_REASON)
        return False
    ttl = ask.request.ttl
    with session.mutex:
        if hold.state != HELD:
            return False
        if session.clock.now() < hold.trusted_until:
            # Renewals never shorten a lease, so the longest of those that were answered may be trusted. (What was asked
            # for may have been sent a while later, or several times, and reach beyond the end.)
            trusted_until = min(local_deadline(ask.t0, ttl, session.margin_s), hold.ends_at)
            hold.trusted_until = max(hold.trusted_until, trusted_until)
            hold.ttl = ttl
            hold.renewed_until = expires_at
            session.renewer.track_again(hold, ask.t0)
            return True
    return not session.keeper.expire(hold)


def give_back_some(session: Session, hold: Hold, take: int) -> Ask:
    """Keep only ``take`` of the permits that a hold has, under the same claim. Answered Granted, or Gone."""
    with session.mutex:
        # From here on, whatever becomes of the answer; an export tells it, too.
        terms = hold.terms = hold.terms._replace(take=take)
        request = Acquire(hold.key, hold.claim_id, hold.ttl, session.holder, terms.info)
        request = request._replace(permits=terms.permits, take=take)
        ask = Reduction(request, session.clock.now() + session.patience_s, session, hold)
        _queue(session, hold, ask)
        return ask


def _queue(session: Session, hold: Hold, ask: Ask) -> None:
    """Queue it, unless the hold has ended meanwhile: nothing is sent of that after its release. Under the mutex."""
    if hold.state == HELD:
        session.lane.put(ask)
    else:
        ask.settle(None)


class Reduction(Ask):
    """Asks that the claim of a hold keep fewer permits.

    If the claim had ended meanwhile, this grants it anew, with another token: that one is given back at once.
    """

    def __init__(self, request: Acquire, give_up_at: float, session: Session, hold: Hold) -> None:
        super().__init__(request, give_up_at)
        self._session = session
        self._hold = hold

    def received(self, outcome: object) -> None:
        if type(outcome) is Granted and outcome.fencing_token != self._hold.granted.fencing_token:
            self._undo()
            outcome = GONE
        self.settle(outcome)

    def failed(self, error: BaseException) -> None:
        # What became of it is unknown: it may have granted the claim anew, in another slot. That is undone when the
        # hold is, or now if the store was told of its end before.
        self._hold.any_slot = True
        if self._hold.state == RELEASED or self._hold.let_go:
            self._undo()
        self.settle(None, error)

    def _undo(self) -> None:
        session, request = self._session, self.request
        undo = Release(request.name, request.claim_id, ANY_SLOT)
        session.lane.put(Ask(undo, session.clock.now() + session.patience_s))
