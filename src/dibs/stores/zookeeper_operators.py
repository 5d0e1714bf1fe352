"""What operators see of leases on ZooKeeper, break and clear away."""

from __future__ import annotations

from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import StoreUnavailable
from dibs.store import StoredLease
from dibs.stores.zookeeper_flights import TRIES, WINDOW, fly
from dibs.stores.zookeeper_ledger import entries, holder_of, ledger_of
from dibs.stores.zookeeper_link import No, Session, answer
from dibs.stores.zookeeper_nodes import BROKEN, Nodes, broken, unbroken, unpacked, waiters
from dibs.stores.zookeeper_pool import Pool

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.stores.zookeeper_link import Flights
    from dibs.stores.zookeeper_permits import Permits


class Operators:
    def __init__(self, pool: Pool, nodes: Nodes, permits: Permits) -> None:
        self._pool = pool
        self._nodes = nodes
        self._permits = permits

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        session = self._pool.any_session(deadline)
        nodes = answer(session.children(self._nodes.leases), self._nodes.root, deadline)
        wanted = []
        for node in [] if type(nodes) is No else nodes:  # nobody has held anything yet
            text, _, one = node.rpartition(",")
            name = unquote(text)
            if one == "1" and first <= name < before:
                wanted.append(name)
        wanted.sort()
        found: list[StoredLease] = []
        for start in range(0, len(wanted), WINDOW):
            seen = [self._stored(session, name) for name in wanted[start : start + WINDOW]]
            found += [lease for leases in fly(seen, self._nodes.root, deadline) for lease in leases]
        return found

    def _stored(self, session: Session, name: str) -> Flights:
        """The leases on a name."""
        permit, line = self._nodes.permit(name), self._nodes.line(name)
        there, nodes, names = yield [session.get(permit), session.children(permit), session.children(line)]
        if type(there) is No or type(nodes) is No or not nodes:
            return []
        waiting = 0 if type(names) is No else len(waiters(line, names))
        ledger = ledger_of(there[0])
        if ledger is not None:
            held = entries(ledger, nodes)
            return (yield from self._permits.stored(session, permit, name, held, there[1], waiting))
        (holder,) = yield [session.get(f"{permit}/{nodes[0]}")]
        if type(holder) is No:
            return []
        words, stat = unpacked(there[0]), there[1]
        _, renewed_at_ms = unbroken(holder[0], holder[1].mtime)
        ends = self._pool.ends(renewed_at_ms / 1000, words["ttl"])
        return [StoredLease(name, 1, words["holder"], stat.czxid, stat.ctime / 1000, *ends, words["info"], waiting)]

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        session = self._pool.any_session(deadline)
        return bool(self._run(self._break(session, self._nodes.permit(name), fencing_token, now), deadline))

    def _break(self, session: Session, permit: str, fencing_token: int, now: bool) -> Flights:
        for _ in range(TRIES):
            there, nodes = yield [session.get(permit), session.children(permit)]
            if type(there) is No or type(nodes) is No or not nodes:
                return False
            ledger = ledger_of(there[0])
            node: str | None = nodes[0]
            if ledger is not None:
                node = holder_of(ledger, there[1], nodes, fencing_token)
            elif there[1].czxid != fencing_token:
                node = None
            if node is None:
                return False
            path = f"{permit}/{node}"
            if now:
                ends = [("delete", path)] if ledger is not None else [("delete", path), ("delete", permit)]
                (done,) = yield [session.multi(ends)]
            else:
                (holder,) = yield [session.get(path)]
                if type(holder) is No:
                    continue
                if node.startswith("k-") or holder[0].startswith(BROKEN):
                    return True
                text = broken(holder[0], holder[1].mtime)
                (done,) = yield [session.multi([("set_data", path, text, holder[1].version)])]
            if type(done) is list:
                return True
        raise StoreUnavailable("ZooKeeper: the lease changed all the time", maybe_applied=False)

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        session = self._pool.any_session(deadline)
        return int(self._run(self._purge(session, first, before, older_than), deadline))

    def _purge(self, session: Session, first: str, before: str, older_than: float) -> Flights:
        """Released names leave nothing; names whose holder died leave a directory, and so may a line."""
        (done,) = yield [session.multi([("set_data", self._nodes.leases, b"")])]
        if type(done) is No:
            return 0
        before_ms = done[0].mtime - older_than * 1000  # by the server's clock
        count = 0
        for above in (self._nodes.leases, self._nodes.lines):
            (nodes,) = yield [session.children(above)]
            names = [] if type(nodes) is No else nodes
            paths = [f"{above}/{node}" for node in names if first <= unquote(node.partition(",")[0]) < before]
            for start in range(0, len(paths), WINDOW):
                window = paths[start : start + WINDOW]
                stats = yield [session.exists(path) for path in window]
                old = [
                    (path, stat)
                    for path, stat in zip(window, stats, strict=True)
                    if stat is not None and stat.mtime <= before_ms
                ]
                deletions = [[("delete", path)] for path, stat in old if not stat.numChildren]
                deletions += yield from self._permits.idle(
                    session, [path for path, stat in old if stat.numChildren == 1]
                )
                answers = yield [session.multi(operations) for operations in deletions]
                count += sum(type(done) is list for done in answers)
        return count

    def _run(self, verb: Flights, deadline: Deadline) -> Any:
        return fly([verb], self._nodes.root, deadline)[0]
