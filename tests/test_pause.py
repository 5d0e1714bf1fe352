"""Pauses beside what the conformance cases show: lost answers, stopped processes, reboots, reads, logs, other faces."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import dibs
from dibs.ask import Ask
from dibs.client import Client
from dibs.connecting import locate
from dibs.desk import DEFAULTS, Desk
from dibs.errors import StoreUnavailable
from dibs.pauses import PAUSES_FRESH_S
from dibs.store import RELEASED, Acquire, Renew, Request, Store
from tests.between import Between, Holdup
from tests.test_api import logged
from tests.test_once import Machine
from tests.waits import eventually


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


@pytest.fixture
def operator(url: str) -> Iterator[dibs.Client]:
    with dibs.connect(url) as client:
        yield client


class Reads:
    """A store that counts how often its leases are read, and fails while it is told to."""

    def __init__(self, url: str) -> None:
        self.address, _ = locate(url)
        self.count = 0
        self.error: Exception | None = None
        self.pause: Callable[[], object] = lambda: None
        self.sent: list[Request] = []

    def client(self, **options: Any) -> dibs.Client:
        address = self.address._replace(open=lambda: _Reading(self, self.address.open()))
        return Client(Desk(address, **{"info": None, **DEFAULTS, **options}))


class _Reading:
    def __init__(self, owner: Reads, store: Store) -> None:
        self._owner = owner
        self._store = store

    def leases(self, *args: Any) -> Any:
        self._owner.count += 1
        if self._owner.error is not None:
            raise self._owner.error
        rows = self._store.leases(*args)
        self._owner.pause()
        return rows

    def act(self, requests: Sequence[Request], deadline: Any) -> Any:
        self._owner.sent += requests
        return self._store.act(requests, deadline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


# -- what is sent, and what is not ------------------------------------------------------------------------------------


def test_a_busy_client_reads_the_pauses_once_a_second(url: str) -> None:
    """A thousand acquires cost as many reads as seconds they take; releases and renewals cost none."""
    reads = Reads(url)
    with reads.client() as client:
        began = time.monotonic()
        for _ in range(1000):
            lease = client.lock("x").acquire(timeout=0)
            assert lease is not None
            lease.release()
        took = time.monotonic() - began
        assert 1 <= reads.count <= 1 + took / PAUSES_FRESH_S
        lease = client.lock("x").acquire(timeout=0)
        assert lease is not None
        before = reads.count
        time.sleep(1.1 * PAUSES_FRESH_S)
        lease.renew()
        lease.release()
        assert reads.count == before


def test_an_acquire_whose_answer_was_lost_is_asked_again(url: str, operator: dibs.Client) -> None:
    """What may have been granted before a pause is sent again in spite of it: else a grant would belong to nobody."""
    between = Between(url)
    with between.client() as client:
        client.ping()
        lost: list[int] = []
        again = Holdup(lambda requests: bool(lost) and any(isinstance(r, Acquire) for r in requests))

        def lose(requests: Sequence[Request]) -> None:
            if not lost and any(isinstance(r, Acquire) for r in requests):
                lost.append(1)
                raise StoreUnavailable("the answer was lost")

        between.after, between.before = lose, again
        got: list[Any] = []
        waiter = _thread(lambda: got.append(client.lock("x").acquire(timeout=20)))
        assert again.reached.wait(20)
        operator.pause("x", ttl=60)
        again.go_on()
        waiter.join(20)
        record = operator.holder("x")
        assert record is not None
        assert got[0].fencing_token == record.fencing_token
        got[0].release()


@contextmanager
def unreadable(url: str) -> Iterator[tuple[Reads, dibs.Client, dibs.Lease]]:
    """A client that holds a lease, and whose list of pauses is too old and cannot be read anew."""
    reads = Reads(url)
    with reads.client(patience=0.2, ttl=5) as client:
        lease = client.lock("held").acquire(timeout=0)
        assert lease is not None
        time.sleep(1.1 * PAUSES_FRESH_S)
        reads.sent.clear()
        reads.error = StoreUnavailable("cannot be read", maybe_applied=False)
        yield reads, client, lease


def test_when_the_pauses_cannot_be_read_nothing_is_granted(url: str) -> None:
    """A failing read is told as the store's error, and no acquire was sent; a lease that is held goes on."""
    with unreadable(url) as (reads, client, lease):
        with pytest.raises(StoreUnavailable, match="cannot be read"):
            client.lock("x").acquire(timeout=0)
        lease.renew()
        lease.release()
        assert not any(isinstance(request, Acquire) for request in reads.sent)
        assert any(isinstance(request, Renew) for request in reads.sent)
        reads.error = None
        with client.lock("x", timeout=5):
            pass


def test_who_gives_back_does_not_wait_for_the_pauses(url: str) -> None:
    """In one call with an acquire, a release is sent though the pauses cannot be read, and the acquire is not."""
    with unreadable(url) as (reads, client, lease):
        session = client._desk.session()
        back = Ask(session.keeper.release_of(lease._hold), session.clock.now())  # it is given up when one call fails
        wish = session.wish("default:x", client.lock("x")._core.terms, None, False)
        with session.mutex:
            session.lane.pending.releases_only = True  # the next call takes everything
            session.lane.put(wish)
            session.lane.put(back)
        assert session.wait(back, 5)
        assert back.outcome == RELEASED
        assert session.wait(wish, 5)
        assert "cannot be read" in str(wish.error)
        assert not any(isinstance(request, Acquire) for request in reads.sent)
        reads.error = None
        with pytest.raises(dibs.LeaseLost):
            lease.release()


def test_a_pause_is_not_told_to_be_in_force_before_it_is(url: str) -> None:
    """Closed while it waits until everybody knows of the pause, a client says that this will be a little later."""
    client = dibs.connect(url)
    errors: list[BaseException] = []

    def pause() -> None:
        try:
            client.pause("x", ttl=60)
        except StoreUnavailable as error:
            errors.append(error)

    operator = _thread(pause)
    with dibs.connect(url) as other:
        eventually(lambda: bool(other.pauses()), "written")
        client.close()
        operator.join(10)
        assert [str(error) for error in errors] == [
            "this dibs client is closed; 'x' is paused, and all know of it in 1.15 s"
        ]
        assert other.resume("x")


def test_a_list_that_was_read_long_ago_is_read_again_before_it_counts(url: str, operator: dibs.Client) -> None:
    """A client that is stopped between reading the pauses and sending obeys one that was made meanwhile."""
    reads = Reads(url)
    with reads.client() as client:

        def pause() -> None:
            reads.pause = lambda: None
            operator.pause("x", ttl=60)

        reads.pause = pause
        assert client.lock("x").acquire(timeout=0) is None
        assert reads.count == 2


def test_a_process_that_was_stopped_obeys(url: str, operator: dibs.Client) -> None:
    """A process stopped before a pause and continued after it is granted nothing, however busy it was."""
    program = """
import sys, dibs
with dibs.connect(sys.argv[1]) as client:
    for line in sys.stdin:
        lease = client.lock("x").acquire(timeout=0)
        if lease: lease.release()  # before it is stopped: whoever is stopped while it writes keeps SQLite's file locked
        print("granted" if lease else "refused", flush=True)
"""
    command = [sys.executable, "-c", program, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("ask\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        try:
            assert [ask(), ask()] == ["granted"] * 2
            os.kill(process.pid, signal.SIGSTOP)
            operator.pause("x", ttl=60)
            os.kill(process.pid, signal.SIGCONT)
            assert [ask(), ask()] == ["refused"] * 2
            operator.resume("x")
            eventually(lambda: ask() == "granted", "it is granted nothing after the resume", 5)
        finally:
            process.kill()


def test_a_busy_fleet_stops(url: str, operator: dibs.Client) -> None:
    """Of many threads and clients that take a name all the time, none is granted it once pause() has returned."""
    over: list[int] = []
    granted_at: list[float] = []
    with dibs.connect(url) as one, dibs.connect(url) as two:

        def work(client: dibs.Client) -> None:
            while not over:
                lease = client.lock("x").acquire(timeout=0.05)
                if lease is not None:
                    granted_at.append(time.monotonic())
                    lease.release()

        threads = [_thread(lambda c=c: work(c)) for c in (one, two) for _ in range(3)]  # type: ignore[misc]
        eventually(lambda: len(granted_at) > 10, "nobody is granted anything")
        operator.pause("x", ttl=60)
        paused_at = time.monotonic()
        time.sleep(3.0)
        resumed_at = time.monotonic()
        operator.resume("x")
        eventually(lambda: granted_at[-1] > resumed_at, "nobody is granted anything after the resume")
        over.append(1)
        for thread in threads:
            thread.join(20)
    # A request may have been under way, and a thread needs its turn to write down what it was granted.
    assert [at - paused_at for at in granted_at if paused_at + 1.0 < at < resumed_at] == []


# -- who is told ------------------------------------------------------------------------------------------------------


def test_waiters_say_once_in_the_log_why_they_wait(
    url: str, operator: dibs.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A waiting program logs who paused the name and why, once; what tries once has it in its error."""
    caplog.set_level(logging.WARNING, "dibs")
    operator.pause("x", "OPS-7", ttl=60, by="ada")
    with dibs.connect(url) as client:
        for _ in range(2):
            assert client.lock("x").acquire(timeout=1.5) is None
        eventually(lambda: logged(caplog), "nothing was logged")
    (text,) = logged(caplog)
    assert text.startswith("'x' is paused by ada since ")
    assert text.endswith(": OPS-7")


def test_tasks_wait_in_spite_of_a_pause(url: str) -> None:
    """asyncio: a task waits while its name is paused, others go on, and it is served after the resume."""

    async def main() -> None:
        async with dibs.connect_async(url) as client, dibs.connect_async(url) as other:
            await other.pause("x", ttl=60)
            waiter = asyncio.create_task(client.lock("x").acquire())
            async with client.lock("y", timeout=5):
                pass
            cancelled = asyncio.create_task(client.lock("x").acquire())
            await asyncio.sleep(0.2)
            cancelled.cancel()
            assert await asyncio.wait([waiter], timeout=1) == (set(), {waiter})
            await other.resume("x")
            lease = await asyncio.wait_for(waiter, 10)
            assert lease is not None
            await lease.release()
            assert [pause.name for pause in await other.pauses()] == []

    asyncio.run(main())


def test_a_client_that_closes_while_its_name_is_paused(url: str, operator: dibs.Client) -> None:
    """close() refuses who waits for a paused name at once, and leaves no place in line behind."""
    operator.pause("x", ttl=60)
    client = dibs.connect(url)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.lock("x").acquire()
        except StoreUnavailable as error:
            errors.append(error)

    waiter = _thread(wait)
    time.sleep(0.3)
    client.close()
    waiter.join(10)
    assert "closed" in str(errors[0])
    operator.resume("x")
    with operator.lock("x", timeout=1):
        pass


# -- how long it lasts ------------------------------------------------------------------------------------------------


def test_a_pause_outlives_a_reboot_on_sqlite(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A maintenance window in which the machine is restarted goes on afterwards, for the rest of its time."""
    machine = Machine(monkeypatch)
    with dibs.connect(sqlite_url) as before:
        before.pause("*", "new kernel", ttl=3600)
        machine.reboot(600)
        with dibs.connect(sqlite_url) as after:
            (pause,) = after.pauses()
            assert pause.expires_in == pytest.approx(3000, abs=30)
            assert after.lock("x").acquire(timeout=0) is None
        machine.reboot(3100)
        with dibs.connect(sqlite_url) as after:
            assert after.pauses() == []
            with after.lock("x", timeout=5):
                pass


def test_two_who_pause_at_once_leave_one_pause(url: str) -> None:
    """Several operators who pause one name at the same moment end with a pause that one resume ends."""
    with dibs.connect(url) as one, dibs.connect(url) as two:
        threads = [_thread(lambda c=c, n=n: c.pause("x", n, ttl=60)) for c, n in ((one, "a"), (two, "b"))]  # type: ignore[misc]
        for thread in threads:
            thread.join(20)
        assert [pause.name for pause in one.pauses()] == ["x"]
        assert two.resume("x")
        assert one.pauses() == []


def test_pauses_are_not_purged(url: str, operator: dibs.Client) -> None:
    """A purge of everything that is free leaves a pause in force; afterwards nothing is in the way of the next."""
    operator.pause("x", "why", ttl=60)
    operator.purge(0)
    assert [pause.note for pause in operator.pauses()] == ["why"]
    operator.resume("x")
    operator.purge(0)
    operator.pause("x", "again", ttl=60)
    assert [pause.note for pause in operator.pauses()] == ["again"]


def _thread(run: Callable[[], object]) -> Any:
    import threading

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_pause_that_somebody_has_scribbled_over_is_none(tmp_path: Path) -> None:
    """It could not be told what it pauses; and no client fails by it."""
    file = tmp_path / "dibs.db"
    with dibs.connect(f"sqlite:///{file}") as client:
        client.pause("x")
        with closing(sqlite3.connect(file)) as connection, connection:
            assert connection.execute("UPDATE dibs_lease SET info = 'scribbles' WHERE info IS NOT NULL").rowcount == 1
    with dibs.connect(f"sqlite:///{file}") as client, client.lock("x", timeout=0), client.lock("y", timeout=0):
        assert client.pauses() != []
