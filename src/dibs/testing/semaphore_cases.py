"""Conformance cases on semaphores, run through both faces."""

from __future__ import annotations

import asyncio

from dibs._typing import TYPE_CHECKING
from dibs.errors import InvalidOption, LeaseLost, LimitMismatch, LockTimeout, Unsupported, WouldDeadlock
from dibs.testing.case import CLIENT_CASES, equal, pools
from dibs.testing.client_bench import had, raises, task, waiting

if TYPE_CHECKING:
    from dibs.store import Capabilities
    from dibs.testing.faces import Face


def none(capabilities: Capabilities) -> bool:
    return not capabilities.permits


case = CLIENT_CASES.case


@case("P14", pools)
async def a_semaphore_lets_so_many_in(face: Face) -> None:
    """Clients that pass through one semaphore are never more inside than its limit, each with a slot of its own."""
    inside: set[int] = set()
    most, visits = 0, 0

    async def work() -> None:
        nonlocal most, visits
        semaphore = face.client().semaphore("rooms", 2, ttl=20)
        for _ in range(5):
            async with face.holding(semaphore) as lease:
                assert lease.slot in (1, 2), f"slot {lease.slot} of 2"
                assert lease.slot not in inside, f"slot {lease.slot} was given twice"
                inside.add(lease.slot)
                most = max(most, len(inside))
                await asyncio.sleep(0.1)  # long enough for the next to be let in beside it
                lease.check()
                inside.discard(lease.slot)
                visits += 1

    await asyncio.gather(*[task(work()) for _ in range(4)])
    equal((most, visits), (2, 20), "most at once, visits of 4 clients")


@case("P14", pools)
async def like_a_bounded_semaphore(face: Face) -> None:
    """One object, many holders; releasing once too often is ValueError; ``available()`` asks the store."""
    client, other = face.client(), face.client()
    semaphore = client.semaphore("bounded", 3)
    equal((semaphore.name, semaphore.limit, semaphore.locked()), ("bounded", 3, False), "name, limit, locked")
    leases = [await had(face, semaphore) for _ in range(3)]
    equal([lease.slot for lease in leases], [1, 2, 3], "slots")
    equal((semaphore.locked(), await face.do(semaphore.available)), (True, 0), "locked and available")
    equal(await face.do(semaphore.acquire, timeout=0), None, "a fourth")
    equal(await face.do(other.semaphore("bounded", 3).acquire, timeout=0), None, "a fourth, elsewhere")
    equal(await face.do(semaphore.release, 2), True, "two released")
    equal(await face.do(semaphore.available), 2, "available")
    with raises(ValueError):
        await face.do(semaphore.release, 2)
    equal(await face.do(semaphore.release), True, "the last released")
    with raises(ValueError):
        await face.do(semaphore.release)
    equal(await face.do(semaphore.available), 3, "available at last")


@case("P14", pools)
async def limits_must_agree(face: Face) -> None:
    """Another limit is LimitMismatch, until it is set with ``resize``; so is a lock of the same name."""
    client, other = face.client(), face.client()
    lease = await had(face, client.semaphore("agreed", 2))
    for how in ({"timeout": 0}, {"timeout": 5}):
        with raises(LimitMismatch) as caught:
            await face.do(other.semaphore("agreed", 3).acquire, **how)
        assert {"2", "3"} <= set(str(caught.error).split()), f"the limits are not told: {caught.error}"
    with raises(LimitMismatch):
        await face.do(other.lock("agreed").acquire)
    with raises(LimitMismatch):
        await face.do(other.rwlock("agreed").read().acquire)
    wider = await had(face, other.semaphore("agreed", 3, resize=True))
    with raises(LimitMismatch):
        await face.do(client.semaphore("agreed", 2).acquire, timeout=0)
    for each in (lease, wider):
        await face.do(each.release)


@case("P14", pools)
async def a_purge_is_of_one_namespace(face: Face) -> None:
    """A client's purge leaves the limits of other namespaces as they are, also of those whose names begin alike."""
    client = face.client()
    others = [face.client(namespace=face.namespace + more) for more in (".x", "-x", "0", "x")]
    for each in (client, *others):
        await face.do((await had(face, each.semaphore("purged", 2))).release)
    await face.do(client.purge, 0)
    for each in others:
        with raises(LimitMismatch):
            await face.do(each.semaphore("purged", 3).acquire, timeout=0)
    await face.do((await had(face, client.semaphore("purged", 3), timeout=0)).release)


@case("P14", pools)
async def a_neighbour_that_waits_hides_no_other_limit(face: Face) -> None:
    """While somebody of the same client waits, another limit or kind is told at once, and a resize is carried out."""
    client, other = face.client(), face.client()
    held = [await had(face, other.semaphore("hidden", 2)) for _ in range(2)]
    waiter = task(face.do(client.semaphore("hidden", 2).acquire, timeout=30))
    await waiting(face, other, "hidden", 1)
    for wrong in (client.semaphore("hidden", 3), client.lock("hidden"), client.rwlock("hidden").read()):
        with raises(LimitMismatch):
            await face.do(wrong.acquire, timeout=10)
    wider = await had(face, client.semaphore("hidden", 6, resize=True), timeout=10)
    with raises(LimitMismatch):  # who waits under the old limit is told, too
        await waiter
    for each in (*held, wider):
        await face.do(each.release)


@case("P14, P22", pools)
async def nested_use_takes_no_second_permit(face: Face) -> None:
    """With ``reentrant`` an owner that holds a permit enters again with the same one."""
    client = face.client()
    semaphore = client.semaphore("nested", 1, reentrant=True)
    async with face.holding(semaphore) as outer:
        async with face.holding(semaphore) as inner:
            equal(inner is outer, True, "the same lease")
        equal(outer.held, True, "after the inner block")
    equal(await face.do(semaphore.available), 1, "afterwards")


@case("P14", pools)
async def weight_is_all_or_nothing(face: Face) -> None:
    """Who takes several permits at once gets all of them or waits, and is not starved by those who take one."""
    client, other = face.client(), face.client()
    ones = [await had(face, client.semaphore("heavy", 4)) for _ in range(2)]
    heavy = task(face.do(other.semaphore("heavy", 4, weight=3).acquire, timeout=20))
    await waiting(face, client, "heavy", 1)
    equal(await face.do(client.semaphore("heavy", 4).acquire, timeout=0), None, "a newcomer who wants one")
    await face.do(ones[0].release)
    lease = await heavy
    equal(lease is not None, True, "three of four")
    equal({r.slot: r.take for r in await face.do(client.leases)}, {ones[1].slot: 1, lease.slot: 3}, "as listed")
    equal(await face.do(client.semaphore("heavy", 4).available), 0, "available")
    for each in (lease, ones[1]):
        await face.do(each.release)


@case("P7, P14", pools)
async def a_lost_permit_is_told(face: Face) -> None:
    """A permit that was broken is lost to its holder, and comes back."""
    client, operator = face.client(), face.client()
    lease = await had(face, client.semaphore("broken", 1, ttl=max(2.0, face.short_ttl)))
    await face.do(operator.break_lease, "broken", fencing_token=lease.fencing_token, now=True)
    equal(await face.do(lease.lost.wait, 20), True, "lost")
    with raises(LeaseLost):
        await face.do(lease.release)
    again = await had(face, operator.semaphore("broken", 1), timeout=20)
    assert again.fencing_token > lease.fencing_token, "the token of the next grant"
    await face.do(again.release)


@case("P14", pools)
async def who_would_wait_for_itself_is_told(face: Face) -> None:
    """Whoever would wait without limit for permits that it holds itself gets WouldDeadlock, and not before."""
    client = face.client()
    leases = [await had(face, client.semaphore("own", 2)) for _ in range(2)]
    with raises(WouldDeadlock):
        await face.do(client.semaphore("own", 2).acquire)
    equal(await face.do(client.semaphore("own", 2).acquire, timeout=0), None, "without waiting")
    for lease in leases:
        await face.do(lease.release)
    reading = await had(face, client.rwlock("own/page").read())
    for side in (client.rwlock("own/page").read(), client.rwlock("own/page").write()):
        with raises(WouldDeadlock):
            await face.do(side.acquire)
    await face.do(reading.release)


@case("P14", pools)
async def all_are_released_before_a_loss_is_told(face: Face) -> None:
    """``release(n)`` gives back everything it can before it raises LeaseLost for what had been lost."""
    client, operator = face.client(), face.client()
    semaphore = client.semaphore("some", 3, ttl=max(2.0, face.short_ttl))
    leases = [await had(face, semaphore) for _ in range(3)]
    await face.do(operator.break_lease, "some", fencing_token=leases[1].fencing_token, now=True)
    equal(await face.do(leases[1].lost.wait, 20), True, "lost")
    with raises(LeaseLost):
        await face.do(semaphore.release, 3)
    equal([lease.held for lease in leases], [False] * 3, "held afterwards")
    equal(await face.do(operator.semaphore("some", 3).available), 3, "available afterwards")


@case("P25", pools)
async def numbers_of_permits_are_checked(face: Face) -> None:
    """Limits and weights that are none are errors before any I/O."""
    client = face.idle_client()
    for limit, weight in ((0, 1), (-1, 1), (True, 1), (2.0, 1), (2**31, 1), (2, 0), (2, 3)):
        with raises(InvalidOption):
            client.semaphore("wrong", limit, weight=weight)
    with raises(LockTimeout, LimitMismatch, InvalidOption):
        client.semaphore("wrong", None)


@case("P25", none)
async def without_permits_there_are_no_semaphores(face: Face) -> None:
    """Where a store has only locks, making a semaphore or a read/write lock is refused at once."""
    client = face.idle_client()
    with raises(Unsupported):
        client.semaphore("none", 2)
    with raises(Unsupported):
        client.rwlock("none")
