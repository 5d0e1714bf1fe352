"""Rings of waiters: which are found by reasoning, and how processes are told of theirs."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dibs
from dibs.connecting import locate
from dibs.deadlock import as_said, in_turn, ring_of, stuck
from dibs.errors import InvalidOption
from dibs.hold import Hold
from dibs.keeper import Keeper
from dibs.lock_order import LockOrder
from dibs.note import HOLDS_BYTES_MAX, Note, understood
from dibs.notes import MARK, PROOF_BEATS, TOLD_WITHIN_S
from dibs.store import StoredLease
from dibs.testing.case import Connection, Lateness
from tests.simulation.bugs import Bug, Edit, Value
from tests.simulation.rings import simulate_ring
from tests.simulation.world import BrokenPromise
from tests.waits import eventually

# -- reasoning --------------------------------------------------------------------------------------------------------

POOLS = {"n:lock": 0, "n:two": 2, "n:five": 5}


def note(who: str, waits: str, *holds: tuple[str, int], take: int = 1, beat: int = 1, since: float = 1.0) -> Note:
    return Note(who, beat, since, f"host/1/{who}", "thread 1", waits, POOLS.get(waits, 0), take, holds)


def test_a_ring_and_who_waits_behind_it() -> None:
    """Two who wait for each other are a ring; a third, who waits for one of them, is stuck but in no ring."""
    notes = [
        note("a", "n:2", ("n:1", 7)),
        note("b", "n:1", ("n:2", 9), since=2.0),
        note("c", "n:1", ("n:3", 1), since=3.0),
    ]
    leases = {"n:1": {7: 1}, "n:2": {9: 1}}
    graph = stuck(notes, leases)
    assert graph == {"a": {"b"}, "b": {"a"}, "c": {"a"}}
    assert ring_of(graph, "a") == ring_of(graph, "b") == {"a", "b"}
    assert ring_of(graph, "c") == set()
    assert [each.id for each in in_turn(notes[:2], graph)] == ["b", "a"]


def test_another_token_is_another_holder() -> None:
    """A note speaks of a lease that is over: whoever has the name now is not known to wait."""
    notes = [note("a", "n:2", ("n:1", 7)), note("b", "n:1", ("n:2", 9))]
    assert stuck(notes, {"n:1": {8: 1}, "n:2": {9: 1}}) == {}
    assert stuck(notes, {"n:1": {}, "n:2": {9: 1}}) == {}


def test_permits_that_are_left_suffice_or_not() -> None:
    """Who wants two of five is stuck when four of them are held by the stuck, and not when three are."""
    notes = [note("a", "n:lock", ("n:five", 1)), note("b", "n:five", ("n:lock", 2), take=2)]
    assert set(stuck(notes, {"n:lock": {2: 1}, "n:five": {1: 4}})) == {"a", "b"}
    assert stuck(notes, {"n:lock": {2: 1}, "n:five": {1: 3}}) == {}


Worlds = tuple[list[Note], dict[str, dict[int, int]]]


@st.composite
def worlds(draw: st.DrawFn) -> Worlds:
    """Callers that hold permits and wait for others, and some that hold and do not wait."""
    free = {name: max(permits, 1) for name, permits in POOLS.items()} | {"n:x": 1, "n:y": 1}
    leases: dict[str, dict[int, int]] = {name: {} for name in free}
    notes = []
    token = 0
    for number in range(draw(st.integers(1, 6))):
        holds = []
        for name in draw(st.lists(st.sampled_from(sorted(free)), unique=True, max_size=3)):
            take = draw(st.integers(1, 2))
            if take <= free[name]:
                token += 1
                free[name] -= take
                leases[name][token] = take
                holds.append((name, token))
        if draw(st.integers(0, 3)):
            waits = draw(st.sampled_from(sorted(free)))
            most = max(POOLS.get(waits, 0), 1)
            take = draw(st.integers(1, most))
            notes.append(note(f"w{number}", waits, *holds, take=take, since=float(draw(st.integers(0, 3)))))
    return notes, leases


def left_over(notes: list[Note], leases: dict[str, dict[int, int]], seed: int) -> set[str]:
    """Who never gets on, when everybody who can does, in a random order, and gives back all it has."""
    waiting = {each.id: each for each in notes}
    theirs = {lease for each in notes for lease in each.holds}
    held = {name: {t: take for t, take in of.items() if (name, t) in theirs} for name, of in leases.items()}
    rand = random.Random(seed)
    while True:
        able = [
            each
            for each in waiting.values()
            if max(each.permits, 1) - sum(held.get(each.waits, {}).values()) >= each.take
        ]
        if not able:
            return set(waiting)
        going = rand.choice(able)
        del waiting[going.id]
        for name, token in going.holds:
            held[name].pop(token, None)


@settings(max_examples=400, deadline=None)
@given(worlds(), st.integers(0, 3))
def test_the_stuck_are_who_never_gets_on(world: Worlds, seed: int) -> None:
    """Nobody is stuck who could proceed in any order of events, and everybody is who could in none."""
    notes, leases = world
    assert set(stuck(notes, leases)) == left_over(notes, leases, seed)
    assert set(stuck(notes, leases)) <= set(stuck(notes, as_said(notes))), "what is worth a look"


@settings(max_examples=400, deadline=None)
@given(worlds())
def test_telling_the_youngest_of_each_ring_frees_everybody(world: Worlds) -> None:
    """While somebody is stuck there is a ring, and when one of each has given up and given back, all others get on."""
    notes, leases = world
    for _ in range(len(notes) + 1):
        graph = stuck(notes, leases)
        if not graph:
            return
        rings = [ring for each in graph if (ring := ring_of(graph, each))]
        assert rings, "stuck, and in no ring"
        victim = max((each for each in notes if each.id in rings[0]), key=lambda each: (each.since, each.id))
        notes = [each for each in notes if each is not victim]
        for name, token in victim.holds:
            leases[name].pop(token, None)
    pytest.fail("somebody is stuck for ever")


def test_a_note_is_read_as_it_was_written() -> None:
    """Also names that JSON must quote, large tokens, and very many holds, of which the first are said."""
    holds = tuple((f'n:"é\\{number}', 2**63 - 1 - number) for number in range(300))
    written = Note("c/1", 3, None, "host/1/c", "task Täsk", "n:" + "ü" * 127, 5, 2, holds)
    info = written.info("n:")
    assert len(info.encode()) <= 4096
    row = StoredLease("n~waiting:1", 1, "host/1/c", 1, 0.0, 0.0, 1.0, info, 0)
    (read,) = understood([row, row._replace(info="{}"), row._replace(info=None), row._replace(info="[1]")], "n:")
    assert read == written._replace(holds=read.holds)
    assert len(read.holds) > HOLDS_BYTES_MAX // 60
    assert read.holds == holds[: len(read.holds)]


# -- simulated worlds -------------------------------------------------------------------------------------------------


def test_rings_in_many_worlds() -> None:
    """Whatever else goes wrong, a ring is told to one of its callers in time, and what is no ring to nobody."""
    outcomes = [simulate_ring(seed) for seed in range(150)]
    assert sum(outcome.told for outcome in outcomes) > 40
    assert sum(not outcome.closed for outcome in outcomes) > 20


BUGS = (
    Bug("no proof of life", ("a false alarm",), 600, (Value(sys.modules["dibs.notes"], "PROOF_BEATS", 0),)),
    Bug(
        "everybody is told",
        ("2 are", "3 are"),
        600,  # one in 40 shows it
        (Edit(sys.modules["dibs.notes"].Notes, "_tell", "max(ring, key=age).id != waiter.id", "False"),),
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    """Worlds that do not show a known mistake would be blind."""
    with bug.planted():
        for seed in range(bug.seeds):
            try:
                simulate_ring(seed)
            except BrokenPromise as broken:
                if broken.what.startswith(bug.breaks):
                    return
    pytest.fail(f"not found in {bug.seeds} seeds")


# -- real processes ---------------------------------------------------------------------------------------------------

CALLER = """
import sys, time, dibs
url, first, second, pause = sys.argv[1:5]
with dibs.connect(url, ttl=5) as client:
    with client.lock(first):
        print("has", flush=True)
        sys.stdin.readline()
        time.sleep(float(pause))  # in which order they begin to wait is what the test is about
        began = time.monotonic()
        try:
            with client.lock(second):
                print("got", flush=True)
        except dibs.WouldDeadlock as error:
            print("told", time.monotonic() - began, error, flush=True)
"""


def caller(url: str, first: str, second: str, pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CALLER, url, first, second, str(pause)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_three_processes_in_a_ring(url: str, processes: list[subprocess.Popen[str]]) -> None:
    """The last to wait is told within 2 s, with the process ids of all, and the others get on."""
    pairs = [("a", "b", 0.0), ("b", "c", 0.3), ("c", "a", 0.8)]
    processes += [caller(url, *pair) for pair in pairs]
    assert [line(process) for process in processes] == ["has"] * 3
    with Lateness() as late:
        for process in processes:
            go_on(process)
        said = [line(process) for process in processes]
    assert said[:2] == ["got", "got"]
    word, took, text = said[2].split(" ", 2)
    assert word == "told"
    assert float(took) < TOLD_WITHIN_S + late.seconds
    assert all(f"pid {process.pid}" in text for process in processes)
    assert all(f"holds '{first}' (token " in text for first, _, _ in pairs)


def test_who_was_killed_is_in_no_ring(url: str, processes: list[subprocess.Popen[str]]) -> None:
    """A process that is killed while it waits frees its name by its ttl, and nobody is told of a ring."""
    processes += [caller(url, "a", "b", 0.0), caller(url, "b", "a", 0.0)]
    assert [line(process) for process in processes] == ["has"] * 2
    go_on(processes[0])
    store = Connection(locate(url)[0].open())
    eventually(lambda: store.leases(f"default{MARK}"), "the first has left no note that it waits")
    store.store.close()
    processes[0].kill()
    go_on(processes[1])  # while the note is there still
    assert line(processes[1]) == "got"


def test_a_thread_and_a_reader_of_one_process(sqlite_url: str) -> None:
    """The error of a ring within a process names the threads, and has the ring line by line."""
    with dibs.connect(sqlite_url, lock_order_warnings=False) as client:
        errors: list[Any] = []
        ready = threading.Barrier(2)

        def take(first: Any, second: Any) -> None:
            with first:
                ready.wait(10)
                try:
                    with second:
                        pass
                except dibs.WouldDeadlock as error:
                    errors.append(error)

        a, b = client.rwlock("a"), client.lock("b")
        threads = [
            threading.Thread(target=take, args=(a.read(), b)),
            threading.Thread(target=take, args=(b, a.write())),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        (error,) = errors
        assert len(error.cycle) == 2
        assert all("thread " in each for each in error.cycle)
        assert isinstance(error, RuntimeError)
        assert PROOF_BEATS >= 2


# -- the order of locks -----------------------------------------------------------------------------------------------


def taken(first: Any, second: Any, **how: Any) -> None:
    with first:
        lease = second.acquire(**how)
        assert lease is not None
        lease.release()


def test_two_orders_are_warned_of_once() -> None:
    """Taking two names in both orders is a warning at the caller's line, naming both and the other place; once."""
    with dibs.connect("memory://") as client:
        a, b = client.lock("a"), client.lock("b")
        taken(a, b)
        with pytest.warns(dibs.LockOrderWarning, match=r"'a' is taken here while 'b' is held, and at .*test_deadlock"):
            taken(b, a)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            taken(b, a)
            taken(a, b)
        assert not caught
        taken(client.lock("c"), a)
        with a, pytest.warns(dibs.LockOrderWarning) as record:
            client.lock("c").acquire().release()  # type: ignore[union-attr]
        assert [each.filename for each in record] == [__file__]


def test_where_no_order_is_broken() -> None:
    """Nothing is said of names taken together, of asking once, of entering again, and where it is switched off."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dibs.connect("memory://") as client:
            a, b = client.lock("a"), client.lock("b")
            taken(client.multilock(["a", "b"]), client.lock("x"))
            taken(client.multilock(["b", "a"]), client.lock("x"))
            taken(a, b, timeout=0)
            taken(b, a, blocking=False)
            again = client.lock("r", reentrant=True)
            with again, a, again:
                pass
        for where, options in (
            ("memory://?lock_order_warnings=false", {}),
            ("memory://", {"lock_order_warnings": False}),
        ):
            with dibs.connect(where, **options) as client:  # type: ignore[arg-type]
                taken(client.lock("a"), client.lock("b"))
                taken(client.lock("b"), client.lock("a"))
    with pytest.raises(InvalidOption, match="neither true nor false"):
        dibs.connect("memory://?lock_order_warnings=perhaps")


def test_what_was_lost_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that was lost has no order with what is taken next, also while its loss is still being told."""
    with dibs.connect("memory://") as client:
        taken(client.lock("a"), client.lock("b"))
        with monkeypatch.context() as while_it_is_told:
            while_it_is_told.setattr(Keeper, "_tell_loss", lambda self, hold: None)
            lease = client.lock("b", ttl=0.1, renew=False).acquire()
            assert lease is not None
            eventually(lambda: not lease.held, "still held")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with client.lock("a", timeout=10):
                    pass


def test_what_is_held_is_looked_at_while_nobody_changes_it() -> None:
    """Where threads run at the same time, one that releases does not disturb another that looks at what is held."""
    mutex = threading.Lock()

    class Held(dict[Hold, int]):
        def __iter__(self) -> Iterator[Hold]:
            assert mutex.locked()
            return super().__iter__()

    LockOrder(mutex).taking(["default:a", "default:b"], Held())


def test_a_multilock_has_an_order_with_what_is_held_besides() -> None:
    """A name held while a multilock is taken, and taken while the multilock is held: that is two orders."""
    with dibs.connect("memory://") as client:
        taken(client.lock("a"), client.multilock(["b", "c"]))
        with pytest.warns(dibs.LockOrderWarning, match="'a' is taken here while 'b' is held"):
            taken(client.multilock(["b", "d"]), client.lock("a"))


def test_what_is_remembered_of_orders_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many pairs the oldest are forgotten."""
    monkeypatch.setattr("dibs.lock_order.PAIRS_MAX", 10)
    with dibs.connect("memory://") as client, client.lock("a"):
        for number in range(50):
            with client.lock(f"n{number}"):
                pass
        order = client._desk.session().rings._lock_order
        assert order is not None
        assert len(order._pairs) == 10
