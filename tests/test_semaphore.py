"""Semaphores: crashes, pauses, processes at odds, lost answers, closing, resizing, purging, old tables, poolers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

import dibs
from dibs.clock import Deadline, RealClock
from dibs.connecting import locate
from dibs.errors import LimitMismatch, SetupRequired, StoreUnavailable, WouldDeadlock
from dibs.hold import HELD
from dibs.owners import this_thread
from dibs.store import ANY_SLOT, RELEASED, Acquire, Granted, Held, Mismatch, Release, Renew, Request, StoreBusy
from dibs.stores import postgres_link, postgres_pools_close
from dibs.stores.permits import decide_all
from dibs.testing.case import within
from tests.between import Between, Holdup
from tests.servers.postgres import PgBouncer, PostgresServer
from tests.test_api import in_a_fork
from tests.test_once import Machine
from tests.waits import eventually

CLOCK = RealClock()
numbers = itertools.count()


@pytest.fixture
def between() -> Between:
    """A place between clients and a memory store of this test."""
    return Between(f"memory://semaphore-{next(numbers)}")


@pytest.fixture(params=["sqlite", "postgresql", "etcd", "zookeeper"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "postgres_url"}.get(request.param, f"{request.param}_url")))


@pytest.fixture
def client(url: str) -> Iterator[dibs.Client]:
    with dibs.connect(url, ttl=20) as client:
        yield client


@pytest.fixture
def other(url: str) -> Iterator[dibs.Client]:
    with dibs.connect(url, ttl=20) as client:
        yield client


def deadline(seconds: float = 10) -> Deadline:
    return Deadline(CLOCK, CLOCK.now() + seconds)


def asked(name: str, claim_id: str, permits: int, take: int = 1, ttl: float = 60) -> Acquire:
    return Acquire(name, claim_id, ttl, "h/1/x", permits=permits, take=take)


def had(lock: Any, **how: Any) -> Any:
    lease = lock.acquire(**how)
    assert lease is not None
    return lease


def kind(wanted: type) -> Any:
    return lambda requests: any(isinstance(request, wanted) for request in requests)


def started(code: str, *args: str) -> subprocess.Popen[str]:
    """A process that runs the code; it has printed "ready"."""
    process = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def over(process: subprocess.Popen[str]) -> str:
    """What else it has printed, when it has ended."""
    with process:
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told
    return told


# -- given back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["before", "after"])
def test_a_cancelled_acquire_gives_its_slot_back_at_once(which: str, url: str) -> None:
    """A permit granted to a task that was cancelled meanwhile is free at once, whichever slot it is."""
    between = Between(url)

    async def main() -> None:
        async with between.async_client(ttl=60) as client, between.async_client(ttl=60) as other:
            first = await client.semaphore("cut", 2).acquire()
            holdup = Holdup(kind(Acquire))
            setattr(between, which, holdup)
            task = asyncio.ensure_future(other.semaphore("cut", 2).acquire())
            assert await asyncio.to_thread(holdup.reached.wait, 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            holdup.go_on()
            second = await client.semaphore("cut", 2).acquire(timeout=5)
            assert second is not None
            assert second.slot == 2
            assert first is not None
            await first.release()
            await second.release()

    asyncio.run(main())


def test_a_grant_whose_answer_was_lost_is_given_back(url: str) -> None:
    """When no answer comes in time, the caller is told, and a permit that was granted all the same is freed."""
    between = Between(url)
    lost = True

    def lose(requests: Sequence[Request]) -> None:
        if lost and any(isinstance(request, Acquire) for request in requests):
            raise StoreUnavailable("the answer was lost")

    with between.client(ttl=60) as client, between.client(ttl=60, request_timeout=1, patience=2) as other:
        first = had(client.semaphore("lost", 2))
        other.ping()
        between.after = lose
        with pytest.raises(StoreUnavailable):
            other.semaphore("lost", 2).acquire(timeout=0.2)
        lost = False
        second = had(client.semaphore("lost", 2), timeout=5)
        first.release()
        second.release()


def test_closing_gives_back_what_is_just_being_renewed(between: Between) -> None:
    """A permit whose renewal is under way when its client is closed is released after it, and never renewed again."""
    with between.client() as operator:
        client = between.client(ttl=0.6)
        lease = had(client.semaphore("closing", 2))
        holdup = between.before = Holdup(kind(Renew))
        assert holdup.reached.wait(5)
        closing = threading.Thread(target=client.close)
        closing.start()
        eventually(lambda: not lease.held, "close() has not begun")
        holdup.go_on()
        closing.join(10)
        assert not closing.is_alive()
        assert operator.semaphore("closing", 2).available() == 2
        assert client._desk.session().renewer.tracked() == []
        before = len(between.calls)
        time.sleep(0.5)
        assert not any(isinstance(request, Renew) for call in between.calls[before:] for request in call)


def test_a_dropped_permit_comes_back_by_its_ttl(between: Between) -> None:
    """Whoever lets go of a lease without release() is warned, and its permit is free a ttl later."""
    with between.client(ttl=4) as client, between.client() as other:
        semaphore = client.semaphore("dropped", 1)
        lease = had(semaphore)
        semaphore._core._grips.clear()
        with pytest.warns(ResourceWarning, match="without release"):  # noqa: PT031 - the warning comes when the block's last name goes
            del lease
            gc.collect()
        assert other.semaphore("dropped", 1).available() == 0
        had(other.semaphore("dropped", 1), timeout=10).release()


def test_a_semaphore_of_many_tasks_remembers_none_of_them(between: Between) -> None:
    """Tasks that release through their leases, and not through the semaphore, leave nothing behind in it."""

    async def main() -> None:
        async with between.async_client() as client:
            semaphore = client.semaphore("tasks", 5)

            async def work() -> None:
                lease = await semaphore.acquire()
                assert lease is not None
                await lease.release()

            for _ in range(20):
                await asyncio.gather(*[work() for _ in range(10)])
            assert len(semaphore._core._grips) <= 10

    asyncio.run(main())


def test_what_a_caller_holds_is_not_looked_through_each_time(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds hundreds of permits, all through one object, is not asked about each for one more."""
    looks = 0

    def looked(_self: object, *_args: object) -> bool:
        nonlocal looks
        looks += 1
        return False

    with between.client() as client:
        semaphore = client.semaphore("many", 300)
        leases = [had(semaphore) for _ in range(200)]
        monkeypatch.setattr("dibs.keeper.Keeper.is_held", looked)
        monkeypatch.setattr("dibs.lease.LeaseFacts._over", property(looked))
        for _ in range(100):
            with semaphore:
                pass
        assert looks <= 300
        monkeypatch.undo()
        assert all(lease.held for lease in leases)
        semaphore.release(100)
        assert semaphore.available() == 200


def test_permits_of_several_weights_are_counted_up_to_the_limit(between: Between) -> None:
    """A caller that would wait for itself is told, however many permits each of its leases has, and no earlier."""
    with between.client() as client:
        one, four = client.semaphore("mixed", 10), client.semaphore("mixed", 10, weight=4)
        lease = had(four)
        for _ in range(6):
            had(one)
        with pytest.raises(WouldDeadlock, match="holds 10 of 10 permits"):
            one.acquire()
        one.release(3)
        with pytest.raises(WouldDeadlock, match="holds 7 of 10 permits"):
            four.acquire()
        lease.release()
        had(four)
        assert client._desk.session().holdings.shares == {this_thread(): {"default:mixed": 7}}


def test_release_takes_this_threads_own_first(between: Between) -> None:
    """``release(n)`` releases what this thread acquired, then what others did; reentrant, never what others did."""
    with between.client() as client:
        semaphore, reentrant = client.semaphore("mine", 4), client.semaphore("ours", 4, reentrant=True)
        theirs: list[Any] = []
        thread = threading.Thread(target=lambda: theirs.extend([had(semaphore), had(reentrant)]))
        thread.start()
        thread.join()
        mine = had(semaphore)
        semaphore.release()
        assert (mine.held, theirs[0].held) == (False, True)
        semaphore.release()
        assert not theirs[0].held
        with pytest.raises(ValueError, match="too many"):
            semaphore.release()
        own = had(reentrant)
        assert had(reentrant) is own
        with pytest.raises(ValueError, match="by this owner"):
            reentrant.release(3)
        assert own.held
        reentrant.release(2)
        assert (own.held, theirs[1].held) == (False, True)
        theirs[1].release()
        for wrong in (0, -1, True, 1.0):
            with pytest.raises(ValueError, match="n is"):
                semaphore.release(wrong)  # type: ignore[arg-type]


def test_a_block_gives_back_its_own_lease(between: Between) -> None:
    """What else is acquired inside a block, released or not, is not what the end of the block gives back."""
    with between.client() as client:
        semaphore = client.semaphore("blocks", 3)
        with semaphore as outer:
            second = had(semaphore)
            with semaphore as inner:
                third_is_over = inner
            assert (outer.held, second.held, third_is_over.held) == (True, True, False)
        assert (outer.held, second.held) == (False, True)
        with semaphore as outer:
            second.release()
        assert not outer.held
        with semaphore as outer:
            outer.release()
            other = had(semaphore)
        assert other.held
        semaphore.release()
        assert not other.held
        assert client.leases() == []


def test_a_refused_try_is_one_call(between: Between) -> None:
    """Asking once for what cannot be had sends one request, and nothing to take it back."""
    with between.client() as client, between.client() as other:
        lease = had(other.semaphore("once", 1))
        before = len(between.calls)
        assert client.semaphore("once", 1).acquire(timeout=0) is None
        client.ping()
        assert [len(call) for call in between.calls[before:]] == [1, 0]
        lease.release()


# -- crashes and pauses -----------------------------------------------------------------------------------------------

HOLDER = """
import sys, time, dibs
url, ttl, weight = sys.argv[1:]
client = dibs.connect(url, ttl=float(ttl))
leases = [client.semaphore("rooms", 3, weight=int(weight)).acquire() for _ in range(2 if weight == "1" else 1)]
print("ready", flush=True)
before = time.monotonic()
while all(lease.held for lease in leases):
    time.sleep(0.01)
print("lost", flush=True)
"""


@pytest.mark.parametrize("weight", ["1", "2"])
def test_a_killed_holder_frees_its_permits(url: str, weight: str, client: dibs.Client) -> None:
    """After kill -9 the permits of a process are free when their ttl is over, whatever they weigh."""
    with started(HOLDER, url, "1.5", weight) as process:
        time.sleep(1.0)  # renewed at least once
        assert client.semaphore("rooms", 3).available() == 1
        process.kill()
    began = time.monotonic()
    lease = had(client.semaphore("rooms", 3, weight=3), timeout=10)
    assert time.monotonic() - began < 4.0
    lease.release()


def test_a_paused_holder_knows_that_it_has_lost(url: str, client: dibs.Client) -> None:
    """A process that is stopped for longer than its ttl is replaced; when it goes on it does not trust its lease."""
    process = started(HOLDER, url, "1", "2")
    process.send_signal(signal.SIGSTOP)
    lease = had(client.semaphore("rooms", 3, weight=3), timeout=10)
    process.send_signal(signal.SIGCONT)
    assert over(process) == "lost\n"
    assert lease.held
    lease.release()


def test_a_killed_waiter_does_not_keep_the_rest(url: str, client: dibs.Client, other: dibs.Client) -> None:
    """A waiter in line that is killed holds those behind it back for the grace, and is counted no longer then."""
    code = (
        "import sys, dibs\nclient = dibs.connect(sys.argv[1])\nprint('ready', flush=True)\n"
        "client.semaphore('line', 2, weight=2).acquire()"
    )
    first = had(client.semaphore("line", 2))
    with started(code, url) as process:
        eventually(lambda: (record := client.holder("line")) is not None and record.waiting == 1, "nobody waits")
        process.kill()
    second = had(other.semaphore("line", 2), timeout=5)
    record = client.holder("line")
    assert record is not None
    assert record.waiting == 0
    first.release()
    second.release()


def test_a_fork_holds_no_permit(url: str, client: dibs.Client) -> None:
    """In a forked child the permits of its parent are not held, and it takes its own."""
    semaphore = client.semaphore("forked", 2)
    lease = had(semaphore)

    def child() -> None:
        assert not lease.held
        assert not semaphore.locked()
        mine = had(semaphore, timeout=5)
        assert mine.slot == 2
        with pytest.raises(ValueError, match="1 held"):  # what its parent acquired is not its own to give back
            semaphore.release(2)
        assert mine.held
        assert semaphore.release()
        with pytest.raises(ValueError, match="0 held"):
            semaphore.release()
        client.close()

    in_a_fork(child)
    assert lease.held
    assert semaphore.available() == 1
    with semaphore:
        in_a_fork(lambda: semaphore.__exit__(None, None, None))  # the end of the block that it was forked in
        assert semaphore.available() == 0
    lease.release()
    assert semaphore.available() == 2


# -- many -------------------------------------------------------------------------------------------------------------

VISITOR = """
import os, sys, time, dibs
url, folder, limit, visits, weight = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
client = dibs.connect(url, ttl=20)
print("ready", flush=True)
while not os.path.exists(folder + ".go"):
    time.sleep(0.001)
for _ in range(visits):
    with client.semaphore("gate", limit, weight=weight) as lease:
        mark = f"{folder}/in-{lease.slot}"
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        with open(mark, "w") as file:
            file.write(str(weight))
        time.sleep(0.001)
        inside = 0
        for name in os.listdir(folder):
            if name.startswith("in-"):
                try:
                    inside += int(open(f"{folder}/{name}").read() or 1)
                except FileNotFoundError:
                    pass
        assert inside <= limit, inside
        lease.check()
        os.unlink(mark)
client.close()
"""


def test_processes_never_exceed_the_limit(url: str, tmp_path: Path, client: dibs.Client) -> None:
    """Several processes pass through one semaphore: never more inside than its limit, and never a slot twice."""
    client.setup()
    folder = tmp_path / "inside"
    folder.mkdir()
    processes = [started(VISITOR, url, str(folder), "3", "15", "1") for _ in range(4)]
    processes.append(started(VISITOR, url, str(folder), "3", "5", "2"))
    Path(f"{folder}.go").touch()
    for process in processes:
        over(process)
    assert os.listdir(folder) == []
    assert client.semaphore("gate", 3).available() == 3


def test_many_threads_of_one_client_share_a_semaphore(url: str, client: dibs.Client) -> None:
    """Threads of one process wait for one semaphore in turn: all are served, never more inside than its limit."""
    inside, most, served = 0, 0, 0
    mutex, full = threading.Lock(), threading.Event()
    weights = itertools.cycle([1, 1, 2])

    def work(weight: int) -> None:
        nonlocal inside, most, served
        for _ in range(3):
            with client.semaphore("threads", 3, weight=weight):
                with mutex:
                    inside += weight
                    most = max(most, inside)
                    if most == 3:
                        full.set()
                full.wait(0.5)  # until others are let in beside it: on a busy machine that takes longer than the work
                time.sleep(0.02)  # the work: the others wait in line for it
                with mutex:
                    inside -= weight
                    served += 1

    threads = [threading.Thread(target=work, args=(next(weights),)) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, served) == (3, 72)


def test_a_thousand_waiters_are_all_served(sqlite_url: str) -> None:
    """A thousand tasks of two clients wait for five permits: all get one, five at a time at most."""
    inside, most, served = 0, 0, 0

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as one, dibs.connect_async(sqlite_url, ttl=20) as two:

            async def work(client: dibs.AsyncClient) -> None:
                nonlocal inside, most, served
                async with client.semaphore("crowd", 5):
                    inside += 1
                    most = max(most, inside)
                    await asyncio.sleep(0)
                    inside -= 1
                    served += 1

            await asyncio.gather(*[work(client) for client in (one, two) * 500])

    asyncio.run(main())
    assert (most <= 5, served) == (True, 1000)


def test_a_waiter_asks_only_when_it_may_help(sqlite_url: str) -> None:
    """Waiting for permits costs a few requests a second, not one for each look at the file."""
    between = Between(sqlite_url)
    with between.client() as client, between.client() as other:
        lease = had(client.semaphore("quiet", 2, weight=2))
        done: list[Any] = []
        waiter = threading.Thread(target=lambda: done.append(had(other.semaphore("quiet", 2))))
        waiter.start()
        time.sleep(0.5)
        before = len(between.calls)
        time.sleep(2.0)
        assert len(between.calls) - before <= 6
        lease.release()
        with within(0.5, "the release was noticed late"):
            waiter.join(10)
        done[0].release()


def test_who_wants_many_is_not_starved(url: str, client: dibs.Client) -> None:
    """While others take one permit after the other, who wants all of them gets its turn."""
    stop = threading.Event()

    def ones() -> None:
        while not stop.is_set():
            with client.semaphore("busy", 3):
                time.sleep(0.002)

    threads = [threading.Thread(target=ones) for _ in range(4)]
    with dibs.connect(url) as other:
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                had(other.semaphore("busy", 3, weight=3), timeout=20).release()
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_who_waits_for_itself_across_objects_is_told(url: str, client: dibs.Client) -> None:
    """Two semaphore objects of one name are one semaphore for the thread that would wait for itself."""
    with client.semaphore("twice", 1), pytest.raises(WouldDeadlock, match="'twice'"):
        client.semaphore("twice", 1).acquire()
    with client.semaphore("twice", 1) as lease:
        other: list[Any] = []
        thread = threading.Thread(target=lambda: other.append(had(client.semaphore("twice", 1), timeout=20)))
        thread.start()
        time.sleep(0.1)
        lease.release()
        thread.join(20)
        other[0].release()


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_waiter_is_told_of_another_limit(url: str, client: dibs.Client, other: dibs.Client) -> None:
    """When the limit is changed while somebody waits, a waiter with the old one is told; then nobody is in line."""
    lease = had(client.semaphore("sized", 1))
    told: list[BaseException] = []

    def wait() -> None:
        try:
            client.semaphore("sized", 1).acquire()
        except LimitMismatch as error:
            told.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(lambda: (record := client.holder("sized")) is not None and record.waiting == 1, "nobody waits")
    wider = had(other.semaphore("sized", 2, resize=True), timeout=10)
    waiter.join(10)
    assert "2 permits in the store and was asked for as a semaphore of 1 permit:" in str(told[0])
    eventually(lambda: (record := client.holder("sized")) is not None and record.waiting == 0, "still in line")
    lease.release()
    narrower = other.semaphore("sized", 1, resize=True)
    assert narrower.acquire(timeout=0) is None
    wider.release()
    with narrower:
        assert client.semaphore("sized", 1).acquire(timeout=0) is None
    with pytest.raises(LimitMismatch, match="another name"), client.lock("sized"):
        pass
    with pytest.raises(LimitMismatch, match="readers and writers"):
        client.rwlock("sized").read().acquire()


@pytest.mark.parametrize("purged", [False, True])
def test_a_name_is_a_lock_or_a_semaphore(url: str, purged: bool) -> None:
    """Clients that take new names for locks and semaphores at once agree on each; tokens rise whatever it becomes."""
    rounds, clients = 30, 4
    address, _ = locate(url)
    stores = [address.open() for _ in range(clients)]
    stores[0].setup(deadline())
    barrier = threading.Barrier(clients)
    seen: dict[str, list[tuple[int, int]]] = {}
    problems: list[str] = []
    mutex = threading.Lock()
    inside: dict[str, set[int]] = {}

    def act(store: Any, request: Request) -> Any:
        for _ in range(2000):
            try:
                return store.act([request], deadline())[0]
            except StoreBusy:
                time.sleep(0.001)
        raise AssertionError("always busy")

    def work(number: int) -> None:
        store = stores[number]
        for at in range(rounds):
            name = "same" if purged else f"name{at}"
            permits = (at + number) % 2 * 2
            barrier.wait(60)
            claim = f"claim{number}-{at}"
            got = act(store, Acquire(name, claim, 60, f"h{number}", permits=permits))
            if isinstance(got, Granted):
                with mutex:
                    seen.setdefault(name, []).append((got.fencing_token, permits))
                    others = inside.setdefault(name, set())
                    if others and (0 in others or not permits):
                        problems.append(f"{name} is held as {others} and as {permits}")
                    others.add(permits)
            barrier.wait(60)
            with mutex:
                inside.clear()
            if isinstance(got, Granted):
                act(store, Release(name, claim, got.slot))
            barrier.wait(60)
            if purged and number == at % clients:
                while True:
                    try:
                        store.purge("", "\U0010ffff", 0, deadline())
                        break
                    except StoreBusy:
                        continue

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not problems
    for name, grants in seen.items():
        tokens = [token for token, _ in grants]
        assert len(set(tokens)) == len(tokens), f"tokens of {name} repeat: {grants}"
        if not purged:
            assert len({bool(permits) for _, permits in grants}) == 1, f"{name} is both: {grants}"
    for store in stores:
        store.close()


def test_purging_forgets_no_limit_that_is_in_use(url: str) -> None:
    """Purging all the time while permits come and go: the limit is kept as long as anybody holds one; tokens rise."""
    address, _ = locate(url)
    store, wrong, purger = address.open(), address.open(), address.open()
    store.setup(deadline())
    stop = threading.Event()
    problems: list[str] = []

    def patiently(act: Any) -> Any:
        for _ in range(5000):
            try:
                return act()
            except StoreBusy:
                time.sleep(0.0005)
        raise AssertionError("always busy")

    def purge() -> None:
        while not stop.is_set():
            patiently(lambda: purger.purge("", "\U0010ffff", 0, deadline()))

    thread = threading.Thread(target=purge)
    thread.start()
    last = 0
    try:
        for at in range(150):
            claim = f"claim-{at}"
            got = patiently(lambda: store.act([asked("p", claim, 2)], deadline())[0])  # noqa: B023
            assert isinstance(got, Granted), got
            assert got.fencing_token > last, "a token did not rise"
            last = got.fencing_token
            other = patiently(lambda: wrong.act([asked("p", f"wrong-{at}", 3)], deadline())[0])  # noqa: B023
            if other != Mismatch(2):
                problems.append(f"{at}: {other}")
                break
            patiently(lambda: store.act([Release("p", claim, got.slot)], deadline()))  # noqa: B023
    finally:
        stop.set()
        thread.join(20)
        for each in (store, wrong, purger):
            each.close()
    assert not problems


# -- SQLite -----------------------------------------------------------------------------------------------------------


def test_a_power_cut_frees_permits_and_repeats_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What held is over after a reboot; grants that a power cut took back have had their tokens, on a lock as well."""
    machine = Machine(monkeypatch)
    path, kept = tmp_path / "locks.db", tmp_path / "kept.db"
    with dibs.connect(f"sqlite:///{path}", ttl=3600) as before:
        *held, permit, lock = [*(had(before.semaphore("x", 3)) for _ in range(3)), had(before.lock("y"))]
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", f"{kept}{end}")
        permit.release()
        lock.release()
        lost = [had(before.semaphore("x", 3)), had(before.lock("y"))]
        assert all(lease.held for lease in held)
    machine.reboot(60)
    with dibs.connect(f"sqlite:///{kept}") as after:
        assert not after.leases()
        new = [had(after.semaphore("x", 3)), had(after.lock("y"))]
        assert new[0].slot == 1
        assert [ours.fencing_token > theirs.fencing_token for ours, theirs in zip(new, lost, strict=True)] == [True] * 2


# -- PostgreSQL -------------------------------------------------------------------------------------------------------


def test_permits_behind_a_pooler(postgres: PostgresServer, postgres_url: str, tmp_path: Path) -> None:
    """Behind PgBouncer in transaction mode, semaphores and read/write locks keep their limits."""
    database = postgres_url.rpartition("/")[2]
    with PgBouncer(postgres) as pooler:
        url = pooler.url(database)

        def reachable() -> bool:
            try:
                with dibs.connect(url) as client:
                    return client.ping() > 0
            except (StoreUnavailable, SetupRequired):
                return False

        eventually(reachable, "the pooler does not answer")
        folder = tmp_path / "inside"
        folder.mkdir()
        processes = [started(VISITOR, url, str(folder), "2", "8", "1") for _ in range(3)]
        Path(f"{folder}.go").touch()
        for process in processes:
            over(process)
        with dibs.connect(url) as client:
            lock = client.rwlock("pooled")
            with lock.write():
                lock.downgrade()
                with dibs.connect(url) as other, other.rwlock("pooled", timeout=5).read():
                    pass


def test_a_renewal_under_way_counts(postgres_url: str) -> None:
    """A permit whose renewal is being committed just when its old time runs out is not given to somebody else."""
    address, _ = locate(postgres_url)
    ours, theirs = address.open(), address.open()
    got = ours.act([asked("late", "claim-1", 1, ttl=1.0)], deadline())[0]
    assert isinstance(got, Granted)
    with psycopg.connect(postgres_url) as renewing:
        # As RENEW does, and not committed yet.
        renewing.execute(
            "UPDATE dibs_lease SET expires_at = clock_timestamp() + interval '1 minute' WHERE name = 'late'"
        )
        time.sleep(1.2)
        answers: list[Any] = []
        asker = threading.Thread(
            target=lambda: answers.append(theirs.act([asked("late", "claim-2", 1)], deadline())[0])
        )
        asker.start()
        asker.join(0.5)
        assert not answers, f"decided while the renewal was under way: {answers}"
        renewing.commit()
        asker.join(10)
    assert isinstance(answers[0], Held)
    assert answers[0].free_in > 30
    ours.close()
    theirs.close()


def test_who_stops_in_the_middle_of_a_decision_stops_nobody_else(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped while it has locked a name's row is cut off by the server, and others go on."""
    address, _ = locate(postgres_url)
    stopped, other = address.open(), address.open()
    stopped.setup(deadline())
    other.setup(deadline())
    stopped.close()
    reached, go_on = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def stop(state: Any, requests: Any, now: float) -> Any:
        if requests[0].claim_id == "claim-1":
            reached.set()
            assert go_on.wait(20)
        return decide_all(state, requests, now)

    def work() -> None:
        try:
            stopped.act([asked("stuck", "claim-1", 2)], deadline(1.0))  # another number of permits needs a close look
        except StoreUnavailable as error:
            failed.append(error)

    got = other.act([asked("stuck", "claim-0", 1)], deadline())[0]
    assert isinstance(got, Granted)
    monkeypatch.setattr(postgres_pools_close, "decide_all", stop)
    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(5)
    began = time.monotonic()
    assert other.act([Release("stuck", "claim-0")], deadline()) == [RELEASED]
    assert isinstance(other.act([asked("stuck", "claim-2", 1)], deadline())[0], Granted)
    assert time.monotonic() - began < 3.0
    go_on.set()
    thread.join(10)
    assert failed
    assert [lease.fencing_token for lease in other.leases("", "z", deadline())] == [2]
    stopped.close()
    other.close()


@pytest.mark.parametrize("pipelines", [True, False])
def test_a_grant_that_came_in_between_is_counted(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, pipelines: bool
) -> None:
    """A look at who holds that another's grant has overtaken grants nothing, with or without pipelines of libpq."""
    monkeypatch.setattr(postgres_link, "PIPELINES", pipelines)
    address, _ = locate(postgres_url)
    store = address.open()
    assert isinstance(store.act([asked("last", "claim-0", 2)], deadline())[0], Granted)
    with psycopg.connect(postgres_url) as granting:
        # What a grant writes, and not committed yet.
        granting.execute("UPDATE dibs_lease_pool SET fencing_token = fencing_token + 1 WHERE name = 'last'")
        granting.execute(
            "INSERT INTO dibs_lease (name, slot, claim_id, holder, fencing_token, acquired_at, expires_at, take)"
            " VALUES ('last', 2, 'claim-1', 'h/1/x', 2, now(), now() + interval '1 minute', 1)"
        )
        answers: list[Any] = []
        asker = threading.Thread(target=lambda: answers.append(store.act([asked("last", "claim-2", 2)], deadline())[0]))
        asker.start()
        asker.join(0.5)
        assert not answers
        granting.commit()
        asker.join(10)
    assert isinstance(answers[0], Held)
    assert store.act([Release("last", "claim-0")], deadline()) == [RELEASED]
    granted = store.act([asked("last", "claim-2", 2)], deadline())[0]
    assert isinstance(granted, Granted)
    assert (granted.fencing_token, granted.slot) == (3, 1)
    store.close()


def test_who_was_overtaken_asks_behind_the_others(postgres_url: str) -> None:
    """A take asks without waiting for those who ask at the same moment, until one of them was granted before it."""
    address, _ = locate(postgres_url)
    first, store = address.open(), address.open()
    assert isinstance(first.act([asked("busy", "claim-0", 9)], deadline())[0], Granted)
    answers: list[Any] = []

    def ask(claim: str) -> threading.Thread:
        asker = threading.Thread(target=lambda: answers.append(store.act([asked("busy", claim, 9)], deadline())[0]))
        asker.start()
        return asker

    with psycopg.connect(postgres_url, autocommit=True) as other:
        # The lock of POOL_QUEUE.
        other.execute("SELECT pg_advisory_lock(hashtextextended('busy', 7095203471))")
        ask("claim-1").join(10)
        with other.transaction():
            other.execute("UPDATE dibs_lease_pool SET fencing_token = fencing_token + 1 WHERE name = 'busy'")
            overtaken = ask("claim-2")
            overtaken.join(0.3)
            assert len(answers) == 1
        overtaken.join(0.3)
        assert len(answers) == 1  # it looks closely, behind those who take at this moment
        other.execute("SELECT pg_advisory_unlock(hashtextextended('busy', 7095203471))")
        overtaken.join(10)
        other.execute("SELECT pg_advisory_lock(hashtextextended('busy', 7095203471))")
        behind = ask("claim-3")
        behind.join(0.3)
        assert len(answers) == 2
        other.execute("SELECT pg_advisory_unlock(hashtextextended('busy', 7095203471))")
        behind.join(10)
    assert [(answer.fencing_token, answer.slot) for answer in answers] == [(2, 2), (4, 3), (5, 4)]
    first.close()
    store.close()


def test_a_slot_that_was_purged_is_used_again(postgres_url: str) -> None:
    """A gap that a purge left among the slots is filled before a new slot is made."""
    address, _ = locate(postgres_url)
    store = address.open()
    granted = [store.act([asked("gap", f"claim-{n}", 9)], deadline())[0] for n in range(3)]
    assert [outcome.slot for outcome in granted if isinstance(outcome, Granted)] == [1, 2, 3]
    assert store.act([Release("gap", "claim-1", 2)], deadline()) == [RELEASED]
    assert store.purge("", "\U0010ffff", 0, deadline()) == 1
    again = [store.act([asked("gap", f"claim-{n}", 9)], deadline())[0] for n in range(3, 5)]
    assert [(outcome.slot, outcome.fencing_token) for outcome in again if isinstance(outcome, Granted)] == [
        (2, 4),
        (4, 5),
    ]
    store.close()


def test_a_lock_made_at_the_same_moment_leaves_no_pool_behind(postgres_url: str) -> None:
    """A name that became a lock while its first permit was asked for is a lock; nothing says that it has permits."""
    address, _ = locate(postgres_url)
    store = address.open()
    store.setup(deadline())
    with psycopg.connect(postgres_url) as locking:
        # As ENTER does, and not committed yet.
        locking.execute(
            "INSERT INTO dibs_lease (name, slot, claim_id, holder, fencing_token, acquired_at, expires_at)"
            " VALUES ('mixed', 1, 'claim-1', 'h/1/x', 7, now(), now() + interval '1 minute')"
        )
        answers: list[Any] = []
        asker = threading.Thread(
            target=lambda: answers.append(store.act([asked("mixed", "claim-2", 2)], deadline())[0])
        )
        asker.start()
        asker.join(0.5)
        assert not answers
        locking.commit()
        asker.join(10)
        assert answers == [Mismatch(0)]
        assert locking.execute("SELECT count(*) FROM dibs_lease_pool").fetchone() == (0,)
    assert store.act([asked("mixed", "claim-1", 0)], deadline())[0] == Granted(7, answers_at(store), 1)
    store.close()


def answers_at(store: Any) -> float:
    """When the one lease there is was granted."""
    (lease,) = store.leases("", "z", deadline())
    return float(lease.acquired_at)


def test_a_waiter_is_woken_over_a_dead_one(postgres_url: str) -> None:
    """The notification of a release goes to the first in line who is alive."""
    address, _ = locate(postgres_url)
    store = address.open()
    granted = store.act([asked("woken", "claim-1", 1)], deadline())[0]
    assert isinstance(granted, Granted)
    store.act([asked("woken", "dead", 1)._replace(wake="dead")], deadline())
    time.sleep(1.3)
    store.act([asked("woken", "alive", 1)._replace(wake="alive")], deadline())
    listener = address.open()
    watch = listener.watch("alive", deadline())
    assert watch is not None
    store.act([Release("woken", "claim-1", ANY_SLOT)], deadline())
    eventually(lambda: list(watch.changed(["woken"])) == ["woken"], "the one who is alive was not told", 3)
    watch.close()
    store.close()


def test_the_limits_are_told_in_plain_words(url: str, client: dibs.Client) -> None:
    """LimitMismatch says what the name is in the store, what it was asked for as, and what to do."""
    with client.semaphore("words", 2), pytest.raises(LimitMismatch) as caught:
        client.semaphore("words", 3).acquire()
    assert re.search(r"'words' is a semaphore of 2 permits .* of 3 permits: .*resize=True", str(caught.value))
    assert not [hold for hold in client._desk.session().renewer.tracked() if hold.state == HELD]


def test_locked_is_of_the_object_where_there_are_permits() -> None:
    """Of a lock, ``locked()`` tells what the client holds; of semaphores and sides, what was acquired through them."""
    with dibs.connect("memory://") as client:
        with client.lock("a"):
            assert client.lock("a").locked()
        assert not client.lock("a").locked()
        semaphore = client.semaphore("b", 1)
        with semaphore:
            assert semaphore.locked()
            assert not client.semaphore("b", 1).locked()
        assert not semaphore.locked()
        rwlock = client.rwlock("c")
        with rwlock.write():
            assert rwlock.write().locked()
            assert not rwlock.read().locked()
            assert not client.rwlock("c").write().locked()
        assert "this object" in (dibs.Semaphore.locked.__doc__ or "")
