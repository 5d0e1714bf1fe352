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

import ssl
from hashlib import sha256
from math import ceil
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, unquote_to_bytes

from dibs.errors import InvalidOption, StoreUnavailable, Unsupported
from dibs.store import (
    GONE,
    RELEASED,
    Acquire,
    Capabilities,
    Finding,
    Granted,
    Held,
    Outcome,
    Release,
    Renew,
    Renewed,
    Request,
    StoreAddress,
    StoreBusy,
    StoredLease,
    Transfer,
)
from dibs.stores import memcached_check
from dibs.stores.memcached_spread import RISK, SpreadStore
from dibs.stores.memcached_wire import RECORD_BYTES_MAX, Connection, Item, Place, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence
    from urllib.parse import SplitResult

    from dibs.clock import Deadline
    from dibs.stores.memcached_wire import Reply

    # One request's part in the conversation: it yields commands and how many replies they bring, and returns its
    # outcome.
    _Steps = Generator[tuple[bytes, int], list[Reply], "Outcome | _Kept"]

TTL_MAX_S = 30 * 24 * 3600  # a greater number is taken for a date, mostly one long past
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
)
OPTIONS = ("tls", "tls_ca", "tls_cert", "tls_key", "spread")
PORT = 11211
# The first line of a value of ours.
MAGIC = "dibs 1"
KEY_BYTES_MAX = 250
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
# CAS numbers of grants that a store remembers; a release whose number is not known reads it first.
KNOWN_MAX = 100_000
# A waiter is told to ask again this soon in the last tick of a lease, whose end nobody can tell exactly.
LAST_TICK_S = 0.25


class _Lease(NamedTuple):
    claim_id: str  # empty: nobody's, but not free before it ends
    token: int
    acquired_at: float
    holder: str
    name: str
    info: str | None
    cas: int
    ticks: int

    @property
    def left(self) -> float:
        """Seconds that it lasts at least; never 0, which would tell a waiter to ask again at once."""
        return max(self.ticks - 1.0, LAST_TICK_S)


class _Kept(NamedTuple):
    """A release that keeps the name was done, and the item says this: Released, unless its end is to be doubted."""

    lease: _Lease


class MemcachedStore:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._connection: Connection | None = None
        self._facts: dict[str, str] = {}
        self._settings: dict[str, str] = {}
        self._token_base = 0
        # The server's time less our boot clock's, never too late; and the boot time at which that was seen.
        self._offset = 0.0
        self._offset_at = 0.0
        # When the server was last heard of with nothing to doubt.
        self._heard_at = NEVER
        # Its Unix time, for people.
        self._now = 0.0
        self._clock_made = False
        self._known: dict[tuple[str, str], int] = {}

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        connection = self._open(deadline)
        now = _boot_time(deadline)
        self._now = self._offset + now
        if not requests:
            connection.fly([b"mn\r\n"], [1], deadline)
            return []
        if len(requests) == 1 and now - self._heard_at <= UNHEARD_MAX_S and not _keeps(requests[0]):
            told = self._alone(connection, requests[0], now, deadline)
            if told is not None:
                return [told]
            now = _boot_time(deadline)
        outcomes: list[Outcome] = [GONE] * len(requests)
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
                    if isinstance(outcome, _Kept):
                        assert isinstance(talk.request, Release)
                        talk.begin(self._keep(talk.request, outcome.lease))
                    elif outcome is not None:
                        talk.begin(self._steps(talk.request))
                    going_on.append(talk)
                    continue
                outcomes[talk.index] = RELEASED if isinstance(outcome, _Kept) else outcome
                if behind[talk.request.name]:
                    index = behind[talk.request.name].pop(0)
                    going_on.append(_Talk(index, requests[index], self._steps(requests[index])))
            talks = going_on
        return outcomes

    def _alone(self, connection: Connection, request: Request, before: float, deadline: Deadline) -> Outcome | None:
        """What ``act`` does, for one request with nothing to doubt; None when there is, and it must be made again.

        A lone pair takes a tenth less than with the bookkeeping of a vector.
        """
        steps = self._steps(request)
        command, count = next(steps)
        try:
            for _ in range(FLIGHTS_MAX):
                command, count = steps.send(connection.fly((command,), (count,), deadline))
        except StopIteration as end:
            after = _boot_time(deadline)
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
                talks.append(_Talk(index, request, self._steps(request)))
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
        after = _boot_time(deadline)
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

    # -- one request ----------------------------------------------------------------------------------------------

    def _steps(self, request: Request) -> _Steps:
        if isinstance(request, Acquire):
            return self._acquire(request)
        if isinstance(request, Renew):
            return self._renew(request)
        if isinstance(request, Transfer):
            return self._transfer(request)
        return self._keep(request) if _keeps(request) else self._release(request)

    def _acquire(self, request: Acquire) -> _Steps:
        name, claim_id = request.name, request.claim_id
        key, ticks = _key(name), _ticks(request.ttl)
        at = round(self._now, 3)
        value = _value(claim_id, f"+{self._token_base}", at, request.holder, name, request.info)
        command = b"add %b 0 %d %d\r\n%b\r\nmg %b v c t\r\n" % (key, ticks, len(value), value, key)
        while True:
            stored, found = yield command, 2
            if stored == b"STORED" and type(found) is Item and found.data == value:
                if len(self._known) >= KNOWN_MAX:
                    self._known.clear()
                self._known[name, claim_id] = found.cas
                return Granted(self._token_base + found.cas, at)
            lease = _lease(found, name)
            if lease is None:
                if stored.startswith(b"SERVER_ERROR"):
                    raise _no_memory(stored)
                continue  # it ended in between, or was taken away
            if lease.claim_id != claim_id:
                return Held(lease.holder, lease.token, lease.acquired_at, lease.left)
            if lease.ticks < ticks:
                (answer,) = yield _change(key, lease, claim_id, ticks), 1
                if not _done(answer):
                    continue
            return Granted(lease.token, lease.acquired_at)

    def _renew(self, request: Renew) -> _Steps:
        name, claim_id = request.name, request.claim_id
        key, ticks = _key(name), _ticks(request.ttl)
        while True:
            (found,) = yield b"mg %b v c t\r\n" % key, 1
            lease = _lease(found, name)
            if lease is None or not claim_id or lease.claim_id != claim_id:
                return GONE
            if lease.ticks >= ticks:  # it lasts as long already: renewals never shorten a lease
                return Renewed(self._now + lease.left)
            (answer,) = yield _change(key, lease, claim_id, ticks), 1
            if _done(answer):
                return Renewed(self._now + request.ttl)

    def _transfer(self, request: Transfer) -> _Steps:
        name, claim_id = request.name, request.claim_id
        key, ticks = _key(name), _ticks(request.ttl)
        while True:
            (found,) = yield b"mg %b v c t\r\n" % key, 1
            lease = _lease(found, name)
            if lease is None or lease.claim_id not in (claim_id, request.from_claim or claim_id):
                return GONE
            if lease.claim_id != claim_id:
                value = _value(
                    claim_id, f"+{self._token_base}", round(self._now, 3), request.holder, name, request.info
                )
                yield b"cas %b 0 %d %d %d\r\n%b\r\n" % (key, ticks, len(value), lease.cas, value), 1
                continue  # the next look shows whether that was stored, and the CAS number that makes the token
            if lease.ticks < ticks:
                (answer,) = yield _change(key, lease, claim_id, ticks), 1
                if not _done(answer):
                    continue
            return Granted(lease.token, lease.acquired_at)

    def _release(self, request: Release) -> _Steps:
        name, claim_id = request.name, request.claim_id
        key = _key(name)
        known = self._known.pop((name, claim_id), None)
        if known is not None:
            (answer,) = yield b"md %b C%d\r\n" % (key, known), 1
            if answer != b"EX":
                return RELEASED if _done(answer) else GONE
        while True:
            (found,) = yield b"mg %b v c t\r\n" % key, 1
            lease = _lease(found, name)
            if lease is None or not claim_id or lease.claim_id != claim_id:
                return GONE
            (answer,) = yield b"md %b C%d\r\n" % (key, lease.cas), 1
            if _done(answer):
                return RELEASED

    def _keep(self, request: Release, kept: _Lease | None = None) -> _Steps:
        """Let the item be nobody's until its time is over. ``kept``: that was done, but the end of it is doubted."""
        name, claim_id = request.name, request.claim_id
        key, ticks = _key(name), _ticks(request.keep)
        self._known.pop((name, claim_id), None)
        while True:
            (found,) = yield b"mg %b v c t\r\n" % key, 1
            lease = _lease(found, name)
            if kept is None:
                if lease is None or not claim_id or lease.claim_id != claim_id:
                    return GONE
                if request.info is not None:
                    lease = lease._replace(info=request.info)
            elif lease is None:  # it had ended as soon as it was stored
                value = _value("", str(kept.token), kept.acquired_at, kept.holder, kept.name, kept.info)
                (answer,) = yield b"add %b 0 %d %d\r\n%b\r\n" % (key, ticks, len(value), value), 1
                if _done(answer):
                    return _Kept(kept)
                continue
            elif lease.claim_id or lease.token != kept.token:
                return RELEASED  # and somebody else was faster
            (answer,) = yield _change(key, lease, "", ticks), 1
            if _done(answer):
                return _Kept(lease)

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        connection = self._open(deadline)
        if before == first + "\x01":  # nothing but this one name lies between
            keys = [_key(first)]
        else:
            keys = _keys(connection, first, before, deadline)
        if not keys:
            return []
        replies = connection.fly([b"mg %b v c t\r\n" % key for key in keys], [1] * len(keys), deadline)
        now = self._offset + _boot_time(deadline)
        found = []
        for reply in replies:
            lease = _lease(reply)
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
        key = _key(name)
        for _ in range(FLIGHTS_MAX):
            (found,) = connection.fly([b"mg %b v c t\r\n" % key], [1], deadline)
            lease = _lease(found, name)
            if lease is None or not lease.name or lease.token != fencing_token:
                return False
            command = b"md %b C%d\r\n" % (key, lease.cas) if now else _change(key, lease, "", max(1, lease.ticks))
            (answer,) = connection.fly([command], [1], deadline)
            if _done(answer):
                return True
        raise StoreUnavailable(f"memcached: {name!r} changed under every attempt to break its lease")

    def purge(self, older_than: float, deadline: Deadline) -> int:
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
        self._token_base = (server_time - int(facts["uptime"])) << CAS_BITS
        self._offset_at = _boot_time(deadline)
        self._offset = server_time - self._offset_at
        self._heard_at = NEVER
        self._clock_made = False
        # A server that was restarted begins its CAS numbers anew: what was known may by now be somebody else's.
        self._known = {}
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

    def __init__(self, index: int, request: Request, steps: _Steps) -> None:
        self.index = index
        self.request = request
        self.flights = 0
        #: How often the request was made.
        self.made = 0
        self.begin(steps)

    def begin(self, steps: _Steps) -> None:
        self.steps = steps
        self.made += 1
        self.outcome: Outcome | _Kept | None = None
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


class MemcachedWatch:
    """Looks whether the items are still there. A look asks, the next one reads what was answered: it never waits.

    Of many names each look asks for some, in turns.
    """

    interval_s: float | None = 0.01

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._turn = 0
        self._asked: list[str] = []
        self._answers = b""
        self._left = b""

    def fileno(self) -> int | None:
        return self._connection.socket.fileno()

    def changed(self, names: Collection[str]) -> Collection[str]:
        if not self._asked:
            if names:
                self._ask(list(names))
                self._left = self._connection.send(self._left)
            return ()
        if self._left:
            self._left = self._connection.send(self._left)
        self._answers += self._connection.receive()
        lines = self._answers.split(b"\r\n")
        if len(lines) <= len(self._asked):
            return ()
        asked, self._asked, self._answers = self._asked, [], b""
        return [name for name, line in zip(asked, lines, strict=False) if line == b"EN"]

    def _ask(self, names: list[str]) -> None:
        size = 0
        for number in range(len(names)):
            name = names[(self._turn + number) % len(names)]
            command = b"mg %b\r\n" % _key(name)
            size += len(command)
            if size > RECORD_BYTES_MAX:
                self._turn += number
                break
            self._asked.append(name)
            self._left += command

    def close(self) -> None:
        self._connection.close()


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``memcached://user:password@host:port?tls=on`` or ``memcached:///path/of/a/socket`` points.

    User and password are for servers started with -Y. With ``tls=on`` the server's certificate is checked against the
    authorities of this machine, or those in the file ``tls_ca``; ``tls_cert`` and ``tls_key`` name one of our own.
    Several hosts, with commas between, need ``spread=two-holders-possible``: see memcached_spread.
    """
    tls = _tls(options)
    spread = options.pop("spread", "")
    path = unquote(url.path)
    user = None if url.username is None else unquote(url.username)
    password = unquote(url.password or "")
    if any(char.isspace() for char in f"{user or ''}{password}"):
        raise InvalidOption("memcached takes no user or password with spaces")
    hosts = url.netloc.rpartition("@")[2]
    servers: list[tuple[str, int] | str]
    if hosts:
        if path not in ("", "/"):
            raise InvalidOption(f"memcached has no databases: leave out {path!r}, and separate by ?namespace=…")
        servers = [_host_and_port(host) for host in hosts.split(",")]
    elif path.startswith("/") and path != "/":
        hosts, servers = path, [path]
    else:
        raise InvalidOption("a memcached URL names a host (memcached://host:11211) or a socket (memcached:///path)")
    if spread not in ("", RISK):
        raise InvalidOption(f"the URL option spread has one value, {RISK}, not {spread!r}")
    if (len(servers) > 1) != bool(spread):
        raise InvalidOption(
            "name one memcached server. Names can be spread over several, but then two hold one name whenever two "
            f"programs do not list the same servers in the same order; who takes that risk adds ?spread={RISK}"
            if not spread
            else "the URL option spread is for several servers"
        )
    places = [Place(f"memcached://{_named(server)}", server, user, password, tls, []) for server in servers]
    if len(places) > 1:
        return StoreAddress(
            f"memcached://{hosts}", CAPABILITIES, lambda: SpreadStore([MemcachedStore(place) for place in places])
        )
    return StoreAddress(places[0].shown, CAPABILITIES, lambda: MemcachedStore(places[0]))


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text[1:].partition("]") if text.startswith("[") else text.partition(":")
    port = port.removeprefix(":")
    if not host or not (port.isdecimal() or not port) or not int(port or PORT) < 2**16:
        raise InvalidOption(f"a memcached URL names a host and perhaps a port, as in host:11211, not {text!r}")
    return unquote(host), int(port or PORT)


def _named(server: tuple[str, int] | str) -> str:
    if isinstance(server, str):
        return server
    host, port = server
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tls(options: dict[str, str]) -> ssl.SSLContext | None:
    wanted = options.pop("tls", "off")
    files = {key: options.pop(key) for key in ("tls_ca", "tls_cert", "tls_key") if key in options}
    if wanted not in ("on", "off"):
        raise InvalidOption(f"the URL option tls is 'on' or 'off', not {wanted!r}")
    if wanted == "off":
        if files:
            raise InvalidOption(f"the URL option {next(iter(files))} goes with tls=on")
        return None
    try:
        context = ssl.create_default_context(cafile=files.get("tls_ca"))
        if "tls_cert" in files or "tls_key" in files:
            context.load_cert_chain(files.get("tls_cert", ""), files.get("tls_key"))
    except OSError as error:  # ssl.SSLError among them
        raise InvalidOption(f"the files of the URL's tls options cannot be used: {error}") from None
    return context


# Outcomes that an expiry goes with, which was set by them.
_WITH_AN_END = (Granted, Renewed, _Kept)


def _keeps(request: Request) -> bool:
    return type(request) is Release and request.keep > 0


# -- values on the wire -----------------------------------------------------------------------------------------------


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
            name = unquote_to_bytes(key[5:]).decode("utf-8", "replace") if key.startswith(b"dibs:") else None
            if key.startswith(b"dibs~") or (name is not None and first <= name < before):
                keys.add(key)
    return sorted(keys)


def _boot_time(deadline: Deadline) -> float:
    """Boot time, as far as a store may know it."""
    return deadline.at - deadline.remaining()


def _ticks(ttl: float) -> int:
    """What is sent for a ttl, see the head of this file. (At 30 days the allowance for clock rates is far more.)"""
    return min(ceil(ttl) + 1, TTL_MAX_S)


def _key(name: str) -> bytes:
    """The key of a name: the name, but for what may not stand in one; a longer one its hash and its beginning.

    (For slot 2 of a name it would begin ``dibs#2:``, and no namespace can.)
    """
    key = b"dibs:" + name.replace("%", "%25").replace(" ", "%20").encode()
    if len(key) <= KEY_BYTES_MAX:
        return key
    return b"dibs~%b~%b" % (sha256(name.encode()).hexdigest().encode(), key[5:165])


def _value(claim_id: str, token: str, acquired_at: float, holder: str, name: str, info: str | None) -> bytes:
    """A token that begins with + has the item's CAS number still to be added to it."""
    holder = holder.replace("\n", " ")
    return f"{MAGIC}\n{claim_id}\n{token}\n{acquired_at!r}\n{holder}\n{name}\n{info or ''}".encode()


def _lease(found: Reply, name: str | None = None) -> _Lease | None:
    """What an item says. One that is not of dibs, or of another name with the same key, is a lease of nobody's."""
    if type(found) is not Item:
        return None
    lines = found.data.decode("utf-8", "replace").split("\n", 6)
    if len(lines) < 7 or lines[0] != MAGIC or (name is not None and lines[5] != name):
        return _Lease("", 0, 0.0, "a program that is not dibs", "", None, found.cas, found.ticks)
    _, claim_id, token, acquired_at, holder, name, info = lines
    number = int(token) + (found.cas if token[0] == "+" else 0)
    return _Lease(claim_id, number, float(acquired_at), holder, name, info or None, found.cas, found.ticks)


def _change(key: bytes, lease: _Lease, claim_id: str, ticks: int) -> bytes:
    """Give the lease another end, or to nobody, if it has not changed since it was read."""
    value = _value(claim_id, str(lease.token), lease.acquired_at, lease.holder, lease.name, lease.info)
    return b"cas %b 0 %d %d %d\r\n%b\r\n" % (key, ticks, len(value), lease.cas, value)


def _done(answer: bytes) -> bool:
    if answer.startswith(b"SERVER_ERROR"):
        raise _no_memory(answer)
    return answer in (b"STORED", b"HD")


def _no_memory(answer: bytes) -> StoreUnavailable:
    return StoreUnavailable(f"memcached cannot keep another lease: {shown(answer)}. Give it more memory (-m)")
