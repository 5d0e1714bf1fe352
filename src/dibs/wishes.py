"""A wish on its way: one caller's ask for a name, or for what another claim holds, and the hold that its grant becomes.

It answers for what every outcome means to the caller: a grant makes a hold unless it came too late to be trusted, and
what nobody wants any more is given back. When a wish that waits asks again is ``dibs.waiting``'s business.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.ask import ON_ITS_WAY, Ask
from dibs.errors import LimitMismatch, StoreUnavailable
from dibs.hold import Hold
from dibs.layout import laid_out
from dibs.store import ANY_SLOT, ANY_TICKET, PERMITS_MAX, PIN_LOOK_S, Acquire, Gone, Granted, Held, Mismatch, Release

if TYPE_CHECKING:
    from dibs.session import Session
    from dibs.terms import Terms

# What is set on a wish on its way (``dibs.layout``).
WISH = (
    f"{ON_ITS_WAY} started_at terms owner blocking _session line hold seen heard_at heard wake_at hinted released along"
    " dropped"
)


@laid_out(WISH)
class AcquireAsk(Ask):
    """One caller's wish for a name, until it is granted, refused or withdrawn."""

    wake_at = 0.0
    #: The latest Held it was told.
    seen: Held | None = None
    #: What its grant became.
    hold: Hold | None = None
    #: When the store last answered that it is to wait, and whether that was just now when its time was over.
    heard_at = float("-inf")
    heard = False
    #: A hint came while its request was under way: what it is told may be older.
    hinted = False
    #: What it waits for was released in this process while its request was under way.
    released = False
    #: It stands behind the first in line, and is asked for along with it.
    along = False
    #: How long its caller, who asks without end, has waited before.
    waited_s = 0.0
    pausable = True
    if_locked = Held(None, 0, 0.0, PIN_LOOK_S)

    # ``Ask.__init__`` is not called: one is made for every acquire.
    def __init__(self, request: Any, terms: Terms, owner: object, session: Session, blocking: bool) -> None:
        now = session.clock.now()
        self.request = request
        self.give_up_at = now + session.patience_s
        self.started_at = now
        self.terms = terms
        self.owner = owner
        #: It waits its turn, where it is not granted at once.
        self.blocking = blocking
        self._session = session
        #: Which line of this process it stands in: who may be told something else than the first in line stands in
        #: another. (A name has no control characters, so that no other name is a line's.)
        self.line: str = f"{request.name}\0{terms.permits}" if terms.permits else request.name

    def may_be_known(self) -> bool:
        """Whether the store may have granted it, or have it in line."""
        if not self.blocking and type(self.outcome) in (Held, Gone) and self.trouble is None:
            return False  # it was asked for once, and refused
        return self.t0 is not None or self.request.ticket is not None

    def undoing(self) -> Ask:
        """What takes back an acquire that was sent: its grant, and its place in line, known or not."""
        request, session = self.request, self._session
        ticket = ANY_TICKET if request.ticket is None and self.blocking else request.ticket
        slot = ANY_SLOT if request.permits else 1
        undo = Ask(Release(request.name, request.claim_id, slot, ticket), session.clock.now() + session.patience_s)
        undo.afterwards = self.error is not None
        undo.owed = True
        return undo

    def received(self, outcome: object) -> None:
        if type(outcome) is Granted:
            self._granted(outcome)
        elif type(outcome) is Held:
            self.seen = outcome
            if self.blocking:
                if outcome.paused is not None and not self.along:
                    self._session.tell_paused(self.request.name, outcome)
                self._session.waiting.fall_asleep(self, outcome)
            else:
                self.settle(outcome)
        elif type(outcome) is Gone:  # there is no such row, of those that keep their claims themselves
            self.settle(outcome)
        elif type(outcome) is Mismatch:
            self.failed(LimitMismatch(_mismatch(outcome.permits, self.request)))

    def _granted(self, outcome: Granted) -> None:
        """Turn a grant into a hold, unless it took so long that it can no longer be trusted.

        Called under the mutex by whoever serves the lane, who also serves what is put into it here.
        """
        if self.dropped or self.settled:
            return
        session, request, terms, t0 = self._session, self.request, self.terms, self.t0
        if t0 is None:  # given out before a Ctrl-C: it was too old to trust, and the ask is queued with a new claim
            self.in_lane = True
            return
        now = session.clock.now()
        if now < t0 + terms.trust_s and not session.closed:
            # Kept on the ask, so that an answer given out twice (after a Ctrl-C) makes one hold.
            hold = self.hold
            if hold is None:
                hold = self.hold = Hold(request.name, request.claim_id, outcome, terms, self.owner, t0)
            session.keeper.look_after(hold, t0)
            if self.blocking:
                session.waiting.leave_line(self, granted=True)
            self.settle(hold)
            return
        # Too old to trust, or nobody is there any more: the claim is given back and never used again.
        self.heard_at = now
        back = Ask(Release(request.name, request.claim_id, outcome.slot), now + session.patience_s)
        back.owed = True
        session.lane.put(back)
        if self.blocking and not session.closed:
            self.request = request._replace(claim_id=session.new_claim(), ticket=None)
            self.give_up_at = now + session.patience_s
            session.waiting.ask_anew(self)
            # Last, so that a Ctrl-C before it is asked leads here again. (A hold of the old claim: see above.)
            self.t0 = self.hold = None
        elif session.closed:
            self.failed(StoreUnavailable("this dibs client was closed", maybe_applied=False))
        else:
            self.failed(StoreUnavailable("the store's answer took longer than the ttl of the lease it granted"))

    def failed(self, error: BaseException) -> None:
        if self.blocking:
            self._session.waiting.leave_line(self)
        self.settle(None, error)


class TakeOver(AcquireAsk):
    """A wish for what another claim holds, until it is granted or refused. It waits for nobody."""

    # What goes on under a pause: the lease is there already, and only changes hands.
    pausable = False

    def may_be_known(self) -> bool:
        return self.t0 is not None and type(self.outcome) is not Gone

    def undoing(self) -> Ask:
        request, session = self.request, self._session
        release = Release(request.name, request.claim_id, request.slot)
        undo = Ask(release, session.clock.now() + session.patience_s)
        undo.owed = True
        return undo

    def received(self, outcome: object) -> None:
        if type(outcome) is not Granted:
            self.settle(outcome)
        elif not self.dropped:
            self._granted(outcome)


def _mismatch(permits: int, request: Acquire) -> str:
    name = request.name.partition(":")[2]
    kept, wanted = _kind(permits), _kind(request.permits)
    do = "name one limit everywhere, or resize=True once" if permits and request.permits else "use another name"
    if PERMITS_MAX in (permits, request.permits):
        do = "use another name"
    return f"{name!r} is {kept} in the store and was asked for as {wanted}: {do}"


def _kind(permits: int) -> str:
    if permits == PERMITS_MAX:
        return "a lock for readers and writers"
    if permits == 1:
        return "a semaphore of 1 permit"
    return f"a semaphore of {permits} permits" if permits else "a lock"
