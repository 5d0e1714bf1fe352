"""Permits on MySQL and MariaDB: the short way grants what the long way would, and nobody ever too many."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dibs.connecting import locate
from dibs.errors import DibsError
from dibs.store import ANY_TICKET, RELEASED, Acquire, Granted, Held, Mismatch, Release, Transfer
from dibs.stores import mysql_drivers
from dibs.stores.mysql import MySQLStore
from dibs.stores.mysql_pools_plain import LOCKED_TIMES, plainly
from dibs.stores.permits import Grant, State, decide
from tests import test_store_machine as machine
from tests.servers.mysql import MariaDBServer
from tests.test_mysql_jobs import DRIVERS, database_of
from tests.waits import soon


def asked(claim_id: str, limit: int, take: int = 1, **how: Any) -> Acquire:
    return Acquire("x", claim_id, 60, "h/1/x", permits=limit, take=take)._replace(**how)


def opened(url: str) -> MySQLStore:
    store = locate(url)[0].open()
    assert isinstance(store, MySQLStore)
    return store


@pytest.fixture(params=DRIVERS)
def url(mysql: MariaDBServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new empty database, through each driver."""
    url = mysql.create_database()
    yield f"{url}?driver={request.param}"
    mysql.drop_database(url)


@pytest.fixture
def store(url: str) -> Iterator[MySQLStore]:
    store = opened(url)
    store.setup(soon(60))
    yield store
    store.close()


@pytest.fixture
def other(url: str) -> Iterator[MySQLStore]:
    store = opened(url)
    yield store
    store.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return sent_by(monkeypatch)


def sent_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first words of every statement that is sent from here on."""
    verbs: list[str] = []
    send = mysql_drivers.Wire.send

    def noted(self: mysql_drivers.Wire, statement: str) -> None:
        verbs.append(statement.split(maxsplit=1)[0])
        send(self, statement)

    monkeypatch.setattr(mysql_drivers.Wire, "send", noted)
    return verbs


def granted(store: MySQLStore, request: Acquire) -> Granted:
    (outcome,) = store.act([request], soon())
    assert isinstance(outcome, Granted), outcome
    return outcome


# -- the same decision ------------------------------------------------------------------------------------------------


def test_it_answers_as_memory_does(mysql_url: str) -> None:
    """The MySQL store gives the memory store's outcomes for names with permits, limits and slots included."""
    machine.compare_permits(locate(mysql_url)[0].open, 60)


def random_pool(execute: Callable[..., object], chance: random.Random, name: str) -> None:
    """Some state that a pool may be in, and some that it can be brought into by hand only."""
    slots = chance.choice([0, 1, 2, 3, 5, 8])
    token = slots + chance.choice([0, 0, 0, 4, -1])
    if chance.random() < 0.95:
        row = (name, chance.choice([1, 2, 4, 4, 9]), max(0, token))
        execute("INSERT INTO dibs_lease_pool (name, permits, fencing_token) VALUES (%s, %s, %s)", row)
    held, over = chance.random(), 0.5 if chance.random() < 0.2 else 0.0
    for slot in range(1, slots + 1):
        if chance.random() < 0.02:
            continue  # somebody deleted it
        claim = f"{name}-{slot}" if chance.random() < held else None
        take = None if slot == 1 and chance.random() < 0.03 else chance.choice([1, 1, 1, 2, 3])
        execute(
            "INSERT INTO dibs_lease (name, slot, claim_id, holder, take, fencing_token, acquired_at, expires_at)"
            " VALUES (%s, %s, %s, 'h', %s, %s, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL %s SECOND)",
            (name, slot, claim, take, slot, -5 if chance.random() < over else 600),
        )
    for number in range(chance.choice([0, 0, 0, 0, 1, 2])):
        execute(
            "INSERT INTO dibs_lease_line (name, claim_id, wake, take, seen_at)"
            " VALUES (%s, %s, 'w', 1, UTC_TIMESTAMP(6) - INTERVAL %s SECOND)",
            (name, f"{name}-{number}", chance.choice([0, 60])),
        )


def test_what_is_plain_is_what_would_be_decided(mysql: MariaDBServer, mysql_url: str) -> None:
    """The server's sums grant what `decide` grants who reads every row, and leave it only what is not plain."""
    chance = random.Random(40)
    store = opened(mysql_url)
    store.setup(soon(60))
    execute = partial(store._connection.ask, deadline=soon(120))
    pools = store._pools
    names = [f"n{number:03}" for number in range(250)]
    with mysql.connect(database_of(mysql_url)) as connection, connection.cursor() as cursor:
        connection.begin()
        for name in names:
            random_pool(cursor.execute, chance, name)
        connection.commit()
    heads, seen = pools._locked(names, execute), pools._see(names, execute)
    alike = 0
    for _ in range(24):
        requests = [
            asked(f"{name}-{chance.choice([1, 3, 99, 99, 99])}", chance.choice([1, 2, 4, 4, 9]), name=name)._replace(
                take=chance.choice([1, 1, 2]), resize=chance.random() < 0.3
            )
            for name in names
        ]
        tallies = store._plain.tallies(requests, execute)
        for request in requests:
            tally, one = tallies.get(request.name), seen[request.name]
            plain = plainly(tally, request) if tally else None
            permits, token = heads.get(request.name, (None, 0))
            decided = decide(State(permits, max(token, one.token), one.holdings, one.line), request)
            if plain is not None:
                assert plain == decided, request
                assert not one.is_lock
                assert (plain.slot in one.slots) == (tally is not None and bool(tally.free))
                alike += 1
                continue
            usual = one.slots == set(range(1, len(one.slots) + 1)) != set() and not one.over and token >= one.token
            if usual and not one.line and not one.is_lock and permits == request.permits:
                assert not isinstance(decided, Grant) or decided.again is not None, request
    assert alike > 200
    store.close()


# -- what it takes ----------------------------------------------------------------------------------------------------


def test_the_last_and_only_holder_writes_at_once(store: MySQLStore, sent: list[str]) -> None:
    """Who was the last to be granted a name, and held all of it that was held, is granted it again by one statement."""
    for number in range(3):
        assert granted(store, asked(f"c-{number}", 9)).slot == 1
        assert store.act([Release("x", f"c-{number}")], soon()) == [RELEASED]
    sent.clear()
    assert granted(store, asked("c-4", 9, 9))[::2] == (4, 1)
    assert sent == ["UPDATE"]


def test_a_thousand_holders_are_not_read(store: MySQLStore, other: MySQLStore, sent: list[str]) -> None:
    """Beside many holders a permit is a look, of one row, and a write."""
    for first in range(0, 1000, 100):  # decided in a transaction, which the server ends when that takes very long
        other.act([asked(f"h-{number}", 1000, name="x") for number in range(first, first + 100)], soon(300))
    assert other.act([Release("x", "h-7", 8)], soon()) == [RELEASED]
    sent.clear()
    assert granted(store, asked("c-1", 1000))[::2] == (1001, 8)
    assert sent[-2:] == ["SELECT", "UPDATE"]
    assert "START" not in sent


def test_what_was_remembered_is_forgotten(store: MySQLStore, other: MySQLStore) -> None:
    """Whatever others do with a name after its last holder has gone, that one is told what is so now."""
    # Nothing; somebody holds; somebody held; in line; another limit; held by oneself; handed over; purged.
    alone = asked("a", 2)

    def begin(claim: str) -> None:
        store.act([Release("x", claim)], soon())
        for _ in range(2):
            assert granted(store, alone._replace(claim_id=claim)).slot == 1
            assert store.act([Release("x", claim)], soon()) == [RELEASED]
        assert store._plain._last["x"].alone

    granted(store, alone)  # makes the slot
    begin("a")
    token = granted(other, asked("b-1", 2, 2)).fencing_token
    assert isinstance(store.act([alone], soon())[0], Held)
    assert other.act([Release("x", "b-1")], soon()) == [RELEASED]
    assert granted(store, alone).fencing_token == token + 1

    begin("a")
    assert granted(other, asked("b-2", 2)).slot == 1
    assert granted(store, alone).slot == 2
    store.act([Release("x", "a", 2)], soon())
    other.act([Release("x", "b-2")], soon())

    begin("a-3")
    assert granted(store, alone).slot == 1
    (held,) = other.act([asked("w-1", 2, 2, wake="w")], soon())
    assert isinstance(held, Held)
    assert store.act([Release("x", "a")], soon()) == [RELEASED]
    (held,) = store.act([alone], soon())
    assert isinstance(held, Held)
    assert held.ahead
    other.act([Release("x", "w-1", 1, ANY_TICKET)], soon())
    assert granted(store, alone).slot == 1

    begin("a")
    assert granted(other, asked("b-3", 7, resize=True)).slot == 1
    assert store.act([alone], soon()) == [Mismatch(7)]
    assert granted(store, asked("a-9", 2, resize=True)).slot == 2
    for claim, slot in (("b-3", 1), ("a-9", 2)):
        assert other.act([Release("x", claim, slot)], soon()) == [RELEASED]

    begin("a-4")
    assert granted(store, alone).slot == 1
    assert granted(store, alone).slot == 1
    assert granted(store, asked("a-5", 2)).slot == 2
    store.act([Release("x", "a-5", 2)], soon())

    begin("a")
    mine = granted(store, alone)
    (moved,) = other.act([Transfer("x", "b-4", 60, "h", "a", None, 1, 2)], soon())
    assert isinstance(moved, Granted)
    assert moved.fencing_token == mine.fencing_token + 1
    assert granted(store, asked("a-6", 2)).slot == 2
    assert store.act([Release("x", "a-6", 2), Release("x", "b-4", 1)], soon()) == [RELEASED, RELEASED]

    begin("a-7")
    last = granted(store, asked("a-8", 2))
    assert store.act([Release("x", "a-8")], soon()) == [RELEASED]
    assert other.purge("", "\U0010ffff", 0, soon()) == 2
    assert granted(store, alone)[::2] == (last.fencing_token + 1, 1)


def test_who_is_overtaken_takes_its_turn(store: MySQLStore, other: MySQLStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another's grant came between the look and the write, permits are taken under the lock for a while."""
    for claim, slot in (("a-1", 1), ("a-2", 2)):
        assert granted(store, asked(claim, 9)).slot == slot
    assert store.act([Release("x", "a-1", 1), Release("x", "a-2", 2)], soon()) == [RELEASED, RELEASED]
    look = store._plain.tallies

    def slowly(*arguments: Any) -> Any:
        seen = look(*arguments)
        assert granted(other, asked("b-1", 9)).slot == 1
        return seen

    monkeypatch.setattr(store._plain, "tallies", slowly)
    assert granted(store, asked("a-3", 9)).slot == 2
    monkeypatch.undo()
    verbs = sent_by(monkeypatch)
    for _ in range(LOCKED_TIMES):
        verbs.clear()
        assert store.act([Release("x", "a-3", 2)], soon()) == [RELEASED]
        assert granted(store, asked("a-3", 9)).slot == 2
        assert "COMMIT" in verbs
    verbs.clear()
    assert store.act([Release("x", "a-3", 2)], soon()) == [RELEASED]
    assert granted(store, asked("a-3", 9)).slot == 2
    assert "COMMIT" not in verbs


def test_of_many_names_some_are_remembered(store: MySQLStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client remembers has a bound."""
    monkeypatch.setattr("dibs.stores.mysql_pools_plain.REMEMBERED_MAX", 5)
    for claim in ("a", "b"):
        for number in range(12):
            granted(store, asked(claim, 3, name=f"n{number}"))
            store.act([Release(f"n{number}", claim)], soon())
            assert len(store._plain._last) <= 5


# -- never too many ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", ["looked", "remembered"])
def test_a_grant_that_came_in_between_is_counted(
    mysql: MariaDBServer, store: MySQLStore, url: str, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    """What another's grant has overtaken, a look at the slots or a memory of them, grants nothing."""
    granted(store, asked("a-1", 2))
    granted(store, asked("a-2", 2))
    assert store.act([Release("x", "a-1", 1), Release("x", "a-2", 2)], soon()) == [RELEASED, RELEASED]
    for _ in range(2):
        granted(store, asked("a-3", 2))
        assert store.act([Release("x", "a-3")], soon()) == [RELEASED]
    assert store._plain._last["x"].alone
    if seen == "looked":
        store._plain._last.clear()
    with mysql.connect(database_of(url)) as granting, granting.cursor() as cursor:
        granting.begin()  # what a grant of both permits writes, in the second slot, and not committed yet
        cursor.execute("UPDATE dibs_lease_pool SET fencing_token = fencing_token + 1 WHERE name = 'x'")
        cursor.execute(
            "UPDATE dibs_lease SET claim_id = 'b-1', take = 2, fencing_token = 5,"
            " expires_at = UTC_TIMESTAMP(6) + INTERVAL 60 SECOND WHERE name = 'x' AND slot = 2"
        )
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.extend(store.act([asked("a-4", 2)], soon())))
        asking.start()
        asking.join(0.5)
        assert not answers
        granting.commit()
        asking.join(20)
    assert isinstance(answers[0], Held)
    assert [lease.take for lease in store.leases("x", "y", soon())] == [2]


LIMIT = 40
# Each line that it prints is an event: when it may first hold, and until when at most; and when it gives back.
VISITOR = """
import random, sys, time
from dibs.clock import Deadline, RealClock
from dibs.connecting import locate
from dibs.store import Acquire, Granted, Held, Mismatch, Release, Renew, Renewed
url, number, seconds, limit = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
chance = random.Random(int(number))
store = locate(url)[0].open()
now = time.monotonic
soon = lambda: Deadline(RealClock(), RealClock.now() + 30)
def tell(*words):
    print(*words, flush=True)
ask = lambda: store.act([], soon())
ask()
tell("ready")
sys.stdin.readline()
until, count = now() + seconds, 0
while now() < until:
    count += 1
    claim, ticket, take = f"v{number}-{count}", None, chance.choice([1, 1, 1, 2, 5, 13])
    size = chance.choice([limit, limit, limit, limit - 10])
    ttl, patient = chance.choice([0.4, 5.0]), chance.random() < 0.5
    info = '{"n":1}' if chance.random() < 0.2 else None
    for _ in range(5):
        wake = f"w{number}" if patient else None
        sent = now()
        request = Acquire("gate", claim, ttl, f"h/{number}/x", info, wake, ticket, permits=size, take=take, resize=True)
        (outcome,) = store.act([request], soon())
        if not isinstance(outcome, Held):
            break
        ticket = outcome.ticket
        time.sleep(chance.random() * 0.005)  # before another look
    if isinstance(outcome, Held):
        if ticket is not None:
            store.act([Release("gate", claim, 1, ticket)], soon())
        continue
    assert isinstance(outcome, Granted), outcome
    tell("in", claim, outcome.slot, outcome.fencing_token, take, now(), sent + ttl - 0.05)
    time.sleep(chance.random() * 0.01)  # the work
    what = chance.random()
    if what < 0.2:
        sent = now()
        if isinstance(store.act([Renew("gate", claim, 0.4, outcome.slot)], soon())[0], Renewed):
            tell("on", claim, sent + 0.4 - 0.05)
    if what > 0.1:  # else it is left to end by itself
        tell("out", claim, now())
        store.act([Release("gate", claim, outcome.slot, ticket)], soon())
tell("over")
"""


def test_a_crowd_never_has_more_than_there_is(url: str, store: MySQLStore) -> None:
    """Takes of several weights, resizes, leases that end, processes that are killed: at no moment more than the limit.

    By each process's own account of when it might hold: tokens are never given twice, nor is a slot, nor too much.
    """

    def started(number: int, seconds: float) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", VISITOR, url, str(number), str(seconds), str(LIMIT)]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    seconds = 6.0
    processes = [started(number, seconds) for number in range(8)]
    told: list[list[str]] = [[] for _ in processes]

    def listen(number: int) -> None:
        told[number] += processes[number].stdout or ()

    listeners = [threading.Thread(target=listen, args=(number,)) for number in range(len(processes))]
    for listener in listeners:
        listener.start()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes[:3]:
        time.sleep(seconds / 5)  # so that the crowd goes on for a while with those that are left
        process.kill()
    for process, listener in zip(processes, listeners, strict=True):
        listener.join(120)
        process.communicate(timeout=60)
    assert [process.returncode for process in processes[3:]] == [0] * 5

    held: dict[str, list[float]] = {}
    what: dict[str, tuple[int, int, int]] = {}
    for line in (line.split() for lines in told for line in lines):
        if line[0] == "in" and len(line) == 7:
            what[line[1]] = int(line[2]), int(line[3]), int(line[4])
            held[line[1]] = [float(line[5]), float(line[6])]
        elif line[0] == "on" and len(line) == 3:
            held[line[1]][1] = max(held[line[1]][1], float(line[2]))
        elif line[0] == "out" and len(line) == 3:
            held[line[1]][1] = min(held[line[1]][1], float(line[2]))
    assert len(what) > 100
    tokens = [token for _, token, _ in what.values()]
    assert len(set(tokens)) == len(tokens)
    edges = [(since, 1, claim) for claim, (since, until) in held.items() if until > since]
    edges += [(until, 0, claim) for claim, (since, until) in held.items() if until > since]
    inside: dict[int, int] = {}
    most = 0
    for _, begins, claim in sorted(edges):
        slot, _, take = what[claim]
        if begins:
            assert slot not in inside, f"slot {slot} twice"
            inside[slot] = take
        else:
            del inside[slot]
        most = max(most, sum(inside.values()))
    assert LIMIT / 2 < most <= LIMIT


@pytest.mark.parametrize("limit", [1, 1000])
def test_takers_at_the_same_moment_all_get_theirs(url: str, limit: int) -> None:
    """Clients that take and give back permits of one name all the time meet no error, and no token is given twice."""
    stores = [opened(url) for _ in range(6)]
    stores[0].setup(soon(60))
    tokens: list[int] = []
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            for count in range(40):
                (outcome,) = stores[number].act([asked(f"c-{number}-{count}", limit)], soon(60))
                if isinstance(outcome, Granted):
                    tokens.append(outcome.fencing_token)
                    stores[number].act([Release("x", f"c-{number}-{count}", outcome.slot)], soon(60))
                else:
                    assert limit == 1
        except (DibsError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert len(set(tokens)) == len(tokens) >= 40
    if limit > 1:
        assert sorted(tokens) == list(range(1, 241))
    assert stores[0].leases("x", "y", soon()) == []
    for store in stores:
        store.close()
