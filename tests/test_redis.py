"""What is particular to Redis: keys people can read, lost data, memory, rights, replicas, sentinels, clusters, TLS."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import redis as redis_py
import redis.asyncio as async_redis_py

import dibs
from dibs.connecting import locate
from dibs.store import (
    GONE,
    RELEASED,
    Acquire,
    Finding,
    Granted,
    Held,
    Release,
    Released,
    Renew,
    Renewed,
    Store,
    Transfer,
)
from dibs.stores.redis_wire import Wire, refusal, refused_with
from dibs.testing import check_store
from dibs.testing.case import within
from tests import test_store_machine as machine
from tests.servers.process import wait_until
from tests.servers.redis import RedisCluster, RedisSentinel, RedisServer, TlsRedisServer
from tests.waits import eventually, soon


def granted(lock: Any, **how: Any) -> Any:
    lease = lock.acquire(**how)
    assert lease is not None
    return lease


@pytest.fixture
def client(redis_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(redis_url) as client:
        yield client


@pytest.fixture
def prefix(redis_url: str) -> str:
    return redis_url.partition("prefix=")[2]


@contextmanager
def opened(url: str) -> Iterator[Store]:
    store = locate(url)[0].open()
    try:
        yield store
    finally:
        store.close()


@contextmanager
def waiting(client: dibs.Client, name: str, observer: dibs.Client) -> Iterator[list[Any]]:
    """Somebody who waits for the name, in line when the block begins; what was granted, when it has ended."""
    got: list[Any] = []

    def wait() -> None:
        try:
            got.append(client.lock(name, ttl=20).acquire(timeout=40))
        except dibs.StoreUnavailable as error:
            got.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: [row.waiting for row in observer.leases(name)] == [1])
    yield got
    thread.join(40)
    assert got, "the waiter did not come back"


def findings(client: dibs.Client) -> dict[str, Finding]:
    """What `dibs doctor` says, by promise."""
    from dibs.steps import run

    return {finding.promise: finding for finding in run(client._desk.checking())}


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_lease_is_a_hash_that_people_can_read(redis: RedisServer, client: dibs.Client, prefix: str) -> None:
    """`HGETALL dibs:lease:{namespace:name}` shows holder, token, times and info; a release leaves no trace of it."""
    with client.lock("digest/42", info={"why": "test"}) as lease, redis.client() as look:
        row = look.hgetall(f"{prefix}:lease:{{default:digest/42}}")
        assert row["holder"] == lease.holder
        assert row["fencing_token"] == str(lease.fencing_token)
        assert row["info"] == '{"why":"test"}'
        assert float(row["expires_at"]) - float(row["acquired_at"]) == pytest.approx(30, abs=0.001)
        assert look.ttl(f"{prefix}:lease:{{default:digest/42}}") == -1
    with redis.client() as look:
        assert look.keys(f"{prefix}:*") == [f"{prefix}:token"]


def test_a_line_leaves_no_trace_either(redis: RedisServer, client: dibs.Client, redis_url: str, prefix: str) -> None:
    """When nobody holds or waits for a name any more, nothing of it is kept; a line that is left is forgotten."""
    with dibs.connect(redis_url) as other, redis.client() as look:
        lease = granted(client.lock("x"))
        with waiting(other, "x", client) as got:
            for kind in ("line", "waiters"):
                assert 0 < look.pttl(f"{prefix}:{kind}:{{default:x}}") <= 3600 * 1000
            lease.release()
        got[0].release()
        assert look.keys(f"{prefix}:*") == [f"{prefix}:token"]


def test_names_with_braces_have_keys_of_their_own(redis: RedisServer, client: dibs.Client, prefix: str) -> None:
    """Braces and percent signs in names neither end the hash tag nor make two names share a key."""
    names = ["a}b", "a%7Db", "a%257Db", "a{b", "{a}b", "}", "{", "{}", "%", "*", "[a]", "a?", "\\", "^"]
    leases = [granted(client.lock(name), timeout=0) for name in names]
    assert [row.name for row in client.leases()] == sorted(names)
    for name in names:
        assert [row.name for row in client.leases(name)] == sorted(n for n in names if n.startswith(name))
    with redis.client() as look:
        assert len(look.keys(f"{prefix}:lease:{{default:*}}")) == len(names)
    for lease in leases:
        lease.release()


def test_tokens_are_exact_beyond_what_a_double_holds(redis: RedisServer, client: dibs.Client, prefix: str) -> None:
    """Tokens taken over from elsewhere rise one by one up to 2^63 - 1, although Lua's numbers are doubles."""
    for start in (2**53 - 2, 2**53, 2**62 + 1, 2**63 - 5):
        redis.ask("SET", f"{prefix}:token", start)
        for step in (1, 2, 3, 4):
            with client.lock("x") as lease:
                assert lease.fencing_token == start + step
                seen = client.holder("x")
                assert seen is not None
                assert seen.fencing_token == start + step


def test_many_tokens_of_one_call_are_exact(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """Tokens granted in one run of a script differ by one each, across the end of the doubles, too."""
    redis.ask("SET", f"{prefix}:token", 2**53 - 50)
    with opened(redis_url) as store:
        outcomes = store.act([Acquire(f"n:{i}", f"c-{i}", 60, "h") for i in range(100)], soon())
    tokens = [outcome.fencing_token for outcome in outcomes if isinstance(outcome, Granted)]
    assert tokens == list(range(2**53 - 49, 2**53 + 51))


def test_tokens_rise_when_the_clock_of_the_server_is_behind(
    redis: RedisServer, client: dibs.Client, prefix: str
) -> None:
    """A server whose clock was set back goes on counting from the last token, also for names it has no trace of."""
    ahead = time.time_ns() // 1000 + 3600 * 10**6
    redis.ask("SET", f"{prefix}:token", ahead)
    for number, name in enumerate(("x", "y", "x", "z"), 1):
        with client.lock(name) as lease:
            assert lease.fencing_token == ahead + number


def test_expiry_is_by_the_servers_clock_and_not_by_its_keys(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """An expired lease is over though its key is still there, and a purge takes the key."""
    with opened(redis_url) as store:
        store.act([Acquire("n:x", "c-1", 0.05, "h")], soon())
        time.sleep(0.1)
        assert redis.ask("EXISTS", f"{prefix}:lease:{{n:x}}") == 1
        assert store.act([Renew("n:x", "c-1", 60)], soon()) == [GONE]
        assert store.leases("n:", "n;", soon()) == []
        assert store.purge("", "\U0010ffff", 3600, soon()) == 0
        assert store.purge("", "\U0010ffff", 0, soon()) == 1
        assert redis.ask("EXISTS", f"{prefix}:lease:{{n:x}}") == 0


# -- scripts ----------------------------------------------------------------------------------------------------------


def test_forgotten_scripts_are_sent_again(redis: RedisServer, client: dibs.Client) -> None:
    """SCRIPT FLUSH at any moment: the next call of each verb works."""
    for _ in range(2):
        redis.ask("SCRIPT", "FLUSH")
        lease = granted(client.lock("x"), timeout=0)
        redis.ask("SCRIPT", "FLUSH")
        lease.renew()
        redis.ask("SCRIPT", "FLUSH")
        assert client.holder("x") is not None
        redis.ask("SCRIPT", "FLUSH")
        lease.release()


def test_forgotten_scripts_do_not_change_the_order(redis: RedisServer, redis_url: str) -> None:
    """Requests for one name in one call are tried in their order by a server that knows some of the scripts only."""
    with opened(redis_url) as store:
        for _ in range(2):
            redis.ask("SCRIPT", "FLUSH")
            store.act([Acquire("n:x", "a-1", 60, "h")], soon())  # which teaches it one of them
            outcomes = store.act([Release("n:x", "a-1"), Acquire("n:x", "b-1", 60, "h"), Release("n:x", "b-1")], soon())
            assert [type(outcome).__name__ for outcome in outcomes] == ["Released", "Granted", "Released"]


def test_ten_thousand_leases_are_renewed_in_one_flight(redis_url: str) -> None:
    """A vector of 10,000 renewals comes back whole."""
    with opened(redis_url) as store:
        names = [f"default:n{i}" for i in range(10_000)]
        outcomes = store.act([Acquire(name, f"c-{i}", 60, "h") for i, name in enumerate(names)], soon(60))
        assert {type(outcome) for outcome in outcomes} == {Granted}
        renewed = store.act([Renew(name, f"c-{i}", 60) for i, name in enumerate(names)], soon(60))
        assert {type(outcome) for outcome in renewed} == {Renewed}
        assert len(store.leases("default:", "default;", soon(60))) == 10_000


def test_a_key_that_is_not_ours_fails_alone(redis: RedisServer, client: dibs.Client, prefix: str) -> None:
    """A key of another type where a lease should be: whoever wants that name is told, its neighbours get theirs."""
    redis.ask("SET", f"{prefix}:lease:{{default:spoilt}}", "by somebody")
    with pytest.raises(dibs.SetupRequired, match="spoilt"):
        client.lock("spoilt").acquire(timeout=0)
    with client.lock("fine", timeout=0):
        assert [row.name for row in client.leases()] == ["fine"]
        assert client.purge(0) == 0


def test_out_of_memory_only_grants_fail(own_redis: RedisServer) -> None:
    """Under OOM no new lease is granted, and it is said at once; those there are can be renewed, seen and released."""
    with dibs.connect(own_redis.url()) as client, dibs.connect(own_redis.url()) as other:
        lease = granted(client.lock("x", ttl=3))
        paced = granted(client.lock("paced", ttl=3, min_hold=1))
        with waiting(other, "x", client) as got:
            own_redis.ask("CONFIG", "SET", "maxmemory", "1kb")
            with pytest.raises(dibs.StoreUnavailable, match="out of memory"):
                client.lock("y").acquire(timeout=0)
            before = lease.trusted_until
            lease.renew()
            assert lease.trusted_until > before
            assert client.holder("x") is not None
            assert paced.release()
            assert lease.release()
            assert client.holder("x") is None
        assert "out of memory" in str(got[0])
        own_redis.ask("CONFIG", "SET", "maxmemory", "0")
        with other.lock("x", timeout=5):
            pass


def test_out_of_memory_spares_the_neighbours(own_redis: RedisServer) -> None:
    """In one call under OOM releases and renewals go through while the acquires beside them fail."""
    with opened(own_redis.url()) as store:
        store.act([Acquire(f"n:{i}", f"c-{i}", 60, "h") for i in range(3)], soon())
        own_redis.ask("CONFIG", "SET", "maxmemory", "1kb")
        outcomes: list[Any] = list(
            store.act([Acquire("n:new", "c-9", 60, "h"), Renew("n:0", "c-0", 60), Release("n:1", "c-1")], soon())
        )
        assert isinstance(outcomes[0], dibs.StoreUnavailable)
        assert not outcomes[0].maybe_applied
        assert isinstance(outcomes[1], Renewed)
        assert outcomes[2] == RELEASED
        own_redis.ask("CONFIG", "SET", "maxmemory", "0")
        assert [lease.name for lease in store.leases("n:", "n;", soon())] == ["n:0", "n:2"]


def test_redis_answers_as_memory_does(redis_url: str) -> None:
    """The Redis store gives the memory store's outcomes, tokens and order in line for locks, vectors included."""
    machine.compare(locate(redis_url)[0].open, 100)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_only_the_next_in_line_is_told(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """A release publishes once, to the client that is first in line."""
    with opened(redis_url) as store, redis.client() as look, look.pubsub() as listener:
        store.act([], soon())  # connects, and tries out whether it may publish
        listener.psubscribe(f"{prefix}:wake:*")
        store.act([Acquire("n:x", "a-1", 60, "h")], soon())
        store.act([Acquire("n:x", f"{who}-1", 60, "h", None, who) for who in ("b", "c", "d")], soon())
        store.act([Release("n:x", "a-1"), Acquire("n:y", "a-2", 60, "h"), Release("n:y", "a-2")], soon())
        time.sleep(0.1)
        heard = [m["channel"] for m in iter(lambda: listener.get_message(timeout=0.1), None) if m["type"] == "pmessage"]
        assert heard == [f"{prefix}:wake:b"]


def test_the_release_wakes_the_waiter(client: dibs.Client, redis_url: str) -> None:
    """A waiter is granted well before its next poll would have been."""
    with dibs.connect(redis_url) as other:
        other.ping()
        delays = []
        for _ in range(5):
            lease = granted(client.lock("x"))
            got: list[float] = []

            def wait(got: list[float] = got) -> None:
                with other.lock("x"):
                    got.append(time.monotonic())

            thread = threading.Thread(target=wait)
            thread.start()
            eventually(lambda: any(row.waiting for row in client.leases("x")))
            time.sleep(0.05)  # the first wait of a client opens its listening connection meanwhile
            released = time.monotonic()
            lease.release()
            thread.join()
            delays.append(got[0] - released)
        # Polls come 0.7 to 1 s apart; that three of five came sooner than half of that is no accident.
        assert sorted(delays)[2] < 0.35, delays


def test_losing_every_message_costs_one_poll(
    client: dibs.Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: with all signals lost a waiter still acquires within one poll of the name being free."""
    from dibs.stores.redis import RedisWatch

    monkeypatch.setattr(RedisWatch, "changed", lambda self, names: list(self._wire.arrived()) and [])
    with dibs.connect(redis_url) as other:
        lease = granted(client.lock("x"))
        with waiting(other, "x", client) as got:
            lease.release()
        got[0].release()


# -- outages ----------------------------------------------------------------------------------------------------------


def test_a_server_killed_with_9_keeps_grants_and_tokens(own_redis: RedisServer) -> None:
    """kill -9 with appendfsync=always: lease and token are there afterwards, and whoever waited gets its turn."""
    with dibs.connect(own_redis.url(), patience=30) as client, dibs.connect(own_redis.url(), patience=30) as other:
        lease = granted(client.lock("x", ttl=20))
        other.ping()  # or, should the answer to its first request be lost, it is told at once: its address may be wrong
        with waiting(other, "x", client) as got:
            own_redis.kill()
            own_redis.start()
            seen = client.holder("x")
            assert seen is not None
            assert seen.fencing_token == lease.fencing_token
            assert lease.held
            lease.release()
        assert got[0].fencing_token > lease.fencing_token
        got[0].release()


def test_a_lease_outlives_a_restart_of_the_server(own_redis: RedisServer) -> None:
    """Redis restarted while a lease is held: renewals go on, others stay out."""
    with dibs.connect(own_redis.url(), patience=30) as client, dibs.connect(own_redis.url(), patience=30) as other:
        lease = granted(client.lock("x", ttl=20))
        own_redis.restart()
        assert lease.held
        assert other.lock("x").acquire(timeout=0) is None
        before = lease.trusted_until
        eventually(lambda: lease.trusted_until > before)  # a renewal has reached the restarted server
        lease.release()


def test_a_stopped_server_ends_trust_by_the_clock(own_redis: RedisServer) -> None:
    """While the server hangs, a lease is lost by its local deadline, loudly; callers get StoreUnavailable."""
    told = threading.Event()
    with dibs.connect(own_redis.url(), request_timeout=1, patience=1) as client:
        lease = granted(client.lock("x", ttl=2, on_lost=told.set))
        with own_redis.paused():
            assert told.wait(10)
            assert not lease.held
            with pytest.raises(dibs.StoreUnavailable):
                client.lock("y").acquire(timeout=0)
        with pytest.raises(dibs.LeaseLost):
            lease.release()
        with client.lock("x", timeout=10) as again:
            assert again.fencing_token > lease.fencing_token


def test_flushall_under_a_holder_is_noticed(own_redis: RedisServer) -> None:
    """FLUSHALL under a live holder: it hears of the loss at its next renewal, and tokens go on rising."""
    told = threading.Event()
    with dibs.connect(own_redis.url()) as client, dibs.connect(own_redis.url()) as other:
        lease = granted(client.lock("x", ttl=1.5, on_lost=told.set))
        own_redis.ask("FLUSHALL")
        with other.lock("x", timeout=0) as next_lease:
            assert next_lease.fencing_token > lease.fencing_token
            assert told.wait(5)
            assert not lease.held
            with pytest.raises(dibs.LeaseLost):
                lease.check()
            assert next_lease.held


def test_no_server_is_unavailable_at_once(own_redis: RedisServer) -> None:
    """Nobody listens: StoreUnavailable, told without patience when the store was never reached."""
    url = own_redis.url()
    own_redis.stop()
    with dibs.connect(url) as client:
        before = time.monotonic()
        with pytest.raises(dibs.StoreUnavailable) as caught:
            client.lock("x").acquire(timeout=0)
        assert not caught.value.maybe_applied
        assert time.monotonic() - before < 3


def test_a_server_that_trickles_cannot_keep_a_caller(redis: RedisServer) -> None:
    """An answer that comes byte by byte is given up at the deadline, however often there is something to read."""
    with Trickle(redis.port) as slow, opened(redis.url().replace(f":{redis.port}/", f":{slow.port}/")) as store:
        assert store.act([], soon()) == []
        slow.pause_s = 0.05
        began = time.monotonic()
        with (
            within(2, "the deadline was passed"),
            pytest.raises(dibs.StoreUnavailable, match="did not answer in time") as caught,
        ):
            store.act([Acquire("trickle:x", "c-1", 60, "h" * 50)], soon(0.5))
        assert caught.value.maybe_applied
        assert time.monotonic() - began > 0.4
        slow.pause_s = 0.0
        assert isinstance(store.act([Acquire("trickle:x", "c-1", 60, "h")], soon())[0], Granted)
        store.act([Release("trickle:x", "c-1")], soon())


class Trickle:
    """A proxy that passes answers on byte by byte, with a pause after each."""

    def __init__(self, port: int) -> None:
        self.pause_s = 0.0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._thread(self._accept)

    def _thread(self, *work: Any) -> None:
        threading.Thread(target=self._quietly, args=work, daemon=True).start()

    def _quietly(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except OSError:
            pass

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += [near, far]
            self._thread(self._pass_on, near, far, False)
            self._thread(self._pass_on, far, near, True)

    def _pass_on(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        while data := source.recv(65536):
            if slow and self.pause_s:
                for byte in data:
                    target.sendall(bytes([byte]))
                    time.sleep(self.pause_s)
            else:
                target.sendall(data)

    def __enter__(self) -> Trickle:
        return self

    def __exit__(self, *_: object) -> None:
        for one in [self._listener, *self._sockets]:
            one.close()


def test_a_forked_child_leaves_the_parents_connection_alone(client: dibs.Client) -> None:
    """A forked child holds nothing, can work with connections of its own, and the parent's lease goes on."""
    lease = granted(client.lock("x"))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if not lease.held and client.lock("x").acquire(timeout=0) is None:
                with client.lock("y", timeout=0):
                    code = 0
            client.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lease.held
    lease.renew()
    assert lease.release()


# -- logins and addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "redis://192.0.2.1/0?colour=blue",
        "redis://192.0.2.1/first",
        "redis://192.0.2.1/-1",
        "redis://192.0.2.1:port/0",
        "redis://192.0.2.1,192.0.2.2/0",
        "redis://192.0.2.1:70000,192.0.2.2/0?cluster=true",
        "redis://192.0.2.1/1?cluster=true",
        "redis://192.0.2.1/?cluster=perhaps",
        "redis://192.0.2.1/?cluster=true&sentinel=lead",
        "redis://192.0.2.1/?sentinel=",
        "redis://192.0.2.1/?sentinel_password=x",
        "redis://192.0.2.1/?min_replicas=-1",
        "redis://192.0.2.1/?min_replicas=many",
        "redis://192.0.2.1/?prefix=",
        "redis://192.0.2.1/?prefix=a{b}",
        "redis://192.0.2.1/?unix_socket=/run/redis.sock",
        "redis://192.0.2.1/?ssl_ca_certs=/ca.pem",
        "rediss://192.0.2.1/?ssl_cert_reqs=sometimes",
        "redis+unix://",
        "redis+tcp://192.0.2.1/0",
    ],
)
def test_a_wrong_url_is_refused_before_any_io(url: str) -> None:
    """A typo in a URL is InvalidOption, without a connection."""
    with pytest.raises(dibs.InvalidOption):
        dibs.connect(url)


@pytest.mark.parametrize(
    "url, shown",
    [
        ("redis://", "redis://localhost/0"),
        ("valkeys://app:secret@h:1/2", "valkeys://h:1/2"),
        ("redis://:secret@[::1]:7/?db=3", "redis://[::1]:7/3"),
        ("redis://:secret@h1:26379,h2/0?sentinel=lead&sentinel_password=secret", "redis://h1:26379,h2/0?sentinel=lead"),
        ("rediss://h1:1,h2:2/?cluster=true&ssl_ca_certs=/ca.pem", "rediss://h1:1,h2:2/0?cluster=true"),
        ("redis+unix:///run/redis.sock?db=2", "redis+unix:///run/redis.sock"),
        ("redis:///?unix_socket=/run/redis.sock", "redis+unix:///run/redis.sock"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    """Every way to write an address is understood, and what is printed of it holds no login."""
    assert locate(url)[0].shown == shown


def test_a_wrong_password_is_a_misconfiguration_and_is_not_shown(redis: RedisServer) -> None:
    """Wrong password: SetupRequired; neither the right nor the wrong password stands in any text."""
    for url in (redis.url(password="hunter2-wrong"), redis.url(user="nobody", password="hunter2-wrong")):
        with dibs.connect(url) as client:
            with pytest.raises(dibs.SetupRequired) as caught:
                client.lock("x").acquire(timeout=0)
            shown = f"{caught.value} {caught.value!r} {caught.value.__cause__!r} {client!r}"
            assert "hunter2" not in shown
            assert redis.password not in shown


def test_no_password_or_no_such_database_is_a_misconfiguration(redis: RedisServer) -> None:
    """No login where one is needed, and a database that is not there: SetupRequired."""
    for url in (f"redis://127.0.0.1:{redis.port}/0", redis.url()[:-1] + "99"):
        with dibs.connect(url) as client, pytest.raises(dibs.SetupRequired):
            client.ping()


def test_databases_are_different_places(redis: RedisServer) -> None:
    """The same name in database 0 and in database 5 is two locks."""
    with dibs.connect(redis.url()) as zero, dibs.connect(redis.url()[:-1] + "5") as five:
        with zero.lock("database"), five.lock("database", timeout=0):
            assert len(five.leases("database")) == 1


def test_over_a_unix_socket(redis: RedisServer) -> None:
    """`redis+unix:///path` and `?unix_socket=` reach the server through its socket."""
    login = f":{redis.password}@"
    for url in (f"redis+unix://{login}{redis.socket_path}", f"redis://{login}/0?unix_socket={redis.socket_path}"):
        with dibs.connect(url) as client, client.lock("socket", timeout=0) as lease:
            assert lease.held


def test_a_login_with_the_documented_rights_can_do_everything(redis: RedisServer) -> None:
    """The rights that `dibs schema` prints are enough for the conformance suite, and for no other key."""
    with opened(f"{redis.url()}?prefix=fenced") as store:
        (rule,) = (line for line in store.schema().splitlines() if line.startswith("ACL SETUSER"))
    redis.ask(*rule.replace(">password", ">secret").split())
    url = f"{redis.url(user='dibs', password='secret')}?prefix=fenced"
    assert check_store(url, only=SMOKE) > len(SMOKE)
    with dibs.connect(url) as client:
        assert all(finding.kept for finding in findings(client).values())
        assert client.capabilities.durable
    with dibs.connect(url.replace("fenced", "elsewhere")) as client:
        with pytest.raises(dibs.SetupRequired, match="permission"):
            client.lock("x").acquire(timeout=0)


#: Cases that between them use every verb and every script.
SMOKE = [
    "grant_then_held",
    "tokens_rise_across_releases",
    "tokens_rise_across_break_now",
    "tokens_rise_across_purge",
    "renewal_extends",
    "a_thousand_in_one_call",
    "one_name_many_times_in_one_call",
    "names_are_exact",
    "leases_by_prefix",
    "first_come_first_served",
    "the_dead_delay_once",
    "a_release_is_hinted",
    "it_says_what_it_is",
    "waiting_ends_with_a_release",
    "breaking_and_purging",
    "the_store_is_reached",
    "no_more_than_the_limit",
    "tokens_of_permits_rise",
    "the_limit_is_kept_by_the_store",
    "a_lock_has_no_permits",
    "permits_are_kept_for_who_is_ahead",
    "permits_can_be_given_back_in_part",
    "who_was_not_told_its_slot_can_give_it_back",
    "a_grant_clears_the_line_of_the_dead",
    "a_semaphore_lets_so_many_in",
    "a_lost_permit_is_told",
    "a_waiting_writer_holds_back_readers",
    "requests_of_one_call_are_carried_out_by_kind",
    "a_job_that_ends_its_worker_ends_dead",
    "replace_what_has_the_key",
    "groups_with_a_limit",
    "extended_claims_last",
    "jobs_are_shown",
    "results_are_kept",
    "cancelled_jobs",
    "dead_jobs_are_revived",
    "depths_by_prefix",
    "hints_for_takers",
]


def test_a_login_without_a_right_is_told_so(redis: RedisServer) -> None:
    """A command that our scripts need and the login may not use: SetupRequired that names where the list is."""
    with opened(f"{redis.url()}?prefix=fenced") as store:
        (rule,) = (line for line in store.schema().splitlines() if line.startswith("ACL SETUSER"))
    for word in ("+hset", "+evalsha", "+incr"):
        words = rule.replace("dibs on >password", "poor reset on >secret").split()
        redis.ask(*[each for each in words if each not in (word, "+set" if word == "+incr" else "")])
        with dibs.connect(f"{redis.url(user='poor', password='secret')}?prefix=fenced") as client:
            with pytest.raises(dibs.SetupRequired, match="rights"):
                client.lock("x").acquire(timeout=0)


def test_a_login_that_may_not_ask_for_settings(redis: RedisServer) -> None:
    """Without INFO, CONFIG and the channels everything goes on by polling, and what is unknown is said to be."""
    with opened(f"{redis.url()}?prefix=fenced") as store:
        (rule,) = (line for line in store.schema().splitlines() if line.startswith("ACL SETUSER"))
    words = rule.replace("dibs on >password", "mute on >secret").split()
    redis.ask(*[word for word in words if word not in ("+info", "+config|get", "+subscribe") and word[0] != "&"])
    url = f"{redis.url(user='mute', password='secret')}?prefix=fenced"
    with dibs.connect(url) as client, dibs.connect(url) as other:
        lease = granted(client.lock("x"))
        with waiting(other, "x", client) as got:
            assert lease.release()
        got[0].release()
        shown = client.capabilities
        assert not shown.durable
        assert "unknown" in shown.survives_restart
        assert shown.signal.startswith("poll")
        told = findings(client)
        assert not told["leases are not evicted"].kept
        assert not told["waiters are woken by the release"].kept


@contextmanager
def busy(server: RedisServer) -> Iterator[None]:
    """A server that runs a script without end, and says so to everybody else, inside the block."""
    server.ask("CONFIG", "SET", "busy-reply-threshold", "1")
    script = threading.Thread(target=run_without_end, args=(server,))
    with server.client() as look:
        script.start()
        try:
            eventually(lambda: is_busy(look))
            yield
        finally:
            look.script_kill()
            script.join(10)


def run_without_end(server: RedisServer) -> None:
    with server.client(socket_timeout=30) as client, pytest.raises(redis_py.ResponseError):
        client.eval("while true do end", 0)


def is_busy(look: redis_py.Redis) -> bool:
    try:
        look.get("x")
    except redis_py.ResponseError as error:
        return str(error).startswith("BUSY")
    return False


def ping_and_tell(client: dibs.Client, ended: threading.Event) -> None:
    client.ping()
    ended.set()


@pytest.mark.parametrize("database", [0, 5])
def test_a_busy_server_is_unavailable(own_redis: RedisServer, database: int) -> None:
    """BUSY, whichever command is refused while connecting: StoreUnavailable, and it goes on when the script is over."""
    url = own_redis.url()[:-1] + str(database)
    with dibs.connect(url, patience=20) as client:
        with busy(own_redis):
            with pytest.raises(dibs.StoreUnavailable, match="BUSY") as caught:
                client.lock("x").acquire(timeout=0)
            assert not caught.value.maybe_applied
        with client.lock("x", timeout=0):
            pass
    with dibs.connect(url, patience=20) as client:
        client.ping()
        own_redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        ended = threading.Event()
        with busy(own_redis):
            waiter = threading.Thread(target=ping_and_tell, args=(client, ended))
            waiter.start()
            assert not ended.wait(1)  # it is tried again
        assert ended.wait(10)
        waiter.join()


@pytest.mark.parametrize("renamed", ["EVALSHA", "EVAL", "SELECT"])
def test_a_command_that_is_needed_and_renamed_is_named(renamed: str) -> None:
    """A command without which nothing works, renamed: SetupRequired that names it, and not what it was given."""
    with RedisServer({"rename-command": f'{renamed} ""'}) as server:
        with dibs.connect(server.url()[:-1] + "2") as client:
            with pytest.raises(dibs.SetupRequired, match=f"(?i)unknown command .{renamed}") as caught:
                client.lock("x", ttl=20).acquire(timeout=0)
            assert "lease" not in str(caught.value)


@pytest.mark.parametrize("renamed", ["CONFIG", "INFO", "CLIENT", "PUBLISH", "SUBSCRIBE"])
def test_a_command_that_is_only_useful_may_be_renamed(renamed: str) -> None:
    """Without INFO, CONFIG and others that managed services keep for themselves everything goes on."""
    with RedisServer({"rename-command": f'{renamed} ""'}) as server:
        with dibs.connect(server.url()) as client, dibs.connect(server.url()) as other:
            lease = granted(client.lock("x", ttl=20))
            with waiting(other, "x", client) as got:
                assert lease.release()
            got[0].release()
            assert client.capabilities.durable is (renamed not in ("INFO", "CONFIG"))
            told = findings(client)
            assert told["reachable"].kept
            assert told["grants survive a failover"].kept is (renamed != "INFO")


@pytest.mark.parametrize("renamed", ["HSET", "TIME", "HMGET"])
def test_a_command_of_a_script_that_is_renamed(renamed: str) -> None:
    """A command that a script needs, renamed: SetupRequired that says what may be the matter, at a look, too."""
    with RedisServer({"rename-command": f'{renamed} ""'}) as server, dibs.connect(server.url()) as client:
        with pytest.raises(dibs.SetupRequired, match="renamed"):
            client.lock("x").acquire(timeout=0)
        if renamed == "TIME":
            with pytest.raises(dibs.SetupRequired, match="renamed"):
                client.holder("x")


@pytest.mark.parametrize(
    "row, shown, refused",
    [
        ({"claim_id": "z", "expires_at": "9999999999"}, ("", 0, None), False),
        (
            {
                "claim_id": b"\xff",
                "expires_at": "9999999999",
                "fencing_token": "q",
                "holder": b"h\xff",
                "info": b"{\xff",
            },
            ("h\ufffd", 0, None),
            True,
        ),
        ({"claim_id": "z", "expires_at": "soon", "acquired_at": "x"}, None, True),
        ({"other": "x"}, None, False),
        ("text", None, True),
    ],
)
def test_what_somebody_wrote_to_our_key_does_not_end_a_listing(
    client: dibs.Client, redis: RedisServer, redis_url: str, row: Any, shown: Any, refused: bool
) -> None:
    """A damaged row is shown as far as it can be read, one that is no lease is left out, and the others are shown."""
    key = f"{redis_url.partition('prefix=')[2]}:lease:{{default:damaged}}"
    with redis.client() as root, client.lock("whole"):
        root.hset(key, mapping=row) if isinstance(row, dict) else root.set(key, row)
        try:
            told = {lease.name: (lease.holder, lease.fencing_token, lease.info) for lease in client.leases()}
            assert told.pop("whole")
            assert told == ({} if shown is None else {"damaged": shown})
            assert (client.holder("damaged") is None) is (shown is None)
            if refused:
                with pytest.raises(dibs.SetupRequired, match="'default:damaged'"):
                    client.lock("damaged").acquire(timeout=0)
            else:
                lease = client.lock("damaged").acquire(timeout=0)
                assert (lease is None) is (shown is not None)
                if lease is not None:
                    lease.release()
        finally:
            root.delete(key)


@pytest.mark.parametrize("right", ["time", "hmget"])
def test_a_command_of_a_script_that_the_login_may_not_use(own_redis: RedisServer, right: str) -> None:
    """A right that a script needs is missing: SetupRequired, also where a look comes first."""
    with own_redis.client() as root:
        root.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "&*", "+@all", f"-{right}")
    with dibs.connect(f"redis://limited:pw@127.0.0.1:{own_redis.port}/0") as client:
        for ask in (lambda: client.holder("x"), lambda: client.lock("x").acquire(timeout=0)):
            with pytest.raises(dibs.SetupRequired, match="rights that"):
                ask()


@pytest.mark.parametrize(
    "line, code",
    [
        (b"ERR Error running script (call to f_1): @user_script:7: @user_script: 7: -OOM not allowed", "OOM"),
        (b"ERR Error running script (call to f_1): @user_script:7: @user_script: 7: Unknown Redis command", ""),
        (b"@user_script: 12: -OOM command not allowed", "OOM"),
        (b"NOPERM this user has no permissions", "NOPERM"),
    ],
)
def test_the_code_of_an_error_of_a_script(line: bytes, code: str) -> None:
    """Redis 6 puts words of its own before the error of a command in a script."""
    assert refusal(line).code == code


@pytest.mark.parametrize(
    "error, code",
    [
        (redis_py.ResponseError("DB index is out of range"), "ERR"),
        (redis_py.ResponseError("BUSY Redis is busy running a script"), "BUSY"),
        (redis_py.ReadOnlyError("You can't write against a read only replica"), "READONLY"),
    ],
)
def test_a_driver_that_takes_the_code_away(error: redis_py.RedisError, code: str) -> None:
    """redis-py 5.2 tells some errors without their first word."""
    assert refused_with(error).code == code


def test_a_url_without_the_password_is_told_so(redis: RedisServer) -> None:
    """A server that wants a password, and a URL without: SetupRequired that says where to give it."""
    with dibs.connect(f"redis://127.0.0.1:{redis.port}/0") as client:
        with pytest.raises(dibs.SetupRequired, match=r"NOAUTH.* Give the password in the URL"):
            client.lock("x").acquire(timeout=0)


def test_protected_mode_says_what_to_do() -> None:
    """A server that lets nobody in from elsewhere: SetupRequired with its own words."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # which sends nothing, and tells the address of this machine
        here = outward.getsockname()[0]
    with RedisServer({"bind": f"127.0.0.1 {here}", "requirepass": None, "masterauth": None}, password="") as server:
        for login in ("", ":secret@"):
            with dibs.connect(f"redis://{login}{here}:{server.port}/0") as client:
                with pytest.raises(dibs.SetupRequired, match=r"DENIED.* protected mode .*password"):
                    client.ping()


@pytest.mark.parametrize("login", [True, False])
def test_a_server_with_too_many_clients_is_unavailable(login: bool) -> None:
    """At `maxclients` it is StoreUnavailable in the server's words, and it goes on when there is room."""
    settings = {} if login else {"requirepass": None, "masterauth": None}
    with RedisServer(settings, password=None if login else "") as server, server.client() as look:
        look.config_set("maxclients", 1)
        url = server.url() if login else f"redis://127.0.0.1:{server.port}/0"
        with dibs.connect(url) as client:
            for _ in range(3):
                with pytest.raises(dibs.StoreUnavailable, match="max number of clients") as caught:
                    client.lock("x").acquire(timeout=0)
                assert not caught.value.maybe_applied
            look.config_set("maxclients", 100)
            with client.lock("x", timeout=0):
                pass


def test_a_password_that_is_changed_meanwhile(own_redis: RedisServer) -> None:
    """When the password is another all of a sudden, and connections are cut: SetupRequired, and neither is shown."""
    with dibs.connect(own_redis.url()) as client:
        client.ping()
        with own_redis.client() as look:
            look.config_set("requirepass", "the-new-secret")
            look.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(dibs.SetupRequired, match=r"WRONGPASS|invalid") as caught:
                client.lock("x").acquire(timeout=0)
            assert own_redis.password not in f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"
            look.config_set("requirepass", own_redis.password)


def test_a_server_that_cannot_save_is_unavailable() -> None:
    """MISCONF, the refusal of writes by a server that cannot write its snapshot: StoreUnavailable in its words."""
    settings = {"appendonly": "no", "save": "3600 1000000", "dbfilename": "snapshot.rdb"}
    with RedisServer(settings) as server, server.client() as look:
        with dibs.connect(server.url()) as client:
            lease = granted(client.lock("x", ttl=20))
            (server.folder / "snapshot.rdb").mkdir()  # it cannot become a file
            look.bgsave()
            eventually(lambda: look.info("persistence")["rdb_last_bgsave_status"] == "err")
            with pytest.raises(dibs.StoreUnavailable, match="MISCONF"):
                client.lock("y").acquire(timeout=0)
            assert lease.held
            (server.folder / "snapshot.rdb").rmdir()
            look.bgsave()
            eventually(lambda: look.info("persistence")["rdb_last_bgsave_status"] == "ok")
            lease.renew()
            assert lease.release()


def test_the_address_of_what_a_program_has_is_enough(redis: RedisServer, own_redis: RedisServer) -> None:
    """connect(client or pool of redis-py) takes the address, whatever it decodes, and never its connections."""
    where: dict[str, Any] = {"host": "127.0.0.1", "port": redis.port, "password": redis.password}
    with dibs.connect(redis.url()) as first:
        lease = granted(first.lock("borrowed"))
        sources = [
            redis_py.Redis(**where, decode_responses=True),
            redis_py.Redis(**where, decode_responses=False),
            redis_py.ConnectionPool(**where),
            redis_py.Redis.from_url(redis.url()),
            redis_py.Redis(unix_socket_path=str(redis.socket_path), password=redis.password),
            redis.client().connection_pool,
            async_redis_py.Redis(**where),
            async_redis_py.ConnectionPool(**where),
        ]
        for source in sources:
            with dibs.connect(source) as client:
                seen = client.holder("borrowed")
                assert seen is not None
                assert seen.fencing_token == lease.fencing_token
        lease.release()


def test_a_client_with_a_credential_provider_is_refused() -> None:
    """A login that only a function knows cannot be borrowed, and that is said."""
    source = redis_py.Redis(credential_provider=redis_py.UsernamePasswordCredentialProvider("a", "b"))
    with pytest.raises(dibs.InvalidOption, match="credential provider"):
        dibs.connect(source)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, durable, survives",
    [
        ({}, True, "yes"),
        ({"appendfsync": "everysec"}, False, "last second"),
        ({"appendfsync": "no"}, False, "not written yet"),
        ({"appendonly": "no"}, False, "no"),
        ({"appendonly": "no", "save": "3600 1"}, False, "snapshot"),
        ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}, False, "evict"),
        ({"maxmemory": "100mb", "maxmemory-policy": "volatile-lru"}, True, "yes"),
    ],
)
def test_what_is_promised_follows_the_settings(settings: dict[str, str], durable: bool, survives: str) -> None:
    """Capabilities and doctor read appendonly, appendfsync, save and maxmemory-policy from the server."""
    with RedisServer(settings) as server, dibs.connect(server.url()) as client:
        shown = client.capabilities
        assert (shown.durable, survives in shown.survives_restart) == (durable, True)
        told = findings(client)
        assert told["grants survive a crash of the server"].kept is durable
        assert told["leases are not evicted"].kept is ("allkeys" not in settings.get("maxmemory-policy", ""))
        assert told["fencing tokens rise"].kept is durable is (shown.fencing_token == "strict")
        assert told["waiters are woken by the release"].kept
        with client.lock("x", timeout=0):
            pass


# -- replicas, sentinels, clusters, TLS -------------------------------------------------------------------------------


@pytest.fixture
def replica(own_redis: RedisServer) -> Iterator[RedisServer]:
    with replica_of(own_redis) as server:
        yield server


@contextmanager
def replica_of(of: RedisServer) -> Iterator[RedisServer]:
    """A replica that has caught up, and of which the master knows that."""
    with RedisServer({"replicaof": f"127.0.0.1 {of.port}"}, password=of.password) as server:
        with server.client() as look:
            eventually(lambda: look.info("replication")["master_link_status"] == "up")
        # The link is up before the master counts the replica among those whose word it takes.
        catch_up(of)
        yield server


def catch_up(master: RedisServer) -> None:
    """Wait until a replica has acknowledged all that was written, which it does by itself once a second."""
    with master.client() as look:
        eventually(lambda: look.set("caught up", 1) and look.wait(1, 500) == 1)


def test_a_replica_is_a_misconfiguration(replica: RedisServer) -> None:
    """A URL that names a replica: SetupRequired that says so, not "held by another"."""
    with dibs.connect(replica.url()) as client, pytest.raises(dibs.SetupRequired, match="replica"):
        client.lock("x").acquire(timeout=0)


def test_grants_wait_for_replicas(own_redis: RedisServer, replica: RedisServer) -> None:
    """With min_replicas a grant is on the replica when it is told; without enough of them nothing stays granted."""
    url = f"{own_redis.url()}?min_replicas=1"
    impatient = dibs.connect(url, request_timeout=1, patience=0.5)
    with dibs.connect(url) as client, impatient, dibs.connect(own_redis.url()) as other:
        for number in range(20):
            with client.lock(f"n/{number}") as lease:
                assert replica.ask("HGET", f"dibs:lease:{{default:n/{number}}}", "fencing_token") == str(
                    lease.fencing_token
                )
        assert findings(client)["grants survive a failover"].kept
        assert not findings(other)["grants survive a failover"].kept
        told = threading.Event()
        lease = granted(client.lock("kept", ttl=3, on_lost=told.set))
        with replica.paused():
            with pytest.raises(dibs.StoreUnavailable, match="min_replicas"):
                impatient.lock("x").acquire(timeout=0)
            eventually(lambda: other.holder("x") is None)
            assert told.wait(10)  # renewals that no replica has heard of are not trusted
        assert not lease.held
        eventually(lambda: can_be_had(client, "x"))


def test_what_is_kept_waits_for_replicas(own_redis: RedisServer, replica: RedisServer) -> None:
    """With min_replicas a release that keeps counts when replicas have it, a plain one at once."""
    asked = [Acquire("n:x", f"a-{i}", 60, "h", permits=3) for i in range(3)]
    with opened(f"{own_redis.url()}?min_replicas=1") as store, opened(own_redis.url()) as other:
        store.act(asked[:2], soon())
        with replica.paused():
            with pytest.raises(dibs.StoreUnavailable, match="min_replicas") as caught:
                store.act([Release("n:x", "a-0", 1, None, 60, '{"ran":true}')], soon(1))
            assert caught.value.maybe_applied
            assert store.act([Release("n:x", "a-1", 2)], soon(1)) == [RELEASED]  # or min_replicas would be told
            with pytest.raises(dibs.StoreUnavailable, match="min_replicas"):
                store.act([asked[2]], soon(1))
            assert [(lease.slot, lease.info) for lease in other.leases("n:", "n;", soon())] == [(1, '{"ran":true}')]
        eventually(lambda: replica.ask("HGET", "dibs:lease:{n:x}1", "info") == '{"ran":true}')


def test_once_is_done_when_replicas_have_the_mark(own_redis: RedisServer, replica: RedisServer) -> None:
    """With min_replicas a run whose mark no replica has is told so, and nobody who sees the mark takes it for done."""
    url = f"{own_redis.url()}?min_replicas=1"
    with dibs.connect(url, request_timeout=1, patience=0.5) as client, dibs.connect(own_redis.url()) as careless:
        with client.once("first", keep=300) as run:
            assert run
        once = client.once("job", keep=300)
        with once as run, replica.paused():
            run.result = "done"
            with pytest.raises(dibs.StoreUnavailable, match=r"may be run again") as caught:
                run.__exit__(None, None, None)
            assert "min_replicas" in str(caught.value.__cause__)
            for look in (once.done, lambda: once.begin(0), lambda: client.holder("job")):
                with pytest.raises(dibs.StoreUnavailable, match="min_replicas"):
                    look()
            assert careless.once("job", keep=300).done()
            assert [lease.name for lease in client.leases()] == ["first", "job"]
        eventually(lambda: done_by(once))
        assert once.run(lambda: "again") == "done"


def done_by(once: dibs.Once) -> bool:
    try:
        return once.done() is not None
    except dibs.StoreUnavailable:
        return False


def test_what_is_repeated_waits_for_replicas(own_redis: RedisServer, replica: RedisServer) -> None:
    """With min_replicas a grant that is repeated on another connection counts when replicas have it."""
    url = f"{own_redis.url()}?min_replicas=1"
    asked: list[list[Any]] = [
        [Acquire("n:lock", "a-1", 60, "h")],
        [Acquire("n:pool", "a-1", 60, "h", permits=3)],
        [Transfer("n:given", "b-1", 60, "h", "a-1")],
        [Transfer("n:shared", "b-1", 60, "h", "a-1", permits=3)],
    ]
    with opened(url) as store:
        store.act([Acquire("n:given", "a-1", 60, "h"), Acquire("n:shared", "a-1", 60, "h", permits=3)], soon())
    with opened(own_redis.url()) as careless, ExitStack() as stack:
        stores = [stack.enter_context(opened(url)) for _ in asked]
        for store in stores:
            store.act([], soon())  # connects, which publishes something, and so is a write of this connection
        catch_up(own_redis)
        stack.enter_context(replica.paused())
        for requests, store in zip(asked, stores, strict=True):
            assert isinstance(careless.act(requests, soon())[0], Granted)
            # A shorter ttl, so that its end stays as it is.
            repeated = [request._replace(ttl=30) for request in requests]
            with pytest.raises(dibs.StoreUnavailable, match="min_replicas"):
                store.act(repeated, soon(1))
        assert careless.leases("n:", "n;", soon()) == []  # they were given back


def can_be_had(client: dibs.Client, name: str) -> bool:
    try:
        lease = client.lock(name).acquire(timeout=0)
    except dibs.StoreUnavailable:
        return False
    return lease is not None and lease.release()


def test_sentinels_lead_to_the_master_across_a_failover(own_redis: RedisServer, replica: RedisServer) -> None:
    """When sentinels make a replica the master, leases go on there, and tokens go on rising."""
    with RedisSentinel(own_redis) as sentinel:
        eventually(lambda: len(sentinel.ask("SENTINEL", "REPLICAS", sentinel.MASTER)) == 1)
        url = sentinel.url()
        with dibs.connect(url, patience=30) as client, dibs.connect(url, patience=30) as other:
            before = granted(client.lock("x", ttl=30))
            assert other.lock("x").acquire(timeout=0) is None
            with replica.client() as look:
                eventually(lambda: look.exists("dibs:lease:{default:x}"))
            own_redis.kill()
            eventually(lambda: replica.ask("ROLE")[0] == "master", limit_s=30)
            assert other.lock("x").acquire(timeout=0) is None
            assert before.held
            before.renew()
            assert before.release()
            after = granted(other.lock("x"), timeout=10)
            assert after.fencing_token > before.fencing_token
            after.release()
        with dibs.connect(sentinel.url().replace("lead", "nobody")) as wrong:
            with pytest.raises(dibs.SetupRequired, match="nobody"):
                wrong.ping()
        with dibs.connect(f"redis://127.0.0.1:{sentinel.port}/0") as bare:
            with pytest.raises(dibs.SetupRequired, match="sentinel="):
                bare.ping()


def test_a_frozen_master_is_left_for_the_one_that_sentinels_name(own_redis: RedisServer, replica: RedisServer) -> None:
    """A master that says nothing does not take all the time there is: who waits is served by the next one."""
    with RedisSentinel(own_redis) as sentinel:
        eventually(lambda: len(sentinel.ask("SENTINEL", "REPLICAS", sentinel.MASTER)) == 1)
        with dibs.connect(sentinel.url()) as client:
            client.ping()
            with own_redis.paused():
                lease = granted(client.lock("x"), timeout=20)
                assert replica.ask("ROLE")[0] == "master"
                assert lease.release()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


def test_a_cluster_keeps_the_promises(cluster: RedisCluster) -> None:
    """On a cluster every verb works: names are spread over its nodes, all keys of one in one slot."""
    assert check_store(cluster.url(), only=[*SMOKE, "poisoned_neighbours", "opposite_orders", "verbs_mix_in_one_call"])
    with dibs.connect(f"{cluster.url()}&prefix=spread") as client:
        leases = [granted(client.lock(f"{{{n}}}/{n}}}"), timeout=0) for n in range(60)]
        spread = [node.ask("KEYS", "spread:lease:*") for node in cluster.nodes]
        assert sum(map(len, spread)) == 60
        assert all(spread)
        assert len(client.leases()) == 60
        assert all("3 masters" in f.detail for p, f in findings(client).items() if p == "reachable")
        for lease in leases:
            lease.release()


@contextmanager
def moving(cluster: RedisCluster, key: str, all_keys: bool = False) -> Iterator[RedisServer]:
    """The slot of a key is on its way, inside the block, to the node that is given: the key, or all that are there."""
    source = next(node for node in cluster.nodes if node.ask("CLUSTER", "COUNTKEYSINSLOT", slot_of(node, key)))
    target = next(node for node in cluster.nodes if node is not source)
    slot = slot_of(source, key)
    names = {node: node.ask("CLUSTER", "MYID") for node in (source, target)}
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
    keys = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100) if all_keys else [key]
    source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "AUTH", cluster.password, "KEYS", *keys)
    yield target
    for node in (target, source):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", names[target])


def test_a_moved_slot_is_followed(cluster: RedisCluster) -> None:
    """A slot that moves to another node while a lease is held: the lease and its token move along."""
    with dibs.connect(cluster.url()) as client:
        lease = granted(client.lock("moving"))
        with moving(cluster, "dibs:lease:{default:moving}", all_keys=True):
            lease.renew()  # told to ask elsewhere (ASK)
        lease.renew()  # told that it has moved (MOVED)
        seen = client.holder("moving")
        assert seen is not None
        assert seen.fencing_token == lease.fencing_token
        lease.release()
        with client.lock("moving", timeout=0) as again:
            assert again.fencing_token > lease.fencing_token


def test_a_slot_on_its_way_is_an_outage(cluster: RedisCluster) -> None:
    """While the keys of a name are on their way, it is renewed, and StoreUnavailable to who wants or returns it."""
    # The patience is over long before the time of a request is: what was heard is known then.
    how: dict[str, Any] = {"patience": 0.5, "request_timeout": 10}
    with dibs.connect(cluster.url(), **how) as client, dibs.connect(cluster.url(), **how) as other:
        lease = granted(client.lock("under way", ttl=30))
        assert other.lock("under way").acquire(timeout=0) is None
        key = "dibs:lease:{default:under way}"
        with moving(cluster, key) as target:
            lease.renew()
            with pytest.raises(dibs.StoreUnavailable, match="TRYAGAIN") as caught:
                other.lock("under way").acquire(timeout=0)
            assert not caught.value.maybe_applied
            assert not lease.release()  # not confirmed
        left = target.ask("HGET", key, "claim_id")
        assert left == lease.claim_id  # it ends by its ttl
        assert other.break_lease("under way", fencing_token=lease.fencing_token, now=True)
        with other.lock("under way", timeout=0) as again:
            assert again.fencing_token > lease.fencing_token


def node_of(cluster: RedisCluster, name: str) -> RedisServer:
    """The node that has the keys of a name, given with its namespace."""
    slot, share = slot_of(cluster.nodes[0], f"dibs:lease:{{{name}}}"), 16384 // len(cluster.nodes)
    return cluster.nodes[min(slot // share, len(cluster.nodes) - 1)]


@pytest.mark.parametrize("named", [True, False], ids=["in the URL", "found through others"])
def test_a_silent_node_concerns_nobody_elses_names(named: bool, cluster: RedisCluster) -> None:
    """Leases on the other nodes are renewed and released, and names there are had, though calls are shared with it."""
    silent, keeper = cluster.nodes[0 if named else 2], cluster.nodes[1]
    # Who asks for a name reads once a second what is paused, which must not be with the silent one.
    namespace = next(f"silence{n}" for n in range(99) if node_of(cluster, f"silence{n}~paused") is keeper)
    with dibs.connect(cluster.url(), namespace=namespace, ttl=4, patience=20) as client:
        leases = [granted(client.lock(f"job/{number}")) for number in range(30)]
        there = [lease for lease in leases if node_of(cluster, f"{namespace}:{lease.name}") is silent]
        others = [lease for lease in leases if lease not in there]
        assert there
        assert others
        with silent.paused():
            eventually(lambda: not any(lease.held for lease in there))
            late: list[Any] = []
            waiting = threading.Thread(target=lambda: late.append(client.lock(there[0].name, ttl=30).acquire()))
            waiting.start()
            assert all(lease.held for lease in others)
            for lease in others[:5]:
                lease.renew()
                assert lease.release()
                with client.lock(lease.name, timeout=0):
                    pass
            assert not late
        waiting.join(30)
        (again,) = late
        assert again.fencing_token > there[0].fencing_token
        assert again.release()
    assert wait_until(lambda: all(cluster._is_whole(node) for node in cluster.nodes), 30)


def slot_of(node: RedisServer, key: str) -> int:
    return int(node.ask("CLUSTER", "KEYSLOT", key))


def test_too_few_replicas_of_several_nodes(cluster: RedisCluster) -> None:
    """Waiting for replicas takes its time on each node, and none is away for it: what was granted is given back."""
    store = locate(f"{cluster.url()}&min_replicas=1&prefix=few")[0].open()
    with pytest.raises(dibs.StoreUnavailable, match="min_replicas=1"):
        store.act([Acquire(f"n:{number}", "c-1", 30, "h") for number in range(9)], soon(5))
    assert store.leases("n:", "n;", soon()) == []
    store.close()


def test_a_cluster_must_be_said_to_be_one(cluster: RedisCluster, redis: RedisServer) -> None:
    """A node of a cluster without cluster=true, and cluster=true on a single server: SetupRequired that says so."""
    node = cluster.nodes[0]
    with dibs.connect(node.url()) as client, pytest.raises(dibs.SetupRequired, match="cluster=true"):
        client.ping()
    with dibs.connect(f"{redis.url()}?cluster=true") as client, pytest.raises(dibs.SetupRequired, match="no cluster"):
        client.ping()


def test_over_tls() -> None:
    """rediss:// with the authority's certificate works, waiters included; without it, or without TLS, it is refused."""
    with TlsRedisServer() as server:
        good = f"{server.url(scheme='rediss')}?ssl_ca_certs={server.authority}"
        assert check_store(good, only=["a_release_is_hinted", "a_thousand_in_one_call", "waiting_ends_with_a_release"])
        with dibs.connect(server.url(scheme="rediss")) as client:
            with pytest.raises(dibs.SetupRequired, match=r"(?i)certificate"):
                client.ping()
        with dibs.connect(server.url()) as client:
            with pytest.raises(dibs.SetupRequired, match="rediss://"):
                client.ping()
        with dibs.connect(f"{server.url(scheme='rediss')}?ssl_ca_certs=/nowhere.pem") as client:
            with pytest.raises(dibs.SetupRequired, match="TLS options"):
                client.ping()
        with dibs.connect(f"{server.url(scheme='valkeys')}?ssl_cert_reqs=none") as client:
            client.ping()


def test_tls_to_a_server_without_it(redis: RedisServer) -> None:
    """rediss:// to a server that speaks no TLS, which waits for more instead of refusing, is SetupRequired."""
    with dibs.connect(redis.url(scheme="rediss"), request_timeout=0.5) as client:
        with pytest.raises(dibs.SetupRequired, match="does not speak TLS"):
            client.ping()


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_who_presses_ctrl_c_twice_leaves_no_answer_for_the_next(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second interrupts the wait for what the first has left: the connection is closed all the same."""
    store = locate(redis_url)[0].open()
    assert type(store.act([Acquire("n:a", "c-1", 60, "h")], soon())[0]) is Granted
    receive, times = Wire.receive, iter(range(2))

    def interrupted(self: Wire, *args: Any) -> list[Any]:
        if next(times, None) is not None:
            raise KeyboardInterrupt
        return receive(self, *args)

    monkeypatch.setattr(Wire, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.act([Acquire("n:b", "c-2", 60, "h")], soon())
    assert type(store.act([Acquire("n:a", "c-3", 60, "h")], soon())[0]) is Held
    assert type(store.act([Release("n:a", "c-1")], soon())[0]) is Released
    store.close()
