"""``takeover="observe"`` on real servers whose wall clock is set while leases are held: nobody is let in by that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import dibs
from dibs.clock import Deadline, RealClock
from dibs.errors import InvalidOption, StoreUnavailable, Unsupported
from dibs.observing import FAR_S, LOOKS_MAX, SIGHTS_MAX, Observing, observing
from dibs.store import RELEASED, Acquire, Capabilities, Granted, Held, Release, StoreAddress, StoredLease
from dibs.stores.memory import CAPABILITIES, MemoryStore, Shelf
from tests.command_line import Dibs, until
from tests.servers.redis import RedisServer
from tests.servers.stepped import SteppedMariaDB, SteppedPostgres

TTL_S = 2.0
HOUR_S = 3600.0


class Place(NamedTuple):
    url: str
    #: Sets the clock on which leases are kept.
    step: Callable[[float], None]

    def client(self, takeover: str = "observe") -> dibs.Client:
        return dibs.connect(self.url, takeover=takeover, namespace=takeover, ttl=TTL_S)


class Holder(NamedTuple):
    """Another process, the token of what it holds, and what it says next."""

    pid: int
    token: int
    says: Callable[[], str]


class SteppedRedis:
    """A Redis whose clock seems to be set: what is kept there is moved the other way.

    (Its allocator asks for the time before libfaketime is ready to answer.)
    """

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def step(self, seconds: float) -> None:
        with self._server.client() as client:
            for key in client.scan_iter("*:lease:*"):
                if client.hget(key, "expires_at") is not None:
                    client.hset(key, "expires_at", f"{float(client.hget(key, 'expires_at') or 0) - seconds:.6f}")


@pytest.fixture(scope="module")
def stepped_postgres() -> Iterator[SteppedPostgres]:
    with SteppedPostgres() as server:
        yield server


@pytest.fixture(scope="module")
def stepped_mysql() -> Iterator[SteppedMariaDB]:
    with SteppedMariaDB() as server:
        yield server


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Dibs]:
    made = Dibs(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=["postgres", "mysql", "redis"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "postgres":
        postgres: SteppedPostgres = request.getfixturevalue("stepped_postgres")
        return Place(postgres.create_database(), postgres.step)
    if request.param == "mysql":
        mysql: SteppedMariaDB = request.getfixturevalue("stepped_mysql")
        return Place(f"{mysql.create_database()}?driver=pymysql", mysql.step)
    redis: RedisServer = request.getfixturevalue("redis")
    return Place(request.getfixturevalue("redis_url"), SteppedRedis(redis).step)


def test_by_default_a_step_forward_lets_the_next_one_in(place: Place) -> None:
    """The control: this is what is not promised, and what the option is for."""
    with place.client("expiry") as mine, place.client("expiry") as theirs:
        lease = mine.lock("job", ttl=60).acquire()  # it is told of it by its first renewal
        assert theirs.lock("job").acquire(timeout=0) is None
        place.step(HOUR_S)
        second = theirs.lock("job", ttl=60).acquire(timeout=0)
        assert second is not None
        assert lease is not None
        assert lease.held
        assert second.held, "two hold it, each by its own clock"
        second.release()
        with pytest.raises(dibs.LeaseLost):
            lease.renew()


def test_no_step_lets_anybody_in(place: Place) -> None:
    """Forward, back, far, and several times while others wait: the holder keeps it, and goes on renewing."""
    with place.client() as mine, place.client() as theirs:
        with mine.lock("job") as lease:
            for seconds in (HOUR_S, -2 * HOUR_S, 365 * 24 * HOUR_S, -1.5, -364 * 24 * HOUR_S):
                place.step(seconds)
                assert theirs.lock("job").acquire(timeout=1.6 * TTL_S) is None, f"after a step of {seconds} s"
                lease.check()
                lease.renew()
        with theirs.lock("job", timeout=5) as second:
            assert second.fencing_token > lease.fencing_token


@contextmanager
def holder(place: Place) -> Iterator[Holder]:
    """A process that holds ``job`` and says its token, and that it is lost when it is; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, place.url, str(TTL_S)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield Holder(process.pid, int(process.stdout.readline()), process.stdout.readline)
    finally:
        process.kill()
        process.communicate()


_HOLDER = """
import sys, dibs
client = dibs.connect(sys.argv[1], takeover="observe", namespace="observe", ttl=float(sys.argv[2]))
lease = client.lock("job").acquire()
print(lease.fencing_token, flush=True)
lease.lost.wait(60)
print("held" if lease.held else "lost", flush=True)
"""


def test_who_dies_is_followed_whatever_the_clock_says(place: Place) -> None:
    """kill -9 of a holder: the next one has it after little more than a ttl, also when the clock went back."""
    with place.client() as client:
        with holder(place) as other:
            assert client.lock("job").acquire(timeout=2 * TTL_S) is None
        died = time.monotonic()
        place.step(-HOUR_S)
        lease = client.lock("job").acquire(timeout=10)
        took = time.monotonic() - died
        assert lease is not None
        assert lease.fencing_token > other.token
        assert took < 1.5 * TTL_S + 2, f"taken over after {took:.1f} s"
        lease.release()


def test_a_stopped_holder_is_not_believed(place: Place) -> None:
    """Who stands still for longer than its ttl has lost the lease when it goes on, and knows it."""
    with place.client() as client, holder(place) as other:
        os.kill(other.pid, signal.SIGSTOP)
        lease = client.lock("job").acquire(timeout=10)
        assert lease is not None
        assert lease.fencing_token > other.token
        os.kill(other.pid, signal.SIGCONT)
        assert other.says() == "lost\n"
        lease.check()
        lease.release()


def test_the_command_line_takes_it_from_the_url(place: Place, shell: Dibs) -> None:
    """``?takeover=observe`` is all that `dibs run` needs, and `dibs ls` shows what a user expects."""
    shell.env["DIBS_URL"] = f"{place.url}{'&' if '?' in place.url else '?'}takeover=observe"
    first = shell.start("run", "--ttl", "1", "backup", "--", "sleep", "60")
    listed = until(lambda: json.loads(shell("ls", "--json").stdout))
    assert [(row["name"], row["holder"].count("/")) for row in listed] == [("backup", 2)]
    assert "ttl=" not in listed[0]["holder"]
    assert 0 < listed[0]["expires_in"] < 1.1
    place.step(HOUR_S)
    again = shell("run", "--ttl", "1", "--timeout", "3", "backup", "--", "true")
    assert (again.returncode, again.stdout) == (75, ""), again
    first.kill()
    first.wait()
    again = shell("run", "--ttl", "1", "--timeout", "20", "backup", "--", "true")
    assert (again.returncode, again.stderr) == (0, ""), again


def test_who_does_not_watch_is_told_how_long_it_would_have_to_wait(redis_url: str) -> None:
    """A client that does not say it gets nothing that is watched, and the message shows that something is odd."""
    with dibs.connect(redis_url, takeover="observe") as mine, dibs.connect(redis_url) as theirs:
        with mine.lock("job"), pytest.raises(dibs.LockTimeout, match="unless renewed, it is free in 60 years"):
            theirs.lock("job", timeout=0).__enter__()
        with theirs.lock("job", timeout=0) as lease:
            assert mine.lock("job").acquire(timeout=0) is None
            lease.check()


def test_a_pause_stops_those_who_watch_and_those_who_do_not(redis_url: str) -> None:
    """It is kept where all clients of a namespace look."""

    def can_have(client: dibs.Client) -> bool:
        lease = client.lock("job").acquire(timeout=0)
        return lease is not None and lease.release()

    with dibs.connect(redis_url, takeover="observe") as mine, dibs.connect(redis_url) as theirs:
        for operator in (mine, theirs):
            operator.pause("job", note="moving")
            assert until(lambda: not can_have(mine) and not can_have(theirs))
            operator.resume("job")
            assert until(lambda: can_have(mine) and can_have(theirs))


def test_a_command_that_does_not_wait_is_refused(shell: Dibs) -> None:
    """It would be a new watcher each time, and a holder that died would keep the name for ever."""
    shell.env["DIBS_URL"] = "postgresql://127.0.0.1:1/none?takeover=observe"
    for how in (["--nowait"], ["--on-busy", "skip"], ["--timeout", "31"], ["--timeout", "2", "--ttl", "2"]):
        done = shell("run", *how, "backup", "--", "true")
        assert done.returncode == 64
        assert "give --timeout more than" in done.stderr


@pytest.mark.parametrize(
    "url", ["sqlite:///{0}/locks.db", "etcd://127.0.0.1:1", "zookeeper://127.0.0.1:1", "memcached://h:1"]
)
def test_where_no_clock_can_be_set_there_is_nothing_to_do(url: str, tmp_path: object) -> None:
    """A program that says it everywhere runs everywhere; its semaphores do, too."""
    client = dibs.connect(url.format(tmp_path), takeover="observe")
    try:
        assert not client._desk.address.observed
        if client._desk.address.capabilities.permits:
            client.semaphore("pool", 3)
    finally:
        client.close()


def test_a_store_that_can_do_neither_says_so() -> None:
    """One that somebody else wrote, say."""

    def never() -> MemoryStore:
        raise AssertionError("it was opened")

    capabilities: Capabilities = CAPABILITIES._replace(store="Foo", steady=False, observe=False)
    address = StoreAddress("foo://", capabilities, never)
    with pytest.raises(Unsupported, match="leases on Foo cannot be watched"):
        observing(address, "observe", time.monotonic)
    with pytest.raises(InvalidOption, match='takeover is "expiry" or "observe", not None'):
        observing(address, None, time.monotonic)


# -- what a watcher does, look by look --------------------------------------------------------------------------------


class Counted(MemoryStore):
    """Counts what it is asked for, and fails when it is told to."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.looks = self.ends = 0
        self.looks_fail = self.ends_fail = False

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        self.looks += 1
        if self.looks_fail:
            raise StoreUnavailable("no answer")
        return super().leases(first, before, deadline)

    def end_unchanged(self, name: str, fencing_token: int, expires_at: float, deadline: Deadline) -> bool:
        self.ends += 1
        if self.ends_fail:
            raise StoreUnavailable("no answer")
        return super().end_unchanged(name, fencing_token, expires_at, deadline)


class Watcher:
    """Somebody who asks for names that others have, on a clock that a test moves."""

    def __init__(self, names: int, ttl: float = 10.0) -> None:
        self.now = 0.0
        shelf = Shelf(now=lambda: 5.0)  # the store's own clock does not move at all
        holder = observing(StoreAddress("", CAPABILITIES, lambda: MemoryStore(shelf)), "observe", lambda: 0.0).open()
        self.names = [f"default:{n}" for n in range(names)]
        self.deadline = Deadline(RealClock(), float("inf"))
        holder.act([Acquire(name, "dead-1", ttl, "dead") for name in self.names], self.deadline)
        self.store = Counted(shelf)
        self.observing = Observing(self.store, lambda: self.now)

    def asks(self) -> list[object]:
        asked = [Acquire(name, "me-1", 10.0, "me") for name in self.names]
        return list(self.observing.act(asked, self.deadline))


def test_a_live_lease_costs_a_look_now_and_then() -> None:
    """Who asks often looks four times in a ttl, and ends nothing before it and the allowance for clocks are over."""
    watcher = Watcher(1)
    while watcher.now < 10.4:
        (outcome,) = watcher.asks()
        assert isinstance(outcome, Held)
        assert outcome.holder == "dead"
        assert outcome.free_in == pytest.approx(10.5 - watcher.now)
        watcher.now += 0.1
    assert (watcher.store.looks, watcher.store.ends) == (4, 0)
    watcher.now = 10.5
    assert [type(outcome) for outcome in watcher.asks()] == [Granted]
    assert watcher.store.ends == 1


def test_many_names_are_looked_at_in_turns() -> None:
    """A call looks at a hundred names at most; all of them are had in the end."""
    watcher = Watcher(2 * LOOKS_MAX + 1)
    for looked in (LOOKS_MAX, 2 * LOOKS_MAX, 2 * LOOKS_MAX + 1, 2 * LOOKS_MAX + 1):
        assert {type(outcome) for outcome in watcher.asks()} == {Held}
        assert watcher.store.looks == looked
    watcher.now = 10.5
    had = [sum(type(outcome) is Granted for outcome in watcher.asks()) for _ in range(3)]
    assert had == [LOOKS_MAX, 2 * LOOKS_MAX, 2 * LOOKS_MAX + 1]


def test_a_look_that_fails_harms_nobody() -> None:
    """After a failed look the answers stand; it is made again. After a failed end nothing was asked for."""
    watcher = Watcher(1)
    watcher.store.looks_fail = True
    (outcome,) = watcher.asks()
    assert isinstance(outcome, Held)
    assert outcome.free_in < 1
    watcher.store.looks_fail = False
    watcher.asks()
    watcher.now, watcher.store.ends_fail = 10.5, True
    with pytest.raises(StoreUnavailable) as failed:
        watcher.asks()
    assert not failed.value.maybe_applied
    watcher.store.ends_fail = False
    assert [type(outcome) for outcome in watcher.asks()] == [Granted]


def test_a_release_does_not_wait_for_an_end() -> None:
    """It is sent at once, also where the end of another name's lease would have no answer."""
    watcher = Watcher(1)
    watcher.asks()
    watcher.now, watcher.store.ends_fail = 10.5, True
    name = watcher.names[0]
    mixed = (Acquire(name, "me-1", 10.0, "me"), Release(name, "dead-1"))
    held, released = watcher.observing.act(mixed, watcher.deadline)
    assert isinstance(held, Held)
    assert released == RELEASED


def test_sights_are_forgotten_before_they_are_too_many() -> None:
    """A client that looks at everything keeps ten thousand."""
    watcher = Watcher(SIGHTS_MAX + 5)
    assert len(watcher.observing.leases("", "z", watcher.deadline)) == SIGHTS_MAX + 5
    assert len(watcher.observing._sights) == SIGHTS_MAX


def test_a_holder_without_a_ttl_is_watched_for_the_longest() -> None:
    """Nobody writes such a lease; whoever did would not be taken over too soon."""
    watcher = Watcher(1)
    name = "default:odd"
    watcher.store.act([Acquire(name, "odd-1", FAR_S, "by hand")], watcher.deadline)
    (outcome,) = watcher.observing.act([Acquire(name, "me-1", 10.0, "me")], watcher.deadline)
    assert isinstance(outcome, Held)
    assert outcome.holder == "by hand"
    assert outcome.free_in == pytest.approx(31.5 * 24 * 3600)
