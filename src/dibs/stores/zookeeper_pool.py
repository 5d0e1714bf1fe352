"""The ZooKeeper sessions of one client: which there are, what is kept in them, and when that ends.

ZooKeeper ends *sessions*, dibs promises an end to every *lease*. So the stores of a client share a ``Pool``, and a
pool has a session for every ttl in use, whose time-out is that ttl and a little more (``SLACK_TICKS``). A lease ends

* when its session does: the process was killed, stopped or cut off, and the server counted the time-out; or
* when the pool's thread, the *warden*, deletes its node, a ttl after it was last acquired or renewed. The driver keeps
  a session alive as long as the process lives, and would keep alive what nobody renews.

Neither looks at a wall clock: the warden counts on the boot clock, from after the answer that it extends, and its end
comes after that of the holder's trust, so that only the *liveness* of others depends on it.

**The slack.** A session's time-out is counted by the leader. A client that is connected to a follower is *touched* by
each of its requests only there; the follower tells the leader with its answers to the leader's pings, every half tick.
When a follower dies, the leader does not know of the touches since. So the warden touches every session each half tick,
renewals are writes (which reach the leader behind whatever the follower told before, and only count when a majority
has them), and the time-out has half a tick for the warden, half a tick for the leader's pings, and half a tick to spare
more than the ttl. With that the leader lets nobody else in before ``t0 + ttl``, whichever server dies.

Threads: the lanes of a session of dibs and the warden. What the maps of a pool hold changes under its mutex; a
``Grant`` is changed by whoever asks the server about it, and forgotten by the warden alone or after the server said
that it is gone.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from math import ceil

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import Deadline, RealClock, boot_now
from dibs.errors import DibsError
from dibs.store import Held
from dibs.stores.zookeeper_link import SLACK_TICKS, Session, Settings, answer
from dibs.stores.zookeeper_nodes import packed
from dibs.threads import begin

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dibs.clock import Bell
    from dibs.store import Acquire, Transfer
    from dibs.stores.zookeeper_link import Operation

# How often the warden touches every session.
TOUCH_TICKS = 0.5
assert SLACK_TICKS >= TOUCH_TICKS + 0.5 + 0.5
# Sessions of one client. More different ttls than this at once share the next longer session.
SESSIONS_MAX = 8
# The ttl of a session for what is the same in each. Kazoo closes a connection that was silent for two thirds of its
# session, which happens to a short one while the server is busy with somebody else.
ANY_S = 10.0
# A session in which nothing is kept, and that nobody used for this long, is closed.
IDLE_S = 60.0
# A place in line whose waiter has not asked for this long is given up; waiters ask at least every second.
FORGOTTEN_S = 10.0
# How long closing waits for the server's good-bye.
GOODBYE_S = 1.0
# The pause of the warden while the server owes it an answer to a deletion.
OWED_S = 0.02
# Deleted by the warden together: what is left is the next look's.
DELETE_MAX = 100
FOREVER = float("inf")


class Grant:
    """A lease, or a kept name, whose node is in a session of this pool; or one that was asked for and may be."""

    #: The token and the time of the grant; None while the server has not told.
    told: Any = None
    #: The data version of the holder's node; None when it is not known.
    version: int | None = None
    #: Its node is in the session of another client, from where it has to be fetched.
    foreign = False
    #: The warden has begun to delete it: the answer the server owes. Set under the mutex; it is over then.
    ending: Any = None
    #: It is of permits (see ``zookeeper_permits``): the node above is a ledger, and stays.
    of_ledger = False
    #: How many permits.
    take = 1
    #: Boot-clock time at which the warden ends it; not while a request for it is under way for the first time.
    until = FOREVER

    def __init__(self, permit: str, path: str, session: Session, words: dict[str, Any]) -> None:
        self.permit = permit
        self.path = path
        self.session = session
        #: What the permit's node says, or where that is a ledger the holder's: holder, info, ttl.
        self.words = words

    def text(self, lasts: float) -> bytes:
        """What stands in the holder's node when the lease lasts so many seconds."""
        return packed({**self.words, "ttl": lasts}) if self.of_ledger else repr(lasts).encode()

    def refusal(self) -> Held:
        """What is told of one that was broken, or whose time is over, until the warden has ended it."""
        return Held(
            self.words["holder"], self.told.fencing_token, self.told.acquired_at, max(0.0, self.until - boot_now())
        )

    def deletion(self) -> list[Operation]:
        """What ends it, whatever its version."""
        return [("delete", self.path)] + ([] if self.of_ledger else [("delete", self.permit)])


class Place:
    """A waiter's node in line."""

    #: Nobody stands before it, or stood behind it, when it last looked.
    first = alone = False
    version = 0  # of its node, as far as is known here: whoever takes the place right before it changes that
    #: The path that is watched for it.
    armed: str | None = None

    def __init__(self, name: str, claim: str, wake: str, path: str, session: Session) -> None:
        self.name = name
        self.claim = claim
        self.wake = wake
        self.path = path
        self.session = session
        self.asked_at = boot_now()


class Pool:
    """The sessions, grants and places that the stores of one client share in one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.mutex = RealClock.mutex()
        #: By the time-out asked for, in ms.
        self.sessions: dict[int, Session] = {}
        #: By the path of the holder's node.
        self.grants: dict[str, Grant] = {}
        #: By the name and the claim of the waiter.
        self.places: dict[tuple[str, str], Place] = {}
        #: Who listens for hints, by the address given as ``wake``.
        self.watches: dict[str, set[PipeWatch]] = {}
        #: Since when a name has been seen free with this node at the front of its line, by the zxid that made the node.
        self.fronts: dict[int, float] = {}
        #: When which zxid had been reached, the oldest first: what was written with no greater one was written before.
        self.heard: tuple[tuple[float, int], ...] = ()
        #: The server's Unix time less this machine's boot time, for people; None before the server told its time.
        self.server_ahead_s: float | None = None
        self._users = 0
        self._bell: Bell | None = None

    # -- who uses it ----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        with self.mutex:
            self._users += 1

    def leave(self) -> None:
        """One store less. After the last the sessions are closed, unless leases are left whose time is not over."""
        with self.mutex:
            self._users -= 1
            if self._users or False in [grant.session.over for grant in list(self.grants.values())]:
                return
            sessions = list(self.sessions.values())
            self.sessions.clear()
            self.places.clear()
            if self._bell is not None:
                self._bell.ring()
        self._close(sessions, GOODBYE_S)

    def _close(self, sessions: Iterable[Session], wait_s: float) -> None:
        gates = []
        for session in sessions:
            gate = RealClock.gate()

            def close(session: Session = session, gate: Any = gate) -> None:
                session.stop()
                gate.open()

            try:
                RealClock.spawn("dibs-zookeeper-close", close)
            except RuntimeError:  # the interpreter is ending and starts no threads: the sessions expire
                return
            gates.append(gate)
        end = boot_now() + wait_s
        for gate in gates:
            gate.wait(max(0.0, end - boot_now()))

    # -- sessions -------------------------------------------------------------------------------------------------

    @contextmanager
    def asking(
        self, request: Acquire | Transfer, permit: str, path: str, deadline: Deadline, *, of_ledger: bool = False
    ) -> Iterator[Grant]:
        """A grant to be asked for in this block.

        Noted before it is sent, so that the warden ends it, too, when nobody hears that it was granted.
        """
        words = {"holder": request.holder, "info": request.info, "ttl": request.ttl}
        grant = Grant(permit, path, self.session_for(request.ttl, deadline), words)
        grant.of_ledger = of_ledger
        self.grants[path] = grant
        try:
            yield grant
        finally:
            if grant.told is None and grant.until == FOREVER:
                grant.until = boot_now() + request.ttl

    def session_for(self, ttl: float, deadline: Deadline, *, exactly: bool = True) -> Session:
        """The session whose leases last ``ttl`` seconds; not ``exactly``: any that is long enough."""
        settings = self.settings
        wanted = ceil(ttl * 1000 - 1e-6) + settings.slack_ms
        session = self.sessions.get(wanted)
        if session is None or session.over:
            session = self._another(min(wanted, settings.session_max_ms), exactly)
        if not session.connected:
            return session.ready(deadline)
        session.used_at = boot_now()
        return session

    def any_session(self, deadline: Deadline) -> Session:
        """A session for what is the same in each: the longest, as a short one loses its connection the sooner."""
        connected = [session for session in list(self.sessions.values()) if session.connected]
        if not connected:
            return self.session_for(ANY_S, deadline, exactly=False)
        session = max(connected, key=lambda session: session.timeout_ms)
        session.used_at = boot_now()
        return session

    def _longer(self, timeout_ms: int) -> list[Session]:
        return [session for ms, session in self.sessions.items() if ms >= timeout_ms and not session.over]

    def _another(self, timeout_ms: int, exactly: bool) -> Session:
        with self.mutex:
            longer = self._longer(timeout_ms)
            if longer and (not exactly or len(self.sessions) >= SESSIONS_MAX):
                return min(longer, key=lambda session: session.timeout_ms)
            if len(self.sessions) >= SESSIONS_MAX:
                timeout_ms = self.settings.session_max_ms  # long enough for every ttl
            session = self.sessions.get(timeout_ms)
            if session is None or session.over:
                if session is not None:
                    self._close([session], 0.0)
                session = self.sessions[timeout_ms] = Session(self.settings, timeout_ms)
            if self._bell is None:
                self._bell = begin(RealClock(), "dibs-zookeeper", self._watch_over)
            return session

    # -- the warden -----------------------------------------------------------------------------------------------

    def _watch_over(self, bell: Bell) -> None:
        """The warden: touches sessions, ends what nobody renewed, closes what nobody needs."""
        while True:
            try:
                pause = self._round()
            except Exception:  # noqa: BLE001 - whatever it was: without a warden nothing would ever end
                pause = OWED_S
            with self.mutex:
                if not self.sessions:
                    self._bell = None
                    break
            bell.wait(pause)
        bell.close()

    def _round(self) -> float:
        """What the warden does at every look; returns how long until the next."""
        touch_s = TOUCH_TICKS * self.settings.tick_ms / 1000
        now = boot_now()
        with self.mutex:
            # Copies: the lanes add and remove without asking for the mutex.
            grants = list(self.grants.values())
            forgotten = [place for place in list(self.places.values()) if place.asked_at < now - FORGOTTEN_S]
            for place in forgotten:
                self.places.pop((place.name, place.claim), None)
            for grant in grants:
                if grant.session.over:
                    self.grants.pop(grant.path, None)
            closing = self._unneeded(
                now, {grant.session for grant in grants} | {place.session for place in list(self.places.values())}
            )
            if not self._users and not self.grants:
                closing += self.sessions.values()
                self.sessions.clear()
            living = list(self.sessions.values())
        self._close(closing, 0.0)
        for session in living:
            session.touch()
        for place in forgotten:
            if place.session.connected:
                place.session.multi([("delete", place.path)])
        due = [grant for grant in grants if grant.until <= now and not grant.session.over][:DELETE_MAX]
        for grant in due:
            self._end(grant)
        next_end = min((grant.until for grant in grants if grant.until > now), default=now + touch_s)
        return OWED_S if due else max(0.0, min(touch_s, next_end - boot_now()))

    def _unneeded(self, now: float, used: set[Session]) -> list[Session]:
        """Take out the sessions that are over, or idle and empty. The caller holds the mutex."""
        found = [
            (ms, session)
            for ms, session in self.sessions.items()
            if session.over or (session not in used and session.used_at < now - IDLE_S)
        ]
        for ms, _ in found:
            del self.sessions[ms]
        return [session for _, session in found]

    def _end(self, grant: Grant) -> None:
        """Delete the nodes of a grant whose time is over; until the server has said so, it is asked again."""
        owed = grant.ending
        if owed is not None:
            if not owed.ready():
                return
            try:
                answer(owed, self.settings.root, Deadline(RealClock(), 0.0))
            except DibsError:
                pass  # the connection was lost, say: once more
            else:  # done, or gone already
                self.forget(grant)
                return
        with self.mutex:
            if owed is None and (grant.until > boot_now() or not grant.session.connected):
                return  # it was extended just now, or has to wait
            grant.ending = grant.session.multi(grant.deletion())

    def forget(self, grant: Grant | None) -> None:
        """The server knows no such grant any more."""
        with self.mutex:
            if grant is not None and self.grants.get(grant.path) is grant:
                del self.grants[grant.path]

    # -- for people -----------------------------------------------------------------------------------------------

    def ends(self, renewed_at: float, lasts: float) -> tuple[float, float]:
        """When a lease ends that was renewed then (Unix time by the server's clock), and in how many seconds.

        The server tells its time only with an answer to a write; before the first, the ttl is the most it can be.
        """
        ahead, ends_at = self.server_ahead_s, renewed_at + lasts
        return ends_at, lasts if ahead is None else min(lasts, max(0.0, ends_at - ahead - boot_now()))

    # -- hints ----------------------------------------------------------------------------------------------------

    def alarm(self, place: Place) -> Callable[[Any], None]:
        """What to leave with the server: it is called when what the waiter waits for has changed."""

        def ring(_event: Any) -> None:
            place.armed = None
            for watch in list(self.watches.get(place.wake, ())):
                watch.tell(place.name)

        return ring

    def listen(self, wake: str) -> PipeWatch:
        watch = PipeWatch(self, wake)
        with self.mutex:
            self.watches.setdefault(wake, set()).add(watch)
        return watch

    def unlisten(self, wake: str, watch: PipeWatch) -> None:
        with self.mutex:
            listeners = self.watches.get(wake, set())
            listeners.discard(watch)
            if not listeners:
                self.watches.pop(wake, None)


class PipeWatch:
    """The names whose waiters of one client were rung for. Kazoo's threads tell, the session's waiting thread reads."""

    interval_s: float | None = None

    def __init__(self, pool: Pool, wake: str) -> None:
        self._pool = pool
        self._wake = wake
        self._mutex = RealClock.mutex()
        self._told: set[str] = set()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)

    def fileno(self) -> int:
        return self._read_fd

    def tell(self, name: str) -> None:
        with self._mutex:
            if self._write_fd >= 0 and name not in self._told:
                if not self._told:
                    os.write(self._write_fd, b"!")
                self._told.add(name)

    def changed(self, names: Collection[str]) -> Collection[str]:
        with self._mutex:
            told, self._told = self._told, set()
            if told:
                os.read(self._read_fd, 16)
        return told

    def close(self) -> None:
        self._pool.unlisten(self._wake, self)
        with self._mutex:
            fds, self._read_fd, self._write_fd = (self._read_fd, self._write_fd), -1, -1
        for fd in {*fds} - {-1}:
            os.close(fd)
