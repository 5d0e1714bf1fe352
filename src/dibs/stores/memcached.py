"""memcached: a lease is an item with an expiry, on one server. Best effort: a cache forgets, and says nothing.

*What a permit is.* The item ``dibs:namespace:name``. Its value is text to be read by people: claim, token, time of the
grant, holder, name and info, a line each.

*Why it is atomic.* ``add`` stores only where nothing is; ``cas`` and ``md`` with a CAS value change only what was read.
Nothing is ever written or deleted blindly. ``add`` and a look at the item travel together and the item decides, so
"held" is never concluded from a refused ``add`` alone, which a proxy answers for a dead server, too. (The meta command
``ms`` is not used: when the server finds no memory for it, it deletes the item that is there, whoever's it is.)

*Whose clock.* The server's, in ticks of about a second. A ttl of n ends n - 1 to n seconds later; but the tick comes a
little later each time, and whenever it has drifted past a full second, every quarter of an hour or so, the server's
time jumps by two, and what was stored just before ends after n - 2. Hence one second more is sent than was asked for,
and trust ends one second early::

    ceil(ttl) + 1 - 2 >= ttl - 1        so nobody else is let in before ttl * 0.95 - MARGIN_S

A server that stood still (SIGSTOP, a frozen machine) stores what waited for it with the time at which it stopped, and
a moment later that has expired. So an answer that was slow, or came from a server whose clock lags, is not believed:
the request, which is idempotent, is made again.

*How tokens rise.* By the CAS number of the ``add``, which one counter of the server gives to everything it stores,
above the second in which the server started. They go on rising across restarts while the server's wall clock does not
go back (and two starts do not share a second).

*What is not promised.* A restart, an eviction or ``flush_all`` takes leases from under their holders, who notice at
their next renewal; another may hold the name by then. There is no line: waiters look every few milliseconds.

pymemcache makes the connection (names, TLS, Unix sockets); what travels on it are vectors, which pymemcache lacks.
"""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import StoreUnavailable, Unsupported
from dibs.store import (
    GONE,
    RELEASED,
    Capabilities,
    Finding,
    Granted,
    Outcome,
    Release,
    Renewed,
    Request,
    StoreAddress,
    StoreBusy,
    StoredLease,
)
from dibs.stores import memcached_address, memcached_check
from dibs.stores.memcached_spread import SpreadStore
from dibs.stores.memcached_values import TTL_MAX_S, change, done, key_of, lease_of, may_be_of
from dibs.stores.memcached_verbs import Kept, Verbs, keeps
from dibs.stores.memcached_watch import MemcachedWatch
from dibs.stores.memcached_wire import Connection
from dibs.stores.parts import Parts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from urllib.parse import SplitResult

    from dibs.clock import Deadline
    from dibs.errors import SetupRequired
    from dibs.stores.memcached_verbs import Steps
    from dibs.stores.memcached_wire import Place, Reply

MARGIN_S = 1.010
CAPABILITIES = Capabilities(
    store="memcached",
    survives_restart="no, and a full or flushed server forgets leases, too",
    fencing_token="best effort: rises while the server's wall clock does not go back",
    clock="server ttl (1 s ticks)",
    waiting_line="none",
    signal="poll",
    queue=False,
    durable=False,
    ttl_min_s=3.0,
    ttl_max_s=float(TTL_MAX_S),
    # A lease may last from a second less to (for a fraction of a second in its ttl) two seconds more than its ttl.
    resolution_s=2.0,
    margin_s=MARGIN_S,
    # To list leases it must go through everything it keeps, which may be a large cache of somebody else's.
    deadlocks=False,
    steady=True,
)
OPTIONS = memcached_address.OPTIONS
# Tokens rise across a restart unless the server stored more than 2 ** this items a second on average.
CAS_BITS = 24
# A request that has met a change by others this often in turn gives up.
FLIGHTS_MAX = 8
# What took longer than this may have been stored by a server that had just stood still; and so may anything that is
# sent to a server that was not heard of for so long.
SLOW_S = 0.2
UNHEARD_MAX_S = 1.0
NEVER = float("-inf")
# Why an expiry that was set is doubted: the answer was slow, once; or the server's clock is behind.
SLOW, BEHIND = 1, 2
# How far the server's time may be behind its real one, and by how much a second its clock and ours drift apart.
LAG_MAX_S = 2.0
DRIFT_MAX = 0.001
# An item that expires at a fixed moment, the last that memcached can name; what it has left tells the server's time.
CLOCK_ENDS_AT = 2**31 - 1
CLOCK_LOOK = b"mg dibs-clock t\r\n"
CLOCK_MAKE = b"add dibs-clock 0 %d 0\r\n\r\n" % CLOCK_ENDS_AT
# Outcomes that an expiry goes with, which was set by them.
_WITH_AN_END = (Granted, Renewed, Kept)


class MemcachedStore:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._connection: Connection | None = None
        self._facts: dict[str, str] = {}
        self._settings: dict[str, str] = {}
        self._verbs = Verbs(0)
        # The server's time less our boot clock's, never too late; and the boot time at which that was seen.
        self._offset = 0.0
        self._offset_at = 0.0
        # When the server was last heard of with nothing to doubt.
        self._heard_at = NEVER
        self._clock_made = False

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        connection = self._open(deadline)
        now = deadline.now()
        self._verbs.now = self._offset + now
        if not requests:
            connection.fly([b"mn\r\n"], [1], deadline)
            return []
        if len(requests) == 1 and now - self._heard_at <= UNHEARD_MAX_S and not keeps(requests[0]):
            told = self._alone(connection, requests[0], now, deadline)
            if told is not None:
                return [told]
            now = deadline.now()
        outcomes: list[Any] = [GONE] * len(requests)
        talks, behind = self._begin(requests)
        while talks:
            doubted, now = self._flight(connection, talks, now, deadline)
            going_on: list[_Talk] = []
            for talk in talks:
                outcome = talk.outcome
                if outcome is None or (doubted and type(outcome) in _WITH_AN_END and talk.doubted(doubted)):
                    if talk.flights >= FLIGHTS_MAX:
                        self.close()
                        raise StoreUnavailable(
                            f"memcached did not get on with {talk.request.name!r} in {FLIGHTS_MAX} attempts: "
                            + ("its clock stands still" if doubted else "what it stores is not there a moment later")
                        )
                    if isinstance(outcome, Kept):
                        assert isinstance(talk.request, Release)
                        talk.begin(self._verbs.keep(talk.request, outcome.lease))
                    elif outcome is not None:
                        talk.begin(self._verbs.steps(talk.request))
                    going_on.append(talk)
                    continue
                outcomes[talk.index] = RELEASED if isinstance(outcome, Kept) else outcome
                if behind[talk.request.name]:
                    index = behind[talk.request.name].pop(0)
                    going_on.append(_Talk(index, requests[index], self._verbs.steps(requests[index])))
            talks = going_on
        return outcomes

    def _alone(self, connection: Connection, request: Request, before: float, deadline: Deadline) -> Any:
        """What ``act`` does, for one request with nothing to doubt; None when there is, and it must be made again.

        A lone pair takes a tenth less than with the bookkeeping of a vector.
        """
        steps = self._verbs.steps(request)
        command, count = next(steps)
        try:
            for _ in range(FLIGHTS_MAX):
                command, count = steps.send(connection.fly((command,), (count,), deadline))
        except StopIteration as end:
            after = deadline.now()
            doubted = after - before > SLOW_S
            self._heard_at = NEVER if doubted else after
            return None if doubted and type(end.value) in _WITH_AN_END else end.value
        return None

    def _begin(self, requests: Sequence[Request]) -> tuple[list[_Talk], dict[str, list[int]]]:
        """Requests for one name are made one after the other, all others together: what is said, and who waits."""
        talks: list[_Talk] = []
        behind: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            if request.name in behind:
                behind[request.name].append(index)
            else:
                behind[request.name] = []
                talks.append(_Talk(index, request, self._verbs.steps(request)))
        return talks, behind

    def _flight(
        self, connection: Connection, talks: list[_Talk], before: float, deadline: Deadline
    ) -> tuple[int, float]:
        """Send what every talk has to say, give each its replies; why expiries are to be doubted, and the boot time.

        A server cannot have stood still for longer than we have not heard of it, so its clock is looked at when that
        is a while ago. (Only plain releases set no expiry.)
        """
        commands = [talk.command for talk in talks]
        counts = [talk.count for talk in talks]
        looks = 0
        if before - self._heard_at > UNHEARD_MAX_S:
            looks = 1 if self._clock_made else 2
            commands.insert(0, CLOCK_LOOK if looks == 1 else CLOCK_MAKE + CLOCK_LOOK)
            counts.insert(0, looks)
        replies = connection.fly(commands, counts, deadline)
        after = deadline.now()
        doubted = 0 if after - before < SLOW_S else SLOW
        if looks and self._clock_is_behind(replies[looks - 1], before, after):
            doubted = BEHIND
        self._heard_at = NEVER if doubted else after
        at = looks
        for talk in talks:
            count = talk.count
            talk.go_on(replies[at : at + count])
            at += count
        return doubted, after

    def _clock_is_behind(self, look: bytes, before: float, after: float) -> bool:
        """Compare the server's clock with ours, by what both showed in earlier flights.

        What the server says is its time or up to ``LAG_MAX_S`` less. So ``said - after`` is never more than the true
        offset between the two clocks, and ``said - before`` never less by more than that.
        """
        self._clock_made = look.startswith(b"HD t")
        if not self._clock_made:  # flushed or evicted: made again in the next flight
            return False
        said = float(CLOCK_ENDS_AT - int(look[4:]))
        offset = self._offset - (before - self._offset_at) * DRIFT_MAX
        self._offset, self._offset_at = max(offset, said - after), after
        return said - before < offset - LAG_MAX_S

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        connection = self._open(deadline)
        if before == first + "\x01":  # nothing but this one name lies between
            keys = [key_of(first)]
        else:
            keys = _keys(connection, first, before, deadline)
        if not keys:
            return []
        replies = connection.fly([b"mg %b v c t\r\n" % key for key in keys], [1] * len(keys), deadline)
        now = self._offset + deadline.now()
        found = []
        for reply in replies:
            lease = lease_of(reply)
            if lease is not None and first <= lease.name < before:
                found.append(
                    StoredLease(
                        lease.name,
                        1,
                        lease.holder,
                        lease.token,
                        lease.acquired_at,
                        now + lease.left,
                        lease.left,
                        lease.info,
                        0,
                    )
                )
        return sorted(found)

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        connection = self._open(deadline)
        key = key_of(name)
        for _ in range(FLIGHTS_MAX):
            (found,) = connection.fly([b"mg %b v c t\r\n" % key], [1], deadline)
            lease = lease_of(found, name)
            if lease is None or lease.foreign or lease.token != fencing_token:
                return False
            command = b"md %b C%d\r\n" % (key, lease.cas) if now else change(key, lease, "", max(1, lease.ticks))
            (answer,) = connection.fly([command], [1], deadline)
            if done(answer):
                return True
        raise StoreUnavailable(f"memcached: {name!r} changed under every attempt to break its lease")

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        """Nothing is kept of what is free."""
        return 0

    def setup(self, deadline: Deadline) -> None:
        """Nothing to make; it is only reached."""
        self._open(deadline)

    def schema(self) -> str:
        return "# memcached needs no setting up\n"

    def check(self, deadline: Deadline) -> list[Finding]:
        self.close()  # so that what is told is of now
        self._open(deadline)
        return memcached_check.findings(self._facts, self._settings)

    # -- connecting -----------------------------------------------------------------------------------------------

    def _open(self, deadline: Deadline) -> Connection:
        connection = self._connection
        if connection is not None and not connection.closed:
            return connection
        connection = Connection(self._place, deadline)
        try:
            facts = connection.stats("", deadline)
            settings = connection.stats("settings", deadline)
            memcached_check.refuse(facts, settings)
        except BaseException:
            connection.close()
            raise
        self._connection, self._facts, self._settings = connection, facts, settings
        server_time = int(facts["time"])
        self._verbs = Verbs((server_time - int(facts["uptime"])) << CAS_BITS)
        self._offset_at = deadline.now()
        self._offset = server_time - self._offset_at
        self._heard_at = NEVER
        self._clock_made = False
        return connection

    def watch(self, address: str, deadline: Deadline) -> MemcachedWatch:
        return MemcachedWatch(self._open(deadline))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Talk:
    """A request under way: what it says next, and at the end its outcome."""

    __slots__ = ("command", "count", "flights", "index", "made", "outcome", "request", "steps")

    def __init__(self, index: int, request: Request, steps: Steps) -> None:
        self.index = index
        self.request = request
        self.flights = 0
        #: How often the request was made.
        self.made = 0
        self.begin(steps)

    def begin(self, steps: Steps) -> None:
        self.steps = steps
        self.made += 1
        self.outcome: Outcome | Kept | SetupRequired | None = None
        self.command, self.count = next(steps)

    def go_on(self, replies: list[Reply]) -> None:
        self.flights += 1
        try:
            self.command, self.count = self.steps.send(replies)
        except StopIteration as end:
            self.outcome = end.value

    def doubted(self, why: int) -> bool:
        """Whether to make it again. A slow answer is doubted once: on a slow network all of them are."""
        return why == BEHIND or self.made == 1


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``memcached://user:password@host:port?tls=on`` or ``memcached:///path/of/a/socket`` points.

    User and password are for servers started with -Y. With ``tls=on`` the server's certificate is checked against the
    authorities of this machine, or those in the file ``tls_ca``; ``tls_cert`` and ``tls_key`` name one of our own.
    Several hosts, with commas between, need ``spread=two-holders-possible``: see memcached_spread.
    """
    shown, places = memcached_address.servers(url, options)
    if len(places) > 1:
        parts = Parts()
        return StoreAddress(
            shown, CAPABILITIES, lambda: SpreadStore([MemcachedStore(place) for place in places], parts)
        )
    return StoreAddress(shown, CAPABILITIES, lambda: MemcachedStore(places[0]))


def _keys(connection: Connection, first: str, before: str, deadline: Deadline) -> list[bytes]:
    """The keys of all leases that may have such a name: the server is asked for everything it has."""
    lines = connection.ask("lru_crawler metadump hash", deadline)
    if lines[0].startswith("BUSY"):
        raise StoreBusy("memcached is listing its keys for somebody else")
    if lines[0].startswith(("ERROR", "CLIENT_ERROR")):
        raise Unsupported("this memcached does not list its keys: start it without no_lru_crawler")
    keys = set()
    for line in lines:
        if line.startswith("key=dibs"):
            key = unquote_to_bytes(line[4 : line.index(" ")])
            if may_be_of(key, first, before):
                keys.add(key)
    return sorted(keys)
