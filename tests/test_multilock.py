"""Several names at once: how many calls it takes, what is left behind by crashes, Ctrl-C, cancellation and forks."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dibs
from dibs.errors import LeaseLost, LimitMismatch, LockTimeout, NotHeld, StoreUnavailable
from dibs.hold import HELD
from dibs.multilock import ASKS_MAX
from dibs.store import Acquire, Release, Request
from dibs.testing.case import within
from tests.anywhere import CtrlC
from tests.between import Between, Holdup
from tests.test_api import in_a_fork
from tests.waits import eventually

HUNDRED = [f"n{number:02}" for number in range(100)]
numbers = itertools.count()


@pytest.fixture
def between() -> Between:
    """A place between clients and a memory store of this test."""
    return Between(f"memory://multilock-{next(numbers)}")


@pytest.fixture
def client(between: Between) -> Iterator[dibs.Client]:
    with between.client(ttl=60) as client:
        yield client


@pytest.fixture
def other(between: Between) -> Iterator[dibs.Client]:
    with between.client(ttl=60) as client:
        yield client


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


def acquires(requests: Sequence[Request]) -> bool:
    return any(isinstance(request, Acquire) for request in requests)


def kinds(call: Sequence[Request]) -> list[str]:
    return sorted({type(request).__name__ + ("+" if getattr(request, "wake", None) else "") for request in call})


def all_free(other: dibs.Client, names: Sequence[str], within: float = 5.0) -> None:
    """Every one of the names can be had, long before any ttl of these tests is over."""
    lease = other.multilock(names).acquire(timeout=within)
    assert lease is not None, f"still held: {other.leases()}"
    lease.release()


# -- calls to the store -----------------------------------------------------------------------------------------------


def test_a_hundred_free_names_take_one_call(between: Between, client: dibs.Client) -> None:
    """All names are asked for in one call, and given back in one."""
    lease = client.multilock(HUNDRED).acquire()
    assert lease is not None
    assert [len(call) for call in between.calls] == [100]
    lease.renew()
    assert [len(call) for call in between.calls] == [100, 100]
    lease.release()
    assert [len(call) for call in between.calls] == [100, 100, 100]
    assert [request.name for request in between.calls[0]] == sorted(request.name for request in between.calls[0])


def test_a_hundred_free_names_take_one_call_of_a_task(between: Between) -> None:
    """The same with asyncio."""

    async def main() -> None:
        async with between.async_client() as client, client.multilock(HUNDRED):
            assert [len(call) for call in between.calls] == [100]

    asyncio.run(main())
    assert [kinds(call) for call in between.calls] == [["Acquire"], ["Release"]]


def test_one_call_also_while_the_lane_is_served(tmp_path: Path) -> None:
    """All travel together, too, when another thread serves the lane just then and would take what it finds."""
    between = Between(f"sqlite:///{tmp_path}/dibs.db")
    over = False

    async def busy(client: dibs.AsyncClient, name: str) -> None:
        while not over:
            async with client.lock(name):
                pass

    async def main() -> None:
        nonlocal over
        async with between.async_client() as client:
            others = [asyncio.create_task(busy(client, f"other{i}")) for i in range(3)]
            for _ in range(200):
                async with client.multilock(HUNDRED):
                    pass
            over = True
            await asyncio.gather(*others)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asyncio.run(main())
    finally:
        sys.setswitchinterval(usual)
    ours = [[request for request in call if request.name.endswith(tuple(HUNDRED))] for call in between.calls]
    assert {len(call) for call in ours} <= {0, 100}


def test_what_was_had_is_given_back_before_the_wait(between: Between, client: dibs.Client, other: dibs.Client) -> None:
    """When one name is held, the others are given back before anything is waited for, and one name is waited for."""
    held = other.lock("n50").acquire()
    assert held is not None
    between.calls.clear()
    done: list[Any] = []
    waiter = threading.Thread(target=lambda: done.append(client.multilock(HUNDRED).acquire()))
    waiter.start()
    eventually(lambda: any(kinds(call) == ["Acquire+"] for call in between.calls), "nobody waits")
    asked, given_back = between.calls[:2]
    assert (len(asked), kinds(asked)) == (100, ["Acquire"])
    assert (len(given_back), kinds(given_back)) == (99, ["Release"])
    assert "n50" not in {request.name.partition(":")[2] for request in given_back}
    assert {len(call) for call in between.calls[2:]} == {1}, "one name is waited for"
    assert len(other.leases()) == 1
    held.release()
    waiter.join(10)
    assert done
    assert done[0] is not None
    assert done[0].held
    done[0].release()


def test_several_held_names_are_waited_for_in_turn(client: dibs.Client, other: dibs.Client) -> None:
    """Whichever of several held names becomes free first, the multilock is had when the last one is."""
    held = [other.lock(name).acquire() for name in ("a", "c", "e")]
    done: list[Any] = []
    waiter = threading.Thread(target=lambda: done.append(client.multilock(list("abcde")).acquire()))
    waiter.start()
    for lease in reversed(held):
        assert lease is not None
        time.sleep(0.05)
        assert not done
        lease.release()
    waiter.join(10)
    assert done
    assert done[0].names == ("a", "b", "c", "d", "e")
    done[0].release()


@pytest.mark.parametrize("freed_after", [2, None])
def test_the_rest_is_asked_for_again_with_what_was_waited_for(
    between: Between, client: dibs.Client, other: dibs.Client, freed_after: int | None
) -> None:
    """A name behind the one that was waited for is asked for some times more before all is given back."""
    first, later = other.lock("a").acquire(), other.lock("c").acquire()
    assert first is not None
    assert later is not None
    me = client._desk.session().client_id
    asks: list[list[str]] = []
    released: list[str] = []

    def look(requests: Sequence[Request]) -> None:
        mine = [request for request in requests if request.claim_id.startswith(me)]
        released.extend(request.name[-1] for request in mine if isinstance(request, Release))
        asks.append([request.name[-1] for request in mine if isinstance(request, Acquire)])
        if first.held and ["a"] in asks:
            first.release()
        if freed_after is not None and "c" in asks[-1] and sum("c" in ask for ask in asks) == freed_after + 2:
            later.release()

    between.before = look
    done: list[Any] = []
    waiter = threading.Thread(target=lambda: done.append(client.multilock(list("abcd")).acquire()))
    waiter.start()
    if freed_after is None:
        eventually(lambda: ["c"] in asks, "nobody waits for what was missing")
        later.release()
    waiter.join(10)
    assert done
    assert done[0].held
    assert asks[0] == list("abcd")
    with_a = [ask for ask in asks if "c" in ask and "a" not in ask]
    again = ASKS_MAX if freed_after is None else freed_after
    assert with_a[: again + 1] == [list("bcd"), *[list("cd")] * again]
    given_back = sorted(released)
    # Before the wait, what was granted; with each further ask, what stands behind the missing name; at the end all.
    assert given_back == sorted("bd" + "d" * again + ("abd" if freed_after is None else ""))
    done[0].release()


def test_the_time_to_wait_is_for_all_together(client: dibs.Client, other: dibs.Client) -> None:
    """``timeout`` is one deadline, however many names are waited for, and the name that was missing is told."""
    first, second = other.lock("a").acquire(), other.lock("b").acquire()
    assert first is not None
    threading.Timer(0.4, first.release).start()
    began = time.monotonic()
    with within(2.5, "the deadline was passed"), pytest.raises(LockTimeout) as caught:
        with client.multilock(["a", "b"], timeout=0.8):
            pass
    assert time.monotonic() - began > 0.75
    assert caught.value.name == "b"
    assert second is not None
    second.release()


def test_who_is_late_begins_no_call_itself(between: Between, client: dibs.Client, other: dibs.Client) -> None:
    """The last name was granted when the time was over: the rest is asked for by the lane's thread, and a store that
    hangs then keeps the caller for the rest of one request's time, and not for the whole time of another."""
    held = other.lock("a").acquire()
    assert held is not None
    asked_by: list[str] = []

    def let_go(requests: Sequence[Request]) -> None:
        asks = {request.name.partition(":")[2]: request for request in requests if isinstance(request, Acquire)}
        if "b" in asks:
            asked_by.append(threading.current_thread().name)
        elif "a" in asks and not asked_by[1:] and held.held:
            held.release()
            time.sleep(0.4)  # longer than the caller's timeout: it is granted after that

    between.before = let_go
    multi = client.multilock(["a", "b"]).acquire(timeout=0.3)
    assert multi is not None
    assert asked_by == [threading.current_thread().name, "dibs-claim"]
    multi.release()


def test_one_error_is_an_error_of_all(between: Between, client: dibs.Client, other: dibs.Client) -> None:
    """Where one name cannot be a lock, the error is raised, and nothing of the others is kept."""
    permit = other.semaphore("b", 2).acquire()
    with pytest.raises(LimitMismatch, match="'b'"):
        client.multilock(["a", "b", "c"]).acquire()
    all_free(other, ["a", "c"])
    assert permit is not None
    permit.release()


def test_a_store_that_does_not_answer_is_told_and_nothing_is_kept(between: Between, other: dibs.Client) -> None:
    """When no answer comes, StoreUnavailable is raised; what may have been granted is given back when possible."""
    lost = True

    def lose(requests: Sequence[Request]) -> None:
        if lost:
            raise StoreUnavailable("the answer was lost")

    with between.client(ttl=60, request_timeout=0.2, patience=0.5) as client:
        client.ping()
        between.after = lose
        with pytest.raises(StoreUnavailable):
            client.multilock(["a", "b"]).acquire()
        lost = False
        all_free(other, ["a", "b"])


# -- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", range(4))
def test_ctrl_c_in_any_call_leaves_nothing(between: Between, other: dibs.Client, when: str, which: int) -> None:
    """Interrupted in its first call, while it waits, or in the call after the wait: no name stays held."""
    names = list("abcd")
    held = other.lock("b").acquire()
    assert held is not None
    threading.Timer(0.15, held.release).start()
    calls = itertools.count()
    main = threading.get_ident()

    def interrupt(requests: Sequence[Request]) -> None:
        mine = any(request.claim_id.startswith(me) for request in requests)
        if mine and next(calls) == which:
            if threading.get_ident() == main:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

    client = between.client(ttl=60)
    me = client._desk.session().client_id
    setattr(between, when, interrupt)
    try:
        lease = client.multilock(names).acquire()
        between.before = between.after = lambda requests: None  # one that would come too late is not sent
    except KeyboardInterrupt:
        between.before = between.after = lambda requests: None
    else:
        assert lease is not None
        lease.release()
    all_free(other, names)
    assert [hold for hold in client._desk.session().renewer.tracked() if hold.state == HELD] == []
    client.close()


def interrupted_everywhere(act: Callable[[int], object], step: int = 1) -> int:
    """Run ``act`` again and again, interrupted somewhere else each time, until it is not any more."""
    for at in itertools.count(1, step):
        ctrl_c = CtrlC(at)
        ctrl_c.during(partial(act, at))
        if not ctrl_c.arrived:
            return at
    raise AssertionError


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_ctrl_c_at_any_point_leaves_nothing_for_longer_than_a_ttl(between: Between) -> None:
    """Acquiring interrupted at any point: everything is free at once, or when its ttl is over."""
    ttl = 1.0
    with between.client(ttl=ttl) as client, between.client() as other:

        def act(at: int) -> None:
            client.multilock([f"{at}/{name}" for name in "abc"]).acquire()

        points = interrupted_everywhere(act)
        assert points > 100
        gc.collect()
        last = f"{points}/"
        eventually(lambda: all(lease.name.startswith(last) for lease in other.leases()), "held for ever", ttl + 2)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_ctrl_c_at_any_point_of_the_release_leaves_nothing_for_longer_than_a_ttl(between: Between) -> None:
    """Releasing interrupted at any point: no name is renewed by a process that believes it has left."""
    ttl = 1.0
    with between.client(ttl=ttl) as client, between.client() as other:
        kept = []

        def act(at: int) -> None:
            lock = client.multilock([f"{at}/{name}" for name in "abc"])
            trace = sys.gettrace()
            sys.settrace(None)
            lease = lock.acquire()
            kept.append(lease)  # as a variable of the caller would
            sys.settrace(trace)
            assert lease is not None
            lease.release()

        points = interrupted_everywhere(act)
        assert points > 30
        tracked = client._desk.session().renewer.tracked()
        # Interrupted before the release had begun, nothing has happened, and the lease is still the caller's.
        begun = {hold.key for hold in tracked if hold.state == HELD}
        whole = [lease for lease in kept if lease is not None and lease.held]
        assert begun == {hold.key for lease in whole for hold in lease._holds}, "some names held, some not"
        for lease in whole:
            lease.release()
        eventually(lambda: other.leases() == [], "held for ever", ttl + 2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", range(4))
def test_cancelled_in_any_call_it_leaves_nothing(between: Between, when: str, which: int) -> None:
    """A task cancelled in its first call, while it waits, or in the call after: no name stays held."""
    names = list("abcd")

    async def main() -> None:
        client, other = between.async_client(ttl=60), between.async_client(ttl=60)
        held = await other.lock("b").acquire()
        assert held is not None
        loop = asyncio.get_running_loop()
        me = client._desk.session().client_id
        mine = itertools.count()
        holdup = Holdup(lambda requests: any(r.claim_id.startswith(me) for r in requests) and next(mine) == which)
        setattr(between, when, holdup)
        loop.call_later(0.15, held.release)
        task = asyncio.ensure_future(client.multilock(names).acquire())
        for _ in range(200):
            await asyncio.sleep(0.01)
            if holdup.reached.is_set() or task.done():
                break
        task.cancel()
        await asyncio.sleep(0.01)
        holdup.go_on()
        try:
            lease = await task
        except asyncio.CancelledError:
            pass
        else:
            assert lease is not None
            await lease.release()
        between.before = between.after = lambda requests: None
        again = await other.multilock(names).acquire(timeout=5)
        assert again is not None
        await again.release()
        await client.close()
        await other.close()

    asyncio.run(main())


# -- gone -------------------------------------------------------------------------------------------------------------


def test_a_dropped_multilease_ends_by_its_ttl(between: Between, other: dibs.Client) -> None:
    """Whoever lets go of the object without release() is warned, and the names are free a ttl later."""
    with between.client(ttl=0.5) as client:
        core = client.multilock(["a", "b"])
        lease = core.acquire()
        assert lease is not None
        core._core._grips.clear()
        with pytest.warns(ResourceWarning, match="without release") as warned:  # noqa: PT031 - the warning comes when the block's last name goes
            del lease
            gc.collect()
        assert len(warned) == 2
        all_free(other, ["a", "b"], 3)


def test_a_fork_holds_none_of_it(url: str) -> None:
    """In a forked child the multilease is not held; its release does nothing, and the child takes its turn."""
    with dibs.connect(url) as client:
        lock = client.multilock(["a", "b"])
        with lock as lease:

            def child() -> None:
                assert not lease.held
                with pytest.raises(LeaseLost):
                    lease.check()
                with pytest.raises(LeaseLost), lease:
                    raise AssertionError("the block was entered")
                assert lease.release() is False
                with pytest.raises(NotHeld):
                    lock.release()
                assert lock.acquire(timeout=0) is None
                with client.multilock(["c", "d"], timeout=5):
                    pass
                client.close()

            in_a_fork(child)
            assert lease.held
        with client.multilock(["a", "b", "c", "d"], timeout=5):
            pass


def test_a_killed_holder_frees_all_names(url: str) -> None:
    """After kill -9 of their holder all names are free when the ttl is over."""
    code = (
        "import sys, time, dibs\nclient = dibs.connect(sys.argv[1], ttl=1.5)\n"
        "lease = client.multilock(['a', 'b', 'c']).acquire()\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    with dibs.connect(url) as client:
        with subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(1.0)  # renewed at least once
            assert client.multilock(["a", "b", "c"]).acquire(timeout=0) is None
            process.kill()
        began = time.monotonic()
        with client.multilock(["c", "b", "a"], timeout=10):
            assert time.monotonic() - began < 4.0


def test_multilocks_of_many_processes_exclude_each_other(url: str, tmp_path: Path) -> None:
    """Processes that take overlapping names in any order are never two in one name, and all finish."""
    code = """
import os, random, sys, dibs
url, folder, seed = sys.argv[1:]
client, chance = dibs.connect(url, ttl=20), random.Random(int(seed))
for _ in range(12):
    names = chance.sample("abcdef", 3)
    with client.multilock(names) as lease:
        for name in names:
            os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL))
        lease.check()
        for name in names:
            os.unlink(f"{folder}/{name}")
client.close()
"""
    with dibs.connect(url) as client:
        client.setup()
    command = [sys.executable, "-c", code, url, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE, text=True) for n in range(4)]
    for process in processes:
        _, told = process.communicate(timeout=60)
        assert process.returncode == 0, told
    assert not [name for name in os.listdir(tmp_path) if len(name) == 1]
