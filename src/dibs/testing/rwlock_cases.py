"""Conformance cases on locks for readers and writers, run through both faces."""

from __future__ import annotations

import asyncio

from dibs._typing import TYPE_CHECKING
from dibs.errors import LeaseLost, NotHeld, WouldDeadlock
from dibs.testing.case import CLIENT_CASES, equal, pools
from dibs.testing.client_bench import had, raises, task, waiting

if TYPE_CHECKING:
    from dibs.testing.faces import Face


case = CLIENT_CASES.case


@case("P15", pools)
async def a_writer_that_became_a_reader_in_a_block(face: Face) -> None:
    """``downgrade()`` inside the writer's block lets readers in at once; the end of the block gives the lease back."""
    ours, theirs = face.client(), face.client()
    lock = ours.rwlock("block")
    async with face.holding(lock.write()) as lease:
        equal((lock.write().locked(), lock.read().locked()), (True, False), "who holds it, before")
        await face.do(lock.downgrade)
        equal((lock.write().locked(), lock.read().locked(), lease.held), (False, True, True), "who holds it, after")
        other = await had(face, theirs.rwlock("block").read(), timeout=20)
        await face.do(other.release)
    equal(lease.held, False, "the lease after the block")
    writer = await had(face, theirs.rwlock("block").write(), timeout=0)
    await face.do(writer.release)


@case("P6, P15", pools)
async def a_lease_that_is_over_is_not_revived_by_a_downgrade(face: Face) -> None:
    """Who downgrades a lease that was taken away is told LeaseLost, and holds nothing in the store."""
    client, operator = face.client(), face.client()
    lock = client.rwlock("taken", ttl=60)
    lease = await had(face, lock.write())
    await face.do(operator.break_lease, "taken", fencing_token=lease.fencing_token, now=True)
    with raises(LeaseLost):
        await face.do(lock.downgrade)
    equal(lease.held, False, "the lease")
    writer = await had(face, operator.rwlock("taken").write(), timeout=20)
    await face.do(writer.release)


@case("P15", pools)
async def many_readers_or_one_writer(face: Face) -> None:
    """Readers are inside together and never with a writer, of whom there is one at a time."""
    readers, writers, together_, writes = 0, 0, 0, 0

    async def read() -> None:
        nonlocal readers, together_
        lock = face.client().rwlock("page", ttl=20)
        for _ in range(4):
            async with face.holding(lock.read()):
                readers += 1
                together_ = max(together_, readers)
                equal(writers, 0, "writers beside a reader")
                await asyncio.sleep(0.1)
                readers -= 1

    async def write() -> None:
        nonlocal writers, writes
        lock = face.client().rwlock("page", ttl=20)
        for _ in range(3):
            async with face.holding(lock.write()):
                writers += 1
                equal((readers, writers), (0, 1), "readers and writers beside a writer")
                await asyncio.sleep(0.002)
                writers -= 1
                writes += 1

    await asyncio.gather(task(read()), task(read()), task(read()), task(write()), task(write()))
    equal((together_ > 1, writes), (True, 6), f"readers were together ({together_}), writes of 2 clients")


@case("P15", pools)
async def a_waiting_writer_holds_back_readers(face: Face) -> None:
    """Once a writer waits, new readers wait behind it; a reader cannot become a writer, a writer can a reader."""
    one, two, three = face.client(), face.client(), face.client()
    reading = one.rwlock("book")
    lease = await had(face, reading.read())
    with raises(WouldDeadlock):
        await face.do(reading.write().acquire, timeout=0)
    with raises(NotHeld):
        await face.do(reading.downgrade)
    writing = two.rwlock("book")
    written = asyncio.Event()

    async def write() -> None:
        got = await had(face, writing.write(), timeout=20)
        written.set()
        equal(await face.do(three.rwlock("book").read().acquire, timeout=0), None, "a reader beside the writer")
        await face.do(writing.downgrade)
        equal(got.held, True, "the downgraded lease")
        other = await had(face, three.rwlock("book").read(), timeout=20)
        equal(await face.do(one.rwlock("book").write().acquire, timeout=0), None, "a writer beside two readers")
        await face.do(other.release)
        equal(await face.do(writing.read().release), True, "released as a reader")

    writer = task(write())
    await waiting(face, three, "book", 1)
    equal(await face.do(three.rwlock("book").read().acquire, timeout=0), None, "a new reader while a writer waits")
    equal(written.is_set(), False, "the writer while a reader holds it")
    await face.do(lease.release)
    await writer
