"""ZooKeeper: a permit is a directory, its holder the one ephemeral node in it, through kazoo.

::

    /dibs/lease/default:digest%2F42,1                 the permit: name and a 1; data: holder, info, ttl
    /dibs/lease/default:digest%2F42,1/c-4c53…-7       ephemeral, named by the claim: it holds
    /dibs/line/default:digest%2F42/w-91aa…-3,0000000004    ephemeral sequential: it waits

*Why a grant is atomic.* Whoever makes the directory and its own node in it, in one transaction, holds the name; a
second cannot make the directory again. A directory without a node is free, because its holder's session has ended: it
is replaced in one transaction as well, which fails when somebody was faster. After a release nothing is left of a name.

*Why nobody harms the next holder.* Renewal and release name the claim's own node and its version, and a path with
another's claim is another path. (A lock whose holders share one path cannot be deleted safely: every node begins with
version 0.) An answer that was lost is found again by the claim in the path. Breaking a lease writes to the holder's
node, so that its next renewal finds another version, and looks.

*The token* is the zxid of the transaction that made the directory: one number for all names, rising for ever, also
across restarts and failovers; renewals do not touch it. *The clock* is the servers' count of a session's time-out, and
no wall clock at all; how leases with ttls of their own fit into sessions is told in ``zookeeper_pool``.

*The line.* Whoever waits makes a sequential node, named by its claim, and watches one thing: the permit when nobody
stands before it, else the node before its own. So a release wakes one waiter, and costs the same however many wait. A
newcomer's transaction makes and deletes the directory of the line, and so fails when there is one. The numbers are
ZooKeeper's and may overflow; they are compared as serial numbers. The line only decides who asks first: a waiter that
has not asked for ``LINE_GRACE_S`` is passed over, as its session may live on long after it. Since when a name is free
and who has asked (it writes to its node then) is what this client has seen; there is no clock to ask.

*Names with permits* have a ledger at the place of that directory: see ``zookeeper_permits``. What is said here of the
holder's node holds for each of theirs.

*Not promised:* two clients may see a waiter pass at slightly different times; a waiter that was passed over while the
line became empty and filled again comes back somewhere in it, not to its old place. While a process is dead but its
session is not over, its names stay taken for up to two and a half ticks more than the ttl.
"""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import SetupRequired
from dibs.store import (
    GONE,
    Acquire,
    Capabilities,
    Finding,
    Held,
    Outcome,
    Release,
    Renew,
    Request,
    StoreAddress,
    StoreBusy,
    StoredLease,
    Transfer,
)
from dibs.stores import zookeeper_address, zookeeper_check
from dibs.stores.turns import rounds_of
from dibs.stores.zookeeper_ends import Ends
from dibs.stores.zookeeper_flights import WINDOW, fly
from dibs.stores.zookeeper_line import Line
from dibs.stores.zookeeper_link import SLACK_TICKS, No, Session, Settings, answer
from dibs.stores.zookeeper_locks import Locks
from dibs.stores.zookeeper_nodes import Nodes
from dibs.stores.zookeeper_operators import Operators
from dibs.stores.zookeeper_permits import Permits
from dibs.stores.zookeeper_pool import PipeWatch, Pool
from dibs.stores.zookeeper_renewals import Renewals

if TYPE_CHECKING:
    from collections.abc import Sequence
    from urllib.parse import SplitResult

    from dibs.clock import Deadline
    from dibs.stores.zookeeper_link import Flights

OPTIONS = zookeeper_address.OPTIONS
# How long a lease may outlast its ttl when its process died: the slack, and the servers' rounding up to a tick.
RESOLUTION_TICKS = SLACK_TICKS + 1


class ZooKeeperStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._nodes = Nodes(pool.settings.root)
        self._acl = pool.settings.acl
        self._line = Line(pool, self._nodes, self._make_nodes)
        self._renewals = Renewals(pool, self._nodes)
        self._locks = Locks(pool, self._nodes, self._line, self._make_nodes, self._renewals)
        self._permits = Permits(pool, self._nodes, self._line, self._make_nodes, self._renewals)
        self._ends = Ends(pool, self._nodes, self._line, self._permits, self._renewals)
        self._operators = Operators(pool, self._nodes, self._permits)
        self._closed = False
        pool.enter()

    @property
    def capabilities(self) -> Capabilities:
        return _capabilities(self._pool.settings)

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        if not requests:
            self._ask(self._pool.any_session(deadline).exists(self._nodes.leases), deadline)
            return []
        outcomes: list[Any] = [GONE] * len(requests)
        for numbers in rounds_of(requests):
            for first in range(0, len(numbers), WINDOW):
                window = numbers[first : first + WINDOW]
                verbs = [self._verb(requests[number], deadline) for number in window]
                for number, outcome in zip(window, fly(verbs, self._nodes.root, deadline), strict=True):
                    outcomes[number] = outcome
        if None in outcomes:
            if len(outcomes) == 1:
                raise StoreBusy("others were faster every time")
            # Others of the vector were answered, and a release must not be repeated: this one is told to ask again.
            outcomes = [Held(None, 0, 0.0, 0.0) if outcome is None else outcome for outcome in outcomes]
        return outcomes

    def _verb(self, request: Request, deadline: Deadline) -> Flights:
        if type(request) is Acquire:
            return (self._permits if request.permits else self._locks).acquire(request, deadline)
        if type(request) is Renew:
            return self._renewals.renew(request, deadline)
        if type(request) is Transfer:
            return self._ends.transfer(request, deadline)
        assert type(request) is Release
        return self._ends.release(request, deadline)

    def _run(self, verb: Flights, deadline: Deadline) -> Any:
        return fly([verb], self._nodes.root, deadline)[0]

    def _ask(self, asked: Any, deadline: Deadline) -> Any:
        return answer(asked, self._nodes.root, deadline)

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        return self._operators.leases(first, before, deadline)

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        return self._operators.break_lease(name, fencing_token, now, deadline)

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        return self._operators.purge(first, before, older_than, deadline)

    # -- set up, and check ----------------------------------------------------------------------------------------

    def setup(self, deadline: Deadline) -> None:
        session = self._pool.any_session(deadline)
        self._run(self._make_nodes(session, "this login may not"), deadline)

    def _make_nodes(self, session: Session, may_not: str) -> Flights:
        for path in self._nodes.all():
            try:
                (stat,) = yield [session.exists(path)]
            except SetupRequired:
                continue  # somebody else's, which ZooKeeper from 3.9 on hides from this login: it is there
            if stat is None:
                try:
                    yield [session.multi([("create", path, b"", self._acl)])]
                except SetupRequired as refused:
                    raise SetupRequired(
                        f"{may_not} make {path} ({refused}). Let somebody who may run `dibs setup`, or what "
                        "`dibs schema` prints"
                    ) from refused

    def schema(self) -> str:
        login = self._pool.settings.login
        lines = ["# for zkCli.sh"]
        if login:
            lines.append(f"addauth digest {login.partition(':')[0]}:PASSWORD")
        lines += [f'create {path} ""{" auth::cdrwa" if login else ""}' for path in self._nodes.all()]
        return "\n".join(lines) + "\n"

    def check(self, deadline: Deadline) -> list[Finding]:
        self.setup(deadline)
        session = self._pool.any_session(deadline)
        acls = self._ask(session.acls(self._nodes.leases), deadline)
        return zookeeper_check.findings(session, self._pool.settings, [] if type(acls) is No else acls[0])

    # -- the rest -------------------------------------------------------------------------------------------------

    def watch(self, address: str, deadline: Deadline) -> PipeWatch:
        return self._pool.listen(address)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.leave()


def _capabilities(settings: Settings) -> Capabilities:
    return Capabilities(
        store="ZooKeeper",
        survives_restart="yes, and failover",
        fencing_token="zxid",
        clock="the servers' count of a session's time-out; no wall clock",
        waiting_line="FIFO",
        signal="watch",
        queue=False,
        durable=True,
        ttl_min_s=settings.tick_ms / 1000,
        ttl_max_s=(settings.session_max_ms - settings.slack_ms) / 1000,
        resolution_s=RESOLUTION_TICKS * settings.tick_ms / 1000,
        margin_s=0.010,
        permits=True,
        steady=True,
    )


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``zookeeper://user:password@host:2181,host:2181/chroot`` points; the chroot is ``/dibs`` unless given.

    The query may say the servers' ``tickTime`` and ``maxSessionTimeout`` (ms, as in zoo.cfg) where they are not 2000
    and 20 ticks; ``tls=true``, ``ssl_ca``, ``ssl_cert``, ``ssl_key`` are for a secureClientPort.
    """
    settings = zookeeper_address.settings(url, options)
    pools: dict[int, Pool] = {}

    def open_store() -> ZooKeeperStore:
        # A pool for each process: in a forked child the parent's stays here untouched, connections and all.
        pid = os.getpid()
        pool = pools.get(pid)
        if pool is None:
            pool = pools.setdefault(pid, Pool(settings))
        return ZooKeeperStore(pool)

    shown = f"zookeeper://{','.join(settings.hosts)}{settings.root}"
    return StoreAddress(shown, _capabilities(settings), open_store)
