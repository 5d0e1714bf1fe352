"""How a lease on ZooKeeper ends, and how it changes hands: release and transfer.

Both name the holder's own node, and a release its version as well: where that has changed (the answer to a renewal was
lost, or the lease was broken) it looks and tries again.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.clock import boot_now
from dibs.errors import StoreUnavailable
from dibs.store import ANY_SLOT, GONE, RELEASED
from dibs.stores.zookeeper_flights import TRIES
from dibs.stores.zookeeper_ledger import ledger_of, told_of
from dibs.stores.zookeeper_link import ABSENT, No, Operation
from dibs.stores.zookeeper_nodes import BROKEN, Nodes, holder_node, kept_node, packed, quoted, unpacked
from dibs.stores.zookeeper_pool import Grant, Pool

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.store import Release, Transfer
    from dibs.stores.zookeeper_line import Line
    from dibs.stores.zookeeper_link import Flights, Session
    from dibs.stores.zookeeper_permits import Permits
    from dibs.stores.zookeeper_renewals import Renewals


class _Held(NamedTuple):
    """What a claim holds, as its node and that of the permit say."""

    #: Of the holder's node.
    version: int
    words: dict[str, Any]
    slot: int
    of_ledger: bool


class Ends:
    def __init__(self, pool: Pool, nodes: Nodes, line: Line, permits: Permits, renewals: Renewals) -> None:
        self._pool = pool
        self._nodes = nodes
        self._acl = pool.settings.acl
        self._line = line
        self._permits = permits
        self._renewals = renewals

    # -- release --------------------------------------------------------------------------------------------------

    def release(self, request: Release, deadline: Deadline) -> Flights:
        pool = self._pool
        if request.ticket is not None:
            yield from self._line.leave(request, deadline)
        permit = self._nodes.permit(request.name)
        path = holder_node(permit, request.claim_id)
        grant = pool.grants.get(path)
        if grant is not None and (grant.session.over or (grant.told is not None and boot_now() >= grant.until)):
            return GONE
        session = grant.session.ready(deadline) if grant is not None else pool.any_session(deadline)
        held: _Held | None = None
        if grant is not None and grant.told is not None and grant.version is not None:
            held = _Held(grant.version, grant.words, grant.told.slot, grant.of_ledger)
        for _ in range(TRIES):
            if held is None:
                held = yield from self._look(session, permit, path, request, grant)
            if held is None or request.slot not in (ANY_SLOT, held.slot):
                return GONE
            operations: list[Operation] = [("delete", path, held.version)]
            kept: Grant | None = None
            if request.keep > 0:
                kept = self._kept(request, permit, held, deadline)
                session = kept.session
                operations.append(("create", kept.path, kept.text(request.keep), self._acl, True))
                if not held.of_ledger:
                    operations.append(("set_data", permit, packed(kept.words)))
            elif not held.of_ledger:
                operations.append(("delete", permit))
            try:
                (done,) = yield [session.multi(operations)]
            finally:
                if kept is not None:
                    kept.until = boot_now() + request.keep
            if type(done) is list:
                pool.forget(grant)
                if held.of_ledger and kept is None:
                    self._permits.ended(permit, request.claim_id)
                return RELEASED
            pool.forget(kept)
            if done.why == ABSENT:
                pool.forget(grant)
                return GONE
            held = None
        raise StoreUnavailable("ZooKeeper: others wrote to the same lease all the time")

    def _look(self, session: Session, permit: str, path: str, request: Release, grant: Grant | None) -> Flights:
        """What the claim holds, by its nodes; None when that is nothing."""
        there, mine = yield [session.get(permit), session.get(path)]
        if type(there) is No or type(mine) is No:
            self._pool.forget(grant)
            return None
        if mine[0].startswith(BROKEN):
            return None  # and the name stays taken until its time is over
        ledger = ledger_of(there[0])
        if ledger is None:
            return _Held(mine[1].version, unpacked(there[0]), 1, False)
        entry = ledger.held.get(quoted(request.claim_id))
        if entry is None:
            return None
        words = unpacked(mine[0])
        words["at"] = told_of(entry, there[1], words, mine[1]).acquired_at
        return _Held(mine[1].version, words, entry.slot, True)

    def _kept(self, request: Release, permit: str, held: _Held, deadline: Deadline) -> Grant:
        """What keeps the name after the release; in a session that outlasts it, also when this process ends."""
        ttl_min = self._pool.settings.tick_ms / 1000
        session = self._pool.session_for(max(request.keep, ttl_min), deadline, exactly=False)
        words = {**held.words, "ttl": request.keep}
        if request.info is not None:
            words["info"] = request.info
        node = kept_node(permit, request.claim_id)
        kept = self._pool.grants[node] = Grant(permit, node, session, words)
        kept.of_ledger = held.of_ledger
        return kept

    # -- transfer -------------------------------------------------------------------------------------------------

    def transfer(self, request: Transfer, deadline: Deadline) -> Flights:
        """Put a node of our session in the place of the holder's, in a permit made anew: its zxid is the token."""
        pool = self._pool
        permit = self._nodes.permit(request.name)
        source, path = holder_node(permit, request.from_claim), holder_node(permit, request.claim_id)
        known, given = pool.grants.get(path), pool.grants.get(source)
        if known is not None and known.told is not None:
            if (yield from self._renewals.extend(known, request.ttl, deadline)):
                return known.told
            pool.forget(known)  # it held once, and may be given it again
        if given is not None and (given.session.over or boot_now() >= given.until):
            return GONE  # its time is over, and the warden about to end it
        with pool.asking(request, permit, path, deadline) as grant:
            told = yield from self._try(request, grant, source, deadline)
            if told is None:
                pool.forget(grant)
                return GONE
            return told

    def _try(self, request: Transfer, grant: Grant, source: str, deadline: Deadline) -> Flights:
        """What the claim holds now; None when there was nothing to be given."""
        pool, session, permit, path, ttl = self._pool, grant.session, grant.permit, grant.path, request.ttl
        for _ in range(TRIES):
            there, mine, held = yield [session.get(permit), session.get(path), session.get(source)]
            if type(there) is tuple and type(mine) is tuple and not mine[0].startswith(BROKEN):
                # Transferred before, and the answer was lost.
                found = self._renewals.found(grant, ttl, there, mine)
                if found is None:
                    continue
                pool.grants[path] = found
                return found.told if (yield from self._renewals.extend(found, ttl, deadline)) else GONE
            if type(there) is No or type(held) is No or held[0].startswith(BROKEN):
                return None
            of_ledger = ledger_of(there[0]) is not None
            if of_ledger != bool(request.permits):
                return None
            if of_ledger:
                moved = yield from self._permits.transfer(request, grant, source, there, held[1])
                if moved is None:
                    return None
            else:
                operations: list[Operation] = [
                    ("delete", source, held[1].version),
                    ("delete", permit),
                    ("create", permit, b"", self._acl),
                    ("create", path, repr(ttl).encode(), self._acl, True),
                    ("set_data", permit, packed(grant.words)),
                ]
                (done,) = yield [session.multi(operations)]
                moved = type(done) is list
                if moved:
                    self._renewals.granted(grant, done[-1])
            if moved:
                pool.forget(pool.grants.get(source))
                return grant.told
        raise StoreUnavailable("ZooKeeper: others wrote to the same lease all the time")
