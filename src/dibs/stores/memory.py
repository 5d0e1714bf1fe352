"""The executable specification: what every store answers, in as few words as possible.

It keeps leases in this process, so it is for tests and for programs that have only threads or tasks. What the other
stores do with conditional writes is here a few lines on a dictionary under one mutex.
"""

from __future__ import annotations

from operator import itemgetter
from weakref import WeakValueDictionary

from dibs._typing import TYPE_CHECKING
from dibs.clock import RealClock, boot_now, wall_now
from dibs.store import (
    ANY_SLOT,
    GONE,
    LAST_TICKET,
    LINE_GRACE_S,
    RELEASED,
    Acquire,
    Capabilities,
    Finding,
    Granted,
    Held,
    Mismatch,
    Outcome,
    Release,
    Renew,
    Renewed,
    Request,
    StoreAddress,
    StoredLease,
    Transfer,
    Watch,
)
from dibs.stores.memory_forks import FORKS, alone
from dibs.stores.memory_jobs import MemoryJobs
from dibs.stores.permits import Grant, Holding, State, Waiting, decide

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dibs.clock import Deadline
    from dibs.stores.memory_jobs import Job

CAPABILITIES = Capabilities(
    store="memory",
    survives_restart="no: it ends with the process",
    fencing_token="strict while the process lives",
    clock="the host's boot clock",
    waiting_line="FIFO",
    signal="poll of a change counter",
    queue=True,
    durable=False,
    ttl_min_s=0.05,
    ttl_max_s=30 * 24 * 3600.0,
    resolution_s=0.0,
    margin_s=0.010,
    permits=True,
    pause=True,
    tries=True,
    steady=True,
    observe=True,
)
OPTIONS = ()
# A renewal moves the end by this at least, so that whoever watches the lease sees that there was one.
RENEWED_S = 1e-6


class _Permit:
    """One row: ``claim_id`` is None when it was released; ``expires_at`` is when it is, or was, free."""

    __slots__ = ("acquired_at", "claim_id", "expires_at", "fencing_token", "holder", "info")

    def __init__(self, fencing_token: int) -> None:
        self.claim_id: str | None = None
        self.fencing_token = fencing_token
        self.holder = ""
        self.info: str | None = None
        self.acquired_at = 0.0
        # In the boot clock's past, so that a permit that was never held is not "free since just now".
        self.expires_at = float("-inf")


class _Waiter:
    __slots__ = ("claim_id", "seen_at", "ticket")

    def __init__(self, ticket: int, claim_id: str, seen_at: float) -> None:
        self.ticket = ticket
        self.claim_id = claim_id
        self.seen_at = seen_at


class _Pool:
    """A name with permits: how many, its last token, who holds it by slot, who waits, since when it is idle."""

    def __init__(self, fencing_token: int) -> None:
        self.permits = 0
        self.fencing_token = fencing_token
        self.holdings: dict[int, tuple[Acquire, _Permit]] = {}
        self.line: list[tuple[Acquire, _Waiter]] = []
        self.idle_since = float("-inf")

    def look(self, now: float) -> None:
        """Let go of whoever's time is over."""
        for slot, (_, permit) in list(self.holdings.items()):
            if permit.expires_at <= now:
                del self.holdings[slot]
                self.idle_since = max(self.idle_since, permit.expires_at)

    def state(self, now: float, wall_offset: float) -> State:
        """What the decision needs to know."""
        return State(
            self.permits or None,
            self.fencing_token,
            [
                Holding(
                    slot,
                    permit.claim_id or "",
                    request.take,
                    permit.holder,
                    permit.fencing_token,
                    permit.acquired_at + wall_offset,
                    permit.expires_at - now,
                )
                for slot, (request, permit) in self.holdings.items()
            ],
            [Waiting(w.ticket, w.claim_id, request.take, now - w.seen_at) for request, w in self.line],
        )

    def worth_asking(self, now: float) -> bool:
        """Whether enough is left for the first in line who is alive."""
        first = next((request.take for request, waiter in self.line if now < waiter.seen_at + LINE_GRACE_S), 0)
        taken = sum(request.take for request, permit in self.holdings.values() if permit.expires_at > now)
        return self.permits - taken >= first


class Shelf:
    """The rows that several memory stores share, as connections share a database."""

    def __init__(self, now: Callable[[], float] = boot_now) -> None:
        self.now = now
        self.mutex = RealClock.mutex()
        self.permits: dict[str, _Permit] = {}
        self.pools: dict[str, _Pool] = {}
        self.lines: dict[str, list[_Waiter]] = {}
        self.last_ticket = 0
        self.token_floor = 0
        self.jobs: dict[int, Job] = {}
        self.last_job = 0
        self.changes = 0
        # Unix time = boot time + this; a process has no other use for the wall clock here than to show it.
        self.wall_offset = 0.0


class MemoryStore:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.jobs = MemoryJobs(shelf)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        shelf = self._shelf
        with shelf.mutex:
            now = shelf.now()
            outcomes = [_act(shelf, request, now) for request in requests]
            shelf.changes += 1
        return outcomes

    @alone
    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        shelf = self._shelf
        now = shelf.now()
        found = [(name, 1, permit, len(shelf.lines.get(name, ())), 1) for name, permit in shelf.permits.items()]
        for name, pool in shelf.pools.items():
            found += [
                (name, slot, permit, len(pool.line), request.take) for slot, (request, permit) in pool.holdings.items()
            ]
        return [
            StoredLease(
                name,
                slot,
                permit.holder,
                permit.fencing_token,
                permit.acquired_at + shelf.wall_offset,
                permit.expires_at + shelf.wall_offset,
                permit.expires_at - now,
                permit.info,
                waiting,
                take,
            )
            for name, slot, permit, waiting, take in sorted(found, key=itemgetter(0, 1))
            if first <= name < before and permit.claim_id is not None and permit.expires_at > now
        ]

    @alone
    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        shelf = self._shelf
        moment = shelf.now()
        pool = shelf.pools.get(name)
        permits = [shelf.permits[name]] if name in shelf.permits else []
        permits += [permit for _, permit in pool.holdings.values()] if pool is not None else []
        permit = next((permit for permit in permits if permit.fencing_token == fencing_token), None)
        if permit is None or permit.claim_id is None or permit.expires_at <= moment:
            return False
        permit.claim_id = None if now else ""
        if now:
            permit.expires_at = moment
        shelf.changes += 1
        return True

    def end_unchanged(self, name: str, fencing_token: int, expires_at: float, deadline: Deadline) -> bool:
        shelf = self._shelf
        with shelf.mutex:
            permit = shelf.permits.get(name)
            if permit is None or permit.claim_id is None or permit.fencing_token != fencing_token:
                return False
            if permit.expires_at + shelf.wall_offset != expires_at:
                return False
            permit.claim_id = None
            permit.expires_at = shelf.now()
            shelf.changes += 1
            return True

    @alone
    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        shelf = self._shelf
        now = shelf.now()
        since = now - older_than
        old = [
            name
            for name, permit in shelf.permits.items()
            if first <= name < before
            and permit.expires_at <= since
            and not any(_alive(w, permit, now) for w in shelf.lines.get(name, ()))
        ]
        for name in old:
            shelf.token_floor = max(shelf.token_floor, shelf.permits.pop(name).fencing_token)
            shelf.lines.pop(name, None)
        for pool in shelf.pools.values():
            pool.look(now)
        idle = [
            name
            for name, pool in shelf.pools.items()
            if first <= name < before
            and not pool.holdings
            and pool.idle_since <= since
            and not any(now < waiter.seen_at + LINE_GRACE_S for _, waiter in pool.line)
        ]
        for name in idle:
            shelf.token_floor = max(shelf.token_floor, shelf.pools.pop(name).fencing_token)
        return len(old) + len(idle)

    def setup(self, deadline: Deadline) -> None:
        """Nothing to make."""

    def schema(self) -> str:
        return "-- the memory store keeps nothing outside the process\n"

    def check(self, deadline: Deadline) -> list[Finding]:
        return [Finding("durable", False, "leases end with this process: use sqlite:// for one machine")]

    def watch(self, address: str, deadline: Deadline) -> Watch:
        return MemoryWatch(self._shelf)

    def close(self) -> None:
        """Nothing to close: the shelf lives as long as somebody uses it."""


def _act(shelf: Shelf, request: Request, now: float) -> Outcome:
    if isinstance(request, Acquire):
        return _acquire_pool(shelf, request, now) if request.permits else _acquire(shelf, request, now)
    if isinstance(request, Transfer):
        return _transfer(shelf, request, now)
    permit = shelf.permits.get(request.name) if request.slot in (1, ANY_SLOT) else None
    pool = shelf.pools.get(request.name)
    if pool is not None:
        if isinstance(request, Release) and request.ticket is not None:
            pool.line = [place for place in pool.line if place[1].claim_id != request.claim_id]
        pool.look(now)
        held = ((slot, p) for slot, (_, p) in pool.holdings.items() if p.claim_id == request.claim_id)
        permit = next((p for slot, p in held if request.slot in (slot, ANY_SLOT)), None)
    if isinstance(request, Release) and request.ticket is not None:
        places = (w.ticket for w in shelf.lines.get(request.name, ()) if w.claim_id == request.claim_id)
        _leave_line(shelf, request.name, next(places, request.ticket))
    if permit is None or permit.claim_id != request.claim_id or permit.expires_at <= now:
        return GONE
    if isinstance(request, Renew):
        permit.expires_at = max(permit.expires_at + RENEWED_S, now + request.ttl)
        return Renewed(permit.expires_at + shelf.wall_offset)
    permit.claim_id = "" if request.keep > 0 else None
    permit.expires_at = now + request.keep
    if request.info is not None:
        permit.info = request.info
    return RELEASED


def _transfer(shelf: Shelf, request: Transfer, now: float) -> Outcome:
    pool = shelf.pools.get(request.name) if request.permits else None
    if pool is not None:
        _, permit = pool.holdings.get(request.slot, (None, None))
    else:
        permit = None if request.permits or request.slot != 1 else shelf.permits.get(request.name)
    if permit is None or permit.expires_at <= now or not request.from_claim:
        return GONE
    if permit.claim_id not in (request.claim_id, request.from_claim):
        return GONE
    until = now + request.ttl
    if permit.claim_id == request.claim_id:
        until = max(until, permit.expires_at)
    else:
        last = permit if pool is None else pool
        permit.fencing_token = last.fencing_token = last.fencing_token + 1
        permit.claim_id, permit.acquired_at = request.claim_id, now
    permit.holder, permit.info, permit.expires_at = request.holder, request.info, until
    return Granted(permit.fencing_token, permit.acquired_at + shelf.wall_offset, request.slot)


def _acquire_pool(shelf: Shelf, request: Acquire, now: float) -> Outcome:
    name = request.name
    if name in shelf.permits:
        return Mismatch(0)
    pool = shelf.pools.setdefault(name, _Pool(shelf.token_floor))
    pool.look(now)
    decision = decide(pool.state(now, shelf.wall_offset), request)
    if isinstance(decision, Mismatch):
        return decision
    if isinstance(decision, Grant):
        slot, token, again, take, _, pool.permits = decision
        permit = pool.holdings[slot][1] if again else _Permit(token)
        if again is None:
            permit.acquired_at = now
            pool.fencing_token = token
        permit.claim_id, permit.holder, permit.info = request.claim_id, request.holder, request.info
        permit.expires_at = max(permit.expires_at, now + request.ttl)
        pool.holdings[slot] = (request._replace(take=take), permit)
        pool.line = [
            (asked, waiter)
            for asked, waiter in pool.line
            if waiter.claim_id != request.claim_id and now < waiter.seen_at + LINE_GRACE_S
        ]
        return Granted(token, permit.acquired_at + shelf.wall_offset, slot)
    pool.permits = request.permits
    if request.wake is None:
        return decision
    place = next((waiter for _, waiter in pool.line if waiter.claim_id == request.claim_id), None)
    if place is None:
        if request.ticket is None:
            shelf.last_ticket += 1
        place = _Waiter(request.ticket or shelf.last_ticket, request.claim_id, now)
    # In its place for what it asks now.
    pool.line = [placed for placed in pool.line if placed[1] is not place]
    pool.line.append((request, place))
    pool.line.sort(key=lambda placed: placed[1].ticket)
    place.seen_at = now
    return decision._replace(ticket=place.ticket)


def _acquire(shelf: Shelf, request: Acquire, now: float) -> Outcome:
    name = request.name
    if name in shelf.pools:
        return Mismatch(shelf.pools[name].permits)
    permit = shelf.permits.get(name)
    if permit is None:
        permit = _Permit(shelf.token_floor)
    mine = permit.claim_id == request.claim_id
    free = permit.claim_id is None or permit.expires_at <= now
    ticket = LAST_TICKET if request.ticket is None else request.ticket
    ahead = any(
        waiter.ticket < ticket and waiter.claim_id != request.claim_id and _alive(waiter, permit, now)
        for waiter in shelf.lines.get(name, ())
    )
    if mine or (free and not ahead):
        if not mine:
            permit.fencing_token += 1
            permit.acquired_at = now
        permit.claim_id = request.claim_id
        permit.holder = request.holder
        permit.info = request.info
        # A repetition, however late, never shortens what a renewal has given since.
        permit.expires_at = max(permit.expires_at, now + request.ttl) if mine else now + request.ttl
        shelf.permits[name] = permit
        if not mine or request.ticket is not None:  # who repeats its acquire passed nobody in line
            _leave_line(shelf, name, ticket, and_before=True)
        return Granted(permit.fencing_token, permit.acquired_at + shelf.wall_offset)
    if request.wake is not None:
        _enter_line(shelf, request, now)
    line = shelf.lines.get(name, ())
    place = next((waiter.ticket for waiter in line if waiter.claim_id == request.claim_id), None)
    if free:
        # Kept for those ahead: they have the rest of the grace to ask; after it only those count who did just now.
        kept_for = permit.expires_at + LINE_GRACE_S - now
        return Held(
            None,
            permit.fencing_token,
            permit.acquired_at + shelf.wall_offset,
            kept_for if kept_for > 0 else LINE_GRACE_S,
            place,
            True,
        )
    return Held(
        permit.holder,
        permit.fencing_token,
        permit.acquired_at + shelf.wall_offset,
        permit.expires_at - now,
        place,
        any(place is not None and waiter.ticket < place for waiter in line),
    )


def _alive(waiter: _Waiter, permit: _Permit, now: float) -> bool:
    """Whether a free name is kept for a waiter: for a while for everybody in line, then for those who ask."""
    return now < max(permit.expires_at, waiter.seen_at) + LINE_GRACE_S


def _enter_line(shelf: Shelf, request: Acquire, now: float) -> None:
    """Put the claim in line, or note that it has been seen alive there."""
    line = shelf.lines.setdefault(request.name, [])
    for waiter in line:
        if waiter.claim_id == request.claim_id:
            waiter.seen_at = now
            return
    ticket = request.ticket
    if ticket is None:
        shelf.last_ticket = ticket = shelf.last_ticket + 1
    line.append(_Waiter(ticket, request.claim_id, now))
    # A waiter that was passed over while it slept and asks again keeps the order in which it had come.
    line.sort(key=lambda waiter: waiter.ticket)


def _leave_line(shelf: Shelf, name: str, ticket: int, *, and_before: bool = False) -> None:
    line = shelf.lines.get(name)
    if line is not None:
        line[:] = [w for w in line if w.ticket > ticket or (w.ticket < ticket and not and_before)]
        if not line:
            del shelf.lines[name]


class MemoryWatch:
    """Looks at the shelf's change counter; every act counts as a change of every name."""

    interval_s: float | None = 0.001

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._seen = shelf.changes
        self._asked: frozenset[str] = frozenset()

    def fileno(self) -> int | None:
        return None

    def changed(self, names: Collection[str]) -> Collection[str]:
        asked, self._asked = self._asked, frozenset(names)
        if self._seen == self._shelf.changes:  # who did not wait at the last look may have missed what that saw
            names = self._asked - asked
        return self._look(names) if names else ()

    @alone
    def _look(self, names: Collection[str]) -> list[str]:
        self._seen = self._shelf.changes
        now = self._shelf.now()
        permits, pools = self._shelf.permits, self._shelf.pools
        return [
            name
            for name in names
            if (pools[name].worth_asking(now) if name in pools else name not in permits)
            or (name in permits and (permits[name].claim_id is None or permits[name].expires_at <= now))
        ]

    def close(self) -> None:
        """Nothing to close."""


# Two clients of one process that name the same shelf share it, as two clients of one database do; an unnamed shelf is
# its client's own. This is module-level state, as the "server" of this store is the process.
_SHELVES: WeakValueDictionary[str, Shelf] = WeakValueDictionary()


def address(shelf_name: str = "") -> StoreAddress:
    """``memory://`` is a shelf of its own, ``memory://name`` one that clients of this process share."""
    shelf = _SHELVES.get(shelf_name) if shelf_name else None
    if shelf is None:
        shelf = Shelf()
        shelf.wall_offset = wall_now() - shelf.now()
        FORKS.add(shelf)
        if shelf_name:
            _SHELVES[shelf_name] = shelf
    kept = shelf
    return StoreAddress(f"memory://{shelf_name}", CAPABILITIES, lambda: MemoryStore(kept), together=True)
