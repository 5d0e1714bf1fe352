"""Take-over by observation: who wants a name watches its lease, and believes no clock but its own.

Where leases end on a server's wall clock, a step of that clock forward ends them too early, and two hold the same name.
With ``takeover="observe"`` no lease ends by that clock: it is written down for ``FAR_S`` seconds, so that no step makes
it end, and its ttl is kept beside its holder's name. A renewal still moves the written end. Whoever wants the name, or
only looks at it, notes what it sees there (a *sight*: token and end). When a whole ttl has passed on the watcher's own
clock and the same stands there, the holder has not renewed for a ttl, and trusts its lease no more: the watcher frees
the name, by a conditional write that fails if anything has changed, and asks again. Who is granted it then, and in what
order, is the store's business as ever.

``Observing`` stands between a session and its store, and does all of this; neither knows of it. It also makes what is
shown to people what they expect: a lease ends when the one who looks would have watched it for long enough.

It is for locks. Permits are counted by ends that the store compares, and so are the claims on jobs of queues and on
rows that keep their own: those are ``Unsupported`` with it. What is kept after a release (``min_hold``, the results of
``once``) is kept by the store's clock still, and so is a place in line: nobody's exclusion rests on them.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, cast
from dibs.errors import DibsError, InvalidOption, StoreUnavailable, Unsupported
from dibs.names import TTL_MAX_S
from dibs.store import ROW_MARK, Acquire, Held, Renew, Renewed, StoreBusy, Transfer
from dibs.trust import watched_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.abilities import Historian, Observed
    from dibs.clock import Deadline
    from dibs.store import (
        Capabilities,
        Outcome,
        Request,
        Store,
        StoreAddress,
        StoredGrant,
        StoredLease,
    )

OBSERVE = "observe"
# How long a lease is written down for: sixty years, which is also as far as a float can tell microseconds apart well. A
# machine without a battery may believe for a while that it is 1970.
FAR_S = 60 * 365.25 * 24 * 3600.0
# A lease that is written down for longer than this is one that is watched. (No ttl is longer than 30 days.)
WATCHED_S = FAR_S / 2
# Stands between the holder and its ttl in seconds.
TTL_MARK = ";ttl="
# Sights that one connection keeps; of more names the oldest are forgotten, and watched anew.
SIGHTS_MAX = 10_000
# Names that are looked at in one call, one after the other; the others' turn comes with the next.
LOOKS_MAX = 100
# Who waits looks again after this part of the ttl; that much longer than a ttl a take-over may take.
LOOK_PART = 0.25
# Who was refused a name that could not be looked at asks again after this.
LOOK_AGAIN_S = 0.2


class Sight(NamedTuple):
    """What was seen of a lease; by the watcher's clock, until when it is to be watched, and when it was looked at."""

    fencing_token: int
    expires_at: float
    over_at: float
    looked_at: float


def observing(address: StoreAddress, takeover: object, now: Callable[[], float]) -> StoreAddress:
    """The address, with leases that are watched; InvalidOption when ``takeover`` does not say so, and Unsupported."""
    if takeover != OBSERVE:
        raise InvalidOption(f'takeover is "expiry" or "{OBSERVE}", not {takeover!r}')
    offered = address.capabilities
    if not offered.observe:
        if offered.steady:  # nothing to guard against
            return address
        raise Unsupported(f"leases on {offered.store} cannot be watched: it has no takeover={OBSERVE!r}")
    return address._replace(
        capabilities=_offered(offered), open=lambda: cast("Store", Observing(address.open(), now)), observed=True
    )


def _offered(capabilities: Capabilities) -> Capabilities:
    return capabilities._replace(
        clock="those of who wait, which watch a lease", steady=True, permits=False, queue=False, query=False
    )


class Observing:
    """A store whose locks are taken over by who has watched them; the rest it passes on."""

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._sights: dict[str, Sight] = {}

    @property
    def capabilities(self) -> Capabilities:
        return _offered(self._store.capabilities)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        self._end_what_was_watched(requests, deadline)
        outcomes = self._store.act([_lasting(request) for request in requests], deadline)
        looks: dict[str, float] = {}
        for place, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            if type(outcome) is Held and outcome.holder is not None:
                holder, watch_s = _taken_apart(outcome.holder)
                if outcome.free_in <= WATCHED_S:  # kept after its release, or not watched
                    outcomes[place] = outcome._replace(holder=holder)
                    continue
                left_s = looks.get(request.name)
                if left_s is None:
                    left_s = self._left(request.name, outcome.fencing_token, watch_s)
                    if left_s is None:
                        few = len(looks) < LOOKS_MAX
                        left_s = self._look(request.name, deadline) if few else LOOK_AGAIN_S
                        looks[request.name] = left_s
                outcomes[place] = outcome._replace(holder=holder, free_in=left_s)
            elif type(outcome) is Renewed and _is_watched(request):
                outcomes[place] = Renewed(outcome.expires_at - FAR_S)
        return outcomes

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        """Those in force, as far as this watcher knows: without those that it may end."""
        shown = []
        for row in self._store.leases(first, before, deadline):
            if row.expires_in > WATCHED_S:
                holder, left_s = self._seen(row)
                if not left_s:
                    continue
                shown.append(row._replace(holder=holder, expires_at=row.expires_at - FAR_S, expires_in=left_s))
            else:
                shown.append(row._replace(holder=_taken_apart(row.holder)[0]))
        return shown

    def history(self, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
        """Whose a lease was; it ended when somebody had watched it."""
        historian = cast("Historian", self._store)
        grants = historian.history(name, limit, deadline)
        return [grant._replace(holder=_taken_apart(grant.holder)[0]) for grant in grants]

    # -- watching -------------------------------------------------------------------------------------------------

    def _end_what_was_watched(self, requests: Sequence[Request], deadline: Deadline) -> None:
        """Before a name is asked for: end the lease on it that was watched for long enough."""
        if not self._sights or any(type(request) is not Acquire for request in requests):
            return  # a release does not wait for that: it is sent, also where answers do not arrive
        store, now = cast("Observed", self._store), self._now()
        asked = dict.fromkeys(request.name for request in requests if type(request) is Acquire)
        due = [(name, sight) for name in asked if (sight := self._sights.get(name)) and sight.over_at <= now]
        try:
            for name, sight in due[:LOOKS_MAX]:
                store.end_unchanged(name, sight.fencing_token, sight.expires_at, deadline)
                del self._sights[name]  # it is over, or somebody else's
        except StoreUnavailable as error:
            # None of what is asked for has been sent.
            raise StoreUnavailable(str(error), maybe_applied=False) from error

    def _left(self, name: str, fencing_token: int, watch_s: float) -> float | None:
        """How long this lease is still to be watched; None when it is time to look at it."""
        sight, now = self._sights.get(name), self._now()
        if sight is None or sight.fencing_token != fencing_token or now >= sight.looked_at + watch_s * LOOK_PART:
            return None
        return max(0.0, sight.over_at - now)

    def _look(self, name: str, deadline: Deadline) -> float:
        """Look at a lease, and say how long it is still to be watched."""
        try:
            # A name has no control characters, so nothing lies between it and this.
            for row in self._store.leases(name, name + "\x01", deadline):
                if row.expires_in > WATCHED_S:
                    return self._seen(row)[1]
        except (DibsError, StoreBusy):
            # What came before this look was done: its outcomes count, and this is looked at again.
            return LOOK_AGAIN_S
        return 0.0

    def _seen(self, row: StoredLease) -> tuple[str, float]:
        """Note what a lease looks like; its holder, and how long it is still to be watched.

        The store has answered already, so the watch does not begin too early.
        """
        holder, watch_s = _taken_apart(row.holder)
        now = self._now()
        sight = self._sights.pop(row.name, None)  # what was looked at last stands last
        if sight is None or sight[:2] != (row.fencing_token, row.expires_at):
            sight = Sight(row.fencing_token, row.expires_at, now + watch_s, now)
        self._sights[row.name] = sight._replace(looked_at=now)
        if len(self._sights) > SIGHTS_MAX:
            del self._sights[next(iter(self._sights))]
        return holder, max(0.0, sight.over_at - now)


def _is_watched(request: Request) -> bool:
    """Whether it is about a lock of a user's; what clients keep for themselves ends by the store's clock."""
    return "~" not in request.name.partition(":")[0] and ROW_MARK not in request.name


def _lasting(request: Request) -> Request:
    """The request as the store is to see it."""
    if not _is_watched(request):
        return request
    if type(request) is Renew:
        return request._replace(ttl=FAR_S + request.ttl)
    if isinstance(request, (Acquire, Transfer)) and not request.permits:
        return request._replace(ttl=FAR_S + request.ttl, holder=f"{request.holder}{TTL_MARK}{request.ttl!r}")
    return request


def _taken_apart(holder: str) -> tuple[str, float]:
    """The holder, and how long to watch; where its ttl cannot be read, as long as for the longest there is."""
    who, _, ttl = holder.rpartition(TTL_MARK)
    try:
        return who, watched_for(float(ttl))
    except ValueError:
        return holder, watched_for(TTL_MAX_S)
