"""How a lease on ZooKeeper is extended: the grants of a client, those that it was never told of among them."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import boot_now
from dibs.errors import StoreUnavailable
from dibs.store import GONE, Granted, Renewed
from dibs.stores.zookeeper_flights import TRIES
from dibs.stores.zookeeper_ledger import ledger_of, told_of
from dibs.stores.zookeeper_link import ABSENT, No
from dibs.stores.zookeeper_nodes import BROKEN, Nodes, claim_of, holder_node, packed, unpacked
from dibs.stores.zookeeper_pool import Grant, Pool

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.store import Renew
    from dibs.stores.zookeeper_link import Flights, Operation


class Renewals:
    def __init__(self, pool: Pool, nodes: Nodes) -> None:
        self._pool = pool
        self._nodes = nodes
        self._acl = pool.settings.acl

    def granted(self, grant: Grant, stat: Any) -> None:
        """Note what the server told of a new grant."""
        if grant.session.over:
            raise StoreUnavailable("ZooKeeper: the session expired while a lease was granted in it")
        now = boot_now()
        grant.version = 0
        grant.told = Granted(stat.czxid, stat.ctime / 1000)
        grant.until = now + grant.words["ttl"]
        self._pool.server_ahead_s = stat.mtime / 1000 - now

    def found(self, asked: Grant, ttl: float, there: Any, mine: Any) -> Grant | None:
        """A grant of the claim that this pool knew nothing of, to be extended at once; None where there is none."""
        if type(there) is No or type(mine) is No or mine[0].startswith(BROKEN):
            return None
        ledger = ledger_of(there[0])
        found = Grant(asked.permit, asked.path, asked.session, unpacked((mine if ledger else there)[0]))
        found.told = Granted(there[1].czxid, there[1].ctime / 1000)
        if ledger is not None:
            entry = ledger.held.get(claim_of(asked.path))
            if entry is None:
                return None
            found.of_ledger, found.take = True, entry.take
            found.told = told_of(entry, there[1], found.words, mine[1])
            found.words["at"] = found.told.acquired_at  # which is to be told when its node was moved
        found.until = boot_now() + ttl
        self._owned(found, mine[1])
        return found

    def _owned(self, grant: Grant, stat: Any) -> None:
        """Note in which session the holder's node really is."""
        grant.version = stat.version
        grant.foreign = True
        for session in list(self._pool.sessions.values()):
            if session.id == stat.ephemeralOwner and not session.over:
                grant.session, grant.foreign = session, False

    def renew(self, request: Renew, deadline: Deadline) -> Flights:
        pool = self._pool
        permit = self._nodes.permit(request.name)
        path = holder_node(permit, request.claim_id)
        grant = pool.grants.get(path)
        known = grant is not None and grant.told is not None
        if not known:
            session = pool.any_session(deadline)
            there, mine = yield [session.get(permit), session.get(path)]
            grant = self.found(Grant(permit, path, session, {}), request.ttl, there, mine)
        if grant is None or request.slot != grant.told.slot:
            return GONE
        if not known:
            pool.grants[path] = grant
        return (yield from self.extend(grant, request.ttl, deadline)) or GONE

    def extend(self, grant: Grant, ttl: float, deadline: Deadline) -> Flights:
        """Let a grant last for ``ttl`` from now; None when it is over.

        Always a write, which only the leader and a majority can answer: a follower that was left behind would go on
        answering reads of a session that is over.
        """
        pool, path = self._pool, grant.path
        for _ in range(TRIES):
            if (grant.session.over and not grant.foreign) or boot_now() >= grant.until:
                return None
            stays = not grant.foreign and ttl * 1000 <= grant.session.ttl_ms + 0.5
            session = grant.session.ready(deadline) if stays else pool.session_for(ttl, deadline)
            if grant.version is None:
                (mine,) = yield [session.get(path)]
                if type(mine) is No:
                    return pool.forget(grant)
                if mine[0].startswith(BROKEN):
                    return None
                self._owned(grant, mine[1])
                continue
            lasts = max(ttl, grant.until - boot_now())
            text, words = grant.text(lasts), grant.words
            operations: list[Operation]
            if stays:
                operations = [("set_data", path, text, grant.version)]
            else:
                operations = [("delete", path, grant.version), ("create", path, text, self._acl, True)]
            if ttl > words["ttl"] or not stays:
                words = {**words, "ttl": lasts}
                if not grant.of_ledger:
                    operations.append(("set_data", grant.permit, packed(words)))
                elif not stays:
                    operations.append(("set_data", path, text))  # to be told the time, as of the others
            (done,) = yield [session.multi(operations)]
            if type(done) is No:
                if done.why == ABSENT:
                    return pool.forget(grant)
                grant.version = None  # written by a renewal whose answer was lost, or broken: look
                continue
            stat = done[0] if stays else done[-1]
            if stays and stat.ephemeralOwner != session.id:
                # It was moved by a request whose answer was lost, or by another client.
                self._owned(grant, stat)
                continue
            with pool.mutex:  # the warden may have begun to end it while this was under way
                if session.over or grant.ending is not None or pool.grants.get(path) is not grant:
                    return None
                grant.session, grant.foreign, grant.words = session, False, words
                grant.version = stat.version if stays or grant.of_ledger else 0
                now = boot_now()
                grant.until = max(grant.until, now + ttl)
                pool.server_ahead_s = stat.mtime / 1000 - now
            return Renewed(stat.mtime / 1000 + grant.until - now)
        raise StoreUnavailable("ZooKeeper: others wrote to the same lease all the time")
