"""A planned change of leader: the term is offered to the one candidate that its leader names, in steps for either face.

The leader's trust ends first. Then its lease is transferred to a claim of nobody's, whose info says to whom it is
offered and which claim that is: the *offer*. Candidates that wait see from every answer who holds the name; when that
has changed, they look, and the one that is addressed transfers the lease to a claim of its own and leaves the line.

Nobody leads between the two transfers, and nobody else can get the name: it is held all the time. An offer that is not
taken up in time is withdrawn, and ends by its ttl if whoever made it has died; then the line moves on as usual.
"""

from __future__ import annotations

import json

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import DibsError, InvalidOption, LeaseLost
from dibs.lease import LeaseFacts
from dibs.names import check_info, check_seconds, info_in
from dibs.steps import asking
from dibs.store import Gone, Release, Transfer

if TYPE_CHECKING:
    from dibs.ask import Ask
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.store import StoredLease

# The leader's value stands under this key of the lease's info, and an offer under that.
VALUE = "value"
OFFER = "offer"
# How long the leader waits for its successor by default: some looks of a waiter (dibs.waiting.POLL_MAX_S).
OFFER_S = 5.0
# An offer lasts this much longer than its maker waits for an answer to it.
SPARE_S = 5.0
UNANSWERED = "the store did not answer; the leader has resigned"
# How often the maker of an offer looks whether it has been taken up.
LOOK_S = 0.2


class TermFacts(LeaseFacts):
    """What a term has besides what every lease has."""

    __slots__ = ()

    def _resigning(self, to: Any, timeout: Seconds) -> Steps[bool]:
        try:
            if to is None:
                check_seconds("timeout", timeout)
                return (yield from self._releasing())
            return (yield from offering(self, to, *check_offer(self._session, to, timeout)))
        except DibsError:
            raise
        except BaseException:  # wherever Ctrl-C comes in, it has resigned
            self._end()
            raise

    @property
    def number(self) -> int:
        """The number of the term: its fencing token, greater than that of every earlier term."""
        return self.fencing_token

    @property
    def value(self) -> Any:
        """What the candidate tells observers about itself."""
        return (self.info or {}).get(VALUE)


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON (for Python 1, 1.0 and True are)."""
    return _canonical(one) == _canonical(other)


def _canonical(value: Any) -> str:
    # Once more through JSON, where all keys are strings: others cannot always be sorted.
    return json.dumps(json.loads(json.dumps(value)), sort_keys=True)


def offered(info: dict[str, Any] | None, value: Any) -> str | None:
    """The claim under which a lease with this info is offered to the candidate with this value, if it is."""
    offer = (info or {}).get(OFFER)
    if not isinstance(offer, dict) or not same(offer.get("to"), value):
        return None
    claim = offer.get("claim")
    return claim if isinstance(claim, str) else None


def check_offer(session: Session, to: Any, timeout: Seconds) -> tuple[str, str, float]:
    """The offer's claim, its info and how long it is to be waited for; InvalidOption before anything is sent."""
    claim = session.new_claim()
    most = session.address.capabilities.ttl_max_s - SPARE_S
    timeout_s = check_seconds("timeout", timeout, most=most)
    try:
        info = check_info({OFFER: {"to": to, "claim": claim}})
    except InvalidOption as error:
        raise InvalidOption(f"to is the value of a candidate: {error}") from None
    assert info is not None
    return claim, info, timeout_s


def offering(lease: LeaseFacts, to: Any, claim: str, info: str, timeout_s: float) -> Steps[bool]:
    """Stop leading and offer the term; whether the candidate with this value took it up."""
    session, hold = lease._session, lease._hold
    lease._check_at_end()
    parting = session.pause()
    try:
        if not session.keeper.export(hold, parting):
            raise LeaseLost(lease._why())
        hold.reason = "resigned, and offered to its successor"
        yield session, parting, None
        ttl = max(timeout_s + SPARE_S, session.address.capabilities.ttl_min_s)
        request = Transfer(hold.key, claim, ttl, session.holder, hold.claim_id, info)
        outcome = yield from _answered(session, request)
        if isinstance(outcome, Gone):
            # It may have been taken up before the store was asked again, after an answer that was lost.
            record = yield from _look(session, hold.key)
            if record is not None and record.fencing_token > lease.fencing_token and _leads(record, to):
                return True
            # Where it is pinned (guard), it is nobody's to hand over: it is free when that transaction has ended.
            if not hold.pins or isinstance((yield from _answered(session, session.keeper.release_of(hold))), Gone):
                session.keeper.found_gone(hold)
                raise LeaseLost(lease._why())
            return False
        until = session.clock.now() + timeout_s
        while session.clock.now() < until and not session.closed:
            yield session, session.pause(), min(LOOK_S, max(0.0, until - session.clock.now()))
            record = yield from _look(session, hold.key)
            if record is None or record.fencing_token != outcome.fencing_token:
                return _leads(record, to)
        released = yield from _answered(session, Release(hold.key, claim))
        if not isinstance(released, Gone):
            return False
        record = yield from _look(session, hold.key)  # taken up at the last moment, or broken
        return _leads(record, to)
    except BaseException:
        try:
            _withdraw(session, hold, claim, parting)
        except BaseException:  # Ctrl-C, also in front of the first line of that; a release sent twice does no harm
            _withdraw(session, hold, claim, parting)
            raise
        raise


def _withdraw(session: Session, hold: Hold, claim: str, parting: Ask) -> None:
    """Whatever came in between: it is resigned, and neither claim is kept."""
    if hold.exported is parting:
        for release in Release(hold.key, claim), session.keeper.release_of(hold):
            ask = session.new_ask(release)
            ask.owed = True
            session.queue(ask)
    session.lane.start()


def _answered(session: Session, request: Any) -> Steps[Any]:
    return asking(session, session.new_ask(request), UNANSWERED)


def _look(session: Session, key: str) -> Steps[StoredLease | None]:
    """Who has the name. Nobody, when that is seen twice: ZooKeeper may not show what is just changing hands."""
    for _ in range(2):
        act = session.new_act(lambda store, deadline: store.leases(key, key + "\x01", deadline))
        found = yield from asking(session, act, UNANSWERED)
        if found:
            return found[0]  # type: ignore[no-any-return]
    return None


def _leads(record: StoredLease | None, to: Any) -> bool:
    info = None if record is None else info_in(record.info)
    return info is not None and same(info.get(VALUE), to)
