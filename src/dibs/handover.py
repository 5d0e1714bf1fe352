"""Exporting a lease, and adopting what another process exported, in steps for either face.

To export ends a hold and leaves its lease in the store: the exporter's trust is over before the state leaves it, so
whoever adopts it, however soon, shares the name with nobody. To adopt is one ``Transfer`` in the store, from the old
claim to a new one. Until then the lease is in force for nobody, and ends by its ttl.

The state names the claim, which is all the proof there is; that it fits the client is checked before anything is sent.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from dibs.errors import InvalidName, InvalidOption, LeaseLost, Unsupported, once_more
from dibs.hold import Hold
from dibs.names import check_name
from dibs.store import PERMITS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.desk import Desk
    from dibs.lease import LeaseFacts
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms

# Of the format of a state.
STATE_VERSION = 1
# No claim id is longer.
CLAIM_CHARS_MAX = 100

L = TypeVar("L", bound="LeaseFacts")


class Exported(NamedTuple):
    """A state that was read: the lease it is about. ``at`` is where its store was, in words; the rest is checked."""

    at: str
    name: str
    claim_id: str
    fencing_token: int
    slot: int
    permits: int
    take: int
    info: dict[str, Any] | None


def exporting(lease: LeaseFacts) -> Steps[dict[str, Any]]:
    """End it here, and tell what an adopter needs to know."""
    session, hold = lease._session, lease._hold
    lease.check()
    ask = session.pause()
    try:
        if not session.keeper.export(hold, ask):
            raise LeaseLost(lease._why())
        # Until no renewal is under way any more. No time-out here: that one has its own.
        yield session, ask, None
        granted, terms, info = hold.granted, hold.terms, lease.info
        state: dict[str, Any] = {
            "dibs": STATE_VERSION,
            "store": session.address.capabilities.store,
            "at": session.address.shown,
            "namespace": hold.key.partition(":")[0],
            "name": lease.name,
            "claim_id": hold.claim_id,
            "fencing_token": granted.fencing_token,
            "slot": granted.slot,
        }
        if terms.permits:
            state |= {"permits": terms.permits, "take": terms.take}
        return state if info is None else {**state, "info": info}
    except BaseException:
        session.keeper.take_back(hold, ask)
        raise


def read_state(desk: Desk, state: object) -> Exported:
    """Check a state before anything is sent: InvalidOption for what is none, or not for this client."""
    if not isinstance(state, dict) or state.get("dibs") != STATE_VERSION:
        raise InvalidOption(
            f"{type(state).__name__} is no state of an exported lease: pass the dict that lease.export() returned"
        )
    try:
        name = check_name(state.get("name"))
    except InvalidName as error:
        raise InvalidOption(f"the state of an exported lease is damaged: {error}") from None
    for field, least, most in (
        ("fencing_token", 1, 2**63 - 1),
        ("slot", 1, PERMITS_MAX),
        ("permits", 0, PERMITS_MAX),
        ("take", 1, PERMITS_MAX),
    ):
        value = state.get(field, {"permits": 0, "take": 1}.get(field))
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidOption(f"the state of the exported lease on {name!r} is damaged: {field} is {value!r}")
    if desk.address.observed and state.get("permits"):
        raise Unsupported(f"the lease on {name!r} is on permits, which are not kept with takeover='observe'")
    claim_id = state.get("claim_id")
    if not isinstance(claim_id, str) or not 0 < len(claim_id) <= CLAIM_CHARS_MAX or not _is_claim(claim_id):
        raise InvalidOption(f"the state of the exported lease on {name!r} is damaged: its claim_id is none")
    at, store, namespace = (str(state.get(field)) for field in ("at", "store", "namespace"))
    if store != desk.address.capabilities.store:
        raise InvalidOption(
            f"the lease on {name!r} was exported from {store} ({at}), and this client keeps its leases on "
            f"{desk.address.capabilities.store} ({desk.address.shown}): connect to the same store"
        )
    if namespace != desk.namespace:
        raise InvalidOption(
            f"the lease on {name!r} was exported from the namespace {namespace!r}, and this client is of "
            f"{desk.namespace!r}: connect with namespace={namespace!r}"
        )
    permits, take, info = state.get("permits", 0), state.get("take", 1), state.get("info")
    return Exported(at, name, claim_id, state["fencing_token"], state["slot"], permits, take, info)


def _is_claim(text: str) -> bool:
    return text.isascii() and all(char.isalnum() or char in "-_." for char in text)


def taking_over(
    session: Session,
    key: str,
    from_claim: str,
    slot: int,
    terms: Terms,
    owner: object,
    make_lease: Callable[[Session, Hold, str], L],
    limit_s: float | None = None,
    *,
    pausable: bool = False,
) -> Steps[L | None]:
    """Transfer what a claim holds to one of this session; its lease, or None when there was nothing to be had.

    The store has as long for its answer as the lane repeats a request, or ``limit_s``. ``pausable``: not while an
    operator has stopped new grants of the name.
    """
    ask = session.wish_for(key, from_claim, slot, terms, owner)
    ask.pausable = pausable
    name = key.partition(":")[2]
    try:
        session.submit(ask)
        ask.overdue = limit_s is not None
        answer_s = session.request_timeout_s + session.patience_s
        if not (yield session, ask, answer_s if limit_s is None else min(limit_s, answer_s)):
            raise ask.unanswered("the store did not answer")
        if ask.error is not None:
            raise once_more(ask.error)
        hold = ask.outcome
        if type(hold) is not Hold:
            return None
        lease = make_lease(session, hold, name)
        if not session.made(lease, hold):
            raise LeaseLost(f"the lease on {name!r} was taken over, and this process then slept until it had ended")
        return lease
    except BaseException:
        session.withdraw(ask)
        raise


def adopting(
    desk: Desk, given: Exported, terms: Terms, owner: object, make_lease: Callable[[Session, Hold, str], L]
) -> Steps[L]:
    """A lease in the place of the one that was exported."""
    session = desk.session()
    if given.permits:
        terms = terms._replace(permits=given.permits, take=given.take)
    key = desk.key_prefix + given.name
    lease = yield from taking_over(session, key, given.claim_id, given.slot, terms, owner, make_lease)
    if lease is None:
        here = "" if given.at == desk.address.shown else f" at {given.at}, and looked for at {desk.address.shown}"
        raise LeaseLost(
            f"the lease on {given.name!r} (token {given.fencing_token}) cannot be adopted: it expired after it was "
            f"exported{here}, was adopted by another, was broken, or is pinned (guard) in a transaction that is open"
        )
    return lease
