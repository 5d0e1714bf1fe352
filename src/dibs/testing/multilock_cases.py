"""Conformance cases on several names at once, run through both faces."""

from __future__ import annotations

import asyncio
import random

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption, LeaseLost, LockTimeout, WouldDeadlock
from dibs.testing.case import CLIENT_CASES, equal, fifo, rising
from dibs.testing.client_bench import had, raises, shown, task, until, waiting

if TYPE_CHECKING:
    from dibs.testing.faces import Face

case = CLIENT_CASES.case

# Far more than it takes six actors to have each of their turns; in step with each other they did not.
CHASE_MAX_S = 20.0


@case("P1, P2")
async def several_names_or_none(face: Face) -> None:
    """A multilock holds all its names; where one of them is held by another, it holds none."""
    ours, theirs = face.client(), face.client()
    multi = ours.multilock(["c", "a", "b"])
    lease = await had(face, multi)
    equal((lease.names, len(lease), lease.held, multi.locked()), (("c", "a", "b"), 3, True, True), "what is held")
    equal(list(lease.fencing_tokens), ["c", "a", "b"], "names in the order given")
    equal(lease["a"].fencing_token, (await shown(face, theirs, "a")).fencing_token, "the token as others see it")
    for name in "abc":
        equal(await face.do(theirs.lock(name).acquire, timeout=0), None, f"{name} meanwhile")
    equal(await face.do(theirs.multilock(["x", "b", "y"]).acquire, timeout=0), None, "with one name held by another")
    for name in "xy":
        other = await had(face, theirs.lock(name), timeout=0)
        await face.do(other.release)
    equal(await face.do(lease.release), True, "release")
    equal((lease.held, multi.locked()), (False, False), "afterwards")
    tokens = [lease["b"].fencing_token, (again := await had(face, theirs.lock("b"), timeout=0)).fencing_token]
    rising(tokens, "tokens of a name, taken with others and alone")
    await face.do(again.release)


@case("P11")
async def who_waits_for_several_holds_none(face: Face) -> None:
    """While one of its names is held by another, a waiting multilock keeps nobody from the rest; then it gets all."""
    ours, theirs, third = face.client(), face.client(), face.client()
    held = await had(face, theirs.lock("m"))
    waiter = task(face.do(ours.multilock(["l", "m", "n"]).acquire))
    if fifo(face.capabilities):
        await waiting(face, third, "m", 1)
    else:
        await asyncio.sleep(0.3)
    for name in "ln":
        free = await had(face, third.lock(name), timeout=5)
        await face.do(free.release)
    with raises(LockTimeout) as caught:
        async with face.holding(third.multilock(["k", "m"], timeout=0.2)):
            pass
    equal(caught.error.name, "m", "the name that was missing")
    await face.do(held.release)
    lease = await waiter
    equal((lease is not None, lease.held), (True, True), "the waiter has them all")


@case("P1")
async def multilocks_in_any_order_do_not_deadlock(face: Face) -> None:
    """Clients that take overlapping sets of names in every order all come to their turns, alone with each name."""
    inside: dict[str, int] = dict.fromkeys("pqrs", 0)
    visits = 0

    async def work(number: int) -> None:
        nonlocal visits
        client, chance = face.client(), random.Random(number)
        for _ in range(4):
            names = chance.sample("pqrs", 3)
            async with face.holding(client.multilock(names, ttl=20)) as lease:
                for name in names:
                    inside[name] += 1
                    equal(inside[name], 1, f"how many are inside {name}")
                await asyncio.sleep(0.002)
                lease.check()
                for name in names:
                    inside[name] -= 1
                visits += 1

    await asyncio.gather(*[task(work(number)) for number in range(3)])
    equal(visits, 12, "visits of 3 clients")


@case("P7")
async def multilocks_of_one_client_do_not_chase_each_other(face: Face) -> None:
    """Actors of one client, whose requests travel in the same calls, all come to their turns, and soon."""
    client, visits = face.client(), 0

    async def work(number: int) -> None:
        nonlocal visits
        chance = random.Random(number)
        for _ in range(8):
            lease = await had(face, client.multilock(chance.sample("xyz", 2 + number % 2)), timeout=CHASE_MAX_S)
            await asyncio.sleep(0.002)
            await face.do(lease.release)
            visits += 1

    await asyncio.gather(*[task(work(number)) for number in range(6)])
    equal(visits, 48, "visits of 6 actors")


@case("P13", fifo)
async def a_multilock_keeps_its_place(face: Face) -> None:
    """Who was granted a name while another is held gives it back, and comes before those who came later there."""
    holder, others, looker = face.client(), [face.client() for _ in range(3)], face.client()
    held = {name: await had(face, holder.lock(name)) for name in "de"}
    order: list[str] = []

    async def visit(label: str, lock: Any) -> None:
        lease = await had(face, lock)
        order.append(label)
        await go_on[label].wait()
        await face.do(lease.release)

    go_on = {label: asyncio.Event() for label in ("both", "second", "third")}
    locks = [others[0].multilock(["d", "e"]), others[1].lock("d"), others[2].lock("d")]
    actors = []
    for count, (label, lock) in enumerate(zip(go_on, locks, strict=True), 1):
        actors.append(task(visit(label, lock)))
        await waiting(face, looker, "d", count)
    await face.do(held["d"].release)
    await until(lambda: order == ["second"], "who came second has the name that the first cannot use alone")
    await waiting(face, looker, "e", 1)
    await face.do(held["e"].release)
    await waiting(face, looker, "d", 2)
    for label in ("second", "both", "third"):
        await until(lambda label=label: label in order, f"{label} has it")  # type: ignore[misc]
        equal(order[-1], label, "who has it now")
        go_on[label].set()
    await asyncio.gather(*actors)
    equal(order, ["second", "both", "third"], "the order of all three")


@case("P6")
async def the_loss_of_one_is_the_loss_of_all(face: Face) -> None:
    """When one of the names is taken away, the whole is not held, and the block ends with LeaseLost."""
    client, operator = face.client(), face.client()
    lease = await had(face, client.multilock(["u", "v"], ttl=max(2.0, face.short_ttl)))
    await face.do(operator.break_lease, "v", fencing_token=lease["v"].fencing_token, now=True)
    await until(lambda: not lease.held, "the loss is noticed")
    equal(await face.do(lease.lost.wait, 10), True, "lost.wait()")
    with raises(LeaseLost):
        lease.check()
    equal((lease["u"].held, lease["v"].held), (True, False), "which of them was lost")
    with raises(LeaseLost):
        await face.do(lease.release)
    again = await had(face, operator.multilock(["u", "v"]), timeout=10)
    await face.do(again.release)


@case("P9, P22")
async def a_multilock_given_up_leaves_nothing(face: Face) -> None:
    """A time-out leaves no name held, and nobody in line."""
    ours, theirs = face.client(), face.client()
    held = await had(face, theirs.lock("h2"))
    equal(await face.do(ours.multilock(["h1", "h2", "h3"]).acquire, timeout=0.3), None, "with one name held")
    lease = await had(face, theirs.multilock(["h1", "h3"]), timeout=5)
    await face.do(lease.release)
    if fifo(face.capabilities):
        await waiting(face, theirs, "h2", 0)
    await face.do(held.release)


@case("P22")
async def a_multilock_may_be_reentrant(face: Face) -> None:
    """With ``reentrant=True`` its owner enters again, and holds it until the last exit."""
    client, other = face.client(), face.client()
    multi = client.multilock(["i", "j"], reentrant=True)
    async with face.holding(multi) as outer:
        async with face.holding(multi) as inner:
            equal(inner is outer, True, "the same lease")
        equal((outer.held, await face.do(other.lock("i").acquire, timeout=0)), (True, None), "after the inner block")
    plain = client.multilock(["i", "z"])
    async with face.holding(plain):
        with raises(WouldDeadlock):
            await face.do(client.multilock(["z", "y"]).acquire)


@case("P20, P25")
async def names_of_a_multilock_are_checked(face: Face) -> None:
    """No name, a name twice, a name that is none, or a text instead of names: an error before any I/O."""
    client = face.idle_client()
    for names, kind in (
        ([], InvalidOption),
        ("ab", InvalidOption),
        (["a", "a"], InvalidName),
        (["a", ""], InvalidName),
        ([["a"]], InvalidName),
        (5, InvalidOption),
        (None, InvalidOption),
    ):
        with raises(kind):
            client.multilock(names)
    with raises(InvalidOption):
        client.multilock([f"n{number}" for number in range(1001)])
