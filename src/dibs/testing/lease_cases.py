"""Conformance cases on leases, run through both faces: how they live, and how they end."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import timedelta

from dibs._typing import TYPE_CHECKING
from dibs.errors import InvalidOption, LeaseLost, StoreUnavailable
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal, fifo, rising
from dibs.testing.client_bench import had, raises, shown, task, until, waiting, why

if TYPE_CHECKING:
    from dibs.testing.faces import Face


case = CLIENT_CASES.case


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
    equal(await face.do(lease.lost.wait, -1), False, "a negative time-out, as of an event of the standard library")
    for_ever = task(face.do(lease.lost.wait, 1e12))
    equal(
        await face.do(theirs.break_lease, "broken", fencing_token=lease.fencing_token + 1, now=True),
        False,
        "wrong token",
    )
    equal(await face.do(theirs.break_lease, "broken", fencing_token=lease.fencing_token, now=True), True, "break_lease")
    next_lease = await had(face, theirs.lock("broken"), timeout=0)
    equal(await watcher, True, "lost.wait() when it is lost")
    equal(await for_ever, True, "lost.wait() with a time-out longer than anybody waits")
    equal(await face.do(lease.lost.wait, -1), True, "a negative time-out, when it is lost")
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


@case("P6")
async def no_block_begins_after_the_end(face: Face) -> None:
    """``with`` of a lease that is over raises LeaseLost at once: its block would run while nobody keeps others out."""
    client = face.client()
    for lease in (
        await had(face, client.lock("over", ttl=20)),
        await had(face, client.multilock(["over/1", "over/2"], ttl=20)),
        await face.do(client.election("over/3", ttl=20).campaign, timeout=PATIENCE_S),
    ):
        async with face.holding(lease):
            equal(lease.held, True, "held in the block")
        with raises(LeaseLost) as caught:
            async with face.holding(lease):
                raise AssertionError(f"a block of {lease} was entered for the second time")
        assert "was released" in str(caught.error), f"the error: {caught.error}"


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


@case("P5, P16")
async def whoever_lost_it_is_told_before_others_enter(face: Face) -> None:
    """From the end of the trust to the end of the ttl nobody enters, unless the holder lets go of what it has lost."""
    ours, theirs = face.client(), face.client()
    ttl = 3 * face.short_ttl
    began = time.monotonic()
    lease = await had(face, ours.lock("told", ttl=ttl, renew=False))
    next_lease = await had(face, theirs.lock("told"), timeout=ttl + PATIENCE_S)
    took = time.monotonic() - began
    assert took >= ttl - face.capabilities.resolution_s - 0.01, f"ttl {ttl}, and others entered after {took:.3f} s"
    equal(lease.lost.is_set(), True, "lost")
    with raises(LeaseLost):
        await face.do(lease.release)
    equal(next_lease.held, True, "held after its predecessor has let go")
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
