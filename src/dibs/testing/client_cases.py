"""Conformance cases on what users see, written once and run through both faces (see ``faces``).

Waits are as short as the store's ttl allows, and nothing depends on how fast a machine is: a case that waits for
something waits as long as ``PATIENCE_S``.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from dibs.errors import (
    InvalidName,
    InvalidOption,
    LeaseLost,
    LockTimeout,
    NotHeld,
    StoreUnavailable,
    Unsupported,
    WouldDeadlock,
)
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal, fifo, rising

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dibs.store import Capabilities
    from dibs.testing.faces import Face

case = CLIENT_CASES.case


async def until(condition: Callable[[], Any], what: str, limit_s: float = PATIENCE_S) -> Any:
    """Look until the condition is true; fail when it never is."""
    end = time.monotonic() + limit_s
    while True:
        seen = condition()
        if hasattr(seen, "__await__"):
            seen = await seen
        if seen:
            return seen
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit_s:g} s")
        await asyncio.sleep(0.005)


class raises:  # noqa: N801 - reads as pytest's
    """``with raises(LeaseLost) as caught:`` fails unless the block raises that."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds
        self.error: Any = None

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        names = " or ".join(kind.__name__ for kind in self._kinds)
        if error is None:
            raise AssertionError(f"expected {names}, and nothing was raised")
        if not isinstance(error, self._kinds):
            if not isinstance(error, Exception):
                return False
            raise AssertionError(f"expected {names}, saw {error!r}") from error
        self.error = error
        return True


async def had(face: Face, lock: Any, **how: Any) -> Any:
    """Acquire, and fail when it could not be had."""
    lease = await face.do(lock.acquire, **how)
    if lease is None:
        raise AssertionError(f"{lock!r} could not be had with {how}")
    return lease


async def shown(face: Face, client: Any, name: str) -> Any:
    """Who holds the name; fail when nobody does."""
    record = await face.do(client.holder, name)
    if record is None:
        raise AssertionError(f"holder({name!r}) knows nobody")
    return record


def why(lease: Any) -> str:
    """What a lease says of its end."""
    try:
        lease.check()
    except LeaseLost as error:
        return str(error)
    return "it is held"


async def waiting(face: Face, client: Any, name: str, count: int) -> None:
    """Until as many stand in the store's line for the name."""

    async def lined_up() -> bool:
        record = await face.do(client.holder, name)
        return record is not None and record.waiting == count

    await until(lined_up, f"{count} waiters in line")


def task(work: Awaitable[Any]) -> asyncio.Task[Any]:
    """An actor of its own."""

    async def run() -> Any:
        return await work

    return asyncio.get_running_loop().create_task(run())


# -- holding ----------------------------------------------------------------------------------------------------------


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


# -- living and ending ------------------------------------------------------------------------------------------------


@case("P1, P2")
async def renewal_goes_on_by_itself(face: Face) -> None:
    """A lease is renewed in the background, so it outlives its ttl with its token and shuts others out."""
    ours, theirs = face.client(), face.client()
    ttl = face.short_ttl
    lease = await had(face, ours.lock("long", ttl=ttl))
    other = theirs.lock("long")
    end = time.monotonic() + 3 * ttl
    while time.monotonic() < end:
        assert lease.held, f"a lease that should be renewed is not held: {why(lease)}"
        assert 0 < lease.remaining() < ttl, f"remaining() of a lease of {ttl} s: {lease.remaining()}"
        equal(await face.do(other.acquire, timeout=0), None, "the answer to others")
        await asyncio.sleep(ttl / 10)
    record = await shown(face, theirs, "long")
    equal(record.fencing_token, lease.fencing_token, "its token after renewals")
    equal(lease.lost.is_set(), False, "lost")
    equal(await face.do(lease.release), True, "release")


@case("P7, P4")
async def an_expiry_needs_no_janitor(face: Face) -> None:
    """A lease that is not renewed frees the name by itself, is not held any more when it does, and is told lost."""
    ours, theirs = face.client(), face.client()
    told: list[str] = []
    lock = ours.lock("short", ttl=face.short_ttl, renew=False, on_lost=lambda: told.append("lost"))
    lease = await had(face, lock)
    waiter = task(face.do(theirs.lock("short").acquire, timeout=30))
    next_lease = await asyncio.wait_for(waiter, PATIENCE_S)
    equal((lease.held, lease.remaining(), lease.lost.is_set()), (False, 0.0, True), "held, remaining(), lost")
    rising([lease.fencing_token, next_lease.fencing_token], "tokens across the expiry")
    with raises(LeaseLost):
        lease.check()
    with raises(LeaseLost):
        await face.do(lease.renew)
    with raises(LeaseLost):
        await face.do(lease.release)
    await until(lambda: told, "on_lost")
    equal(next_lease.held, True, "the next holder's lease after the late release")
    equal(await face.do(next_lease.release), True, "its release")
    await asyncio.sleep(0.05)
    equal(told, ["lost"], "calls of on_lost")


@case("P4, P6")
async def a_loss_is_told(face: Face) -> None:
    """A lease broken at once hears of it at its next renewal: not held, ``lost`` set, ``on_lost`` called, for good."""
    ours, theirs = face.client(), face.client()
    told: list[str] = []
    lease = await had(face, ours.lock("broken", ttl=3 * face.short_ttl, on_lost=lambda: told.append("lost")))
    watcher = task(face.do(lease.lost.wait, PATIENCE_S))
    equal(await face.do(lease.lost.wait, 0.05), False, "lost.wait() while it is held")
    equal(
        await face.do(theirs.break_lease, "broken", fencing_token=lease.fencing_token + 1, now=True),
        False,
        "wrong token",
    )
    equal(await face.do(theirs.break_lease, "broken", fencing_token=lease.fencing_token, now=True), True, "break_lease")
    next_lease = await had(face, theirs.lock("broken"), timeout=0)
    equal(await watcher, True, "lost.wait() when it is lost")
    equal((lease.held, lease.lost.is_set()), (False, True), "held, lost")
    await until(lambda: told, "on_lost")
    with raises(LeaseLost):
        lease.check()
    with raises(LeaseLost):
        await face.do(lease.release)
    equal((lease.held, next_lease.held), (False, True), "held: the old lease and the new")
    equal(await face.do(next_lease.release), True, "release")


@case("P6")
async def a_block_ends_with_the_loss(face: Face) -> None:
    """A ``with`` block whose lease was lost ends with LeaseLost; an error of its own is not hidden by it."""
    ours, theirs = face.client(), face.client()
    with raises(LeaseLost):
        async with face.holding(ours.lock("block", ttl=3 * face.short_ttl)) as lease:
            await face.do(theirs.break_lease, "block", fencing_token=lease.fencing_token, now=True)
            await until(lambda: not lease.held, "the loss")
    with raises(ZeroDivisionError):
        async with face.holding(ours.lock("block", ttl=face.short_ttl, renew=False)) as lease:
            while lease.held:
                time.sleep(0.005)  # noqa: ASYNC251 - awaiting would let the loss cancel the block before its own error
            raise ZeroDivisionError


@case("P8, P10")
async def release_may_be_called_twice(face: Face) -> None:
    """The second release of a lease does nothing and is no error; a released lease is over, but not lost."""
    ours, theirs = face.client(), face.client()
    told: list[str] = []
    lease = await had(face, ours.lock("twice", ttl=face.short_ttl, on_lost=lambda: told.append("lost")))
    equal(await face.do(lease.release), True, "the first release")
    next_lease = await had(face, theirs.lock("twice", ttl=20), timeout=0)
    equal(await face.do(lease.release), True, "the second release")
    equal((lease.held, lease.remaining(), lease.lost.is_set()), (False, 0.0, False), "held, remaining(), lost")
    with raises(LeaseLost):
        lease.check()
    with raises(LeaseLost):
        await face.do(lease.renew)
    equal(await face.do(lease.lost.wait, 0.05), False, "lost.wait() of a released lease")
    await asyncio.sleep(face.short_ttl)
    equal((next_lease.held, told), (True, []), "the next holder, and calls of on_lost")
    record = await shown(face, theirs, "twice")
    assert record.fencing_token == next_lease.fencing_token, f"the holder shown: {record}"
    equal(await face.do(next_lease.release), True, "its release")


@case("P5")
async def a_lease_can_be_renewed_by_hand(face: Face) -> None:
    """``renew(ttl)`` moves the end and becomes the ttl of later renewals; a ttl out of bounds is refused."""
    client = face.client()
    lease = await had(face, client.lock("by hand", ttl=face.short_ttl, renew=False))
    await face.do(lease.renew, 20)
    assert 15 < lease.remaining() < 20, f"remaining() after renew(20): {lease.remaining()}"
    equal(lease.ttl, 20.0, "ttl")
    record = await shown(face, client, "by hand")
    assert 15 < record.expires_in <= 20, f"as others see it: {record}"
    assert lease.expires_at - lease.acquired_at > timedelta(seconds=15), f"expires_at: {lease.expires_at}"
    for wrong in (face.capabilities.ttl_min_s / 2, math.nan, -1, "20"):
        with raises(InvalidOption):
            await face.do(lease.renew, wrong)
    await face.do(lease.renew)
    equal(lease.held, True, "held")
    equal(await face.do(lease.release), True, "release")


@case("P1")
async def min_hold_keeps_the_name(face: Face) -> None:
    """With ``min_hold``, nobody gets the name sooner after the grant, however early it is released."""
    ours, theirs = face.client(), face.client()
    least = 2 * face.short_ttl
    began = time.monotonic()
    lease = await had(face, ours.lock("paced", min_hold=least))
    equal(await face.do(lease.release), True, "release")
    equal(lease.held, False, "held after the release")
    equal(await face.do(theirs.lock("paced").acquire, timeout=0), None, "the name just after the release")
    next_lease = await had(face, theirs.lock("paced"), timeout=PATIENCE_S)
    took = time.monotonic() - began
    assert took >= least - face.capabilities.resolution_s - 0.01, f"min_hold={least}, and had after {took:.3f} s"
    equal(await face.do(next_lease.release), True, "release")


@case("P4")
async def max_hold_ends_it(face: Face) -> None:
    """With ``max_hold``, a lease is not renewed beyond it: it is lost in time and others get the name."""
    ours, theirs = face.client(), face.client()
    most = 2 * face.short_ttl
    began = time.monotonic()
    lease = await had(face, ours.lock("bounded", ttl=face.short_ttl, max_hold=most))
    equal(await face.do(lease.lost.wait, PATIENCE_S), True, "lost.wait()")
    took = time.monotonic() - began
    assert most / 2 < took <= most + 0.5, f"max_hold={most}, and lost after {took:.3f} s: {why(lease)}"
    next_lease = await had(face, theirs.lock("bounded"), timeout=PATIENCE_S)
    equal((lease.held, next_lease.held), (False, True), "held: the old lease and the new")
    equal(await face.do(next_lease.release), True, "release")


@case("P9")
async def closing_gives_everything_back(face: Face) -> None:
    """Closing a client gives back what it holds at once, and wakes its waiters with StoreUnavailable."""
    ours, theirs = face.client(), face.client()
    leases = [await had(face, ours.lock(f"mine/{n}")) for n in range(3)]
    busy = await had(face, theirs.lock("theirs"))
    waiters = [task(face.do(ours.lock("theirs").acquire, timeout=limit)) for limit in (None, 60)]
    if fifo(face.capabilities):
        await waiting(face, theirs, "theirs", 1)
    await asyncio.sleep(0.1)
    await face.do(ours.close)
    for waiter in waiters:
        with raises(StoreUnavailable):
            await asyncio.wait_for(waiter, PATIENCE_S)
    equal([lease.held for lease in leases], [False] * 3, "held after close()")
    for n in range(3):
        await face.do((await had(face, theirs.lock(f"mine/{n}"), timeout=0)).release)
    with raises(StoreUnavailable):
        await face.do(ours.lock("mine/0").acquire, timeout=0)
    await face.do(ours.close)
    equal(await face.do(busy.release), True, "release")
    again = await had(face, theirs.lock("theirs"), timeout=0)
    equal(await face.do(again.release), True, "the name the closed client waited for")


# -- locks as objects -------------------------------------------------------------------------------------------------


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


# -- seeing and mending -----------------------------------------------------------------------------------------------


@case("P20")
async def leases_are_seen(face: Face) -> None:
    """``leases(prefix)`` and ``holder(name)`` show what is held in this namespace, by whom and how many wait."""
    ours, theirs = face.client(), face.client()
    names = ["a", "a/1", "a/2", "b%", "b_c", "Ä 🔒"]
    leases = {name: await had(face, ours.lock(name, ttl=20)) for name in names}
    for prefix in ("", "a", "a/", "b%", "b_", "Ä", "c", "%"):
        records = await face.do(theirs.leases, prefix)
        equal([r.name for r in records], sorted(n for n in names if n.startswith(prefix)), f"leases({prefix!r})")
    for record in await face.do(theirs.leases):
        lease = leases[record.name]
        equal(
            (record.holder, record.fencing_token), (lease.holder, lease.fencing_token), f"the record of {record.name}"
        )
    equal(await face.do(theirs.holder, "a/"), None, "holder() of a name that is the beginning of others")
    await face.do(leases["a"].release)
    equal(await face.do(theirs.holder, "a"), None, "holder() after a release")
    for lease in leases.values():
        await face.do(lease.release)
    equal(await face.do(theirs.leases), [], "leases() after all were released")


@case("P20")
async def namespaces_do_not_meet(face: Face) -> None:
    """One name in two namespaces is two locks, and neither sees the other's leases."""
    one, two = face.client(), face.client(namespace=face.namespace + "-2")
    first, second = await had(face, one.lock("same"), timeout=0), await had(face, two.lock("same"), timeout=0)
    for client, lease in ((one, first), (two, second)):
        records = await face.do(client.leases)
        equal([(r.name, r.holder) for r in records], [("same", lease.holder)], "leases of a namespace")
    equal(await face.do(one.break_lease, "same", fencing_token=first.fencing_token, now=True), True, "breaking one")
    record = await shown(face, two, "same")
    assert record.holder == second.holder, f"the other after that: {record}"
    equal(await face.do(second.release), True, "release")
    with raises(LeaseLost):
        await face.do(first.renew)


@case("P2")
async def breaking_and_purging(face: Face) -> None:
    """A broken lease cannot be renewed and frees the name at its expiry; tokens go on rising across a purge."""
    ours, theirs = face.client(), face.client()
    ttl = 2 * face.short_ttl
    lease = await had(face, ours.lock("mend", ttl=ttl))
    equal(
        await face.do(theirs.break_lease, "mend", fencing_token=lease.fencing_token),
        True,
        f"break_lease ({why(lease)})",
    )
    equal(await face.do(theirs.lock("mend").acquire, timeout=0), None, "the name before the expiry")
    next_lease = await had(face, theirs.lock("mend"), timeout=PATIENCE_S)
    equal(lease.held, False, "whether the old holder still trusts its lease when another has it")
    equal(await face.do(next_lease.release), True, "release")
    for client in (ours, theirs):
        purged = await face.do(client.purge, 0)
        assert purged >= 0, f"purge(0) says {purged!r}"
        after = await had(face, ours.lock("mend"), timeout=0)
        rising(
            [lease.fencing_token, next_lease.fencing_token, after.fencing_token], "tokens across a break and a purge"
        )
        next_lease = after
        equal(await face.do(after.release), True, "release")
    equal(await face.do(ours.purge, timedelta(days=1)), 0, "what a purge of the last day deletes")


@case("P23")
async def the_store_is_reached(face: Face) -> None:
    """``setup`` may be called again and again, ``ping`` says how long it took, ``capabilities`` what is promised."""
    client = face.client()
    await asyncio.gather(*[task(face.do(face.client().setup)) for _ in range(4)])
    await face.do(client.setup)
    took = await face.do(client.ping)
    assert 0 <= took < PATIENCE_S, f"ping() took {took} s"
    shown = await face.real_capabilities(client)
    equal(shown.store, face.capabilities.store, "the store's name")
    # What follows from the address alone must not change when the store is reached, or locks were checked wrongly.
    equal(
        (shown.ttl_min_s, shown.ttl_max_s), (face.capabilities.ttl_min_s, face.capabilities.ttl_max_s), "limits of ttl"
    )
    assert shown.margin_s <= face.capabilities.margin_s, f"a margin that grows when connected: {shown}"


@case("P23")
async def limits_of_ttl_are_real(face: Face) -> None:
    """The shortest and the longest ttl that a store declares work, and beyond them nothing is sent."""
    limits = face.capabilities
    client, idle = face.client(), face.idle_client()
    for wrong in (limits.ttl_min_s * 0.99, limits.ttl_max_s * 1.01, 0, -1, math.nan, math.inf, "30", True):
        with raises(InvalidOption):
            idle.lock("ttl", ttl=wrong)
        with raises(InvalidOption):
            face.idle_client(ttl=wrong)
    long = await had(face, client.lock("longest", ttl=limits.ttl_max_s), timeout=0)
    record = await shown(face, client, "longest")
    assert record.expires_in > limits.ttl_max_s - 3600, f"the longest lease: {record}"
    equal(await face.do(long.release), True, "release")

    async def short_lease_was_held() -> bool:
        lease = await face.do(client.lock("shortest", ttl=limits.ttl_min_s, renew=False).acquire, timeout=0)
        seen = lease is not None and lease.held
        if lease is not None:
            try:
                await face.do(lease.release)
            except LeaseLost:
                seen = False
        return seen

    await until(short_lease_was_held, "a lease of the shortest ttl that is held for a moment")


@case("P20, P25")
async def wrong_input_is_refused_before_any_io(face: Face) -> None:
    """A name, a number or an info that cannot be kept exactly is refused before anything is sent."""
    idle = face.idle_client()
    for name in ("", "a\nb", "a\0b", "a\x7f", "a\x85b", "\ud800", "x" * 256, "é" * 128, b"bytes", None, 7):
        with raises(InvalidName):
            idle.lock(name)
        with raises(InvalidName):
            await face.do(idle.holder, name)
        with raises(InvalidName):
            await face.do(idle.break_lease, name, fencing_token=1)
    wrong: list[dict[str, Any]] = [
        {"timeout": -1},
        {"timeout": math.nan},
        {"timeout": "1"},
        {"min_hold": -1},
        {"min_hold": math.nan},
        {"max_hold": 0},
        {"min_hold": 5, "max_hold": 4},
        {"on_lost": "call me"},
        {"on_busy": "wait"},
        {"info": "text"},
        {"info": {"a": object()}},
        {"info": {"a": math.nan}},
        {"info": {"a": "x" * 4096}},
        {"info": {"a": "\0"}},
        {"info": {"a": "\ud800"}},
    ]
    for options in wrong:
        with raises(InvalidOption):
            idle.lock("name", **options)
    for namespace in ("", "a:b", "a b", "ä", "x" * 64, None):
        with raises(InvalidOption):
            face.idle_client(namespace=namespace)
    for seconds in (-1, math.nan, "1"):
        with raises(InvalidOption):
            await face.do(idle.purge, seconds)
    for token in ("1", 1.0, True, None):
        with raises(InvalidOption):
            await face.do(idle.break_lease, "name", fencing_token=token)
    equal(idle.lock("x" * 255).name, "x" * 255, "the longest name")
    lock = idle.lock("tab", info={"a": "x" * 4000})
    equal(lock.locked(), False, "locked() of a lock nobody acquired")


def pins(capabilities: Capabilities) -> bool:
    return capabilities.guard


def pins_nothing(capabilities: Capabilities) -> bool:
    return not capabilities.guard


@case("P1", promised=pins_nothing)
async def what_cannot_pin_says_so(face: Face) -> None:
    """A lease on a store without transactions cannot be guarded: Unsupported, and it is held as before."""
    lease = await face.do(face.client().lock("name").acquire, timeout=0)
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    for verb in (lease.guard, lease.release_after_commit):
        with raises(Unsupported):
            await face.do(verb, connection)
    connection.close()
    equal(lease.held, True, "held after a guard that is not supported")


@case("P1", promised=pins)
async def only_a_transaction_there_can_pin(face: Face) -> None:
    """What is no connection, or one to another database, cannot guard a lease: InvalidOption; it is held as before."""
    lease = await face.do(face.client().lock("name").acquire, timeout=0)
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    for verb in (lease.guard, lease.release_after_commit):
        for wrong in (connection, connection.cursor(), object(), None):
            with raises(InvalidOption):
                await face.do(verb, wrong)
    connection.close()
    equal(lease.held, True, "held after a guard with what is no connection")
