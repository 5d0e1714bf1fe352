"""What is particular to memcached: it forgets, its clock ticks, and much that is not memcached answers like it."""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import dibs
from dibs import desk
from dibs.clock import RealClock
from dibs.connecting import locate
from dibs.store import Acquire, Gone, Granted, Held, Release, Released, Renew, Renewed, Store, Transfer
from dibs.stores import memcached as module
from dibs.stores import memcached_values, memcached_wire
from dibs.stores.inlet import Inlet
from dibs.stores.memcached_verbs import Verbs
from tests.servers.memcached import MemcachedServer
from tests.waits import eventually, soon

CLOCK = RealClock()


def asking(name: str, claim_id: str = "c-1", ttl: float = 30, info: str | None = None) -> Acquire:
    return Acquire(name, claim_id, ttl, "host/1/c", info)


@pytest.fixture
def client(memcached_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(memcached_url) as client:
        yield client


@pytest.fixture
def store(memcached_url: str) -> Iterator[Store]:
    store = locate(memcached_url)[0].open()
    yield store
    store.close()


@pytest.mark.parametrize("when", ["sent", "received"])
def test_no_reply_to_an_interrupted_request_is_taken_for_another(
    when: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes just as something was sent or received: sent twice, it would shift all replies that follow."""
    store.act([asking("a", "c-1"), asking("b", "c-2")], soon())
    shipped: Any = {"sent": Inlet.send, "received": Inlet.receive}[when]

    def interrupted(self: Inlet, *args: Any) -> Any:
        shipped(self, *args)
        time.sleep(0.05)  # until the reply is there
        monkeypatch.setattr(Inlet, shipped.__name__, shipped)
        raise KeyboardInterrupt

    monkeypatch.setattr(memcached_wire, "RECEIVE_BYTES", 4)  # one reply, also where another follows on its heels
    monkeypatch.setattr(Inlet, shipped.__name__, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.act([Release("a", "c-1")], soon())
    assert type(store.act([Release("a", "c-1")], soon())[0]) is Gone
    assert type(store.act([Release("b", "c-2")], soon())[0]) is Released
    outcomes = store.act([asking("a", "c-3"), asking("b", "c-4"), asking("c", "c-5")], soon())
    assert [type(outcome) for outcome in outcomes] == [Granted] * 3
    assert type(store.act([asking("a", "c-6")], soon())[0]) is Held


# -- what is stored ---------------------------------------------------------------------------------------------------


def test_a_lease_can_be_read(client: dibs.Client, memcached: MemcachedServer) -> None:
    """`get dibs:default:name` shows claim, token, time, holder, name and info, a line each."""
    with client.lock("digest/42", info={"why": "test"}) as lease:
        answer = memcached.ask("gets dibs:default:digest/42")
        cas = int(answer[0].split()[-1])
        kind, claim_id, token, acquired_at, holder, name, info = "\n".join(answer[1:-1]).split("\n")
        assert (kind, claim_id) == ("dibs 1", lease.claim_id)
        assert token[0] == "+"
        assert int(token) + cas == lease.fencing_token
        assert float(acquired_at) == lease.acquired_at.timestamp()
        assert (holder, name, info) == (lease.holder, "default:digest/42", '{"why":"test"}')
    assert memcached.ask("get dibs:default:digest/42") == ["END"]


def test_names_become_keys_that_memcached_takes() -> None:
    """Every name has a key of at most 250 bytes without spaces, and no two names the same."""
    names = ["a b", "a%20b", "a%b", "a%25b", "é" * 127, "x" * 255, "x" * 240, "x" * 241]
    names += ["y" * 254 + "a", "y" * 254 + "b", "y" * 255, "% " * 85, "z" * 239 + " ", "dibs~", "~"]
    names += [f"{'n' * 63}:{name}" for name in names]
    keys = [memcached_values.key_of(name) for name in names]
    assert len(set(keys)) == len(names)
    assert all(len(key) <= 250 and not set(key) & set(b" \r\n\0\t") for key in keys)
    assert memcached_values.key_of("default:digest/42") == b"dibs:default:digest/42"


def test_the_value_has_the_whole_name(store: Store, memcached: MemcachedServer) -> None:
    """What another program put under our key, or another name's lease would be, is never taken for a lease."""
    for name, value in (
        ("n:a", "a page of html"),
        ("n:b", "dibs 1\nc-1\n7\n0.0\nhost/1/c\nn:other\n"),
        ("n:c", "dibs 1\nc-1\nseven\n0.0\nhost/1/c\nn:c\n"),
        ("n:d", "dibs 1\nc-1\n\n0.0\nhost/1/c\nn:d\n"),
    ):
        memcached.ask(f"set dibs:{name} 0 30 {len(value)}\r\n{value}")
        (outcome,) = store.act([asking(name)], soon())
        assert isinstance(outcome, dibs.SetupRequired)
        assert f"key dibs:{name} holds something that is not dibs's: delete that" in str(outcome)
        assert store.leases(name, name + "\x01", soon()) == []
        assert [type(o).__name__ for o in store.act([Renew(name, "c-1", 30), Release(name, "c-1")], soon())] == [
            "Gone",
            "Gone",
        ]
        assert store.break_lease(name, 0, True, soon()) is False
    assert store.leases("n:a", "n:a\x01", soon()) == []


def test_a_ttl_is_rounded_up_and_stays_relative(store: Store, memcached: MemcachedServer) -> None:
    """One second more is sent than was asked for, and never more than 30 days, which would be a date long past."""
    store.act([asking("n:a", ttl=3), asking("n:b", ttl=3.2), asking("n:c", ttl=30 * 24 * 3600)], soon())
    left = {name: int(memcached.ask(f"mg dibs:n:{name} t")[0][4:]) for name in "abc"}
    assert 3 <= left["a"] <= 4
    assert 4 <= left["b"] <= 5
    assert 30 * 24 * 3600 - 1 <= left["c"] <= 30 * 24 * 3600
    # What the head of the module says must hold, for a server whose time has just jumped by two.
    for ttl in (3.0, 3.2, 4.0, 59.9, 3600.0, 29 * 24 * 3600.0, 30 * 24 * 3600.0):
        assert memcached_values.ticks_for(ttl) - 2 >= ttl * 0.95 - module.MARGIN_S


def test_a_shorter_renewal_shortens_nothing(store: Store) -> None:
    """Renewals and repeated acquires for less time than is left leave the end where it is."""
    store.act([asking("n:a", ttl=60)], soon())
    for request in (Renew("n:a", "c-1", 3), asking("n:a", ttl=3)):
        (outcome,) = store.act([request], soon())
        assert isinstance(outcome, (Renewed, Granted))
        (lease,) = store.leases("n:a", "n:a\x01", soon())
        assert lease.expires_in > 50


# -- a server that forgets, stops and comes back ----------------------------------------------------------------------


def test_a_restart_forgets_leases_and_tokens_rise(own_memcached: MemcachedServer) -> None:
    """kill -9 and a restart: the holder hears of its loss, a waiter gets the name, tokens go on rising."""
    with dibs.connect(own_memcached.url()) as client, dibs.connect(own_memcached.url()) as other:
        lease = client.lock("x", ttl=3).acquire()
        assert lease is not None
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(other.lock("x").acquire(timeout=30)))
        waiting.start()
        time.sleep(1.1)  # two starts in one second have tokens of the same height
        own_memcached.kill()
        own_memcached.start()
        waiting.join()
        assert got[0] is not None
        assert got[0].fencing_token > lease.fencing_token
        assert lease.lost.wait(10)
        with pytest.raises(dibs.LeaseLost):
            lease.release()
        assert got[0].held
        got[0].release()


def test_flush_all_takes_leases_away_and_tokens_rise(own_memcached: MemcachedServer) -> None:
    """`flush_all` under a live holder: it hears of its loss, the next holder's token is greater, doctor says so."""
    with dibs.connect(own_memcached.url()) as client, dibs.connect(own_memcached.url()) as other:
        lost = threading.Event()
        lease = client.lock("x", ttl=3, on_lost=lost.set).acquire()
        assert lease is not None
        own_memcached.ask("flush_all")
        again = other.lock("x").acquire(timeout=5)
        assert again is not None
        assert again.fencing_token > lease.fencing_token
        assert lost.wait(10)
        with pytest.raises(dibs.LeaseLost):
            lease.check()
        assert again.held
        again.release()
        flushed = findings(own_memcached.url())["leases are not flushed"]
        assert not flushed.kept
        assert "1 times" in flushed.detail


def test_a_stopped_server_ends_trust_by_the_clock(own_memcached: MemcachedServer) -> None:
    """While the server hangs, a lease is lost by its local deadline, and callers get StoreUnavailable."""
    with dibs.connect(own_memcached.url(), request_timeout=1, patience=1) as client:
        lease = client.lock("x", ttl=3).acquire()
        assert lease is not None
        deadline = lease.trusted_until
        with own_memcached.paused():
            assert lease.lost.wait(10)
            assert not lease.held
            assert lease._session.clock.now() >= deadline
            with pytest.raises(dibs.StoreUnavailable):
                client.lock("y").acquire(timeout=0)
            time.sleep(2)
        with pytest.raises(dibs.LeaseLost):
            lease.release()
        with client.lock("x", timeout=15) as again:
            assert again.fencing_token > lease.fencing_token


@pytest.mark.parametrize("verb", ["acquire", "renew", "keep"])
def test_what_a_server_stores_with_a_stale_clock_is_not_believed(own_memcached: MemcachedServer, verb: str) -> None:
    """Requests that waited while the server stood still get an expiry that lasts, however shortly before it went on."""
    stores = [locate(own_memcached.url())[0].open() for _ in range(12)]
    requests: list[list[Any]] = [[asking(f"n:{i}", ttl=4)] for i in range(len(stores))]
    for one in stores:
        one.act([asking("n:other")], soon())  # each has heard of the server and its clock
    if verb != "acquire":
        requests = [[Renew(f"n:{i}", "c-1", 10)] for i in range(len(stores))]
        if verb == "keep":
            requests = [[Release(f"n:{i}", "c-1", keep=10, info="{}")] for i in range(len(stores))]
        for i, one in enumerate(stores):
            one.act([asking(f"n:{i}", ttl=9)], soon())
    outcomes: list[Any] = [None] * len(stores)

    def ask(i: int) -> None:
        while outcomes[i] is None:
            with suppress(dibs.StoreUnavailable):  # its clock stands still yet: asked again, as a session does
                outcomes[i] = stores[i].act(requests[i], soon(20))[0]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(stores))]
    with own_memcached.paused():
        time.sleep(5)
        for thread in threads:
            thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    expected = {"acquire": Granted, "renew": Renewed, "keep": Released}[verb]
    assert {type(outcome) for outcome in outcomes} == {expected}
    time.sleep(1.2)
    left = stores[0].leases("n:", "n:\U0010ffff", soon())
    assert {lease.name for lease in left} >= {f"n:{i}" for i in range(len(stores))}
    if verb != "acquire":
        assert min(lease.expires_in for lease in left) > 6
    for one in stores:
        one.close()


def test_a_slow_network_is_only_slow(memcached_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every answer takes long, requests are made twice and then believed."""
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    store = locate(memcached_url)[0].open()
    outcomes = store.act([asking("n:a"), asking("n:b"), Renew("n:a", "c-1", 60), Release("n:b", "c-1")], soon())
    assert [type(o).__name__ for o in outcomes] == ["Granted", "Granted", "Renewed", "Released"]
    keeping = Release("n:a", "c-1", keep=60, info="{}")
    assert [type(o).__name__ for o in store.act([keeping, keeping], soon())] == ["Released", "Gone"]
    assert store.leases("n:", "n:~", soon())[0].info == "{}"
    store.close()


@pytest.mark.parametrize("end", ["at once", "at once, and taken"])
def test_a_kept_name_that_ended_at_once_is_kept_again(
    memcached_url: str, memcached: MemcachedServer, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A release that kept nothing, since the server's clock was stale, keeps the name when it is made again."""
    monkeypatch.setattr(module, "SLOW_S", 0.0)  # whatever it answers is doubted once
    store, other = (locate(memcached_url)[0].open() for _ in range(2))
    (granted,) = store.act([asking("n:a")], soon())
    assert isinstance(granted, Granted)
    token = granted.fencing_token
    keep = Verbs.keep
    made_again, meanwhile = [], list[Any]()

    def keep_again(self: Verbs, request: Release, kept: Any = None) -> Any:
        if kept is not None:
            made_again.append(kept.token)
            assert other.break_lease("n:a", token, True, soon())
            if end != "at once":
                meanwhile.extend(other.act([asking("n:a", "d-1")], soon()))
        return keep(self, request, kept)

    monkeypatch.setattr(Verbs, "keep", keep_again)
    (outcome,) = store.act([Release("n:a", "c-1", keep=60, info="{}")], soon())
    assert (type(outcome), made_again) == (Released, [token])
    (lease,) = store.leases("n:", "n:~", soon())
    assert (lease.fencing_token, lease.info) == ((meanwhile[0].fencing_token, None) if meanwhile else (token, "{}"))
    for one in (store, other):
        one.close()


def test_a_clock_that_stands_still_is_unavailable(memcached_url: str) -> None:
    """A server whose clock does not go on, whatever is tried, is reported, and nothing it grants is believed."""
    store = locate(memcached_url)[0].open()
    assert isinstance(store, module.MemcachedStore)
    store.act([asking("n:a")], soon())
    store._offset += 60
    store._heard_at = 0.0
    with pytest.raises(dibs.StoreUnavailable, match="clock stands still"):
        store.act([asking("n:b")], soon())
    assert isinstance(store.act([asking("n:b")], soon())[0], Granted)  # on a new connection the offset is learnt anew
    store.close()


def test_waiting_goes_on_through_an_outage(own_memcached: MemcachedServer) -> None:
    """A waiter outlives a restart shorter than its patience."""
    with (
        dibs.connect(own_memcached.url(), patience=30) as other,
        dibs.connect(own_memcached.url(), patience=30) as client,
    ):
        lease = client.lock("x", ttl=20).acquire()
        assert lease is not None
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(other.lock("x").acquire(timeout=30)))
        waiting.start()
        eventually(lambda: other._desk.session().waiting._asleep)
        own_memcached.stop()
        time.sleep(1.1)  # an outage; and two starts in one second have tokens of the same height
        own_memcached.start()
        waiting.join()
        assert got[0] is not None
        got[0].release()


def test_waiters_look_often(client: dibs.Client, memcached_url: str) -> None:
    """A waiter is granted well before its next poll would have been."""
    with dibs.connect(memcached_url) as other:
        delays = []
        for _ in range(5):
            lease = client.lock("x").acquire()
            assert lease is not None
            got: list[float] = []

            def wait(got: list[float] = got) -> None:
                with other.lock("x"):
                    got.append(time.monotonic())

            waiting = threading.Thread(target=wait)
            waiting.start()
            time.sleep(0.15)
            released = time.monotonic()
            lease.release()
            waiting.join()
            delays.append(got[0] - released)
        # Polls come 0.7 to 1 s apart; that three of five came sooner than half of that is no accident.
        assert sorted(delays)[2] < 0.35, delays


# -- memory -----------------------------------------------------------------------------------------------------------


def findings(url: str) -> dict[str, Any]:
    store = locate(url)[0].open()
    try:
        return {finding.promise: finding for finding in store.check(soon())}
    finally:
        store.close()


def fill(server: MemcachedServer, megabytes: int = 8) -> None:
    """Pages of some application, more than fit, of the sizes that leases have and greater."""
    import pymemcache

    cache = pymemcache.Client(("127.0.0.1", server.port))
    for size in (200_000, 20_000, 2_000, 400, 100):
        for number in range(megabytes * 2**20 // size // 4):
            try:
                cache.set(f"page/{size}/{number}", b"x" * size, noreply=False)
            except pymemcache.MemcacheServerError:  # -M
                break
    cache.close()


def test_a_full_server_that_evicts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evictions break a promise, which doctor says with what to do."""
    monkeypatch.setattr(MemcachedServer, "MEMORY_MB", 2)
    with MemcachedServer() as server:
        before = findings(server.url())["leases are not evicted"]
        assert before.kept
        fill(server)
        after = findings(server.url())["leases are not evicted"]
        assert not after.kept
        assert "-m" in after.detail


def test_a_full_server_that_does_not_evict_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """-M and no memory: a new lease is StoreUnavailable, not "held"; what is asked for a held name does it no harm."""
    monkeypatch.setattr(MemcachedServer, "MEMORY_MB", 2)
    with MemcachedServer(["-M"]) as server:
        store = locate(server.url())[0].open()
        store.act([asking("n:held", "c-1", 60)], soon())
        fill(server)
        big = '{"x":"' + "y" * 4000 + '"}'
        requests = [asking(f"n:{number}", info=big) for number in range(2000)]
        with pytest.raises(dibs.StoreUnavailable, match="memory"):
            store.act(requests, soon())
        assert "refuses" in findings(server.url())["leases are not evicted"].detail
        # The answer to this add is "out of memory", too, but the name is held, and stays so.
        for _ in range(3):
            (outcome,) = store.act([asking("n:held", "c-2", info=big)], soon())
            assert isinstance(outcome, Held)
        with pytest.raises(dibs.StoreUnavailable, match="memory"):
            store.act([Transfer("n:held", "c-2", 30, "host/1/c", "c-1", big)], soon())
        (outcome,) = store.act([Release("n:held", "c-1")], soon())
        assert type(outcome).__name__ == "Released"
        store.close()


# -- refusals ---------------------------------------------------------------------------------------------------------


def listens(place: tuple[str, int] | str) -> bool:
    with socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET) as probe:
        return probe.connect_ex(place) == 0


def test_no_server_is_unavailable_at_once(own_memcached: MemcachedServer) -> None:
    """Nobody listens: StoreUnavailable, told without patience when the store was never reached."""
    own_memcached.stop()
    eventually(lambda: not listens(("127.0.0.1", own_memcached.port)))  # its last thread may outlive its first
    with dibs.connect(own_memcached.url()) as client:
        before = time.monotonic()
        with pytest.raises(dibs.StoreUnavailable) as caught:
            client.lock("x").acquire(timeout=0)
        assert caught.value.maybe_applied is False
        assert time.monotonic() - before < 3


def test_a_server_that_does_not_answer_is_unavailable_in_time(own_memcached: MemcachedServer) -> None:
    """A server that takes connections and says nothing: StoreUnavailable when the request has timed out."""
    with own_memcached.paused(), dibs.connect(own_memcached.url(), request_timeout=0.5) as client:
        before = time.monotonic()
        with pytest.raises(dibs.StoreUnavailable):
            client.lock("x").acquire(timeout=0)
        assert time.monotonic() - before < 3


def is_turned_away(connection: socket.socket) -> bool:
    """Whether a server says something to a connection, or closes it, before it was asked anything."""
    try:
        connection.recv(100)
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("way", ["open", "password", "tls"])
def test_a_server_with_too_many_connections_is_unavailable(way: str, tmp_path: Path) -> None:
    """At its limit (-c) a server is StoreUnavailable, no misconfiguration, and is tried again until it has room."""
    options, files, login, query = {
        "open": ([], {}, "", ""),
        "password": (["-Y", "users"], {"users": "app:hunter2\n"}, "app:hunter2@", ""),
        "tls": (*with_certificate(tmp_path), "", f"?tls=on&tls_ca={tmp_path}/server.crt"),
    }[way]
    with MemcachedServer(["-c", "40", *options], files=files, quiet=way != "open") as server, ExitStack() as stack:
        url = f"memcached://{login}127.0.0.1:{server.port}{query}"
        known = stack.enter_context(dibs.connect(url, patience=0.5))
        patient = stack.enter_context(dibs.connect(url, patience=30))
        for client in (known, patient):
            client.ping()
        server.kill()  # they have to connect anew
        server.start()
        crowd = stack.enter_context(ExitStack())
        for _ in range(60):
            crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        while not is_turned_away(crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=2))):
            pass  # it counts whom it has let in a little later, and may let in more until then
        got = stack.enter_context(ThreadPoolExecutor(1)).submit(patient.lock("x").acquire)
        for client in (known, stack.enter_context(dibs.connect(url))):
            with pytest.raises(dibs.StoreUnavailable, match="too many open connections: raise its -c") as caught:
                client.lock("y").acquire(timeout=0)
            assert not caught.value.maybe_applied
        assert not got.done()
        crowd.close()
        lease = got.result(40)
        assert lease is not None
        lease.release()


def test_localhost_is_found_by_whichever_address_answers(own_memcached: MemcachedServer) -> None:
    """A name with several addresses is tried at each of them."""
    with dibs.connect(f"memcached://localhost:{own_memcached.port}") as client:
        client.ping()


def test_user_and_password(caplog: pytest.LogCaptureFixture) -> None:
    """A server with -Y: the right password opens it; a wrong one or none is SetupRequired, and is not shown."""
    caplog.set_level(1)
    with MemcachedServer(["-Y", "users"], files={"users": "app:open/sesame\n"}, quiet=True) as server:
        at = f"127.0.0.1:{server.port}"
        with dibs.connect(f"memcached://app:open%2Fsesame@{at}") as client, client.lock("x") as lease:
            assert lease.held
            assert "sesame" not in repr(client)
        for login in ("app:hunter2-wrong@", ""):
            with dibs.connect(f"memcached://{login}{at}") as client:
                with pytest.raises(dibs.SetupRequired) as caught:
                    client.lock("x").acquire(timeout=0)
                assert "hunter2" not in f"{caught.value} {caught.value!r} {caught.value.__cause__!r} {client!r}"
    assert "sesame" not in caplog.text
    assert "hunter2" not in caplog.text


def test_sasl_is_a_misconfiguration() -> None:
    """A server with -S takes our words for half of a request, and waits for more: it is asked what it wants."""
    with MemcachedServer(["-S"], files={"memcached.conf": "mech_list: plain\n"}, quiet=True) as server:
        with dibs.connect(server.url(), request_timeout=0.5) as client, pytest.raises(dibs.SetupRequired, match="SASL"):
            client.ping()


def test_a_password_is_not_given_to_who_does_not_ask(own_memcached: MemcachedServer) -> None:
    """A server without -Y would keep it as an item."""
    with dibs.connect(f"memcached://app:secret@127.0.0.1:{own_memcached.port}") as client, client.lock("x"):
        assert own_memcached.ask("get dibs") == ["END"]


def with_certificate(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The options and files of a server that speaks TLS; its certificate is server.crt in this folder."""
    certificate, key = folder / "server.crt", folder / "server.key"
    options = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    options += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(["openssl", "req", *options, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    files = {"crt": certificate.read_text(), "key": key.read_text()}
    return ["-Z", "-o", "ssl_chain_cert=crt,ssl_key=key"], files


def test_tls(tmp_path: Path) -> None:
    """tls=on checks the server's certificate; a server that wants TLS and gets none is SetupRequired that says so."""
    ours = tmp_path / "server.crt"
    options, files = with_certificate(tmp_path)
    with MemcachedServer(options, files=files, quiet=True) as server:
        with dibs.connect(f"memcached://127.0.0.1:{server.port}?tls=on&tls_ca={ours}") as client:
            with client.lock("x", info={"big": "y" * 4000}) as lease:
                assert lease.held
            names = [f"n:{number}" for number in range(500)]
            store = client._desk.address.open()
            store.act([asking(name, info='"' + "y" * 3000 + '"') for name in names], soon())
            assert len(store.leases("n:", "n:\U0010ffff", soon())) == len(names)
            store.close()
        with dibs.connect(f"memcached://127.0.0.1:{server.port}?tls=on") as client:
            with pytest.raises(dibs.SetupRequired, match="CERTIFICATE_VERIFY_FAILED"):
                client.ping()
        with dibs.connect(server.url()) as client, pytest.raises(dibs.SetupRequired, match="tls=on"):
            client.ping()


def test_tls_where_there_is_none(own_memcached: MemcachedServer) -> None:
    """tls=on for a server that does not speak it is SetupRequired."""
    with dibs.connect(own_memcached.url() + "?tls=on") as client, pytest.raises(dibs.SetupRequired):
        client.ping()


def test_a_unix_socket(tmp_path: Path) -> None:
    """memcached:///path is a Unix socket."""
    with MemcachedServer() as server:  # for a folder that its user may write
        path = server.folder / "socket"
        server.stop()
        server.process.spawn([server.program, "-s", path, "-a", "0777"])
        eventually(lambda: listens(str(path)))
        with dibs.connect(f"memcached://{path}") as client, client.lock("x") as lease:
            assert lease.held
    with dibs.connect(f"memcached://{tmp_path}/none") as client, pytest.raises(dibs.StoreUnavailable):
        client.ping()


def test_a_server_without_cas_is_refused() -> None:
    """-C: SetupRequired, since nothing could be released without risk."""
    with MemcachedServer(["-C"]) as server, dibs.connect(server.url()) as client:
        with pytest.raises(dibs.SetupRequired, match="-C"):
            client.lock("x").acquire(timeout=0)


def test_a_server_that_does_not_list_its_keys() -> None:
    """Without the LRU crawler leases cannot be listed, and doctor says so; everything else works."""
    with MemcachedServer(["-o", "no_lru_crawler"]) as server, dibs.connect(server.url()) as client:
        with client.lock("x") as lease:
            seen = client.holder("x")
            assert seen is not None
            assert seen.fencing_token == lease.fencing_token
            with pytest.raises(dibs.Unsupported, match="list"):
                client.leases()
        assert not findings(server.url())["leases can be listed"].kept


@pytest.mark.parametrize(
    "url",
    [
        "memcached://",
        "memcached:///",
        "memcached://host/0",
        "memcached://a:11211,b:11211",
        "memcached://a,b",
        "memcached://a,b?spread=yes",
        "memcached://a?spread=two-holders-possible",
        "memcached://a,?spread=two-holders-possible",
        "memcached://a,b:port?spread=two-holders-possible",
        "memcached://a:70000,b?spread=two-holders-possible",
        "memcached://host:port",
        "memcached://host?colour=blue",
        "memcached://host?tls=maybe",
        "memcached://host?tls_ca=/etc/hosts",
        "memcached://host?tls=on&tls_ca=/does/not/exist",
        "memcached://host?tls=on&tls_ca=/etc/hosts",
        "memcached://host?ttl=1",
        "memcached://app:open%20sesame@host",
    ],
)
def test_a_wrong_url_is_refused_before_any_io(url: str) -> None:
    """A typo in a URL is InvalidOption, without a connection."""
    with pytest.raises(dibs.InvalidOption):
        dibs.connect(url)


def test_several_servers_need_an_option_that_names_the_risk(own_memcached: MemcachedServer) -> None:
    """Several addresses are refused, and the error says why and how; with the option each name stays on one server."""
    with MemcachedServer() as second:
        url = f"{own_memcached.url()},127.0.0.1:{second.port}"
        with pytest.raises(dibs.InvalidOption, match=r"two hold one name .* \?spread=two-holders-possible"):
            dibs.connect(url)
        url += "?spread=two-holders-possible"
        with dibs.connect(url, patience=1) as client, dibs.connect(url, patience=1) as other:
            leases = [client.lock(f"job/{number}").acquire() for number in range(20)]
            assert all(leases)
            assert [other.lock(f"job/{number}").acquire(timeout=0) for number in range(20)] == [None] * 20
            seen = []
            for server in (own_memcached, second):
                with dibs.connect(server.url()) as alone:
                    seen.append(len(alone.leases("job/")))
            assert min(seen) > 0
            assert sum(seen) == 20
            assert len(client.leases("job/")) == 20
            got: list[Any] = []
            waiting = threading.Thread(target=lambda: got.append(other.lock("job/7").acquire(timeout=30)))
            waiting.start()
            eventually(lambda: other._desk.session().waiting._asleep)
            assert leases[7] is not None
            leases[7].release()
            waiting.join()
            assert got[0].fencing_token > leases[7].fencing_token
            second.kill()
            outcomes: list[bool | None] = []
            for number in range(20, 40):
                try:
                    with dibs.connect(url) as third, third.lock(f"job/{number}", timeout=0) as lease:
                        outcomes.append(lease.held)
                except dibs.StoreUnavailable:
                    outcomes.append(None)
            assert {True, None} == set(outcomes)  # names do not move to the server that is left
            second.start()
            assert not findings(own_memcached.url() + f",127.0.0.1:{own_memcached.port}?spread=two-holders-possible")[
                "all programs ask the same server"
            ].kept


def test_a_server_that_hangs_up_at_once_is_said_to_do_so() -> None:
    """What is no memcached and closes the connection without a word, as etcd does: the error says that."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as closing:
        thread = threading.Thread(target=closing.serve_forever)
        thread.start()
        try:
            with dibs.connect(f"memcached://127.0.0.1:{closing.server_address[1]}") as client:
                with pytest.raises(dibs.StoreUnavailable, match=r"without a word|reset by peer"):
                    client.ping()
        finally:
            closing.shutdown()
            thread.join()


def test_a_silent_server_concerns_nobody_elses_names(own_memcached: MemcachedServer) -> None:
    """Where names are spread, leases on the other server are renewed and released though calls are shared with it."""
    with MemcachedServer() as silent:
        url = f"{own_memcached.url()},127.0.0.1:{silent.port}?spread=two-holders-possible"
        with dibs.connect(url, ttl=4, patience=20) as client:
            leases = [had for n in range(20) if (had := client.lock(f"silence/{n}").acquire())]
            assert len(leases) == 20
            with dibs.connect(silent.url()) as alone:
                names = {record.name for record in alone.leases("silence/")}
            others = [lease for lease in leases if lease.name not in names]
            assert names
            assert others
            with silent.paused():
                eventually(lambda: not any(lease.held for lease in leases if lease.name in names))
                assert all(lease.held for lease in others)
                for lease in others[:5]:
                    lease.renew()
                    assert lease.release()
                    with client.lock(lease.name, timeout=0):
                        pass


def test_a_missing_driver_is_named() -> None:
    """Without pymemcache the error says what to install."""
    code = "import sys; sys.modules['pymemcache'] = None; import dibs; dibs.connect('memcached://host')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'dibs[memcached]'" in done.stderr.splitlines()[-1]


# -- what is not memcached --------------------------------------------------------------------------------------------


class Imitation:
    """Something that answers as a proxy does whose server is away; `stats` as given."""

    def __init__(self, stats: str) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    words = line.split()
                    if words[:1] == [b"version"]:
                        answer = "VERSION 1.6.18\r\n"
                    elif words[:1] == [b"stats"]:
                        answer = stats + "END\r\n"
                    elif words[:1] == [b"add"]:
                        self.rfile.readline()
                        answer = "NOT_STORED\r\n"
                    else:
                        answer = "EN\r\n"
                    self.wfile.write(answer.encode())

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"memcached://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Imitation:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_a_proxy_is_refused() -> None:
    """What does not tell process, uptime and settings as memcached does is not talked to any further."""
    with Imitation("STAT version 1.6.18\r\n") as proxy, dibs.connect(proxy.url) as client:
        with pytest.raises(dibs.Unsupported, match="proxy"):
            client.lock("x").acquire(timeout=0)


def test_a_refused_add_is_not_taken_for_held() -> None:
    """NOT_STORED where nothing is to be seen, as for a dead server behind a proxy, is StoreUnavailable, not "held"."""
    stats = "".join(
        f"STAT {key} {value}\r\n"
        for key, value in {
            "pid": 1,
            "uptime": 100,
            "time": int(time.time()),
            "version": "1.6.18",
            "cas_enabled": "yes",
        }.items()
    )
    with Imitation(stats) as dead, dibs.connect(dead.url, patience=0.2) as client:
        with pytest.raises(dibs.StoreUnavailable, match="not there"):
            client.lock("x").acquire(timeout=0)


def test_an_old_memcached_is_refused() -> None:
    """Before 1.6.10: Unsupported, naming both versions."""
    stats = "STAT pid 1\r\nSTAT uptime 1\r\nSTAT time 1\r\nSTAT version 1.5.22\r\nSTAT cas_enabled yes\r\n"
    with Imitation(stats) as old, dibs.connect(old.url) as client:
        with pytest.raises(dibs.Unsupported, match=r"1\.6\.10 or later; this is 1\.5\.22"):
            client.ping()


# -- said aloud -------------------------------------------------------------------------------------------------------


def test_best_effort_is_said_in_the_log_once(
    memcached_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first use in a process logs a warning, later ones and mere connecting do not."""
    monkeypatch.setattr(desk, "_WARNED", set())
    with caplog.at_level(logging.WARNING, "dibs"):
        for _ in range(2):
            with dibs.connect(memcached_url) as client:
                logged = len(caplog.records)
                client.ping()
        assert logged == 1
        assert [record.getMessage()[:40] for record in caplog.records] == [
            "locks on memcached (memcached://127.0.0.1"[:40]
        ]
        assert "best effort" in caplog.text


def test_best_effort_is_not_said_by_each_command(memcached_url: str) -> None:
    """cron mails what `dibs run` says, so it says nothing while nothing is wrong; `dibs doctor` says it all."""
    command = [sys.executable, "-m", "dibs", "--url", memcached_url, "run", "quiet", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_best_effort_is_said_by_capabilities_and_doctor(client: dibs.Client, memcached_url: str) -> None:
    """`capabilities` and doctor promise no durability, no line and no strict tokens; requiring them is refused."""
    offered = client.capabilities
    assert offered.fencing_token.startswith("best effort")
    assert (offered.durable, offered.waiting_line, offered.queue) == (False, "none", False)
    assert not findings(memcached_url)["durable"].kept
    for promise in ("durable", "fencing_token", "waiting_line"):
        with pytest.raises((dibs.Unsupported, dibs.SetupRequired)):
            dibs.connect(f"{memcached_url}?require={promise}").ping()


def test_a_forked_child_has_a_connection_of_its_own(client: dibs.Client) -> None:
    """In a child the parent's lease is not held, the library works anew, and the parent's connection is unharmed."""
    lease = client.lock("x").acquire()
    assert lease is not None
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            seen = [lease.held, client.lock("x").acquire(timeout=0) is None, client.lock("y").acquire() is not None]
            os.write(write_fd, repr(seen).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read_fd, 100) == b"[False, True, True]"
    os.close(read_fd)
    os.close(write_fd)
    assert lease.held
    lease.renew()
    lease.release()
