"""Readers and writers: crashes, pauses, processes at odds, and downgrades that are interrupted, lost or overtaken."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dibs
from dibs.errors import LeaseLost, LockTimeout, NotHeld, StoreUnavailable, WouldDeadlock
from dibs.renewing import give_back_some
from dibs.store import Acquire, Request
from tests.between import Between, Holdup
from tests.test_api import in_a_fork
from tests.test_semaphore import had, over, started
from tests.waits import eventually

numbers = itertools.count()


@pytest.fixture
def between() -> Between:
    """A place between clients and a memory store of this test."""
    return Between(f"memory://rwlock-{next(numbers)}")


@pytest.fixture(params=["sqlite", "postgresql", "etcd", "zookeeper"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "postgres_url"}.get(request.param, f"{request.param}_url")))


@pytest.fixture
def client(url: str) -> Iterator[dibs.Client]:
    with dibs.connect(url, ttl=20) as client:
        yield client


def downgrades(requests: Sequence[Request]) -> bool:
    """The only acquire of a claim that holds which these tests send."""
    return any(isinstance(request, Acquire) and request.take == 1 for request in requests)


# -- crashes and pauses -----------------------------------------------------------------------------------------------

HOLDER = """
import sys, time, dibs
url, side = sys.argv[1:]
lease = getattr(dibs.connect(url, ttl=1.2).rwlock("page"), side)().acquire()
print("ready", flush=True)
while lease.held:
    time.sleep(0.01)
print("lost", flush=True)
"""


@pytest.mark.parametrize("side, other", [("read", "write"), ("write", "read"), ("write", "write")])
def test_a_killed_holder_delays_others_by_its_ttl(url: str, client: dibs.Client, side: str, other: str) -> None:
    """A reader or writer that is killed keeps others out until its ttl is over, and no longer."""
    with started(HOLDER, url, side) as process:
        time.sleep(0.8)
        assert getattr(client.rwlock("page"), other)().acquire(timeout=0) is None
        process.kill()
    began = time.monotonic()
    had(getattr(client.rwlock("page"), other)(), timeout=10).release()
    assert time.monotonic() - began < 4.0


def test_a_paused_reader_knows_that_it_has_lost(url: str, client: dibs.Client) -> None:
    """A reader that is stopped for longer than its ttl makes way for a writer, and then does not believe in it."""
    process = started(HOLDER, url, "read")
    process.send_signal(signal.SIGSTOP)
    lease = had(client.rwlock("page").write(), timeout=10)
    process.send_signal(signal.SIGCONT)
    assert over(process) == "lost\n"
    assert lease.held
    lease.release()


def test_a_killed_writer_in_line_lets_readers_pass(url: str, client: dibs.Client) -> None:
    """A writer that dies while it waits holds new readers back for the grace of the line, and no longer."""
    code = (
        "import sys, dibs\nclient = dibs.connect(sys.argv[1])\nprint('ready', flush=True)\n"
        "client.rwlock('page').write().acquire()"
    )
    lease = had(client.rwlock("page").read())
    with started(code, url) as process, dibs.connect(url) as other:
        eventually(lambda: (record := client.holder("page")) is not None and record.waiting == 1, "nobody waits")
        assert other.rwlock("page").read().acquire(timeout=0) is None
        process.kill()
        process.wait()
        had(other.rwlock("page").read(), timeout=5).release()
    lease.release()


def test_a_fork_neither_reads_nor_writes(url: str, client: dibs.Client) -> None:
    """In a forked child a read or write lease of its parent is not held, and cannot be downgraded."""
    lock = client.rwlock("page")
    with lock.write() as lease:

        def child() -> None:
            assert not lease.held
            with pytest.raises(NotHeld):
                lock.downgrade()
            assert lock.read().acquire(timeout=0) is None
            client.close()

        in_a_fork(child)
        assert lease.held


# -- many -------------------------------------------------------------------------------------------------------------

VISITOR = """
import os, sys, time, dibs
url, folder, side, visits = sys.argv[1:]
client = dibs.connect(url, ttl=20)
lock = client.rwlock("book")
print("ready", flush=True)
while not os.path.exists(folder + ".go"):
    time.sleep(0.001)
most = 0
for at in range(int(visits)):
    mark = f"{folder}/{side}-{os.getpid()}"
    with getattr(lock, side)() as lease:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        time.sleep(0.03 if side == "read" else 0.005)
        inside = os.listdir(folder)
        until = time.monotonic() + 0.5
        while side == "read" and max(most, len(inside)) < 2 and time.monotonic() < until:
            time.sleep(0.005)  # until another reader is there: on a busy machine that takes longer than a visit does
            inside = os.listdir(folder)
        writers = [name for name in inside if name.startswith("write")]
        assert side == "read" and not writers or inside == [os.path.basename(mark)], inside
        most = max(most, len(inside))
        lease.check()
        if side == "write" and at % 2:
            os.rename(mark, f"{folder}/read-{os.getpid()}")
            mark = f"{folder}/read-{os.getpid()}"
            lock.downgrade()
            time.sleep(0.005)
            assert not [name for name in os.listdir(folder) if name.startswith("write")]
            lease.check()
        os.unlink(mark)
client.close()
print(most, flush=True)
"""


def test_processes_read_together_and_write_alone(url: str, tmp_path: Path, client: dibs.Client) -> None:
    """Processes that read, write and downgrade: never a writer with anybody else, readers together, all finish."""
    client.setup()
    folder = tmp_path / "inside"
    folder.mkdir()
    processes = [started(VISITOR, url, str(folder), side, "8") for side in ("read", "read", "read", "write", "write")]
    Path(f"{folder}.go").touch()
    most = [int(over(process)) for process in processes]
    assert max(most) > 1, "no two readers were ever together"
    assert os.listdir(folder) == []


def test_a_stream_of_readers_does_not_keep_a_writer_out(url: str, client: dibs.Client) -> None:
    """However many readers come and go, and overlap, a writer gets its turn."""
    stop = threading.Event()

    def reads() -> None:
        with dibs.connect(url) as reader:
            while not stop.is_set():
                with reader.rwlock("stream").read():
                    time.sleep(0.02)

    threads = [threading.Thread(target=reads) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            time.sleep(0.1)
            had(client.rwlock("stream").write(), timeout=20).release()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# -- nested -----------------------------------------------------------------------------------------------------------


def test_nested_use_of_one_thread(between: Between) -> None:
    """Reading twice needs ``reentrant=True``; from reading to writing there is no way, the other way round there is."""
    with between.client() as client:
        plain, reentrant = client.rwlock("plain"), client.rwlock("reentrant", reentrant=True)
        with plain.read() as lease:
            with pytest.raises(WouldDeadlock, match="reentrant"):
                plain.read().acquire()
            with pytest.raises(WouldDeadlock, match="downgrade"):
                plain.write().acquire(timeout=0)
            second = had(plain.read(), timeout=1)  # who sets a limit to the wait may try
            assert second.slot != lease.slot
            second.release()
        with reentrant.write() as outer:
            with reentrant.write() as inner:
                assert inner is outer
                reentrant.downgrade()
                with reentrant.read() as reading:
                    assert reading is outer
            assert outer.held
            assert reentrant.read().locked()
        assert not outer.held
        assert not reentrant.read().locked()
        assert client.leases() == []


def test_a_dropped_lease_is_noticed_at_once(between: Between) -> None:
    """Whoever lets go of lock and lease without release() is warned there and then, as with a plain lock."""
    with between.client(ttl=0.5) as client, between.client() as other:
        lease = had(client.rwlock("dropped").write())
        gc.disable()
        try:
            with pytest.warns(ResourceWarning, match="without release"):
                del lease
        finally:
            gc.enable()
        had(other.rwlock("dropped").write(), timeout=3).release()


def test_a_writers_block_ends_as_a_readers_without_the_lock(between: Between) -> None:
    """The side of the writers is enough to end a block that was downgraded."""
    with between.client() as client:
        lock = client.rwlock("page")
        writing = lock.write()
        with writing as lease:
            lock.downgrade()
            del lock
            assert lease.held
        assert not lease.held
        assert client.leases() == []


def test_a_downgrade_after_a_close_says_so(between: Between) -> None:
    """It was no mistake of the writer's that it holds nothing any more: NotHeld would say so."""
    client = between.client()
    lock = client.rwlock("page")
    with lock.write():
        client.close()
        with pytest.raises(dibs.StoreUnavailable, match="client is closed"):
            lock.downgrade()


def test_a_downgraded_lease_is_released_by_either_side(between: Between) -> None:
    """``read().release()`` releases what was downgraded, and the writer's block then has nothing to release."""
    with between.client() as client:
        lock = client.rwlock("page")
        with lock.write() as lease:
            lock.downgrade()
            lock.read().release()
            assert not lease.held
            with pytest.raises(NotHeld):
                lock.downgrade()
        assert client.leases() == []


def test_nobody_downgrades_the_lease_of_another(between: Between) -> None:
    """Who writes goes on alone when another thread or task that shares the object calls ``downgrade()`` by mistake."""
    with between.client() as client, ThreadPoolExecutor() as pool:
        lock = client.rwlock("page")
        with lock.write():
            with pytest.raises(NotHeld, match="by this very caller"):
                pool.submit(lock.downgrade).result()
            assert pool.submit(lock.read().acquire, timeout=0).result() is None
            lock.downgrade()
            had(client.rwlock("page").read(), timeout=3).release()

    async def main() -> None:
        async with between.async_client() as client:
            lock = client.rwlock("page")
            async with lock.write():
                with pytest.raises(NotHeld, match="by this very caller"):
                    await asyncio.create_task(lock.downgrade())
                assert await client.rwlock("page").read().acquire(timeout=0) is None

    asyncio.run(main())


# -- downgrades that go wrong -----------------------------------------------------------------------------------------


def test_a_downgrade_without_an_answer_leaves_a_reader(between: Between) -> None:
    """When the answer is lost, this process counts as a reader from the moment it asked, and gives it back as one."""
    lost = True

    def lose(requests: Sequence[Request]) -> None:
        if lost and downgrades(requests):
            raise StoreUnavailable("the answer was lost")

    with between.client(ttl=60, request_timeout=0.2, patience=0.4) as client, between.client() as other:
        lock = client.rwlock("page")
        with lock.write() as lease:
            between.after = lose
            with pytest.raises(StoreUnavailable):
                lock.downgrade()
            assert lease.held
            assert (lock.write().locked(), lock.read().locked()) == (False, True)
            lost = False
            had(other.rwlock("page").read(), timeout=5).release()  # for the store had done it
        had(other.rwlock("page").write(), timeout=5).release()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cancelled_downgrade_leaves_nothing_behind(between: Between, when: str) -> None:
    """A task cancelled during its downgrade gives the lease back at the end of its block."""

    async def main() -> None:
        async with between.async_client(ttl=60) as client, between.async_client() as other:
            lock = client.rwlock("page")
            holdup = Holdup(downgrades)

            async def work() -> None:
                async with lock.write():
                    setattr(between, when, holdup)
                    await lock.downgrade()

            task = asyncio.ensure_future(work())
            assert await asyncio.to_thread(holdup.reached.wait, 5)
            task.cancel()
            await asyncio.sleep(0)  # the task hears of it, and comes to the end of its block
            holdup.go_on()
            with pytest.raises(asyncio.CancelledError):
                await task
            lease = await other.rwlock("page").write().acquire(timeout=5)
            assert lease is not None
            await lease.release()

    asyncio.run(main())


def test_ctrl_c_during_a_downgrade_leaves_nothing_behind(between: Between) -> None:
    """Interrupted during its downgrade, a thread gives the lease back at the end of its block."""

    def interrupt(requests: Sequence[Request]) -> None:
        if downgrades(requests) and threading.current_thread() is threading.main_thread():
            between.before = lambda requests: None
            raise KeyboardInterrupt

    with between.client(ttl=60) as client, between.client() as other:
        lock = client.rwlock("page")
        with pytest.raises(KeyboardInterrupt), lock.write():  # noqa: PT012 - what raises is the end of the block
            between.before = interrupt
            lock.downgrade()
        had(other.rwlock("page").write(), timeout=5).release()


def test_a_release_that_overtakes_a_downgrade(between: Between) -> None:
    """A lease released while its downgrade is on the way: the store holds nothing of it afterwards."""
    with between.client(ttl=60) as client, between.client() as other:
        for _ in range(20):
            lock = client.rwlock("page")
            lease = had(lock.write())
            go = threading.Barrier(2)

            def release() -> None:
                go.wait(5)  # noqa: B023
                lease.release()  # noqa: B023

            thread = threading.Thread(target=release)
            thread.start()
            go.wait(5)
            try:
                lock.downgrade()
            except (LeaseLost, NotHeld):
                pass
            thread.join(5)
            writer = other.rwlock("page").write().acquire(timeout=5)
            assert writer is not None, f"still held: {other.leases()}"
            writer.release()


def test_a_late_downgrade_does_not_take_the_name_again(between: Between) -> None:
    """A downgrade that reaches the store after the release is undone at once."""
    with between.client(ttl=60) as client, between.client() as other:
        lock = client.rwlock("page")
        lease = had(lock.write())
        session = client._desk.session()
        # Both are queued before anybody serves the lane, which sends releases first.
        ask = give_back_some(session, lease._hold, 1)
        released = session.keeper.release(lease._hold)
        session.lane.start()
        eventually(lambda: ask.settled and released is not None and released.settled, "no answer")
        had(other.rwlock("page").write(), timeout=5).release()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_downgrade_without_an_answer_takes_no_other_slot(between: Between, when: str) -> None:
    """A downgrade that granted an ended claim anew, unheard, is undone: with the release, also one that overtook it."""
    lost = threading.Event()

    def lose(requests: Sequence[Request]) -> None:
        if downgrades(requests) and requests[0].claim_id == lease.claim_id:
            lost.set()
            raise StoreUnavailable("the answer was lost")

    with between.client(ttl=60, request_timeout=0.2, patience=0.4) as client, between.client(ttl=60) as other:
        lock = client.rwlock("page")
        lease = had(lock.write())
        assert other.break_lease("page", fencing_token=lease.fencing_token, now=True)
        reader = had(other.rwlock("page").read())
        assert reader.slot == lease.slot
        between.after = lose

        def release() -> None:
            assert lost.wait(5)
            try:
                lease.release()
            except LeaseLost:  # as it was
                pass

        releaser = threading.Thread(target=release)
        if when == "before":
            releaser.start()
        with pytest.raises(StoreUnavailable):
            lock.downgrade()
        if when == "after":
            releaser.start()
        releaser.join(5)
        assert not releaser.is_alive()
        reader.release()
        had(other.rwlock("page").write(), timeout=5).release()


def test_the_error_of_a_reader_names_the_writer(between: Between) -> None:
    """Who cannot read in time is told who writes."""
    with between.client() as client, between.client() as other:
        with (
            client.rwlock("page").write(),
            pytest.raises(LockTimeout, match="is held by"),
            other.rwlock("page", timeout=0).read(),
        ):
            pass


def test_what_was_downgraded_is_exported_as_a_readers(client: dibs.Client, url: str) -> None:
    """Whoever adopts a write lease that was downgraded is told that it reads, and others read beside it."""
    with dibs.connect(url, ttl=20) as other:
        lock = client.rwlock("page")
        lease = had(lock.write())
        lock.downgrade()
        state = lease.export()
        assert state["take"] == 1
        adopted = other.adopt(state)
        with client.rwlock("page", timeout=5).read():
            assert adopted.held
        adopted.release()
