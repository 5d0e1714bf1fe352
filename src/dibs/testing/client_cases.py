"""Conformance cases on what users see, run through both faces (see ``faces``): holding, waiting, and locks as objects.

Each is written once. Waits are as short as the store's ttl allows, and nothing depends on how fast a machine is: a
case that waits for something waits as long as ``PATIENCE_S``.
"""

from __future__ import annotations

import asyncio
import math
import time
from datetime import datetime, timedelta, timezone

from dibs._typing import TYPE_CHECKING
from dibs.errors import LockTimeout, NotHeld, WouldDeadlock
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal, fifo, rising
from dibs.testing.client_bench import had, raises, shown, task, waiting

if TYPE_CHECKING:
    from dibs.testing.faces import Face


case = CLIENT_CASES.case


@case("P1, P2")
async def one_at_a_time(face: Face) -> None:
    """Several clients that count through one lock lose no count, and tokens rise in the order of the visits."""
    counter, inside = 0, 0
    tokens: list[int] = []

    async def work() -> None:
        nonlocal counter, inside
        lock = face.client().lock("counter", ttl=20)
        for _ in range(6):
            async with face.holding(lock) as lease:
                inside += 1
                equal(inside, 1, "how many are inside")
                tokens.append(lease.fencing_token)
                seen = counter
                await asyncio.sleep(0.002)
                lease.check()
                counter = seen + 1
                inside -= 1

    await asyncio.gather(*[task(work()) for _ in range(4)])
    equal(counter, 24, "the count of 4 clients with 6 visits each")
    rising(tokens, "tokens in the order of the visits")


@case("P1")
async def one_client_one_at_a_time(face: Face) -> None:
    """Actors of one client that share one lock object exclude each other as those of many clients do."""
    lock, inside, visits = face.client().lock("shared", ttl=20), 0, 0

    async def work() -> None:
        nonlocal inside, visits
        for _ in range(6):
            async with face.holding(lock) as lease:
                inside += 1
                equal((inside, lease.held, lock.locked()), (1, True, True), "how many are inside, held, locked")
                await asyncio.sleep(0.001)
                visits += 1
                inside -= 1

    await asyncio.gather(*[task(work()) for _ in range(6)])
    equal((visits, lock.locked()), (36, False), "visits, and locked() after them")


@case("P3")
async def a_lease_tells_all(face: Face) -> None:
    """A lease knows its name, slot, token, holder, times, ttl and info."""
    client = face.client(info={"service": "conformance", "both": 1})
    lock = client.lock("facts", ttl=timedelta(seconds=20), info={"ü": ["🔒", None, 2**60]})
    lease = await had(face, lock)
    record = await shown(face, client, "facts")
    equal((lease.name, lease.slot, lease.ttl), ("facts", 1, 20.0), "name, slot, ttl")
    equal(lease.info, {"ü": ["🔒", None, 2**60]}, "info")
    equal(record.info, lease.info, "info as others see it")
    equal((record.name, record.slot, record.holder), ("facts", 1, lease.holder), "name, slot, holder as others see it")
    equal(record.fencing_token, lease.fencing_token, "token as others see it")
    equal(len(lease.holder.split("/")), 3, f"parts of the holder {lease.holder!r}")
    assert 0 < record.expires_in <= 20, f"a lease of 20 s ends in {record.expires_in} s"
    assert 15 < lease.remaining() < 20 * 0.95, f"a lease of 20 s is trusted for {lease.remaining()} s"
    age = datetime.now(timezone.utc) - lease.acquired_at
    assert abs(age) < timedelta(hours=1), f"acquired at {lease.acquired_at}"
    equal(record.acquired_at, lease.acquired_at, "the time of the grant as others see it")
    assert timedelta(seconds=19) < lease.expires_at - lease.acquired_at < timedelta(seconds=21), "expires_at"
    other = await had(face, client.lock("facts 2"))
    equal(other.info, {"service": "conformance", "both": 1}, "info of the client, when the lock has none")
    equal(await face.do(lease.release), True, "release")
    equal(await face.do(other.release), True, "release")


@case("P11")
async def not_now_is_a_value(face: Face) -> None:
    """``timeout=0`` asks once, ``timeout=T`` for T seconds; None says that the name could not be had."""
    ours, theirs = face.client(), face.client()
    lease = await had(face, ours.lock("busy"))
    lock = theirs.lock("busy")
    equal(await face.do(lock.acquire, timeout=0), None, "timeout=0 on a held name")
    equal(await face.do(lock.acquire, False), None, "blocking=False on a held name")
    equal(await face.do(theirs.lock("busy", timeout=0).acquire), None, "a lock built with timeout=0")
    for how in ({"timeout": 0.3}, {"timeout": timedelta(seconds=0.3)}):
        began = time.monotonic()
        equal(await face.do(lock.acquire, **how), None, f"{how} on a held name")
        took = time.monotonic() - began
        assert 0.29 <= took < 0.3 + PATIENCE_S, f"{how} took {took:.2f} s"
    equal(lease.held, True, "the holder's lease meanwhile")
    equal(await face.do(lease.release), True, "release")
    again = await had(face, lock, timeout=0)
    equal(await face.do(again.release), True, "release")


@case("P11")
async def a_block_that_cannot_be_entered(face: Face) -> None:
    """``with`` on a name that cannot be had in time raises LockTimeout, which says who holds it and for how long."""
    lease = await had(face, face.client().lock("busy", ttl=20))
    with raises(LockTimeout) as caught:
        async with face.holding(face.client().lock("busy", timeout=0.2)):
            raise AssertionError("the block was entered")
    error = caught.error
    equal((error.name, error.holder), ("busy", lease.holder), "name and holder in the error")
    assert 0 < error.free_in <= 20, f"free_in: {error.free_in}"
    assert error.waited >= 0.19, f"waited: {error.waited}"
    host, pid, _ = lease.holder.split("/")
    for word in ("busy", host, pid):
        assert word in str(error), f"the message does not name {word}: {error}"
    assert isinstance(error, TimeoutError), "LockTimeout is no TimeoutError"


@case("P3")
async def waiting_ends_with_a_release(face: Face) -> None:
    """A waiter has the name soon after it is released, without limit or with one."""
    ours, theirs = face.client(), face.client()
    for limit in (None, 30):
        lease = await had(face, ours.lock("wanted"))
        waiter = task(face.do(theirs.lock("wanted").acquire, timeout=limit))
        if fifo(face.capabilities):
            await waiting(face, ours, "wanted", 1)
        else:
            await asyncio.sleep(0.2)
        equal(waiter.done(), False, "whether the waiter has come back while the name is held")
        equal(await face.do(lease.release), True, "release")
        next_lease = await asyncio.wait_for(waiter, PATIENCE_S)
        equal(next_lease.held, True, "the waiter's lease")
        rising([lease.fencing_token, next_lease.fencing_token], "tokens from holder to waiter")
        equal(await face.do(next_lease.release), True, "its release")


@case("P13", fifo)
async def clients_are_served_in_order(face: Face) -> None:
    """Waiters of different clients get the name in the order in which they came."""
    holder = face.client()
    lease = await had(face, holder.lock("queue"))
    served: list[int] = []

    async def wait(number: int) -> None:
        lock = face.client().lock("queue")
        mine = await had(face, lock, timeout=30)
        served.append(number)
        await face.do(mine.release)

    waiters = []
    for number in range(4):
        waiters.append(task(wait(number)))
        await waiting(face, holder, "queue", number + 1)
    await face.do(lease.release)
    await asyncio.gather(*waiters)
    equal(served, [0, 1, 2, 3], "the order in which waiters were served")


@case("P9, P13", fifo)
async def a_waiter_that_gives_up_is_forgotten(face: Face) -> None:
    """A waiter that timed out holds nothing, stands in no line, and is not waited for."""
    ours, theirs, third = face.client(), face.client(), face.client()
    lease = await had(face, ours.lock("given up"))
    equal(await face.do(theirs.lock("given up").acquire, timeout=0.3), None, "the waiter's answer")
    await waiting(face, ours, "given up", 0)
    equal(await face.do(lease.release), True, "release")
    mine = await had(face, third.lock("given up"), timeout=0)
    equal(await face.do(mine.release), True, "release")


@case("P8")
async def like_the_standard_library(face: Face) -> None:
    """``acquire`` and ``release`` of a lock work as the standard library's, and misuse raises the same errors."""
    client = face.client()
    lock = client.lock("plain")
    with raises(RuntimeError) as caught:
        await face.do(lock.release)
    assert isinstance(caught.error, NotHeld), f"release of what was never held: {caught.error!r}"
    assert await face.do(lock.acquire), "acquire() is not true"
    equal(lock.locked(), True, "locked()")
    equal(await face.do(lock.acquire, timeout=0), None, "acquiring what this caller holds already")
    equal(await task(face.do(lock.release)), True, "release by another caller")
    equal(lock.locked(), False, "locked()")
    with raises(RuntimeError):
        await face.do(lock.release)
    for wrong in ({"timeout": -2}, {"timeout": math.nan}, {"blocking": False, "timeout": 1}):
        with raises(ValueError):
            await face.do(lock.acquire, **wrong)
    with raises(OverflowError):
        await face.do(lock.acquire, timeout=1e100)
    equal(lock.locked(), False, "locked() after misuse")


@case("P1")
async def reentrant_for_its_owner(face: Face) -> None:
    """A reentrant lock is had again by its owner at once, under one token, and freed by its last release."""
    ours, theirs = face.client(), face.client()
    lock = ours.lock("nested", reentrant=True)
    first = await had(face, lock)
    second = await had(face, lock)
    equal((second.fencing_token, second.held), (first.fencing_token, True), "token and held of the second")
    equal(await task(face.do(lock.acquire, timeout=0)), None, "another caller of the same client")
    with raises(NotHeld):
        await task(face.do(lock.release))
    equal(await face.do(lock.release), True, "the first of two releases")
    equal((first.held, lock.locked()), (True, True), "held and locked() in between")
    equal(await face.do(theirs.lock("nested").acquire, timeout=0), None, "another client in between")
    async with face.holding(lock) as third:
        equal(third.fencing_token, first.fencing_token, "token of a block inside")
    equal(first.held, True, "held after the block inside")
    equal(await face.do(lock.release), True, "the last release")
    equal((first.held, lock.locked()), (False, False), "held and locked() at the end")
    with raises(NotHeld):
        await face.do(lock.release)
    await face.do((await had(face, theirs.lock("nested"), timeout=0)).release)


@case("P22")
async def nobody_waits_for_himself(face: Face) -> None:
    """A caller that would wait without limit for what it holds itself gets WouldDeadlock; with a limit it gets None."""
    client = face.client()
    lock = client.lock("self")
    lease = await had(face, lock)
    for again in (lock, client.lock("self")):
        with raises(WouldDeadlock) as caught:
            await face.do(again.acquire)
        assert isinstance(caught.error, RuntimeError), f"the error: {caught.error!r}"
        assert "self" in str(caught.error), f"the error does not name the lock: {caught.error}"
        equal(await face.do(again.acquire, timeout=0.1), None, "with a limit")
    equal(lease.held, True, "the lease meanwhile")
    equal(await face.do(lease.release), True, "release")
    await face.do((await had(face, lock)).release)


@case("P1")
async def a_decorated_function_holds_the_lock(face: Face) -> None:
    """A decorated function runs under the lock; when it cannot be had, it raises LockTimeout or is skipped."""
    ours, theirs = face.client(), face.client()
    seen: list[bool] = []
    lock = ours.lock("decorated", timeout=0)

    def body() -> int:
        seen.append(lock.locked())
        return 41

    function = face.decorate(lock, body)
    equal(await function(), 41, "what the function returns")
    equal(await function(), 41, "what it returns again")
    equal((seen, lock.locked()), ([True, True], False), "locked() inside and after")
    lease = await had(face, theirs.lock("decorated"))
    with raises(LockTimeout):
        await function()
    skipped = face.decorate(ours.lock("decorated", timeout=0, on_busy="skip"), lambda: seen.append(True))
    equal(await skipped(), None, "what a skipped call returns")
    equal(len(seen), 2, "calls of the function")
    equal(await face.do(lease.release), True, "release")
    failing = face.decorate(lock, lambda: 1 // 0)
    with raises(ZeroDivisionError):
        await failing()
    equal(lock.locked(), False, "locked() after a call that failed")
