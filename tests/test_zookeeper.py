"""What is particular to ZooKeeper: sessions and their ends, logins, outages, hands that meddle, and other clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.security import make_digest_acl

import dibs
from dibs.clock import Deadline
from dibs.connecting import locate
from dibs.errors import StoreUnavailable
from dibs.steps import run as run_steps
from dibs.store import ANY_SLOT, LINE_GRACE_S, RELEASED, Acquire, Granted, Held, Release, Renew, Renewed
from dibs.stores import zookeeper as store_module
from dibs.stores import zookeeper_flights, zookeeper_line, zookeeper_link, zookeeper_pool
from dibs.stores.zookeeper_link import Session
from dibs.stores.zookeeper_pool import Place
from dibs.testing.conformance import Run, runs
from dibs.trust import DRIFT
from tests.chaos.proxy import Proxy
from tests.servers.process import START_LIMIT_S
from tests.servers.zookeeper import Ensemble, ZooKeeperServer, tls_settings
from tests.waits import eventually, soon


def root_of(url: str) -> str:
    return "/" + url.partition("://")[2].partition("/")[2].partition("?")[0]


@pytest.fixture
def client(zookeeper_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(zookeeper_url) as client:
        yield client


@pytest.fixture
def by_hand(zookeeper: ZooKeeperServer) -> Iterator[KazooClient]:
    """The server as an operator sees it."""
    yield from hands_on(zookeeper)


def hands_on(server: ZooKeeperServer) -> Iterator[KazooClient]:
    hands = KazooClient(f"127.0.0.1:{server.port}")
    hands.start()
    yield hands
    hands.stop()
    hands.close()


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_a_released_name_leaves_nothing(client: dibs.Client, zookeeper_url: str, by_hand: KazooClient) -> None:
    """A lease is a directory and a node in it, which people can read; after the release both are gone."""
    root = root_of(zookeeper_url)
    with client.lock("digest/42", info={"why": "test"}) as lease:
        assert by_hand.get_children(f"{root}/lease") == ["default:digest%2F42,1"]
        data, stat = by_hand.get(f"{root}/lease/default:digest%2F42,1")
        assert lease.holder.encode() in data
        assert b"test" in data
        assert stat.czxid == lease.fencing_token
    assert by_hand.get_children(f"{root}/lease") == []
    assert by_hand.get_children(f"{root}/line") == []
    assert client.purge(0) == 0


def test_names_cannot_leave_their_place(client: dibs.Client, zookeeper_url: str, by_hand: KazooClient) -> None:
    """Dots, slashes, percent signs and reserved words are letters of a name."""
    names = [".", "..", "/", "a/../b", "zookeeper", "%2F", "a,1", "é" * 100, "\ue000\uffff"]
    leases = [client.lock(name).acquire(timeout=0) for name in names]
    assert all(leases)
    assert sorted(record.name for record in client.leases()) == sorted(names)
    assert set(by_hand.get_children(root_of(zookeeper_url))) == {"lease", "line"}
    for lease in leases:
        assert lease is not None
        lease.release()


@pytest.mark.parametrize("run", [pytest.param(run, id=run.case.name) for run in runs() if run.face == "store"])
def test_stores_of_different_clients(run: Run, zookeeper_url: str) -> None:
    """Every case holds, too, when no two stores share a session, as in different processes."""
    if run.case.name.endswith("_hinted"):
        return  # hints are for the waiters of the client that listens
    together = locate(zookeeper_url)[0]

    def apart() -> Any:
        return locate(zookeeper_url)[0].open()

    run.on(together._replace(open=apart))


def test_a_lost_answer_is_found_again(zookeeper_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An acquire whose answer was lost is repeated and finds its own node by its claim: one node, one token."""
    store = locate(zookeeper_url)[0].open()
    store.act([], soon())
    real = zookeeper_link.answer
    lost: list[Any] = []

    def lossy(asked: Any, root: str, deadline: Deadline) -> Any:
        answer = real(asked, root, deadline)
        if type(answer) is list and not lost:
            lost.append(answer)
            raise StoreUnavailable("lost")
        return answer

    store.setup(soon())
    monkeypatch.setattr(zookeeper_flights, "answer", lossy)
    request = Acquire("default:x", "c-1", 20, "h")
    with pytest.raises(StoreUnavailable) as caught:
        store.act([request], soon())
    assert caught.value.maybe_applied
    granted = store.act([request], soon())[0]
    assert isinstance(granted, Granted)
    assert granted.fencing_token == next(stat.czxid for stat in lost[0] if hasattr(stat, "czxid"))
    assert store.act([Release("default:x", "c-1")], soon()) == [RELEASED]
    assert store.leases("", "\U0010ffff", soon()) == []
    store.close()


def test_a_longer_ttl_moves_to_a_longer_session(zookeeper_url: str, by_hand: KazooClient) -> None:
    """A renewal for a longer ttl moves the holder's node into another session, under the same token."""
    store = locate(zookeeper_url)[0].open()
    permit = f"{root_of(zookeeper_url)}/lease/default:x,1"
    granted = store.act([Acquire("default:x", "c-1", 2, "h", '{"a":1}')], soon())[0]
    assert isinstance(granted, Granted)
    before = by_hand.exists(f"{permit}/c-c-1").ephemeralOwner
    assert isinstance(store.act([Renew("default:x", "c-1", 60)], soon())[0], Renewed)
    stat = by_hand.exists(f"{permit}/c-c-1")
    assert stat.ephemeralOwner not in (0, before)
    assert store.act([Acquire("default:x", "c-1", 2, "h", '{"a":1}')], soon()) == [granted]
    (lease,) = store.leases("", "\U0010ffff", soon())
    assert (lease.fencing_token, lease.info) == (granted.fencing_token, '{"a":1}')
    assert lease.expires_in > 50
    assert store.act([Release("default:x", "c-1")], soon()) == [RELEASED]
    store.close()


def test_what_any_session_can_do_is_done_in_the_longest(zookeeper_url: str) -> None:
    """A connection is closed when it was silent for two thirds of its session: a short one is lost the sooner."""
    store = locate(zookeeper_url)[0].open()
    assert isinstance(store, store_module.ZooKeeperStore)
    store.act([], soon())
    (first,) = store._pool.sessions.values()
    assert first.ttl_ms >= 10_000
    requests = [Acquire(f"default:{ttl}", f"c-{ttl}", ttl, "h") for ttl in (1, 60, 5)]
    assert {type(outcome) for outcome in store.act(requests, soon())} == {Granted}
    assert len(store._pool.sessions) == 4
    assert store._pool.any_session(soon()).ttl_ms >= 60_000
    assert set(store.act([Release(r.name, r.claim_id) for r in requests], soon())) == {RELEASED}
    store.close()


def test_more_ttls_than_sessions(zookeeper_url: str) -> None:
    """More different ttls than sessions share the longer ones, and all are granted, renewed and released."""
    address = locate(zookeeper_url)[0]
    store = address.open()
    requests = [Acquire(f"default:{n}", f"c-{n}", 5 + n / 7, "h") for n in range(30)]
    assert {type(outcome) for outcome in store.act(requests, soon())} == {Granted}
    renewals = [Renew(request.name, request.claim_id, 40 - request.ttl) for request in requests]
    assert {type(outcome) for outcome in store.act(renewals, soon())} == {Renewed}
    assert isinstance(store, store_module.ZooKeeperStore)
    assert len(store._pool.sessions) <= 9
    assert set(store.act([Release(r.name, r.claim_id) for r in requests], soon())) == {RELEASED}
    store.close()


def test_thousands_of_leases_are_renewed_in_one_call(zookeeper_url: str) -> None:
    """A vector of 1500 renewals comes back whole."""
    store = locate(zookeeper_url)[0].open()
    requests = [Acquire(f"default:n{n}", f"c-{n}", 100, "h") for n in range(1500)]
    assert {type(outcome) for outcome in store.act(requests, soon(60))} == {Granted}
    renewals = [Renew(r.name, r.claim_id, 100) for r in requests]
    assert {type(outcome) for outcome in store.act(renewals, soon(60))} == {Renewed}
    assert len(store.leases("", "\U0010ffff", soon(60))) == 1500
    assert set(store.act([Release(r.name, r.claim_id) for r in requests], soon(60))) == {RELEASED}
    store.close()


# -- hands that meddle ------------------------------------------------------------------------------------------------


def test_deleteall_under_a_live_holder(client: dibs.Client, zookeeper_url: str, by_hand: KazooClient) -> None:
    """Everything deleted by hand: the holder hears of it at its next renewal, and the next token is greater."""
    lease = client.lock("x", ttl=2).acquire()
    assert lease is not None
    by_hand.delete(root_of(zookeeper_url), recursive=True)
    assert lease.lost.wait(5)
    assert not lease.held
    with client.lock("x", timeout=5) as again:
        assert again.fencing_token > lease.fencing_token


def test_a_release_by_an_old_holder_deletes_nobody_elses_node(zookeeper_url: str, by_hand: KazooClient) -> None:
    """A holder whose nodes were deleted by hand does not harm the next one, however like its own the nodes look."""
    first, second = (locate(zookeeper_url)[0].open() for _ in range(2))
    assert isinstance(first.act([Acquire("default:x", "a-1", 20, "a")], soon())[0], Granted)
    by_hand.delete(f"{root_of(zookeeper_url)}/lease/default:x,1", recursive=True)
    granted = second.act([Acquire("default:x", "b-1", 20, "b")], soon())[0]
    assert isinstance(granted, Granted)
    assert not first.act([Release("default:x", "a-1")], soon())[0].was_held  # type: ignore[union-attr]
    seen = first.act([Acquire("default:x", "a-2", 20, "a")], soon())[0]
    assert isinstance(seen, Held)
    assert seen.fencing_token == granted.fencing_token
    for store in (first, second):
        store.close()


def test_scribbles_in_a_node_are_survived(client: dibs.Client, zookeeper_url: str, by_hand: KazooClient) -> None:
    """Somebody writes into the nodes of a lease, and makes nodes beside it: nothing fails, the lease goes on."""
    with client.lock("x", ttl=3) as lease:
        root = root_of(zookeeper_url)
        by_hand.set(f"{root}/lease/default:x,1", b"\xff not JSON")
        by_hand.create(f"{root}/lease/README")
        before = lease.trusted_until
        eventually(lambda: lease.trusted_until > before)
        assert client.lock("x").acquire(timeout=0.1) is None
        assert [record.name for record in client.leases()] == ["x"]


# -- the end of processes and sessions --------------------------------------------------------------------------------

HOLD = """
import sys, time, dibs
client = dibs.connect(sys.argv[1])
lease = client.lock("x", ttl=float(sys.argv[2])).acquire(timeout=30)
print("held", flush=True)
while lease.held:
    time.sleep(0.01)
print("lost", flush=True)
"""
RUN_ONCE = """
import os, signal, sys, dibs
with dibs.connect(sys.argv[1]).once("report", keep=100) as run:
    run.result = "kept"
os.kill(os.getpid(), signal.SIGKILL)
"""
WAIT = """
import sys, dibs
dibs.connect(sys.argv[1]).lock("x", ttl=30).acquire()
"""
CROWD = """
import sys, time
from dibs.clock import Deadline, RealClock
from dibs.connecting import locate
from dibs.store import Acquire
store = locate(sys.argv[1])[0].open()
store.watch("w", Deadline(RealClock(), RealClock.now() + 10))
permits, size = map(int, sys.argv[2:])
crowd = [Acquire("default:x", f"c-{n}", 25, "h", wake="w", permits=permits) for n in range(size)]
while True:
    held = store.act(crowd, Deadline(RealClock(), RealClock.now() + 60))
    crowd = [request._replace(ticket=outcome.ticket) for request, outcome in zip(crowd, held)]
    print("asked", flush=True)
    time.sleep(1)
"""


def program(text: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True)


def test_a_killed_holder_frees_its_name(client: dibs.Client, zookeeper_url: str) -> None:
    """kill -9 of a holder: its session ends after the ttl and the slack, and a waiter gets the name."""
    with program(HOLD, zookeeper_url, "1") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        killed = time.monotonic()
        holder.kill()
        lease = client.lock("x").acquire(timeout=20)
        assert lease is not None
        took = time.monotonic() - killed
        assert took < 1 + client.capabilities.resolution_s + 2, f"free after {took:.2f} s"
        lease.release()


def test_a_stopped_holder_knows_when_it_goes_on(client: dibs.Client, zookeeper_url: str) -> None:
    """SIGSTOP for longer than the ttl: another gets the name, and the holder sees the loss when it wakes."""
    with program(HOLD, zookeeper_url, "1") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        lease = client.lock("x").acquire(timeout=20)
        assert lease is not None
        holder.send_signal(signal.SIGCONT)
        assert holder.stdout.readline() == "lost\n"
        assert lease.held
        lease.release()
        holder.kill()


def test_a_dead_waiter_delays_the_line_briefly(client: dibs.Client, zookeeper_url: str) -> None:
    """A waiter killed with -9 is passed over within 2 s, although its session lives on for 30 s."""
    lease = client.lock("x").acquire()
    assert lease is not None
    with dibs.connect(zookeeper_url) as other, program(WAIT, zookeeper_url) as waiter:
        eventually(lambda: [record.waiting for record in client.leases()] == [1])
        got: list[Any] = []
        second = threading.Thread(target=lambda: got.append(other.lock("x").acquire(timeout=20)))
        second.start()
        eventually(lambda: [record.waiting for record in client.leases()] == [2])
        waiter.kill()
        released = time.monotonic()
        lease.release()
        second.join()
        # Two seconds are promised; the rest is for a busy machine. The session would have lived for 30.
        assert time.monotonic() - released < 6
        got[0].release()


# More than are looked at together.
CROWD_SIZE = zookeeper_line.SIGNS_MAX + 6


def behind_a_dead_crowd(url: str, kind: str) -> list[tuple[str, float]]:
    """Two wait behind a crowd that was killed with -9: who got the name in which order, and when after its release."""
    got: list[tuple[str, float]] = []
    with contextlib.ExitStack() as stack:
        holder, first, second = (stack.enter_context(dibs.connect(url)) for _ in range(3))

        def of(client: dibs.Client) -> Any:
            return client.lock("x") if kind == "lock" else client.semaphore("x", 1)

        lease = of(holder).acquire()
        crowd = stack.enter_context(waiting_crowd(url, kind))

        def wait(who: str, client: dibs.Client) -> None:
            with of(client):
                got.append((who, time.monotonic() - released))

        waiting = [threading.Thread(target=wait, args=one) for one in (("first", first), ("second", second))]
        for number, thread in enumerate(waiting, 1):
            thread.start()
            eventually(partial(waited_for, holder, CROWD_SIZE + number))
        crowd.kill()
        released = time.monotonic()
        lease.release()
        for thread in waiting:
            thread.join()
    return got


@contextlib.contextmanager
def waiting_crowd(url: str, kind: str) -> Iterator[subprocess.Popen[str]]:
    with program(CROWD, url, str(int(kind != "lock")), str(CROWD_SIZE)) as crowd:
        try:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == "asked\n"
            yield crowd
        finally:
            crowd.kill()


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_dead_waiters_delay_the_line_together(zookeeper_url: str, kind: str) -> None:
    """However many died, they delay the line no more than one does."""
    got = behind_a_dead_crowd(zookeeper_url, kind)
    assert [who for who, _ in got] == ["first", "second"]
    # Two seconds are promised; the rest is for a busy machine. Their session would have lived for 25.
    assert got[0][1] < 6, got


@pytest.mark.parametrize("limit, to", [("LOOK_MAX", zookeeper_line.SIGNS_MAX), ("DELETE_BYTES_MAX", 3000)])
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_more_dead_waiters_than_one_look_takes(
    zookeeper_url: str, monkeypatch: pytest.MonkeyPatch, kind: str, limit: str, to: int
) -> None:
    """More than are looked at, or deleted, at a time are passed by and by, before their session ends."""
    monkeypatch.setattr(zookeeper_line, limit, to)
    got = behind_a_dead_crowd(zookeeper_url, kind)
    assert [who for who, _ in got] == ["first", "second"]
    assert got[1][1] < 15, got


def test_who_is_alive_behind_dead_waiters_is_not_passed(zookeeper_url: str) -> None:
    """Who asks first when the dead have been silent for long enough passes nobody who has asked meanwhile."""
    holder, first, second = (locate(zookeeper_url)[0].open() for _ in range(3))
    assert isinstance(holder.act([Acquire("default:x", "h-1", 20, "h")], soon())[0], Granted)

    def asks(store: Any, claim: str, ticket: int | None = None) -> Any:
        return store.act([Acquire("default:x", claim, 20, claim, wake="w", ticket=ticket)], soon())[0]

    with waiting_crowd(zookeeper_url, "lock") as crowd:
        tickets = [asks(first, "first").ticket, asks(second, "second").ticket]
        crowd.kill()
        assert holder.act([Release("default:x", "h-1")], soon()) == [RELEASED]
        outcomes = [asks(second, "second", tickets[1]), asks(first, "first", tickets[0])]
        time.sleep(LINE_GRACE_S + 0.1)
        outcomes.append(asks(second, "second", tickets[1]))
        assert [type(outcome) for outcome in outcomes] == [Held] * 3
        eventually(lambda: isinstance(asks(first, "first", tickets[0]), Granted))
    for store in (holder, first, second):
        store.close()


def test_closing_leaves_a_kept_name_taken(zookeeper_url: str) -> None:
    """A name kept by min_hold stays taken when its client closes, and is free when the time is over."""
    began = time.monotonic()
    with dibs.connect(zookeeper_url) as client:
        lease = client.lock("x", min_hold=2).acquire()
        assert lease is not None
        lease.release()
    with dibs.connect(zookeeper_url) as other:
        assert other.lock("x").acquire(timeout=0) is None
        with other.lock("x", timeout=20):
            assert time.monotonic() - began > 1.9


def test_a_lease_that_nobody_renews_ends_while_its_process_lives(client: dibs.Client, zookeeper_url: str) -> None:
    """renew=False: kazoo keeps the session alive, and the lease ends all the same after its ttl."""
    began = time.monotonic()
    lease = client.lock("x", ttl=1, renew=False).acquire()
    assert lease is not None
    with dibs.connect(zookeeper_url) as other, other.lock("x", timeout=20):
        took = time.monotonic() - began
        assert not lease.held
        assert took < 4, f"free after {took:.2f} s"


def test_a_renewal_that_crosses_the_end_is_no_renewal(zookeeper_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that was written, but whose answer comes when the lease is being ended, is Gone."""
    store = locate(zookeeper_url)[0].open()
    assert isinstance(store.act([Acquire("default:x", "c-1", 1, "h")], soon())[0], Granted)

    def late(asked: Any, root: str, deadline: Deadline) -> Any:
        answer = zookeeper_link.answer(asked, root, deadline)
        time.sleep(1.2)
        return answer

    monkeypatch.setattr(zookeeper_flights, "answer", late)
    assert not isinstance(store.act([Renew("default:x", "c-1", 1)], soon())[0], Renewed)
    monkeypatch.undo()
    assert store.leases("", "\U0010ffff", soon()) == []
    store.close()


def test_a_grant_that_took_longer_than_its_ttl_ends(own_zookeeper: ZooKeeperServer) -> None:
    """A server that hung for longer than the ttl while it was asked: the lease ends all the same, and is not kept."""
    store = locate(own_zookeeper.url())[0].open()
    assert isinstance(store.act([Acquire("default:x", "c-1", 1, "h"), Release("default:x", "c-1")], soon())[0], Granted)
    own_zookeeper.pause()
    outcomes: list[Any] = []

    def ask() -> None:
        try:
            outcomes.append(store.act([Acquire("default:x", "c-2", 1, "h")], soon()))
        except StoreUnavailable as error:
            outcomes.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1.1)
    own_zookeeper.resume()
    asking.join()
    other = locate(own_zookeeper.url())[0].open()
    eventually(lambda: isinstance(other.act([Acquire("default:x", "d-1", 20, "h")], soon())[0], Granted))
    for one in (store, other):
        one.close()


def test_a_lost_session_is_a_lost_lease(client: dibs.Client, zookeeper_url: str) -> None:
    """A session that the server ended: its leases are Gone at the next renewal, and new ones get a new session."""
    lease = client.lock("x", ttl=3).acquire()
    assert lease is not None
    end_session(session_of(client))
    assert lease.lost.wait(5)
    with client.lock("x", timeout=10) as again:
        assert again.fencing_token > lease.fencing_token


def session_of(client: dibs.Client) -> Session:
    store = client._desk.address.open()
    assert isinstance(store, store_module.ZooKeeperStore)
    session = max(store._pool.sessions.values(), key=lambda session: session.timeout_ms)
    store.close()
    return session


def end_session(session: Session) -> None:
    """Close a session at the server behind its client's back: another connection takes it over and ends it."""
    hosts = ",".join(session._settings.hosts)
    while not session.over:  # its client may have taken it back before
        thief = KazooClient(hosts, client_id=session.client.client_id, timeout=session.timeout_ms / 1000)
        with contextlib.suppress(KazooTimeoutError):
            thief.start(5)
        thief.stop()
        thief.close()
        time.sleep(0.2)


def test_a_forked_child_works_anew(client: dibs.Client) -> None:
    """In a forked child the lease is not held, its own lock works, and the parent's session is not harmed."""
    lease = client.lock("x", ttl=5).acquire()
    assert lease is not None
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with client.lock("y", timeout=5) as own:
                if not lease.held and own.held and client.lock("x").acquire(timeout=0) is None:
                    code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    before = lease.trusted_until
    eventually(lambda: lease.trusted_until > before)
    lease.release()


# -- permits ----------------------------------------------------------------------------------------------------------


def permits(name: str, claim_id: str, of: int, take: int = 1, ttl: float = 20) -> Acquire:
    return Acquire(f"default:{name}", claim_id, ttl, "h", '{"a":1}', permits=of, take=take)


def test_permits_can_be_read(client: dibs.Client, zookeeper_url: str, by_hand: KazooClient) -> None:
    """A name with permits is a ledger with a node for each holder; it keeps the limit until a purge, and no longer."""
    place = f"{root_of(zookeeper_url)}/lease/default:shard%2F1,1"
    first, second = (client.semaphore("shard/1", 5, weight=weight).acquire() for weight in (1, 2))
    assert first is not None
    assert second is not None
    ledger = json.loads(by_hand.get(place)[0])
    assert (ledger["permits"], ledger["grants"]) == (5, 2)
    assert sorted(ledger["held"].values()) == [[1, 1, 0], [2, 2, 1]]
    assert sum(node.startswith("c-") for node in by_hand.get_children(place)) == 2
    assert client.purge(0) == 0
    for lease in (first, second):
        lease.release()
    with pytest.raises(dibs.LimitMismatch):
        client.lock("shard/1").acquire()
    assert client.purge(0) == 1
    assert by_hand.get_children(f"{root_of(zookeeper_url)}/lease") == []
    with client.lock("shard/1") as lock:
        assert lock.fencing_token > second.fencing_token > first.fencing_token
        with pytest.raises(dibs.LimitMismatch):
            client.semaphore("shard/1", 5).acquire()
    with client.semaphore("shard/1", 6) as again:
        assert again.fencing_token > lock.fencing_token


def test_a_lost_answer_on_permits_is_found_again(zookeeper_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant of permits whose answer was lost is found by its claim, also by another client: one node, one token."""
    store, other = (locate(zookeeper_url)[0].open() for _ in range(2))
    store.setup(soon())
    real = zookeeper_link.answer

    def lossy(asked: Any, root: str, deadline: Deadline) -> Any:
        answer = real(asked, root, deadline)
        if type(answer) is list and any(hasattr(result, "czxid") for result in answer):
            raise StoreUnavailable("lost")
        return answer

    monkeypatch.setattr(zookeeper_flights, "answer", lossy)
    with pytest.raises(StoreUnavailable):
        store.act([permits("x", "a-1", 2)], soon())
    monkeypatch.undo()
    granted = other.act([permits("x", "a-1", 2)], soon())[0]
    assert store.act([permits("x", "a-1", 2)], soon()) == [granted]
    assert store.act([permits("x", "b-1", 2)], soon())[0].slot == 2  # type: ignore[union-attr]
    assert isinstance(store.act([permits("x", "c-1", 2)], soon())[0], Held)
    assert store.act([Release("default:x", "a-1", ANY_SLOT)], soon()) == [RELEASED]
    assert [lease.slot for lease in other.leases("", "\U0010ffff", soon())] == [2]
    for each in (store, other):
        each.close()


def resumed(verb: Any, answers: list[Any]) -> Any:
    """A verb that goes on with these answers to its first flight."""
    flight = verb.send(answers)
    while True:
        try:
            flight = verb.send((yield flight))
        except StopIteration as end:
            return end.value


def test_a_decision_on_a_ledger_that_is_no_more(zookeeper_url: str) -> None:
    """Who decided on a ledger that was purged and made again meanwhile, with the very same version, is too late."""
    slow, quick = (locate(zookeeper_url)[0].open() for _ in range(2))
    assert isinstance(slow, store_module.ZooKeeperStore)
    root = root_of(zookeeper_url)
    assert isinstance(quick.act([permits("x", "a-1", 1)], soon())[0], Granted)
    assert quick.act([Release("default:x", "a-1")], soon()) == [RELEASED]
    verb = slow._permits.acquire(permits("x", "b-1", 1), soon())
    seen = [zookeeper_link.answer(asked, root, soon()) for asked in next(verb)]
    assert quick.purge("", "\U0010ffff", 0, soon()) == 1
    granted = quick.act([permits("x", "a-2", 1)], soon())[0]
    assert isinstance(granted, Granted)
    now = slow._ask(slow._pool.any_session(soon()).get(f"{root}/lease/default:x,1"), soon())
    assert now[1].version == seen[0][1].version
    outcome = slow._run(resumed(verb, seen), soon())
    assert isinstance(outcome, Held)
    assert outcome.fencing_token == granted.fencing_token
    for each in (slow, quick):
        each.close()


def test_permits_move_to_a_longer_session(zookeeper_url: str, by_hand: KazooClient) -> None:
    """A renewal for a longer ttl, by another client too, moves the holder's node; token, slot and time stay."""
    store, other = (locate(zookeeper_url)[0].open() for _ in range(2))
    node = f"{root_of(zookeeper_url)}/lease/default:x,1/c-b-1"
    store.act([permits("x", "a-1", 3)], soon())
    granted = store.act([permits("x", "b-1", 3, 2, ttl=2)], soon())[0]
    before = by_hand.exists(node).ephemeralOwner
    (shown,) = (lease for lease in store.leases("", "\U0010ffff", soon()) if lease.slot == 2)
    for each in (store, other):
        assert isinstance(each.act([Renew("default:x", "b-1", 60, 2)], soon())[0], Renewed)
        assert by_hand.exists(node).ephemeralOwner != before
        before = by_hand.exists(node).ephemeralOwner
        assert each.act([permits("x", "b-1", 3, 2, ttl=2)], soon()) == [granted]
        (lease,) = (lease for lease in each.leases("", "\U0010ffff", soon()) if lease.slot == 2)
        assert lease._replace(expires_at=0, expires_in=0) == shown._replace(expires_at=0, expires_in=0)
        assert lease.expires_in > 50
    assert other.act([Renew("default:x", "b-1", 60, 1)], soon())[0].was_held is False  # type: ignore[union-attr]
    assert other.act([Release("default:x", "b-1", 2)], soon()) == [RELEASED]
    for each in (store, other):
        each.close()


def test_a_killed_holder_frees_its_permits(client: dibs.Client, zookeeper_url: str) -> None:
    """kill -9 of who holds for writing: its session ends after the ttl and the slack, and readers are let in."""
    code = HOLD.replace('lock("x", ', 'rwlock("x", ').replace("acquire(", "write().acquire(")
    with program(code, zookeeper_url, "1") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        killed = time.monotonic()
        holder.kill()
        with client.rwlock("x").read(), dibs.connect(zookeeper_url) as other, other.rwlock("x", timeout=0).read():
            took = time.monotonic() - killed
        assert took < 1 + client.capabilities.resolution_s + 2, f"free after {took:.2f} s"


def test_a_release_wakes_one_of_those_who_wait_for_permits(zookeeper_url: str) -> None:
    """Only the first in line watches those who hold, each of the others the one before it."""
    with dibs.connect(zookeeper_url) as holder, contextlib.ExitStack() as stack:
        leases = [holder.semaphore("x", 2).acquire() for _ in range(2)]
        others = [stack.enter_context(dibs.connect(zookeeper_url)) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            waiting: list[Any] = []
            for number, other in enumerate(others, 1):
                waiting.append(threads.submit(other.semaphore("x", 2).acquire, timeout=30))
                eventually(partial(waited_for, holder, number))
            pools = [pool_of(other) for other in others]
            eventually(lambda: all(place.armed for pool in pools for place in pool.places.values() or [Place]))
            armed = [place for pool in pools for place in pool.places.values()]
            above = root_of(zookeeper_url) + "/lease/default:x,1"
            assert [place.armed for place in armed] == [above, *(place.path for place in armed[:-1])]
            rung: list[str] = []
            eventually(lambda: all(any(pool.watches.values()) for pool in pools))
            watches = [watch for pool in pools for listening in pool.watches.values() for watch in listening]
            for watch in watches:
                watch.tell = rung.append
            time.sleep(2.5)
            assert rung == []  # also not by the signs of life that all of them give
            for watch in watches:
                del watch.tell
            for lease in leases:
                assert lease is not None
                lease.release()
            first, second = (waiter.result(10) for waiter in waiting[:2])
            assert {lease.slot for lease in (first, second)} == {1, 2}
            assert not any(waiter.done() for waiter in waiting[2:])
            for lease in (first, second):
                lease.release()
            for waiter in waiting[2:]:
                waiter.result(10).release()


def waited_for(client: dibs.Client, by: int) -> bool:
    return {record.waiting for record in client.leases()} == {by}


def pool_of(client: dibs.Client) -> Any:
    store = client._desk.address.open()
    assert isinstance(store, store_module.ZooKeeperStore)
    store.close()
    return store._pool


def test_a_session_in_use_is_not_closed(zookeeper_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is asked all the time is not idle, though nothing is kept in it."""
    monkeypatch.setattr(zookeeper_pool, "IDLE_S", 1.0)
    store = locate(zookeeper_url)[0].open()
    assert isinstance(store, store_module.ZooKeeperStore)
    store.act([], soon())
    (session,) = store._pool.sessions.values()
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        store.act([], soon())
        time.sleep(0.01)
    assert not session.over
    eventually(lambda: session.over)
    store.close()


# -- outages ----------------------------------------------------------------------------------------------------------


def test_a_server_killed_with_9_while_held_and_waited_for(own_zookeeper: ZooKeeperServer) -> None:
    """kill -9 and restart: sessions, grants and the line are still there, and tokens go on rising."""
    # The server may need START_LIMIT_S to be back: a short lease is not trusted so long, and callers must be patient.
    ttl, patience = START_LIMIT_S * 1.5, START_LIMIT_S * 2
    assert ttl * (1 - DRIFT) > START_LIMIT_S + 10
    with (
        ThreadPoolExecutor(1) as threads,  # the last to end: when this fails, the waiter ends with its client
        dibs.connect(own_zookeeper.url(), patience=patience) as client,
        dibs.connect(own_zookeeper.url(), patience=patience) as other,
    ):
        lease = client.lock("x", ttl=ttl).acquire()
        assert lease is not None
        other.ping()  # or, should the answer to its first request be lost, it is told at once: its address may be wrong
        waiter = threads.submit(other.lock("x").acquire, timeout=100)
        eventually(lambda: [record.waiting for record in client.leases()] == [1])
        own_zookeeper.kill()
        assert lease.held
        own_zookeeper.start()
        seen = client.holder("x")
        assert seen is not None
        assert seen.fencing_token == lease.fencing_token
        assert not waiter.done(), waiter.exception()
        before = lease.trusted_until
        eventually(lambda: lease.trusted_until > before, limit_s=30)
        assert not waiter.done(), waiter.exception()
        lease.release()
        won = waiter.result(30)
        assert won is not None
        assert won.fencing_token > lease.fencing_token
        won.release()


def test_permits_outlive_the_server(own_zookeeper: ZooKeeperServer) -> None:
    """kill -9 and restart of the server: permits are held, renewed and counted as before, and tokens go on rising."""
    ttl, patience = START_LIMIT_S * 1.5, START_LIMIT_S * 2
    with (
        dibs.connect(own_zookeeper.url(), patience=patience) as client,
        dibs.connect(own_zookeeper.url(), patience=patience) as other,
    ):
        leases = [client.semaphore("x", 2, ttl=ttl).acquire() for _ in range(2)]
        own_zookeeper.kill()
        assert all(lease is not None and lease.held for lease in leases)  # unknown is no loss
        own_zookeeper.start()
        one, two = leases
        assert one is not None
        assert two is not None
        before = two.trusted_until
        eventually(lambda: two.trusted_until > before, limit_s=30)
        assert other.semaphore("x", 2).acquire(timeout=0) is None
        with pytest.raises(dibs.LimitMismatch):
            other.semaphore("x", 3).acquire(timeout=0)
        one.release()
        again = other.semaphore("x", 2).acquire(timeout=20)
        assert again is not None
        assert again.slot == one.slot
        assert again.fencing_token > two.fencing_token > one.fencing_token
        for lease in (two, again):
            lease.release()


def test_what_is_kept_outlives_process_and_server(own_zookeeper: ZooKeeperServer) -> None:
    """A name that was kept is kept, and shown with what was left there, after kill -9 of its process and the server."""
    with program(RUN_ONCE, own_zookeeper.url()) as runner:
        assert runner.wait(30) == -signal.SIGKILL
    own_zookeeper.kill()
    own_zookeeper.start()
    with dibs.connect(own_zookeeper.url(), patience=30) as client:
        once = client.once("report", keep=100)
        assert once.run(lambda: "again") == "kept"
        done = once.done()
        assert done is not None
        assert done.expires_in <= 100
        assert once.forget()
        assert once.run(lambda: "again") == "again"


def test_whether_the_first_are_alive_is_looked_at_while_nothing_is_to_be_had(
    zookeeper: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So who is behind a dead waiter knows it when a permit is released, and does not begin to watch only then."""
    looked: list[int] = []
    look = zookeeper_line.Line._seen

    def counting(self: Any, session: Session, some: Any) -> Any:
        looked.append(len(some))
        return (yield from look(self, session, some))

    monkeypatch.setattr(zookeeper_line.Line, "_seen", counting)
    url = zookeeper.create_root()
    with dibs.connect(url) as client, dibs.connect(url) as ahead, dibs.connect(url) as behind:
        with client.semaphore("s", 1), ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(ahead.semaphore("s", 1).acquire)
            eventually(lambda: [record.waiting for record in client.leases()] == [1])
            assert not looked
            assert behind.semaphore("s", 1).acquire(timeout=0) is None
            assert looked == [1]
            client.close()
            lease = waiting.result(30)
            assert lease is not None
            lease.release()


def test_nothing_is_kept_for_longer_than_a_session() -> None:
    """A time to keep a name that no session can last is refused when it is asked for, with the limit and the store."""
    with dibs.connect("zookeeper://192.0.2.1") as client:
        with pytest.raises(dibs.InvalidOption, match=r"keep \(on ZooKeeper\) is at most 37 s, not 86,400"):
            client.once("report", keep=86400)
        with pytest.raises(dibs.InvalidOption, match="min_hold is at most 37 s"):
            client.lock("report", min_hold=38)
        assert client.once("report", keep=37).name == "report"


def test_a_paused_server_ends_trust_by_the_clock(own_zookeeper: ZooKeeperServer) -> None:
    """While the server hangs, a lease is lost by its local deadline; callers get StoreUnavailable; then all is well."""
    told = threading.Event()
    with dibs.connect(own_zookeeper.url(), request_timeout=1, patience=1) as client:
        lease = client.lock("x", ttl=2, on_lost=told.set).acquire()
        assert lease is not None
        with own_zookeeper.paused():
            assert told.wait(10)
            assert not lease.held
            with pytest.raises(dibs.StoreUnavailable):
                client.lock("y").acquire(timeout=0)
        with pytest.raises(dibs.LeaseLost) as lost:
            lease.release()
        assert "None" not in str(lost.value)  # as its reason, where kazoo has given none yet
        eventually(lambda: acquired(client, "x", lease.fencing_token))


def test_a_paused_server_ends_trust_in_permits_by_the_clock(own_zookeeper: ZooKeeperServer) -> None:
    """While the server hangs a permit is held, as nothing is known, until its local deadline; then it is lost."""
    with dibs.connect(own_zookeeper.url(), request_timeout=2, patience=10) as client:
        lease = client.semaphore("x", 2, ttl=2).acquire()
        assert lease is not None
        with own_zookeeper.paused():
            time.sleep(0.3)
            assert lease.held
            assert lease.lost.wait(10)
        eventually(lambda: free_again(client))


def free_again(client: dibs.Client) -> bool:
    try:
        return client.semaphore("x", 2).available() == 2
    except dibs.StoreUnavailable:
        return False


def acquired(client: dibs.Client, name: str, above: int) -> bool:
    try:
        with client.lock(name, timeout=2) as lease:
            return lease.fencing_token > above
    except (dibs.StoreUnavailable, dibs.LockTimeout):
        return False


def test_no_server_is_unavailable_at_once(own_zookeeper: ZooKeeperServer) -> None:
    """Nobody listens: StoreUnavailable that says so, told without patience when the store was never reached."""
    url = own_zookeeper.url()
    own_zookeeper.stop()
    with dibs.connect(url) as client:
        before = time.monotonic()
        with pytest.raises(dibs.StoreUnavailable, match="refused") as caught:
            client.lock("x").acquire(timeout=0)
        assert "maxClientCnxns" not in str(caught.value)
        assert time.monotonic() - before < 3


def test_a_server_with_too_many_connections_is_unavailable() -> None:
    """A host that has all the connections it may have is turned away: StoreUnavailable, which names the setting."""
    with ZooKeeperServer({"maxClientCnxns": 1}) as server, dibs.connect(server.url()) as client:
        lease = client.lock("x").acquire(timeout=0)
        assert lease is not None
        with (
            dibs.connect(server.url()) as other,
            pytest.raises(dibs.StoreUnavailable, match="maxClientCnxns"),
        ):
            other.lock("x").acquire(timeout=0)
        lease.renew()
        assert lease.release() is True


def test_no_route_is_unavailable() -> None:
    """A host that never answers, or has no address: StoreUnavailable after the request's time-out."""
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with dibs.connect(f"zookeeper://{host}/?request_timeout=0.5&patience=0") as client:
            with pytest.raises(dibs.StoreUnavailable):
                client.ping()


def test_an_ensemble_outlives_its_leader() -> None:
    """Three servers, the leader killed: the lease goes on, its release reaches the rest, and tokens go on rising."""
    with Ensemble() as ensemble, dibs.connect(ensemble.url(), patience=30) as client:
        lease = client.lock("x", ttl=15).acquire()
        assert lease is not None
        (leader,) = [number for number, mode in ensemble.modes().items() if mode == "leader"]
        ensemble.servers[leader].kill()
        before = lease.trusted_until
        eventually(lambda: lease.trusted_until > before, limit_s=40)
        assert lease.held
        lease.release()
        with client.lock("x", timeout=20) as again:
            assert again.fencing_token > lease.fencing_token


def test_a_frozen_server_is_left_for_another(zookeeper: ZooKeeperServer, zookeeper_url: str) -> None:
    """A server that owes answers and says nothing is left, also while its client goes on asking; the session stays."""
    here = f"127.0.0.1:{zookeeper.port}"
    with Proxy(zookeeper.port) as one, Proxy(zookeeper.port) as two:
        url = zookeeper_url.replace(here, f"127.0.0.1:{one.port},127.0.0.1:{two.port}")
        with dibs.connect(url) as client:
            lease = client.lock("x").acquire(timeout=0)
            assert lease is not None
            (taken,) = [network for network in (one, two) if network._links]
            taken.spoil("late")

            def works() -> bool:
                try:
                    with client.lock("y", timeout=0):
                        return True
                except dibs.StoreUnavailable:
                    return False

            eventually(works)
            assert taken.done["late"]
            lease.renew()
            assert lease.release() is True


# -- logins, rights, TLS ----------------------------------------------------------------------------------------------


def test_a_login_closes_the_nodes(zookeeper: ZooKeeperServer, by_hand: KazooClient) -> None:
    """user:password: nodes are made for this login alone; a wrong password is SetupRequired, and is never shown."""
    root = root_of(zookeeper.create_root())
    by_hand.add_auth("digest", "app:s3cret")
    with dibs.connect(zookeeper.url(root, login="app:s3cret")) as client, client.lock("x"):
        assert {acl.id.scheme for acl in by_hand_acls(by_hand, f"{root}/lease")} == {"digest"}
        for login in ("app:hunter2-wrong", ""):
            with dibs.connect(zookeeper.url(root, login=login)) as other:
                with pytest.raises(dibs.SetupRequired, match="password") as caught:
                    other.lock("x").acquire(timeout=0)
                shown = f"{caught.value} {caught.value!r} {caught.value.__cause__!r} {other!r}"
                assert "hunter2" not in shown
                assert "s3cret" not in shown
        findings = run_steps(client._desk.checking())
        assert all(finding.kept for finding in findings)
        assert any("digest:app" in finding.detail for finding in findings)


def test_a_password_is_not_logged(zookeeper: ZooKeeperServer, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is logged, at any level, has neither the password nor what a session can be taken over with."""
    with caplog.at_level(1), caplog.at_level(1, "dibs.stores.zookeeper.kazoo"):
        with dibs.connect(zookeeper.url("/logged", login="app:hunter2secret")) as client:
            with client.lock("x"):
                session = session_of(client)
                secret = session.client._session_passwd
                session.client._connection._socket.shutdown(socket.SHUT_RDWR)
                eventually(lambda: caplog.text.count("Connect(") >= 3)
    assert "Auth(auth_type=0, scheme='digest'" in caplog.text
    for words in ("hunter2secret", secret.hex(), repr(secret)):
        assert words not in caplog.text


def by_hand_acls(by_hand: KazooClient, path: str) -> Any:
    return by_hand.get_acls(path)[0]


def test_doctor_says_when_nodes_are_open(client: dibs.Client, zookeeper: ZooKeeperServer, zookeeper_url: str) -> None:
    """Without a login the nodes are open, which is said; with a login on open nodes it is a fault."""
    words = {finding.promise: finding for finding in run_steps(client._desk.checking())}
    assert words["who can change leases"].kept
    assert "open to everybody" in words["who can change leases"].detail
    with dibs.connect(zookeeper.url(root_of(zookeeper_url), login="app:s3cret")) as other:
        findings = {finding.promise: finding for finding in run_steps(other._desk.checking())}
        assert not findings["only this login can change leases"].kept
        assert "setAcl" in findings["only this login can change leases"].detail


def test_a_login_that_may_not_make_nodes_is_told_what_to_do(zookeeper: ZooKeeperServer, by_hand: KazooClient) -> None:
    """A chroot under somebody else's node: SetupRequired, naming the command; when it was made for it, all works."""
    above = root_of(zookeeper.create_root())
    by_hand.create(above, acl=[make_digest_acl("admin", "admin", all=True)])
    with dibs.connect(zookeeper.url(f"{above}/app", login="app:s3cret")) as client:
        with pytest.raises(dibs.SetupRequired, match="dibs setup"):
            client.lock("x").acquire(timeout=0)
        with pytest.raises(dibs.SetupRequired, match="dibs schema"):
            client.setup()
        by_hand.add_auth("digest", "admin:admin")
        by_hand.create(f"{above}/app", acl=[make_digest_acl("app", "s3cret", all=True)])
        by_hand.set_acls(
            above, [make_digest_acl("admin", "admin", all=True), make_digest_acl("app", "s3cret", read=True)]
        )
        with client.lock("x", timeout=5):
            pass


def test_schema_is_for_the_servers_own_shell(zookeeper: ZooKeeperServer) -> None:
    """`dibs schema` prints the commands that make the nodes, without the password."""
    store = locate(zookeeper.url("/a/b", login="app:s3cret"))[0].open()
    text = store.schema()
    assert 'create /a ""' in text
    assert 'create /a/b/lease "" auth::cdrwa' in text
    assert "s3cret" not in text
    store.close()


@pytest.mark.parametrize(
    "options, ttl", [("", 30), ("tickTime=10&maxSessionTimeout=1000", 0.1), ("maxSessionTimeout=300000", 250)]
)
def test_sessions_that_the_server_does_not_give(zookeeper: ZooKeeperServer, options: str, ttl: float) -> None:
    """A URL with other ticks or limits than the server's: SetupRequired that names both options, nothing granted."""
    server = zookeeper if options else ZooKeeperServer({"tickTime": 100, "maxSessionTimeout": 2000})
    try:
        with dibs.connect(f"zookeeper://127.0.0.1:{server.port}/other?{options}".rstrip("?"), ttl=ttl) as client:
            with pytest.raises(dibs.SetupRequired, match=r"zoo\.cfg"):
                client.lock("x").acquire(timeout=0)
    finally:
        if server is not zookeeper:
            server.close()


def test_a_session_that_is_too_short_for_the_server() -> None:
    """Where the server has a greater minSessionTimeout the error says so, and a longer ttl works."""
    with ZooKeeperServer({"minSessionTimeout": 8000}) as server, dibs.connect(server.url()) as client:
        with pytest.raises(dibs.SetupRequired, match="where minSessionTimeout is greater there, take a longer ttl"):
            client.lock("x", ttl=5).acquire(timeout=0)
        with client.lock("x", ttl=8):
            pass


def test_limits_of_ttl_follow_the_ticks() -> None:
    """Without options they are those of a server as shipped: two seconds a tick, sessions of at most twenty."""
    capabilities = locate("zookeeper://localhost")[0].capabilities
    assert (capabilities.ttl_min_s, capabilities.ttl_max_s) == (2.0, 37.0)
    with pytest.raises(dibs.InvalidOption):
        dibs.connect("zookeeper://localhost").lock("x", ttl=60)


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://",
        "zookeeper://host:0/",
        "zookeeper://host:port/",
        "zookeeper://host,,other/",
        "zookeeper://::1/",
        "zookeeper://user@host/",
        "zookeeper://:secret@host/",
        "zookeeper://host/a//b",
        "zookeeper://host/a/../b",
        "zookeeper://host/zookeeper",
        "zookeeper://host/?tickTime=2s",
        "zookeeper://host/?tickTime=%C2%B2%C2%B2",
        "zookeeper://host/?tick_time=2000",
        "zookeeper://host/?maxSessionTimeout=1000",
        "zookeeper://host/?tls=yes",
        "zookeeper://host/?ssl_ca=/etc/hostname",
        "zookeeper://host/?tls=true&ssl_ca=/no/such/file",
        "zookeeper://host/?tls=true&ssl_cert=/etc/hostname",
    ],
)
def test_a_wrong_url_is_refused_before_any_io(url: str) -> None:
    """What is wrong with a URL is InvalidOption, without a connection and without the password."""
    with pytest.raises(dibs.InvalidOption) as caught:
        dibs.connect(url)
    assert "secret" not in str(caught.value)


def test_several_servers_stand_in_one_url() -> None:
    """Hosts with and without ports, IPv6 in brackets; the login is not shown."""
    shown = locate("zookeeper://app:s3cret@a:1,b,[::1]:3/chroot/two")[0].shown
    assert shown == "zookeeper://a:1,b:2181,[::1]:3/chroot/two"


def test_without_kazoo_the_extra_is_named() -> None:
    """The driver is missing: InvalidOption with the pip command."""
    code = "import sys; sys.modules['kazoo'] = None; import dibs; dibs.connect('zookeeper://host')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'dibs[zookeeper]'" in done.stderr


@pytest.fixture(scope="module")
def secure_zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ZooKeeperServer, Path]]:
    """A server with a secureClientPort, and the folder of its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "stranger"):
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=dibs test"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1"]
        command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        subprocess.run(command, check=True, capture_output=True)
    # Where the server's user can read it.
    store = Path("/tmp") / f"dibs-zookeeper-{os.getpid()}.pem"
    store.write_text((folder / "server.key").read_text() + (folder / "server.crt").read_text())
    store.chmod(0o644)
    try:
        with ZooKeeperServer(tls_settings(store), secure=True) as server:
            yield server, folder
    finally:
        store.unlink()


def test_tls(secure_zookeeper: tuple[ZooKeeperServer, Path]) -> None:
    """tls=true with the server's certificate works; with another, or without, it is a misconfiguration."""
    server, folder = secure_zookeeper
    with dibs.connect(server.url(secure=True, options=f"tls=true&ssl_ca={folder}/server.crt")) as client:
        with client.lock("x"):
            pass
    for options in (f"tls=true&ssl_ca={folder}/stranger.crt", "tls=true"):
        with dibs.connect(server.url(secure=True, options=options)) as client:
            with pytest.raises(dibs.SetupRequired, match="ssl_ca"):
                client.ping()


def test_tls_is_required(secure_zookeeper: tuple[ZooKeeperServer, Path]) -> None:
    """A plain client at a secure port, and TLS at a plain port, are told that this is no outage."""
    server, folder = secure_zookeeper
    options = f"tls=true&ssl_ca={folder}/server.crt"
    for url in (server.url(secure=True), server.url(options=options)):
        with dibs.connect(url) as client, pytest.raises(dibs.SetupRequired, match="Check tls"):
            client.ping()
