"""How a lock on ZooKeeper is granted: a try, a look at what is in the way, and a place in the line.

How a name with permits is granted is told in ``zookeeper_permits``.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.clock import boot_now
from dibs.store import Acquire, Held, Mismatch
from dibs.stores.zookeeper_flights import TRIES
from dibs.stores.zookeeper_ledger import ledger_of
from dibs.stores.zookeeper_link import ABSENT, No, Operation, Session
from dibs.stores.zookeeper_nodes import Nodes, Standing, holder_node, packed, unpacked
from dibs.stores.zookeeper_pool import Grant, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Deadline
    from dibs.stores.zookeeper_line import Line, Sign
    from dibs.stores.zookeeper_link import Flights
    from dibs.stores.zookeeper_renewals import Renewals


class Locks:
    def __init__(
        self,
        pool: Pool,
        nodes: Nodes,
        line: Line,
        make_nodes: Callable[[Session, str], Flights],
        renewals: Renewals,
    ) -> None:
        self._pool = pool
        self._nodes = nodes
        self._line = line
        self._acl = pool.settings.acl
        self._make_nodes = make_nodes
        self._renewals = renewals

    def acquire(self, request: Acquire, deadline: Deadline) -> Flights:
        """Try to take the name, look at what is in the way, and line up, until it is had or there is a refusal."""
        pool = self._pool
        permit = self._nodes.permit(request.name)
        path = holder_node(permit, request.claim_id)
        known = pool.grants.get(path)
        if known is not None and known.of_ledger:
            (there,) = yield [known.session.get(permit)]
            ledger = None if type(there) is No else ledger_of(there[0])
            if ledger is not None:
                return Mismatch(ledger.permits)
        elif known is not None and known.told is not None:
            if (yield from self._renewals.extend(known, request.ttl, deadline)):
                return known.told
            if pool.grants.get(path) is known and not known.session.over:
                return known.refusal()
        with pool.asking(request, permit, path, deadline) as grant:
            return (yield from self._try(request, grant, deadline))

    def _try(self, request: Acquire, grant: Grant, deadline: Deadline) -> Flights:
        pool, ttl, session, permit, path = self._pool, request.ttl, grant.session, grant.permit, grant.path
        held: Held | Mismatch
        line = self._nodes.line(request.name)
        take: list[Operation] = [
            ("create", permit, b"", self._acl),
            ("create", path, repr(ttl).encode(), self._acl, True),
            ("set_data", permit, packed(grant.words)),  # its answer tells the zxid and the time of the transaction
        ]
        place = pool.places.get((request.name, request.claim_id))
        attempt: list[Operation] | None = None
        if place is not None:
            place.asked_at = boot_now()
            if place.first:
                attempt = [*take, ("delete", place.path, place.version)]
        elif request.ticket is None:
            # Nobody may be waiting: a directory that can be made was not there.
            attempt = [("create", line, b"", self._acl), ("delete", line), *take]
        for _ in range(TRIES):
            if attempt is not None:
                granted = yield from self._attempt(request, grant, attempt)
                if granted:
                    return grant.told
                if granted is None:
                    continue
                attempt = None
            there, mine, names = yield [session.get(permit), session.get(path), session.children(line)]
            ledger = ledger_of(there[0]) if type(there) is tuple else None
            if ledger is not None:
                held = Mismatch(ledger.permits)
                break
            found = self._renewals.found(grant, ttl, there, mine)
            if found is not None:
                # Granted before, and the answer was lost; or granted to this claim through another client.
                pool.grants[path] = found
                if (yield from self._renewals.extend(found, ttl, deadline)):
                    return found.told
                pool.grants[path] = grant
                continue
            queue = Standing(line, request.claim_id, request.ticket, names)
            own, ahead = queue.own, queue.ahead
            ticket = None if own is None else own.number + 1
            if type(there) is tuple and there[1].numChildren > 0:
                seen, stat = unpacked(there[0]), there[1]
                behind = own is not None and bool(ahead)
                held = Held(seen["holder"], stat.czxid, stat.ctime / 1000, seen["ttl"], ticket, behind)
            else:
                kept_for, dead = yield from self._line.kept_for(session, ahead)
                if kept_for <= 0:
                    attempt = [("delete", permit), *take] if type(there) is tuple else list(take)
                    attempt += self._leaving(line, queue, dead)
                    continue
                held = Held(None, 0, 0.0, kept_for, ticket, True)
            if request.wake is None:
                break
            if own is None:
                new, behind_it = not queue.there, queue.behind[:1]
                yield from self._line.enter(request, session, queue.number, new=new, behind=behind_it)
                continue
            free = held.holder is None  # then those behind want to know who is alive
            if (yield from self._line.stand(request, session, own, ahead, alone=not queue.others, sign=free)):
                break
        else:
            held = Held(None, 0, 0.0, 0.0, None if place is None else request.ticket, False)
        if pool.grants.get(path) is grant:
            del pool.grants[path]
        return held

    def _attempt(self, request: Acquire, grant: Grant, attempt: list[Operation]) -> Flights:
        """Whether the name is had; None where the nodes of dibs were missing, and are made now."""
        session = grant.session
        (done,) = yield [session.multi(attempt)]
        if type(done) is list:
            self._renewals.granted(grant, next(result for result in done if hasattr(result, "czxid")))
            self._line.left(request, session)
            return True
        if done.why == ABSENT and attempt[done.at][0] == "create":
            yield from self._make_nodes(session, "the nodes of dibs are missing, and this login may not")
            return None
        return False

    def _leaving(self, line: str, queue: Standing, dead: Sequence[Sign]) -> list[Operation]:
        """What takes from the line who is granted, and the dead before it; and the line when nobody else is in it."""
        cleared = self._line.clearing(dead)
        operations: list[Operation] = [("delete", queue.own.path)] if queue.own is not None else []
        operations += cleared
        alone = queue.nodes == len(queue.ahead) + (queue.own is not None)
        if queue.there and alone and len(cleared) == len(dead):
            operations.append(("delete", line))
        return operations
